"""Trackers get every run as its record says, whatever happens to it or to them; all of it can be made from records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from sweeps import SHORT, forked

from kvcompress import tracking
from kvcompress.commands import sync
from kvcompress.commands.run import main
from kvcompress.methods import H2O
from kvcompress.sweep import config, record, record_schema
from kvcompress.sweep.launcher import strategies
from kvcompress.sweep.outcome import Outcome
from kvcompress.tracking import LoggerConfig, content
from kvcompress.tracking.board import board

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    """Hydra and wandb as in a fresh process of a user without settings or a network."""
    from hydra.core.global_hydra import GlobalHydra

    home = tmp_path_factory.mktemp("home")
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home))
    for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_API_KEY", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking, "_given_up", set())
    before = sys.argv[:]
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()
    sys.argv[:] = before


def command(folder, *arguments):
    return main(["-m", *SHORT, f"paths.results={folder}", f"logger.dir={folder}", *arguments])


def inspect(folder, *options):
    """What wandb's own reader finds in an offline run (`wandb leet inspect`, without the start of its Python)."""
    from wandb.util import get_core_path

    (log,) = folder.glob("run-*.wandb")
    line = [get_core_path(), "leet", "inspect", "--json", *options, "--run-file", str(log), str(folder)]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def runs(folder):
    """Folder of each offline run by its id."""
    return {path.stem.removeprefix("run-"): path.parent for path in (folder / "wandb").glob("offline-run-*/*.wandb")}


def table(folder, name):
    """Rows of a logged table, each as a dict."""
    (path,) = (folder / "files" / "media" / "table").glob(f"{name}_*.table.json")
    stored = json.loads(path.read_text())
    return [dict(zip(stored["columns"], line, strict=True)) for line in stored["data"]]


def settings(folder, **more):
    return LoggerConfig("wandb", dir=str(folder), **more)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three cells of one multirun, the second of which raises: results, wandb's folder, exit code."""
    pytest.importorskip("wandb")
    folder, patch = tmp_path_factory.mktemp("swept"), pytest.MonkeyPatch()
    run_sample = strategies.run_sample

    def raising(cell, *arguments):
        if isinstance(cell.method, H2O):
            raise RuntimeError("deliberate")
        return run_sample(cell, *arguments)

    patch.setattr(strategies, "run_sample", raising)
    patch.setenv("WANDB_DATA_DIR", str(folder / "data"))
    before = sys.argv[:]
    code = command(folder, "method=snapkv,h2o,full", "budget=0.5", "logger=wandb", "hydra.launcher.together=false")
    sys.argv[:] = before
    patch.undo()
    return folder, code


def records(folder):
    return {path.parent.name: record.read_record(path) for path in folder.glob("test/*/record.json")}


def test_three_runs_of_a_multirun_keep_apart_and_the_one_that_raised_is_failed(swept):
    folder, code = swept
    made, found = records(folder), runs(folder)
    assert code == 1 and len(made) == 3 and set(found) == {*made, "board-test"}
    for run_id, stored in made.items():
        seen = json.loads(inspect(found[run_id], "--summary"))
        failed = stored["method"] == "h2o"
        assert (seen["state"], seen["exit_code"]) == (("failed", 1) if failed else ("finished", 0))
        assert seen["config"]["method"]["name"] == stored["method"] and seen["config"]["budget"] == stored["budget"]
        assert seen["config"]["task"]["lengths"] == [450] and seen["config"]["sweep"]["name"] == "test"
        assert seen["config"]["parts"]["scorer"] == stored["parts.scorer"]
        assert not set(content.LEAVE_OUT) & set(seen["config"])
        shown = {key: value for key, value in stored.items() if value is not None and key != "error"}
        assert {key: seen["summary"].get(key) for key in shown} == shown
        assert ("deliberate" in seen["summary"].get("error", "")) == failed
        assert {stored["method"], "random/llama", "needle", stored["status"]} <= set(seen["tags"])
    assert {stored["delta_full"] for stored in made.values()} == {None, 0.0}, (
        "the baseline came last, and was waited for"
    )


def test_the_table_of_samples_and_the_files_are_complete(swept):
    folder, _ = swept
    for run_id, stored in records(folder).items():
        where, rows = runs(folder)[run_id], list(record.read_rows(folder / "test" / run_id / "samples.jsonl"))
        lines = table(where, "samples") if rows else []
        assert len(rows) == (0 if stored["status"] == "failed" else 2)
        assert [(line["id"], line["score"]) for line in lines] == [(row["id"], row["score"]) for row in rows]
        assert all(line["text"] == row["out"]["text"][0] for line, row in zip(lines, rows, strict=True))
        assert all(line["meta.depth"] == row["meta"]["depth"] for line, row in zip(lines, rows, strict=True))
        log = [json.loads(line) for line in inspect(where).splitlines()]
        (about,) = (line["run"] for line in log if line["type"] == "run")
        assert (about["run_group"], about["job_type"], about["run_id"]) == ("test", "eval", run_id)
        artifacts = {line["artifact"]["name"]: line["artifact"] for line in log if line["type"] == "artifact"}
        files = artifacts[f"record-{run_id}"]["manifest"]["contents"]
        assert {file["path"] for file in files} == set(content.FILES)


