"""A memo of a finished command is not believed where anything it follows from has changed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from kvcompress.commands import memo
from kvcompress.common.hashing import source_hash
from kvcompress.sweep.outcome import Outcome

COMMAND = ["-m", "method=full", "budget=0.5"]


@pytest.fixture
def swept(monkeypatch, tmp_path):
    """A finished run, its memo, and a folder of data that its configuration names."""
    monkeypatch.setattr(memo, "cache_dir", lambda: tmp_path / "cache")
    run, data = tmp_path / "results" / "sweep" / "run", tmp_path / "data"
    run.mkdir(parents=True)
    data.mkdir()
    (data / "rows.jsonl").write_text("{}")
    record = {
        "run_id": "run",
        "status": "ok",
        "model": "m",
        "task": "t",
        "method": "full",
        "budget": 1.0,
        "n_samples": 1,
    }
    record |= {"score": 1.0, "versions.source": source_hash()}
    (run / "record.json").write_text(json.dumps(record))
    config = {"model": {"name": "m"}, "task": {"path": None}, "paths": {"data": str(data), "results": "results"}}
    inputs = memo.Inputs()
    inputs.add([OmegaConf.create(config)])
    outcome = Outcome("full", 1.0, "ok", "run", record, folder=run)
    memo.note(COMMAND, [outcome, Outcome("snapkv", 1, "dropped")], inputs)
    return SimpleNamespace(run=run, data=data, record=record, inputs=inputs, outcome=outcome)


def test_the_same_command_is_known_to_be_finished_however_it_would_run(swept):
    for more in (
        [],
        ["dry=true"],
        ["logger=wandb", "resume=any"],
        ["hydra/launcher=basic", "hydra.launcher.share=false"],
    ):
        assert memo.finished_runs([*COMMAND, *more]) == 1


def test_another_command_or_folder_is_not(swept, monkeypatch, tmp_path):
    for other in ("seed=1", "hydra.sweeper.params.seed='0,1'", "sweep.name=other"):
        assert memo.finished_runs([*COMMAND, other]) is None
    monkeypatch.chdir(tmp_path)
    assert memo.finished_runs(COMMAND) is None, "paths are relative to where the command is given"


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_changed_data_is_looked_at_again(swept, change):
    if change == "edited":
        (swept.data / "rows.jsonl").write_text("{ }")
    elif change == "added":
        (swept.data / "more.jsonl").write_text("")
    else:
        (swept.data / "rows.jsonl").unlink()
    assert memo.finished_runs(COMMAND) is None


@pytest.mark.parametrize("record", [{"versions.source": "other"}, {"status": "failed"}, None])
def test_a_record_that_is_stale_failed_or_gone_is_run_again(swept, record):
    path = swept.run / "record.json"
    path.unlink() if record is None else path.write_text(json.dumps(swept.record | record))
    assert memo.finished_runs(COMMAND) is None


@pytest.mark.parametrize("status", ["failed", "running", "stale", "refused", "oom", "partial"])
def test_a_sweep_with_a_cell_that_is_not_finished_leaves_no_memo(swept, status):
    other = [*COMMAND, "seed=2"]
    memo.note(other, [swept.outcome, Outcome("full", 1.0, status, folder=swept.run)], swept.inputs)
    assert memo.finished_runs(other) is None


def test_a_damaged_memo_is_no_memo(swept):
    (file,) = (swept.run.parents[2] / "cache" / "commands").glob("*.json")
    for text in ("", "[1]", '{"runs": 3}', '{"runs": ["x"], "inputs": []}'):
        file.write_text(text)
        assert memo.finished_runs(COMMAND) is None


def test_a_cache_folder_that_cannot_be_written_to_is_no_fault(swept, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(memo, "cache_dir", lambda: tmp_path / "file")
    memo.note(COMMAND, [swept.outcome], swept.inputs)
    assert memo.finished_runs(COMMAND) is None
