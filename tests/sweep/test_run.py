"""The runner: one record per cell, nothing finished is repeated, faults are recorded and the sweep goes on."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from composed import composed
from rich.console import Console

from kvcompress.commands.run import main, summary
from kvcompress.common import hashing
from kvcompress.models import loading
from kvcompress.sweep import cell_spec, components, record, record_schema
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.outcome import Outcome
from kvcompress.tasks import Needle

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ("at least 33", "compact positions need equal")  # each setting is legal with others
SHORT = (
    "model=random",
    "task.lengths=[450]",
    "task.depths=[0.0,1.0]",
    "task.n_seeds=2",
    "task.max_new_tokens=3",
    "device=cpu",
)


@pytest.fixture
def cell(tmp_path):
    def make(*overrides):
        return composed(*SHORT, f"paths.results={tmp_path}", "sweep.name=test", "paths.data=null", *overrides)

    return make


@pytest.fixture
def runner():
    return Scheduler(Console(file=io.StringIO()))


def identity(made):
    made = cell_spec.with_dtype(made)
    return hashing.digest(cell_spec.identity(made, components.build_method(made), components.build_task(made)))


def count_samples(monkeypatch, stop_after=None):
    """Ids of samples as they are finished; the run is interrupted after `stop_after`."""
    done = []
    append = record.RunFolder.append

    def counting(folder, row):
        append(folder, row)
        done.append(row["id"])
        if len(done) == stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(record.RunFolder, "append", counting)
    return done


def test_a_cell_leaves_a_complete_record(cell, runner, tmp_path):
    outcome = runner(cell("method=h2o", "budget=0.25"))
    assert outcome.status == "ok", outcome.record.get("error")
    stored = json.loads((tmp_path / "test" / outcome.run_id / "record.json").read_text())
    assert set(record_schema.KEYS) <= set(stored)
    assert stored["n_samples"] == 4 and stored["method"] == "h2o" and stored["budget"] == 0.25
    assert 0.25 <= stored["kv.ratio"] <= 0.28 and stored["share_inactive"] == 0.0
    assert stored["time.ttft_s"] >= stored["time.prefill_s"] > 0 and stored["time.tpot_s"] > 0
    assert stored["protocol.question"] == "seen" and stored["protocol.haystack"] == "noise"
    assert stored["versions.source"] == hashing.source_hash() and stored["versions.torch"] == torch.__version__
    assert stored["delta_full"] is None and stored["error"] is None
    assert len((tmp_path / "test" / outcome.run_id / "samples.jsonl").read_text().splitlines()) == 4


def test_interrupted_after_two_of_four_samples_exactly_two_are_run_again(cell, monkeypatch):
    first = count_samples(monkeypatch, stop_after=2)
    made = cell("method=snapkv", "budget=0.5")
    with pytest.raises(KeyboardInterrupt):
        Scheduler(Console(file=io.StringIO()))(made)
    monkeypatch.undo()
    folder = record.RunFolder(Path(made.paths.results), "test", identity(made))
    assert folder.record()["status"] == "partial" and folder.record()["n_samples"] == 2
    again = count_samples(monkeypatch)
    outcome = Scheduler(Console(file=io.StringIO()))(made)
    assert outcome.status == "ok" and outcome.record["n_samples"] == 4
    assert len(again) == 2 and not set(first) & set(again)


def test_a_finished_cell_is_not_run_again_unless_it_is_stale_and_asked_for(cell, monkeypatch):
    def outcome(*overrides):
        return Scheduler(Console(file=io.StringIO()))(cell("method=random", "budget=0.5", *overrides)).status

    assert outcome() == "ok"
    done = count_samples(monkeypatch)
    assert outcome() == "done" and not done
    monkeypatch.setattr(hashing, "source_hash", lambda: "other")
    assert outcome() == "stale" and not done
    assert outcome("resume=any") == "done" and not done
    assert outcome("resume=refresh") == "ok" and len(done) == 4


def test_budgets_of_a_method_without_one_collapse_to_one_cell(cell, runner):
    first, second = runner(cell("method=full", "budget=0.5")), runner(cell("method=full", "budget=0.1"))
    assert first.status == "ok" and second.status == "same" and first.run_id == second.run_id
    assert first.record["budget"] == 1.0 and "one cell" in second.note


@pytest.mark.parametrize(
    "override",
    [
        "budget=0.25",
        "budget=64",
        "seed=1",
        "dtype=bfloat16",
        "limit=2",
        "method.kernel=3",
        "method.preset=code",
        "task.question=hidden",
        "task.lengths=[460]",
        "task.max_new_tokens=4",
        "model=random/qwen2",
        "prefill=chunked",
    ],
)
def test_changing_what_may_change_the_result_changes_the_run_id(cell, override):
    assert identity(cell("method=snapkv", "budget=0.5", override)) != identity(cell("method=snapkv", "budget=0.5"))


@pytest.mark.parametrize(
    "override", ["resume=any", "paths.results=elsewhere", "sweep.name=other", "logger=wandb", "budget=0.5000000001"]
)
def test_changing_what_cannot_change_the_result_keeps_the_run_id(cell, override):
    assert identity(cell("method=snapkv", "budget=0.5", override)) == identity(cell("method=snapkv", "budget=0.5"))


def test_task_and_metric_versions_are_in_the_run_id(cell, monkeypatch):
    made = cell("method=full")
    before = identity(made)
    task = type(components.build_task(made))
    for name in ("version", "metric_version"):
        monkeypatch.setattr(task, name, "99")
        assert identity(made) != before
        monkeypatch.undo()


def test_a_fault_is_recorded_with_its_traceback_and_the_next_cell_runs(cell, runner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(components.build_task(cell())), "run", lambda *_: 1 / 0)
        broken = runner(cell("method=random", "budget=0.5"))
    assert broken.status == "failed" and "ZeroDivisionError" in broken.record["error"] and broken.failed
    with monkeypatch.context() as patch:
        patch.setattr(
            type(components.build_task(cell())), "run", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
        )
        assert runner(cell("method=random", "budget=0.25")).status == "oom"
    assert runner(cell("method=random", "budget=0.1")).status == "ok"
    again = Scheduler(Console(file=io.StringIO()))(cell("method=random", "budget=0.5"))
    assert again.status == "ok" and again.record["error"] is None


@pytest.mark.parametrize(
    "overrides, says",
    [
        (("method=random", "budget=2.0"), "share in (0, 1]"),
        (("method=random", "budget=0"), "budget=0"),
        (("method=snapkv", "budget=10"), "at least 33"),
        (("method=streamingllm", "method.positions=compact", "allocator=ada"), "compact positions need equal"),
        (("method=snapkv", "method.pooling=median", "budget=0.5"), "max, avg"),
        (("method=full", "task.form=x"), "ruler, classic"),
        (("method=full", "dtype=int3"), "dtype"),
        (("method=full", "resume=maybe"), "auto, refresh, any"),
        (("method=full", "limit=0"), "limit=0"),
    ],
)
def test_an_illegal_cell_is_refused_before_a_model_is_loaded(cell, runner, monkeypatch, tmp_path, overrides, says):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    outcome = runner(cell(*overrides))
    assert outcome.status == ("dropped" if says in PAIRS else "refused") and says in outcome.note
    assert summary([outcome], Console(file=io.StringIO())) == 1, "there is no other cell"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "statuses, code",
    [
        (("ok", "dropped"), 0),
        (("done", "dropped"), 0),
        (("dropped", "dropped"), 1),
        (("dropped", "refused"), 1),
        (("ok", "failed", "dropped"), 1),
    ],
)
def test_the_exit_code_does_not_count_dropped_pairs_while_there_are_other_cells(statuses, code, capsys):
    outcomes = [Outcome("snapkv", 10, status, note="why it is so") for status in statuses]
    begun = set(statuses) - {"dropped", "refused"}
    console = Console(file=io.StringIO(), width=200)
    assert summary(outcomes, console) == code
    assert console.file.getvalue().count("dropped: snapkv budget 10") == (1 if begun and "dropped" in statuses else 0)
    assert ("why it is so" in console.file.getvalue()) == ("failed" in statuses)


def test_why_a_cell_is_refused_is_printed_once(cell, tmp_path):
    """Alone it is the last that is said; beside others it is named again, without the reason."""
    for others in ([], [cell("method=random", "budget=0.5", "limit=1")]):
        console = Console(file=io.StringIO(), width=200)
        runner = Scheduler(console)
        runner.sweep([cell("method=snapkv", "budget=10"), *others])
        assert summary(runner.outcomes, console) == (0 if others else 1)
        said = console.file.getvalue()
        assert said.count("at least 33") == 1 and said.count("snapkv budget 10") == 1 + len(others)


def test_a_prompt_longer_than_the_models_positions_is_an_error_before_any_sample(cell, runner, monkeypatch):
    done = count_samples(monkeypatch)
    outcome = runner(cell("method=full", "task.lengths=[450,9000]"))
    assert outcome.status == "failed" and "positions" in outcome.record["error"] and not done


def test_a_method_that_should_act_and_never_does_is_inactive(cell, runner):
    outcome = runner(cell("method=random", "budget=100000"))
    assert outcome.status == "inactive" and outcome.record["share_inactive"] == 1.0
    assert runner(cell("method=full")).status == "ok"
    assert runner(cell("method=random", "budget=1.0")).status == "ok"


def test_reuse_of_chunks_is_inactive_where_no_prompt_has_one_and_a_result_where_all_are_recomputed(
    cell, runner, monkeypatch
):
    """A needle's prompt is one segment, all question; ratio 1 reuses nothing either, but is the baseline of the ratios."""
    deep = ("+model.options.num_hidden_layers=4", "limit=1")
    for ratio in (0.15, 1.0):
        outcome = runner(cell("method=cacheblend", f"method.ratio={ratio}", *deep))
        assert outcome.status == "inactive" and "had nothing to reuse" in outcome.record["notes"][0]
    stock = Needle.samples

    def parted(task, tokenizer):
        for sample in stock(task, tokenizer):
            ids = sample.segments[0]
            yield dataclasses.replace(sample, segments=(ids[:200], ids[200:400], ids[400:]))

    monkeypatch.setattr(Needle, "samples", parted)
    for ratio in (0.15, 1.0):
        outcome = runner(cell("method=cacheblend", f"method.ratio={ratio}", *deep, "seed=1"))
        assert (outcome.status, outcome.record["notes"]) == ("ok", [])
        assert outcome.record["share_inactive"] == float(ratio == 1.0)