def test_a_tracker_is_told_nothing_of_the_machine(swept):
    folder, _ = swept
    for where in runs(folder).values():
        for file in where.rglob("*"):
            if file.is_file() and "logs" not in file.relative_to(where).parts:
                content_of_file = file.read_bytes()
                assert (
                    str(ROOT).encode() not in content_of_file
                    and str(Path.home()).encode() + b"/" not in content_of_file
                )
        assert not list(where.rglob("wandb-metadata.json"))


def test_the_leaderboard_has_a_line_per_run_and_its_figures(swept):
    folder, _ = swept
    where = runs(folder)["board-test"]
    lines = {line["method"]: line for line in table(where, "leaderboard")}
    made = {stored["method"]: stored for stored in records(folder).values()}
    assert set(lines) == {"full", "snapkv", "h2o"} and "failed" in lines["h2o"]["flags"]
    assert lines["snapkv"]["kv.bytes_held"] == made["snapkv"]["kv.bytes_held"] and lines["h2o"]["score"] is None
    images = {path.parent.name for path in (where / "files" / "media" / "images").rglob("*.png")}
    assert images == {"heat", "pareto"}


def test_a_row_is_refreshed_when_its_record_changes_and_syncing_again_changes_nothing(swept, tmp_path):
    pytest.importorskip("wandb")
    shutil.copytree(swept[0] / "test", tmp_path / "results" / "test")
    arguments = [str(tmp_path / "results"), "--dir", str(tmp_path), "--no-board"]

    def state():
        return {run_id: json.loads(inspect(where, "--summary")) for run_id, where in runs(tmp_path).items()}

    def essence(seen):
        own = {k: v for k, v in seen["summary"].items() if not k.startswith("_") and k != "samples"}
        return seen["state"], seen["config"], seen["tags"], own

    assert sync.main(arguments) == 0
    first = {run_id: essence(seen) for run_id, seen in state().items()}
    live = {run_id: essence(json.loads(inspect(runs(swept[0])[run_id], "--summary"))) for run_id in first}
    assert first == live, "rebuilt from records is what was logged live"
    assert sync.main(arguments) == 0
    assert {run_id: essence(seen) for run_id, seen in state().items()} == first
    (failed,) = (run_id for run_id, seen in first.items() if seen[0] == "failed")
    path = tmp_path / "results" / "test" / failed / "record.json"
    record.write_json(path, record.read_record(path) | {"status": "ok", "score": 0.25, "error": None})
    assert sync.main(arguments) == 0
    seen = state()
    assert len(seen) == 3 and seen[failed]["state"] == "finished"
    assert seen[failed]["summary"]["score"] == 0.25 and "error" not in seen[failed]["summary"]


def test_a_damaged_record_is_named_and_the_others_are_sent(swept, tmp_path, capsys):
    pytest.importorskip("wandb")
    shutil.copytree(swept[0] / "test", tmp_path / "results" / "test")
    first, second, _ = sorted((tmp_path / "results" / "test").glob("*/"))
    (first / "record.json").write_text('{"run_id": "x", "sta')
    (second / "config.yaml").write_text("a: [1, ")
    assert sync.main([str(tmp_path / "results"), "--dir", str(tmp_path), "--no-board"]) == 0
    assert first.name in capsys.readouterr().err and len(runs(tmp_path)) == 2
    assert content.read(second).config.keys() == {"budget", "parts"}
    assert sync.main([str(tmp_path / "nothing")]) == 1


def refusing(monkeypatch, fault):
    """Have wandb raise when a run is started: the list of tries."""
    tries = []

    def init(**_):
        tries.append(1)
        raise fault

    monkeypatch.setattr(pytest.importorskip("wandb"), "init", init)
    return tries


def test_a_tracker_that_does_not_start_is_tried_once_and_fails_no_run(monkeypatch, tmp_path, caplog):
    tries = refusing(monkeypatch, RuntimeError("no route to host"))
    assert command(tmp_path, "method=full,random", "budget=0.5", "logger=wandb", "limit=1") == 0
    assert {stored["status"] for stored in records(tmp_path).values()} == {"ok"}
    assert len(tries) == len(caplog.messages) == 1
    assert "kvcompress sync" in caplog.messages[0] and "no route to host" in caplog.text


