"""A submission is what its samples say; whatever else is in it is named with its file and field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sweeps import TOGETHER, cells, sweep

from kvcompress.commands.report import main as report
from kvcompress.commands.submit import main
from kvcompress.common.hashing import digest
from kvcompress.report import board_file, board_runs
from kvcompress.report.run_index import gather

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A finished sweep: the full cache and two budgets of a method, two samples."""
    folder = tmp_path_factory.mktemp("results")
    outcomes, said = sweep([*cells(folder, "full", "1.0"), *cells(folder, "snapkv", "0.5,0.2")], TOGETHER)
    assert all(one.status == "ok" for one in outcomes), said
    return folder / "test"


@pytest.fixture(scope="module")
def submitted(swept, tmp_path_factory) -> Path:
    """Its board file."""
    out = tmp_path_factory.mktemp("board") / "mine.board.json"
    assert main([str(swept), "--name", "mine", "--by", "us", "--out", str(out), "--board", str(out.parent)]) == 0
    return out


@pytest.fixture
def results(swept, tmp_path) -> Path:
    """A copy of the sweep that a test may edit."""
    return Path(shutil.copytree(swept, tmp_path / "results" / "test"))


@pytest.fixture
def board(submitted, tmp_path) -> Path:
    """A copy of the file that a test may edit."""
    return Path(shutil.copy(submitted, tmp_path / "mine.board.json"))


def of(results: Path, method: str, budget: float) -> Path:
    """The folder of a run."""
    for path in results.glob("*/record.json"):
        found = json.loads(path.read_text())
        if (found["method"], found["budget"]) == (method, budget):
            return path.parent
    raise AssertionError(method)


def edit(path: Path, change) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(results: Path, capsys, *more: str) -> str:
    out = results.parent / "x.board.json"
    assert main([str(results), "--out", str(out), "--board", str(results.parent / "board"), *more]) == 1
    assert not out.exists()
    return capsys.readouterr().out


def test_a_submission_is_checked_and_makes_the_board_of_its_sweep(submitted, swept, capsys):
    assert main(["--check", str(submitted), "--board", str(submitted.parent)]) == 0
    assert "3 runs in 1 protocols" in capsys.readouterr().out
    mine, theirs = gather([submitted]), gather([swept])
    assert not mine.damaged and len(mine.entries) == 3
    for one, other in zip(
        sorted(mine.entries, key=lambda e: e.record["run_id"]),
        sorted(theirs.entries, key=lambda e: e.record["run_id"]),
        strict=True,
    ):
        assert one.scores == other.scores and one.record == other.record, "intervals and differences included"
    assert report([str(submitted), "--markdown", "-"]) == 0
    assert "| snapkv | 0.5 |" in capsys.readouterr().out


def test_an_edited_score_of_a_record_is_named(results, capsys):
    run = of(results, "snapkv", 0.2)
    edit(run / "record.json", lambda found: found.update({"score": 0.75, "kv.ratio": 0.1}))
    said = refused(results, capsys)
    assert f"{run / 'record.json'} (snapkv 0.2 {run.name[:8]}): score is 0.75, by its samples 0.0" in said
    assert "kv.ratio is 0.1, by its samples" in said