def test_deltas_are_filled_whichever_comes_first(cell, runner, tmp_path):
    first = runner(cell("method=random", "budget=0.5"))
    base = runner(cell("method=full"))
    stored = record.read_record(tmp_path / "test" / first.run_id / "record.json")
    assert stored["delta_full"] == stored["score"] - base.record["score"] and stored["baseline"] == base.run_id


def test_hidden_question_is_appended_after_the_compression(cell, runner, tmp_path):
    seen, hidden = (runner(cell("method=random", "budget=0.5", f"task.question={q}")) for q in ("seen", "hidden"))
    assert hidden.record["protocol.question"] == "hidden"
    assert hidden.record["kv.kept_tokens_mean"] < seen.record["kv.kept_tokens_mean"]
    rows = record.RunFolder(tmp_path, "test", hidden.run_id).rows()
    assert all(row["out"]["end"]["moments"][-1]["moment"] == "append" for row in rows.values())


def test_command_line_sweeps_and_drops_pairs_that_do_not_go_together_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code = main(["-m", "method=full,snapkv", "budget=0.5,10", *SHORT, "limit=1", f"paths.results={tmp_path}"])
    text = capsys.readouterr().err
    assert code == 0, text
    assert "dropped: snapkv budget 10" in text and "at least 33" in text
    assert len(list((tmp_path / "default").glob("*/record.json"))) == 2
    assert not (ROOT / "multirun").exists()


def test_command_line_names_the_valid_methods_and_exits_2(tmp_path, capsys):
    code = main(["method=snapvk", "budget=0.5", *SHORT, f"paths.results={tmp_path}"])
    text = " ".join(capsys.readouterr().err.split())
    assert code == 2 and "did you mean snapkv?" in text and "streamingllm" in text
