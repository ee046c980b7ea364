"""The launcher on the command line, and the plan, status and estimate it prints."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.console import Console
from sweeps import SHARED, SHORT, TOGETHER, cell, cell_run, cells, left, sweep

from kvcompress.commands.run import main
from kvcompress.models import loading
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.report.table import title
from kvcompress.sweep import components, config, record, sanity
from kvcompress.sweep.cell_spec import check
from kvcompress.sweep.hydra_errors import HYDRA_ERRORS, one_line
from kvcompress.sweep.launcher import strategies
from kvcompress.sweep.launcher.answer_check import compare_answers
from kvcompress.sweep.launcher.dry import PlanRow
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.status import cells_of, show
from kvcompress.tasks import Capacity, Latency, Memory
from kvcompress.tasks.needle import Needle


def command(folder, *arguments):
    return main(["-m", *SHORT, f"paths.results={folder}", "limit=1", *arguments])


def shared_flags(folder):
    return {record.read_record(path)["protocol.shared"] for path in folder.glob("test/*/record.json")}


@pytest.fixture(autouse=True)
def clean_hydra(monkeypatch):
    """Hydra's singletons are per process: each command starts afresh, and a caller's wish for tracebacks stays out."""
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = sys.argv[:]
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()
    sys.argv[:] = before


def test_a_sweep_shares_unless_told_otherwise(tmp_path):
    assert command(tmp_path / "default", "method=snapkv,tova", "budget=0.5") == 0
    assert shared_flags(tmp_path / "default") == {True}
    assert command(tmp_path / "off", "method=snapkv,tova", "budget=0.5", "hydra.launcher.share=false") == 0
    assert shared_flags(tmp_path / "off") == {False}
    assert command(tmp_path / "basic", "method=snapkv,tova", "budget=0.5", "hydra/launcher=basic") == 0
    assert shared_flags(tmp_path / "basic") == {False}
    assert left(tmp_path / "default") == left(tmp_path / "basic") == left(tmp_path / "off")


def test_every_cell_has_its_folder_with_its_own_configuration(tmp_path):
    assert command(tmp_path, "method=snapkv,tova", "budget=0.5,0.2") == 0
    found = list((tmp_path / "test").glob("*/config.yaml"))
    assert len(found) == 4 and len({path.read_text() for path in found}) == 4
    assert all(str(tmp_path) in path.read_text() for path in found)


REFUSED = [
    (["budget=range(5,5)"], "no cell"),
    (["bugdet=0.5"], "did you mean budget?"),
    (["metod=h2o,snapkv"], "did you mean method?"),
    (["modle=random"], "did you mean model?"),
    (["experiement=quick"], "did you mean experiment?"),
    (["lengths=[300]"], "did you mean task.lengths?"),
    (["task.lenghts=[300]"], "did you mean task.lengths?"),
    (["method.windw=8"], "no setting of SnapKV; did you mean method.window?"),
    (["hydra.launcher.memroy=1"], "did you mean hydra.launcher.memory?"),
    (["hydra/launcher=shred"], "did you mean shared?"),
    (["budget=25%"], "such as budget=0.25"),
    (["budget=0.5,much"], "budget=much: a budget is a share"),
    (["budget=range(1,2"], "cannot be read"),
    (["budget=[0.5,0.25]"], "such as budget=0.25"),
    (["method.window=[8,16]"], "-m method.window=8,16"),
    (["method=[h2o,snapkv]"], "-m method=h2o,snapkv"),
    (["task.lengths=300"], "task.lengths=[300]"),
    (["seed=1.5"], "could not be converted to Integer"),
    (["allocator.floor=2"], "allocator=NAME"),
    (["allocator=null,ada"], "write allocator=own"),
    (["+budget=0.5"], "leave the + out"),
    (["~metod"], "'metod' does not exist"),
    (["budget"], "key=value"),
    (["paths.results=a(b"], "quote it twice"),
    (["hydra.launcher.memory=0"], "GiB above 0"),
    (["hydra.launcher.engine=slurm"], "joblib, submitit, ray"),
]


# what only the start of a sweep sees; the others are refused by what composes a cell, and one of them is enough here
BY_A_SWEEP = ("budget=range(5,5)", "metod=h2o,snapkv", "hydra.launcher.memroy=1", "budget=0.5,much", "budget=range(1,2",
              "budget", "paths.results=a(b", "hydra.launcher.memory=0", "hydra.launcher.engine=slurm")  # fmt: skip


def refused(short):
    """Refused command lines as parameters; those for which `short(argument)` is false only run with `--long`."""
    return [
        pytest.param(arguments, says, id=" ".join(arguments), marks=() if short(arguments[0]) else pytest.mark.long)
        for arguments, says in REFUSED
    ]


@pytest.mark.parametrize(("arguments", "says"), refused(lambda one: one in (*BY_A_SWEEP, "bugdet=0.5")))
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line_before_work(
    tmp_path, monkeypatch, capfd, arguments, says
):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setenv("COLUMNS", "1000")
    assert command(tmp_path, "method=snapkv", *arguments) == 2
    printed = capfd.readouterr().err.strip()
    assert says in printed and printed.count("\n") == 0
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.parametrize(("arguments", "says"), [one for one in REFUSED if one[0][0] not in BY_A_SWEEP])
def test_a_cell_that_makes_no_sense_is_refused_in_one_line(arguments, says):
    with pytest.raises((ValueError, *HYDRA_ERRORS)) as error, config.composing() as compose:
        config.check_overrides(["-m", *arguments], config.folder())
        compose([*SHORT, "method=snapkv", *arguments])
    printed = one_line(error.value) if isinstance(error.value, HYDRA_ERRORS) else str(error.value)
    assert says in printed and printed.count("\n") == 0


def test_several_values_without_m_say_how_to_sweep(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main([*SHORT, "budget=0.5,0.25"]) == 2
    assert "with -m they are a sweep" in capfd.readouterr().err


def test_who_asks_for_tracebacks_gets_what_hydra_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(HydraException):
        command(tmp_path, "bugdet=0.5")


def test_a_flag_may_stand_among_the_overrides(tmp_path):
    assert main([*SHORT, f"paths.results={tmp_path}", "limit=1", "method=snapkv", "-m", "budget=0.5,0.2"]) == 0
    assert len(left(tmp_path)) == 2


def test_a_sweep_may_name_the_methods_own_part_beside_others(tmp_path):
    assert command(tmp_path, "method=snapkv", "budget=0.5", "allocator=own,ada") == 0
    records = [record.read_record(path) for path in tmp_path.glob("test/*/record.json")]
    assert sorted(found["parts.allocator"] for found in records) == ["ada", "uniform"]
    (alone,) = [o for o in sweep([cell(tmp_path, "method=snapkv", "budget=0.5", "limit=1")])[0]]
    assert alone.status == "done", "own is what is there when nothing is said"


def test_a_folder_that_cannot_be_is_said_without_a_traceback(tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    assert command(tmp_path / "file" / "sub", "method=snapkv") == 2
    printed = capfd.readouterr().err
    assert "cannot write to" in printed.replace("\n", " ") and "Traceback" not in printed
    assert main([*SHORT, "method=snapkv", "paths.results=/proc"]) == 2
    assert "cannot write to paths.results=/proc" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["n" * 300, f"fine/{'n' * 300}"])
def test_a_sweeps_name_that_no_folder_can_have_is_refused_in_one_line_before_work(tmp_path, capfd, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")
    assert command(tmp_path, "method=snapkv", f"sweep.name={name}") == 2
    printed = capfd.readouterr().err.strip()
    assert "bytes; a folder's name may have 255" in printed and printed.count("\n") == 0 and len(printed) < 160
    assert not list(tmp_path.iterdir())
    outcomes, _ = sweep([cell(tmp_path, "method=snapkv", f"sweep.name={name}")])
    assert outcomes[0].status == "refused" and "choose a shorter one" in outcomes[0].note
    (tmp_path / "fine").mkdir()
    assert main([f"status={tmp_path / name}"]) == 2
    assert "File name too long" in capfd.readouterr().err


def test_a_dry_run_of_a_model_that_cannot_be_loaded_says_so(tmp_path, capfd):
    nowhere = f"model.name={tmp_path / 'nowhere'}"
    assert command(tmp_path, "method=snapkv,tova", "budget=0.5", "dry=true", nowhere) == 1
    printed = capfd.readouterr().err
    assert printed.count("failed: ") == 2 and "Traceback" not in printed


def test_a_dry_run_says_that_right_answers_do_not_score_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sanity, "_passed", {})
    monkeypatch.setattr(Needle, "gold", lambda self, sample: ["another answer"])
    assert command(tmp_path, "method=snapkv,tova", "budget=0.5", "dry=true") == 1
    printed = " ".join(capfd.readouterr().err.split())
    assert "the right answer 'another answer' scores 0" in printed and "Traceback" not in printed


def test_tables_of_one_task_at_two_lengths_have_headings_of_their_own(tmp_path):
    for length in (300, 450):
        sweep(cells(tmp_path, "full,snapkv", "0.5", f"task.lengths=[{length}]"))
    records = [record.read_record(path) for path in sorted(tmp_path.glob("test/*/record.json"))]
    assert {title(one).split(" · ")[2] for one in records} == {"300 tokens", "450 tokens"}


def test_the_plan_of_a_dry_run_fits_eighty_columns(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "80")
    budgets = ",".join(str(round(0.05 * i, 2)) for i in range(1, 5))
    assert command(tmp_path, "method=snapkv,tova,adakv,keydiff", f"budget={budgets}", "seed=0,1", "dry=true") == 0
    printed = capfd.readouterr().err.splitlines()
    assert max(map(len, printed)) <= 80 and len(printed) < 40
    sums = next(line.split() for line in printed if line.split()[:1] == ["all"])
    assert sums[1:3] == ["32", "32"]


def test_a_dry_run_of_cells_that_run_one_by_one_is_one_plan(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    assert command(tmp_path, "method=snapkv,tova", "budget=0.5,0.2", "dry=true", "hydra/launcher=basic") == 0
    printed = capfd.readouterr().err
    assert "1: random/llama · needle · seed 0 · 4 alone: snapkv 0.5, 0.2; tova 0.5, 0.2" in printed
    assert printed.count("cell by cell") == 1
    found = config.with_launcher(["-m", "experiment=efficiency", "dry=true"], config.folder())
    assert found[-2:] == ["hydra/launcher=shared", "hydra.launcher.share=false"]


@pytest.mark.parametrize(
    ("task", "prompts", "answers"),
    [
        (Latency(lengths=(64,), batches=(4,), rounds=5, warmup=1), 6 * 3 * 4, 6 * 3),
        (Latency(lengths=(64,), rounds=2, warmup=0, aa=False), 2 * 2, 2 * 2),
        (Memory(lengths=(64,), batches=(2,), compare=False), 2, 1),
        (Memory(lengths=(64,), memory=1.0, tries=10), 2 + 6 + 30, 2),
        (Capacity(lengths=(64,), batches=(1, 2), check=3, rounds=2, warmup=1), 6 * 4 + 2, 6 * 3),
    ],
)
def test_an_estimate_counts_every_run_that_a_measuring_task_makes(task, prompts, answers):
    (sample,) = task.samples(byte_tokenizer())
    assert task.effort(sample) == (prompts, answers)
    waiting = SimpleNamespace(spec=SimpleNamespace(task=task), stored_rows=dict)
    row = PlanRow("model", task.name, False)
    row.add([waiting], [sample], (1e-3, 0.0, 1e-2))
    assert row.seconds == pytest.approx(prompts * 64e-3 + answers * 1e-2 * sample.turns[0].max_new_tokens)


def test_a_dry_run_counts_what_would_be_done_and_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    assert command(tmp_path, "method=snapkv,tova", "budget=0.5,0.2", "dry=true") == 0
    printed = capfd.readouterr().err
    assert "4 cells share each prefill" in printed and "cell by cell" in printed
    assert "1: random/llama · needle · seed 0 · 4 cells share each prefill: snapkv 0.5, 0.2; tova 0.5, 0.2" in printed
    head, numbers = (line.split() for line in printed.splitlines()[1:3])
    assert head[-5:-3] == ["saved", "prompt"]
    assert numbers[:5] == ["1", "4", "4", "1", "3"], "of four prefills three are saved"
    assert not list(tmp_path.rglob("record.json")) and not list(tmp_path.rglob("sweep.json"))


def test_status_tells_done_running_failed_and_missing_cells_apart(tmp_path, monkeypatch):
    configs = cells(tmp_path, "full,snapkv,tova,random", "0.5")
    sweep(configs[:2])
    (tmp_path / "test" / cell_run(configs[0]).spec.run_id / "record.json").unlink()
    running = cell_run(configs[2])
    assert running.acquire() is None
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load", lambda *_, **__: 1 / 0)
        sweep(configs[3:])
    (tmp_path / "test" / "sweep.json").write_text(
        json.dumps(
            {
                "layout": 1,
                "cells": {c.spec.run_id: {"method": c.spec.config.method.name} for c in map(cell_run, configs)},
            }
        )
    )
    found = {entry["method"]: entry["status"] for entry in cells_of(tmp_path / "test")}
    assert found == {"full": "missing", "snapkv": "ok", "tova": "running", "random": "failed"}
    notes = {entry["method"]: entry["note"] for entry in cells_of(tmp_path / "test")}
    assert notes["full"] == "begun, not finished" and "process" in notes["tova"] and "ZeroDivision" in notes["random"]
    running.release()


def test_status_of_a_finished_sweep_is_0_and_of_no_sweep_2(tmp_path, capsys):
    sweep(cells(tmp_path, "snapkv", "0.5,0.2"))
    assert main([f"status={tmp_path / 'test'}"]) == 0
    assert "2 ok" in capsys.readouterr().out
    console = Console(file=io.StringIO(), width=200)
    assert show(tmp_path / "nowhere", console) == 2 and "no such folder" in console.file.getvalue()
    assert show(tmp_path, console) == 2 and "no sweep lies here" in console.file.getvalue()


def test_status_is_sorted_by_method_and_budget_and_shows_scores(tmp_path, capsys):
    sweep(cells(tmp_path, "snapkv,knorm", "64,0.2,0.5", "limit=1"))
    assert main([f"status={tmp_path / 'test'}"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(printed[0]) == "model random/llama, seed 0" and printed[1][4] == "score"
    rows = [line[1:3] for line in printed if line[0] == "ok"]
    assert rows == [[method, budget] for method in ("knorm", "snapkv") for budget in ("0.5", "0.2", "64")]
    scores = {line[4] for line in printed if line[0] == "ok"}
    assert scores <= {"0", "1"}


@pytest.mark.parametrize("cells", [{"q": None}, ["q"], None])
def test_a_table_of_cells_that_is_none_is_named(tmp_path, cells):
    (tmp_path / "sweep.json").write_text(json.dumps({"layout": 1, "cells": cells}))
    console = Console(file=io.StringIO(), width=200)
    assert show(tmp_path, console) == 2 and "take the file away" in console.file.getvalue()


def test_status_of_records_that_lack_keys_shows_what_there_is(tmp_path):
    folder = tmp_path / "test" / "abc"
    folder.mkdir(parents=True)
    found = {"run_id": "abc", "status": "ok", "model": "m", "task": "t", "method": "x", "budget": 0.5, "n_samples": 1}
    (folder / "record.json").write_text(json.dumps(found | {"score": 0.5}))
    (folder / "samples.jsonl").write_text('{"id": [1], "score": 1, "out": {}}\n{"id": "a", "score": "x", "out": {}}\n')
    (entry,) = cells_of(tmp_path / "test")
    assert (entry["status"], entry["method"], entry["samples"]) == ("stale", "x", 0)


def test_cells_decode_together_by_default_and_the_record_says_so(tmp_path):
    for folder, options in (("apart", SHARED), ("together", TOGETHER)):
        sweep(cells(tmp_path / folder, "full,snapkv,adakv,tova", "0.5"), options)
    apart, together = left(tmp_path / "apart"), left(tmp_path / "together")
    assert apart == together
    said = {
        record.read_record(path)["method"]: record.read_record(path)["protocol.decoding"]
        for path in (tmp_path / "together").glob("test/*/record.json")
    }
    assert said == dict.fromkeys(("full", "snapkv", "adakv"), "together") | {"tova": "separate"}


def whys(folder):
    """By method why its cells decode separately, as their records say."""
    records = [record.read_record(path) for path in folder.glob("test/*/record.json")]
    return {found["method"]: found["protocol.decoding_why"] for found in records}


def test_why_a_cell_decodes_separately_is_said_and_in_its_record(tmp_path):
    _, text = sweep(cells(tmp_path, "snapkv,knorm,tova", "0.5,0.2", "limit=1"), TOGETHER)
    assert whys(tmp_path) == {"snapkv": None, "knorm": None, "tova": "it evicts while decoding"}
    assert text.count("it evicts while decoding: tova 0.5, 0.2 · needle decode separately") == 1
    _, text = sweep(cells(tmp_path / "sliding", "snapkv,knorm", "0.5", "limit=1", "model=random/gemma3_text"), TOGETHER)
    assert "the model has sliding-window layers" in text
    assert all("sliding-window layers" in why for why in whys(tmp_path / "sliding").values())
    sweep(cells(tmp_path / "off", "snapkv,knorm", "0.5", "limit=1"), SHARED)
    assert set(whys(tmp_path / "off").values()) == {"decoding together is switched off"}
    sweep(cells(tmp_path / "two", "snapkv,tova", "0.5", "limit=1"), TOGETHER)
    assert whys(tmp_path / "two")["snapkv"] == "no other cell of its prefill can join it"
    sweep(cells(tmp_path / "alone", "snapkv", "0.5", "limit=1", "prefill=chunked"), TOGETHER)
    assert whys(tmp_path / "alone") == {"snapkv": "prefill=chunked is its own"}


def test_a_fault_in_one_of_the_cells_that_decode_together_ends_that_cell(tmp_path, monkeypatch):
    from kvcompress.methods import Knorm

    def broken(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(type(Knorm(budget=0.5).make_scorer()), "score", broken)
        outcomes, _ = sweep(cells(tmp_path, "snapkv,knorm,adakv", "0.5,0.2"), TOGETHER)
    found = {(outcome.method, outcome.status) for outcome in outcomes}
    assert found == {("snapkv", "ok"), ("adakv", "ok"), ("knorm", "failed")}
    sweep(cells(tmp_path, "snapkv,knorm,adakv", "0.5,0.2"), TOGETHER)
    sweep(cells(tmp_path / "calm", "snapkv,knorm,adakv", "0.5,0.2"), TOGETHER)
    assert left(tmp_path) == left(tmp_path / "calm")


def test_one_cell_alone_runs_as_it_always_did(tmp_path):
    (outcome,), _ = sweep([cell(tmp_path, "method=snapkv", "budget=0.5")], TOGETHER)
    assert outcome.record["protocol.shared"] is False and outcome.record["protocol.decoding"] == "separate"
    assert outcome.record["protocol.kernel"] == "sdpa"


def test_check_mode_decodes_alone_as_well_and_fails_what_differs(tmp_path, monkeypatch):
    check = Options(check=True)
    outcomes, _ = sweep(cells(tmp_path / "good", "snapkv,knorm", "0.5,0.2"), check)
    assert {o.status for o in outcomes} == {"ok"}
    assert {o.record["protocol.decoding"] for o in outcomes} == {"together, checked"}
    stock = strategies.decode_together

    def wrong(*arguments):
        results, share = stock(*arguments)
        results[0]["tokens"][0][2] += 1
        return results, share

    monkeypatch.setattr(strategies, "decode_together", wrong)
    outcomes, _ = sweep(cells(tmp_path / "bad", "snapkv,knorm", "0.5,0.2", "limit=1"), check)
    assert sorted(o.status for o in outcomes) == ["failed", "ok", "ok", "ok"]
    assert "answer 1, token 3: together not as alone" in next(o.note for o in outcomes if o.failed)


@pytest.mark.parametrize(
    "found, leads, wrong",
    [
        ([5, 6, 7], [1.0, 1.0, 1.0], None),
        ([5, 9, 7], [1.0, 0.5, 1.0], "token 2"),
        ([5, 9, 9], [1.0, 1e-4, 1.0], None),
        ([5, 6], [1.0, 1.0, 0.5], "token 3"),
        ([5, 6], [1.0, 1.0, 1e-4], None),
    ],
)
def test_tokens_may_differ_from_a_close_call_on(found, leads, wrong):
    alone = {"tokens": [[5, 6, 7]], "finished": ["length"]}
    together = {"tokens": [found], "finished": ["length" if len(found) == 3 else "stop"]}
    said = compare_answers(alone, together, [leads])
    assert said is None if wrong is None else wrong in said


PRESETS = config.options("experiment", config.folder())


def test_the_presets_are_all_there():
    """Those a study is begun with, by name."""
    wanted = {"demo", "quick", "needle_grid", "matched_budgets", "efficiency", "eviction", "slope", "fidelity", "rag"}
    assert wanted | {"ruler_4k", "longbench_small", "longbench_full", "reasoning", "reasoning_small"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_made_of_legal_cells(name):
    """Each of its tasks with its settings, each method with each budget; no folder is named by two presets."""
    params = OmegaConf.load(config.folder() / "experiment" / f"{name}.yaml").hydra.sweeper.params
    methods = sorted(components.method_classes()) if params.method.startswith("glob(*") else params.method.split(",")
    tasks = str(params.get("task", "")).split(",")
    with config.composing() as compose:
        made = compose([f"experiment={name}", f"method={methods[0]}", *([f"task={tasks[0]}"] if tasks[0] else [])])
    check(made)
    assert made.sweep.name == name and made.model.name == "smollm2"
    assert set(tasks) <= {"", *config.options("task", config.folder())}
    for task in tasks:
        if "/" in task:  # the tasks of a suite have the same settings
            made.task.name = task
            assert components.build_task(made).name == task
        elif task:
            with config.composing() as compose:
                assert components.build_task(compose([f"experiment={name}", f"task={task}"])).name in task
    for method in methods:
        made.method = OmegaConf.create({"name": method})
        for budget in str(params.budget).split(","):
            made.budget = json.loads(budget)
            assert components.build_method(made).budget == made.budget


def test_presets_are_what_their_names_say():
    """All data sets of LongBench; documents compressed before the question."""
    params = OmegaConf.load(config.folder() / "experiment" / "longbench_full.yaml").hydra.sweeper.params
    assert sorted(params.task.split(",")) == [
        name for name in config.options("task", config.folder()) if "longbench/" in name
    ]
    with config.composing() as compose:
        assert compose(["experiment=documents", "task=longbench/musique"]).task.question == "hidden"
        small = compose(["experiment=longbench_small", "task=longbench/lcc"])
        assert small.limit == 5 and small.task.max_length == 2000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "method=full,h2o"], True),
        (["-m", "experiment=quick"], True),
        (["-m", "experiment=demo"], False),
        (["-m", "experiment=efficiency"], False),
        (["-m", "experiment=quick", "hydra/launcher=basic"], False),
    ],
)
def test_sweeps_are_shared_unless_the_command_or_an_experiment_says_otherwise(arguments, expected):
    found = config.with_launcher(arguments, config.folder())
    assert found == arguments + ["hydra/launcher=shared"] * expected