def test_samples_that_are_missing_are_named_also_where_the_record_counts_fewer(results, capsys):
    run = of(results, "snapkv", 0.5)
    rows = lines(run / "samples.jsonl")
    (run / "samples.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "n_samples is 2, but samples.jsonl has 1" in refused(results, capsys)
    edit(run / "record.json", lambda found: found.update({"n_samples": 1}))
    assert f"{run / 'samples.jsonl'}: 1 of the task's 2 samples missing: {rows[1]['id']}" in refused(results, capsys)
    (run / "samples.jsonl").unlink()
    assert f"{run / 'samples.jsonl'}: missing" in refused(results, capsys)


def test_a_prompt_that_is_not_the_tasks_is_named(results, capsys):
    run = of(results, "snapkv", 0.5)
    rows = lines(run / "samples.jsonl")
    rows[0]["meta"]["prompt_hash"] = "0" * 16
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"1 prompts are not the task's: meta.prompt_hash of {rows[0]['id']} is 0000" in refused(results, capsys)


def test_settings_that_were_edited_or_belong_to_another_run_are_named(results, capsys):
    run = of(results, "snapkv", 0.5)
    text = (run / "config.yaml").read_text()
    assert "window: null" in text or "window: 32" in text
    (run / "config.yaml").write_text(text.replace("budget: 0.5", "budget: 0.4"))
    assert f"{run / 'config.yaml'}: it describes run " in refused(results, capsys)


def test_a_run_of_other_sources_or_that_is_not_finished_is_named(results, capsys):
    run = of(results, "snapkv", 0.5)
    edit(run / "record.json", lambda found: found.update({"versions.source": "0" * 16}))
    edit(of(results, "full", 1.0) / "record.json", lambda found: found.update({"status": "partial"}))
    said = refused(results, capsys)
    assert "versions.source is 0000000000000000, of these sources" in said and "status is 'partial'" in said
    edit(of(results, "full", 1.0) / "record.json", lambda found: found.update({"status": "ok"}))
    out = results.parent / "taken.board.json"
    assert main([str(results), "--other-sources", "--out", str(out), "--board", str(results.parent / "board")]) == 0
    said = refused(results, capsys)
    assert "versions.source" in said


def test_a_sweep_without_the_full_cache_is_refused(results, capsys):
    shutil.rmtree(of(results, "full", 1.0))
    assert "no run of the full cache (needle): add method=full" in refused(results, capsys)


EDITS = {
    "a score of a sample": (lambda f: f["runs"][0]["scores"].__setitem__(0, 0.5), "score is"),
    "a score of a record": (lambda f: f["runs"][0]["record"].update({"score": 0.9}), "score is 0.9, by its samples"),
    "a sample less": (lambda f: f["runs"][0]["scores"].pop(), "scores: 1 samples, its protocol has 2"),
    "bytes": (lambda f: f["runs"][0]["record"].update({"kv.ratio": 0.01}), "kv.ratio is 0.01, by its samples"),
    "a time": (lambda f: f["runs"][0]["record"].update({"time.tpot_s": 1e-3}), "something in it was edited"),
    "a budget": (lambda f: f["runs"][0]["record"].update({"budget": 0.1}), "budget is 0.1, but"),
    "a setting of the protocol": (
        lambda f: next(iter(f["protocols"].values()))["settings"]["task"].update({"lengths": [9]}),
        "a setting was edited",
    ),
    "a setting of the method": (lambda f: f["runs"][0]["identity"]["method"].update({"x": 1}), "settings hash to"),
    "a run twice": (lambda f: f["runs"].append(f["runs"][0]), "is also runs[0]"),
    "a row of others as measured": (
        lambda f: f["foreign"].append({"origin": "measured", "source": "x"}),
        "foreign[0]: origin is 'measured'",
    ),
    "a row of others without a source": (
        lambda f: f["foreign"].append({"origin": "published", "score": 1.0}),
        "foreign[0]: source is missing",
    ),
    "a record that is none": (lambda f: f["runs"][0]["record"].update({"score": "high"}), "score: "),
    "another kind of file": (lambda f: f.update({"kind": "x"}), "kind is not"),
    "an unknown field": (lambda f: f.update({"more": 1}), "unknown field more"),
    "a run that lacks a field": (lambda f: f["runs"][0].pop("held"), "a field is missing"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_edited_in_a_file_is_named(name, board, capsys):
    change, says = EDITS[name]
    edit(board, change)
    assert main(["--check", str(board), "--board", str(board.parent)]) == 1
    said = capsys.readouterr().out
    assert says in said and str(board) in said
    assert not gather([board]).entries, "and nothing of it is shown"


def test_a_run_of_another_version_of_its_task_is_named(board, monkeypatch, capsys):
    monkeypatch.setattr(board_runs, "task_versions", lambda: {"needle": ("99", "string_match_all/1")})
    assert main(["--check", str(board), "--board", str(board.parent)]) == 1
    assert "settings.task: version is '" in (said := capsys.readouterr().out) and "of these sources '99'" in said


def test_another_protocol_than_the_boards_is_named_by_setting_unless_it_is_meant(submitted, board, tmp_path, capsys):
    other = tmp_path / "other"
    made = board_file.read(board)
    made.name = "other"
    ((pair, protocol),) = made.protocols.items()
    protocol["settings"]["task"] |= {"question": "hidden"}
    for run in made.runs:
        run["record"]["protocol.pair"] = digest(protocol["settings"])
        run["record"]["run_id"] = digest(board_file.identity_of(run, protocol["settings"]))
        run["seal"] = board_file.seal_of(run)
    made.protocols = {digest(protocol["settings"]): protocol}
    other.mkdir()
    file = other / "other.board.json"
    file.write_text(made.text())
    assert main(["--check", str(file), "--board", str(submitted.parent)]) == 1
    assert "task.question is 'hidden', on the board 'seen' (--own-setting" in capsys.readouterr().out
    protocol["own_setting"] = True
    file.write_text(made.text())
    assert main(["--check", str(file), "--board", str(submitted.parent)]) == 0


def test_a_run_that_the_board_has_already_is_refused(submitted, results, capsys):
    assert main([str(results), "--name", "zz", "--board", str(submitted.parent)]) == 1
    assert "is in mine.board.json already" in capsys.readouterr().out


def test_rows_of_others_stay_marked(swept, tmp_path, capsys):
    csv = tmp_path / "published.csv"
    csv.write_text(
        "source,model,benchmark,method,budget,metric,value,table\nA paper,random/llama,needle,Theirs,50%,avg,91.5,2\n"
    )
    out = tmp_path / "mine.board.json"
    asked = [str(swept), "--out", str(out), "--board", str(tmp_path), "--published", str(csv)]
    assert main(asked) == 0
    (row,) = board_file.read(out).foreign
    assert row["origin"] == "published" and row["source"] == "A paper"
    assert main(["--check", str(out), "--board", str(tmp_path)]) == 0
    from kvcompress.report.frame import load

    frame = load(out)
    assert (
        list(frame[frame.origin == "published"].method) == ["Theirs"]
        and not frame[frame.origin == "published"].on_board.any()
    )


def test_a_folder_without_runs_and_a_command_without_a_folder_are_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1 and "no runs here" in capsys.readouterr().out
    assert main([]) == 2 and "give a folder of results, or --check FILE" in capsys.readouterr().err


def test_the_files_of_the_board_are_sound():
    """Those that pull requests added: `kvcompress submit --check results/board` as `make test` runs it."""
    assert main(["--check", str(ROOT / "results" / "board"), "--board", str(ROOT / "results" / "board")]) == 0
