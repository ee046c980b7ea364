"""What is written of a run holds nothing of the machine it ran on, and what is read back is not resolved."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from sweeps import SHORT, cells, sweep

from kvcompress.commands.run import main
from kvcompress.methods import SnapKV
from kvcompress.report.command import Commands
from kvcompress.sweep import stored_config
from kvcompress.sweep.faults import text_of, without_paths
from kvcompress.sweep.launcher import engines
from kvcompress.tracking import content

SECRET = "hunter2-hunter2"
CONFIG = (
    "model: {name: tiny}\ntask: {name: needle, source: '${oc.env:SECRET_TOKEN}'}\nmethod: {name: full}\nbudget: 1.0\n"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    monkeypatch.setenv("KVCOMPRESS_DATA", "/srv/private/data")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "alice"))


def test_a_stored_configuration_is_not_resolved_when_it_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert stored_config.read(tmp_path / "config.yaml")["task"]["source"] == "${oc.env:SECRET_TOKEN}"
    assert SECRET not in json.dumps(content.configuration(tmp_path / "config.yaml"))
    assert SECRET not in Commands().line(tmp_path, {})


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, ",
        "- a",
        "a: &b [1]\nc: *b",
        "? [1]\n: 2",
        "a: " + "[" * 1200,  # more than Python calls deep
        "a: !!python/name:os.system",
        "\0",
        "a: 2020-13-45",
    ],
)
def test_a_stored_configuration_that_is_none_reads_as_nothing(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert stored_config.read(tmp_path / "config.yaml") is None
    assert content.configuration(tmp_path / "config.yaml") == {} and Commands().line(tmp_path, {}) is None


def test_values_of_the_environment_are_not_written(tmp_path):
    (config,) = cells(tmp_path, "snapkv", "0.5", "limit=1", "logger.entity=${oc.env:SECRET_TOKEN}")
    config.paths.data = "${oc.env:KVCOMPRESS_DATA,data}"
    stored_config.resolve(config)
    assert config.logger.entity == SECRET, "it is resolved where it is used"
    (outcome,) = sweep([config])[0]
    assert outcome.status == "ok", outcome.note
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode()
    assert SECRET not in everything and "/srv/private" not in everything
    kept = stored_config.read(outcome.folder / "config.yaml")
    assert kept["logger"]["entity"] == "${oc.env:SECRET_TOKEN}"
    assert kept["paths"]["data"] == "${oc.env:KVCOMPRESS_DATA,data}"


def test_a_command_leaves_no_path_of_the_machine(tmp_path, monkeypatch):
    """Of all files that a sweep writes, and with a fault in it."""

    def score(*_):
        raise FileNotFoundError(2, "No such file", str(Path.home() / "secret plans" / "x.bin"))

    monkeypatch.setattr(type(SnapKV(budget=0.5).make_scorer()), "score", score)
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *SHORT, "method=full,snapkv", "budget=0.5", "limit=1", "paths.results=out"]) == 1
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"config.yaml", "samples.jsonl", "record.json", "sweep.json"}
    everything = "".join(path.read_text() for path in files)
    for place in (str(tmp_path), str(Path.home()), str(Path(torch.__file__).parent), str(Path(__file__).parents[2])):
        assert place not in everything
    (error,) = (
        json.loads(p.read_text())["error"] for p in files if p.name == "record.json" and '"failed"' in p.read_text()
    )
    assert 'File "kvcompress/' in error and "FileNotFoundError" in error and "~/secret plans/x.bin" in error


def test_a_traceback_is_cut_to_the_package_and_the_place_that_raised():
    try:
        torch.nn.Linear(2, 2)(torch.zeros(3))
    except RuntimeError as error:
        text = text_of(error)
    assert "torch/nn/modules/linear.py" in text and "test_secrets.py" in text and "/module.py" not in text
    assert str(Path(torch.__file__).parent) not in text and text.splitlines()[-1].startswith("RuntimeError")


def test_a_traceback_tells_of_causes_too():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        text = text_of(error)
    assert "first" in text and "direct cause" in text and "second" in text and str(Path(__file__).parent) not in text


def test_paths_are_cut_unless_they_were_typed_and_secrets_are_named():
    text = f"open('/srv/a/b.txt'): token {SECRET}, see https://host.org/a/b and task=suite/name, {Path.home()}/x"
    assert without_paths(text) == (
        "open('…/b.txt'): token ${SECRET_TOKEN}, see https://host.org/a/b and task=suite/name, ~/x"
    )
    assert "/srv/a/b.txt" in without_paths(text, ["/srv/a"]) and "/srv/a/b.txt" not in without_paths(text, ["/srv/ab"])
    assert without_paths("\ud800").isascii()


def test_locks_of_gpus_lie_in_a_folder_of_the_user_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = engines.own_folder()
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    (tmp_path / "victim").mkdir()
    folder.symlink_to(tmp_path / "victim")
    assert engines.own_folder() is None and "cannot hold their locks" in caplog.text
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engines.take_gpu(2) is None and os.listdir(tmp_path / "victim") == []