@pytest.mark.parametrize("fault", [SystemExit(1), ImportError("no such package")])
def test_whatever_a_tracker_raises_at_its_start_is_a_warning(monkeypatch, swept, tmp_path, caplog, fault):
    tries = refusing(monkeypatch, fault)
    made = list((swept[0] / "test").glob("*/"))
    assert [tracking.log(settings(tmp_path), folder) for folder in made] == [False] * 3
    assert tries and all("kvcompress sync" in text for text in caplog.messages) and str(fault) in caplog.text
    if isinstance(fault, Exception):
        assert len(tries) == len(caplog.messages) == 1


def test_what_a_tracker_cannot_take_costs_that_run_alone(monkeypatch, swept, tmp_path, caplog):
    wandb = pytest.importorskip("wandb")
    made, calls = sorted((swept[0] / "test").glob("*/")), []

    add_file = wandb.Artifact.add_file

    def failing(artifact, path, *others, **more):
        calls.append(path)
        if len(calls) == 1:
            raise TypeError("cannot be an artifact")
        return add_file(artifact, path, *others, **more)

    monkeypatch.setattr(wandb.Artifact, "add_file", failing)
    sent = [tracking.log(settings(tmp_path), folder) for folder in made]
    assert sent == [False, True, True] and "cannot be an artifact" in caplog.text
    states = {run_id: json.loads(inspect(where, "--summary"))["state"] for run_id, where in runs(tmp_path).items()}
    assert len(states) == 3 and states[made[0].name] == "failed"
    assert not tracking.log(settings(tmp_path), tmp_path / "nowhere") and "nowhere" in caplog.messages[-1]


def test_nothing_is_started_where_it_is_not_wanted(monkeypatch, swept, tmp_path):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("started"))
    folder = next((swept[0] / "test").glob("*/"))
    assert not tracking.log(LoggerConfig(), folder)
    assert not tracking.log(settings(tmp_path, mode="disabled"), folder)
    assert not tracking.log_board(settings(tmp_path, mode="disabled"), folder.parent)


