"""The command that a board gives for a run composes the very configuration that the run had."""

from __future__ import annotations

import shlex

import pytest
import yaml
from helpers import thinned
from omegaconf import OmegaConf

from kvcompress.common import hashing
from kvcompress.report.command import Commands, from_hydra
from kvcompress.sweep.cell_spec import identity, with_dtype
from kvcompress.sweep.components import build_method, build_task
from kvcompress.sweep.config import check_overrides, composing, folder

CELLS = [
    ["model=random", "task=needle", "method=snapkv", "budget=0.25"],
    ["model=random", "task=needle", "method=snapkv", "allocator=ada", "budget=64", "seed=3", "task.lengths=[200,300]"],
    ["model=random", "task=needle", "method=streamingllm", "method.sinks=8", "task.question=hidden", "limit=2"],
    ["model=random", "task=needle", "method=full", "prefill=chunked", "task.haystack=noise"],
    ["model=random", "task=needle_short", "method=rkv", "schedule=interval", "budget=0.5", "dtype=bfloat16"],
    ["model=random/gemma2", "task=fidelity_short", "method=h2o", "budget=1"],
]


def left_behind(path, compose, overrides):
    """A run's configuration in its folder, and its run id."""
    check_overrides(overrides, folder())
    config = with_dtype(compose([*overrides, "paths.data=null"]))
    path.mkdir()
    (path / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    return run_id(config)


def run_id(config):
    config = with_dtype(config)
    return hashing.digest(identity(config, build_method(config), build_task(config)))


@pytest.fixture(scope="module")
def usual():
    """Commands that leave out what is usual."""
    return from_hydra()


@pytest.mark.parametrize(("cell", "written_out"), thinned(CELLS, [False, True], every=2))
def test_the_command_of_a_run_gives_the_run_id_of_that_run(tmp_path, usual, cell, written_out):
    commands = Commands() if written_out else usual
    with composing() as compose:
        expected = left_behind(tmp_path / "run", compose, cell)
    line = commands.line(tmp_path / "run", {"task": cell[1].partition("=")[2].removesuffix("_short")})
    program, script, *overrides = shlex.split(line)
    assert (program, script) == ("kvcompress", "run")
    with composing() as compose:
        assert run_id(compose([*overrides, "paths.data=null"])) == expected


def test_the_command_says_no_more_than_what_differs_from_the_usual(tmp_path, usual):
    with composing() as compose:
        left_behind(tmp_path / "run", compose, CELLS[0])
    assert usual.line(tmp_path / "run", {}) == (
        "kvcompress run model=random/llama task=needle method=snapkv budget=0.25 seed=0 dtype=float32"
    ), "dtype: what auto came to, so that the run is the same on a GPU"


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "model: 3\ntask: {}\nmethod: {}", None])
def test_a_folder_without_a_configuration_that_can_be_read_has_no_command(tmp_path, text):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert Commands().line(tmp_path, {}) is None


ODD = ["it's", "a,b", "1", "null", "$x `ls`", "{a}", 'quo"te', "", "back\\slash", "end\\", "\\'", "x=y", "né"]


def test_odd_values_survive_shell_and_hydra(tmp_path):
    with composing() as compose:
        for value in ODD:
            config = {
                "model": {"name": "random", "revision": value},
                "task": {"name": "needle"},
                "method": {"name": "full"},
            }
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
            assert compose(shlex.split(Commands().line(tmp_path, {}))[2:]).model.revision == value