@pytest.mark.parametrize("override", ["logger.mode=ofline", "logger.name=wandbb", "logger.timeout=0"])
def test_a_wrong_setting_is_refused_before_anything_is_run(tmp_path, capsys, override):
    assert main([*SHORT, f"paths.results={tmp_path}", "method=full", override]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "valid: " in shown or "above 0" in shown
    assert not list(tmp_path.rglob("record.json"))


def test_a_table_takes_samples_that_differ_in_what_they_have():
    row = {
        "id": "a",
        "score": 1,
        "out": {"text": ["x" * 20_000], "tokens": [[1, 2], [3]], "finished": ["stop", "length"]},
    }
    other = {"id": "b", "score": 0.5, "out": {"tpot_s": [3.0, 1.0, 2.0]}, "meta": {"depth": 0.5, "spans": [1]}}
    columns, lines = content.table(
        [row, other, {"id": "c", "score": 0, "out": {}, "meta": None, "scores": {"f1": 0.1}}]
    )
    first, second, third = (dict(zip(columns, line, strict=True)) for line in lines)
    assert first["tokens"] == 3 and first["finished"] == "stop, length" and len(first["text"]) == content.TEXT
    assert second["tpot_s"] == 2.0 and second["meta.depth"] == 0.5 and "meta.spans" not in columns
    assert third["scores.f1"] == 0.1 and third["meta.depth"] is None
    assert content.table([]) == ([], [])


def test_tags_are_short_and_come_once():
    long = {"model": "owner/" + "m" * 80, "method": "needle", "task": "needle", "status": "ok", "protocol.shared": True}
    assert content.tags(long) == ["m" * 64, "needle", "ok", "shared"]


def test_a_leaderboard_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no record"), board(tmp_path):
        pass


def test_the_agents_file_is_wandbs_and_no_choice_of_hydra():
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    found = utils.load_sweep_config(str(config.folder() / "sweep" / "wandb.yaml"))
    assert (ROOT / found["program"]).is_file() and found["metric"]["name"] in record_schema.KEYS
    assert set(found["parameters"]["method"]["values"]) <= set(config.options("method", config.folder()))
    assert config.options("sweep", config.folder()) == ["default"]
    with pytest.raises(ValueError, match="Valid: default"):
        config.check_overrides(["sweep=wandb"], config.folder())


def as_the_agents_process(environment, arguments):
    """What a process of an agent does, in a copy of this one."""
    import wandb

    os.environ.clear()
    os.environ.update(environment)
    code = main(arguments)
    wandb.teardown()
    os._exit(code)


class Copied:
    """A process of an agent that is a copy of this one: it need not import torch anew."""

    def __init__(self, env, command, **_):
        assert command[:3] == ["/usr/bin/env", "python", "scripts/run.py"], command
        env.pop("WANDB_SERVICE", None)  # as the agent does
        self.process = forked(as_the_agents_process, env, command[3:])

    def wait(self):
        self.process.join()
        return self.process.exitcode


@pytest.mark.parametrize("process", ["a copy", pytest.param("its own", marks=pytest.mark.long)])
def test_an_agents_command_makes_one_run_with_the_agents_id_also_where_all_is_done(monkeypatch, tmp_path, process):
    """wandb's agent, fed by hand what its server would send; offline, on a small model."""
    agents = pytest.importorskip("wandb.wandb_agent")
    from wandb.sdk.launch.sweeps import utils

    if process == "a copy":
        monkeypatch.setattr(agents, "AgentProcess", Copied)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # the agent sets them here
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    definition = utils.load_sweep_config(str(config.folder() / "sweep" / "wandb.yaml"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    small = dict(override.split("=", 1) for override in (*SHORT, "limit=1", "logger.mode=offline"))
    chosen = {"method": "snapkv", "budget": 0.5, "task": "needle", **small, "paths.results": str(tmp_path / "results")}
    agent = agents.Agent(None, None, sweep_id="sweep1")
    agent._sweep_command = definition["command"]
    for name in ("first", "second"):  # the same cell twice: the second time there is nothing to run
        arguments = {key: {"value": value} for key, value in chosen.items()}
        answer = agent._process_command(
            {"id": name, "type": "run", "run_id": name, "program": definition["program"], "args": arguments}
        )
        assert "exception" not in answer, answer
        assert agent._run_processes[name].wait() == 0
    found = runs(tmp_path)
    assert set(found) == {"first", "second"}
    (stored,) = records(tmp_path / "results").values()
    for where in found.values():
        seen = json.loads(inspect(where, "--summary"))
        assert seen["state"] == "finished" and seen["summary"]["score"] == stored["score"]
        assert seen["config"]["run_id"] == stored["run_id"] and seen["config"]["method"] == "snapkv"
        assert "sweep1" in inspect(where)


def test_under_an_agent_no_leaderboard_is_sent_and_done_runs_are(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(tracking, "log", lambda _, folder: calls.append(folder))
    monkeypatch.setattr(tracking, "log_board", lambda *_: calls.append("board"))
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text("{}")
    tracking.finish(settings(tmp_path), tmp_path, [], [tmp_path / "a"])
    assert calls == ["board"]
    monkeypatch.setenv("WANDB_SWEEP_ID", "x")
    tracking.finish(settings(tmp_path), tmp_path, [], [tmp_path / "a"])
    assert calls == ["board", tmp_path / "a"]


def test_trackio_has_one_run_per_run_id_however_often_it_is_sent(monkeypatch, swept, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    arguments = [str(swept[0] / "test"), "--logger", "trackio"]
    assert sync.main(arguments) == 0 and sync.main(arguments) == 0
    made = records(swept[0])
    found = {run.name.rpartition(" ")[2]: run for run in Api().runs("kvcompress")}
    assert set(found) == {*made, "leaderboard-test"}
    for run_id, stored in made.items():
        (line,) = SQLiteStorage.get_logs("kvcompress", found[run_id].name, run_id=found[run_id].id)
        assert line["status"] == stored["status"] and line.get("score") == stored["score"]
        assert found[run_id].config["method"]["name"] == stored["method"]
        assert len(line["samples"]["_value"]) == (stored["n_samples"] or 0)


def test_a_tracker_that_is_not_installed_is_said_with_the_way_to_it(monkeypatch, swept, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "trackio", None)
    made = list((swept[0] / "test").glob("*/"))
    chosen = LoggerConfig("trackio", dir=str(tmp_path))
    assert [tracking.log(chosen, folder) for folder in made] == [False] * 3
    assert len(caplog.messages) == 1 and "pip install" in caplog.text


def test_a_run_is_sent_by_the_process_that_wrote_its_record_and_by_no_other(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(tracking, "log", lambda settings, folder: sent.append(folder.name))
    tracker = tracking.SweepTracker()
    tracker.expect([OmegaConf.create({"paths": {"results": str(tmp_path)}, "sweep": {"name": "s"}, "logger": {}})])
    for fresh in (True, False):
        folder = tmp_path / "s" / ("here" if fresh else "elsewhere")
        tracker(Outcome("full", 1.0, "ok", record={"score": 1.0}, folder=folder, fresh=fresh))
    assert sent == ["here"]
