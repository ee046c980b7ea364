"""Command lines that run nothing answer without importing torch or transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG
from sweeps import SHORT

from kvcompress.commands import memo
from kvcompress.commands.run import main
from kvcompress.sweep import components, schema_index

ROOT = Path(__file__).resolve().parents[2]
# Commands one after another in one process: of each its exit code, what it printed, and what is imported after it.
PROBE = """
import contextlib, io, json, sys
from kvcompress.commands.run import main
found = []
for arguments in json.loads(sys.argv.pop(1)):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code or 0
    found.append([code, text.getvalue(), sorted(sys.modules)])
    if hydra := sys.modules.get("hydra.core.global_hydra"):
        hydra.GlobalHydra.instance().clear()
print(json.dumps(found))
"""
CELLS = ("-m", *SHORT, "limit=1", "method=full,snapkv", "budget=0.5")
HEAVY = {"torch", "transformers", "numpy", "kvcompress.methods", "kvcompress.tasks"}


def ask(cache: Path, *commands: list[str]) -> list[tuple[int, str, set[str]]]:
    """Exit code, output and imported modules of each command in a process of their own."""
    environment = os.environ | {"KVCOMPRESS_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    line = [sys.executable, "-c", PROBE, json.dumps(commands)]
    done = subprocess.run(line, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [(code, text, set(modules)) for code, text, modules in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache folder with the index of schemas, as the first command leaves it."""
    folder, patch = tmp_path_factory.mktemp("cache"), pytest.MonkeyPatch()
    patch.setenv("KVCOMPRESS_CACHE", str(folder))
    if LONG:
        ((code, _, modules),) = ask(folder, ["method=snapvk"])
        assert code == 2 and "torch" in modules, "the first command makes the index"
    else:
        schema_index._write(schema_index.path(), components.table(within="kvcompress."))
    assert schema_index.path().is_file()
    patch.undo()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache) -> Path:
    """A finished sweep of a process that has the same cache folder."""
    from hydra.core.global_hydra import GlobalHydra

    folder, patch = tmp_path_factory.mktemp("results"), pytest.MonkeyPatch()
    patch.setattr(memo, "cache_dir", lambda: cache)
    patch.chdir(ROOT)
    GlobalHydra.instance().clear()
    assert main([*CELLS, f"paths.results={folder}"]) == 0
    GlobalHydra.instance().clear()
    patch.undo()
    return folder


ASKED = {
    "help": (["--help"], 0, "snapkv"),
    "a mistyped key": (["metod=h2o"], 2, "did you mean method?"),
    "an unknown method": (["method=snapvk"], 2, "did you mean snapkv?"),
    "status": (["status={}/test"], 0, "2 ok"),
    "a dry run of a finished sweep": (
        [*CELLS, "paths.results={}", "dry=true"],
        0,
        "nothing to do: all 2 cells are finished",
    ),
}


@pytest.fixture(scope="module")
def answers(cache, finished) -> dict[str, tuple[int, str, set[str]]]:
    """What each command answers: all of them asked in one process, where one after another must import nothing heavy."""
    commands = [[word.format(finished) for word in arguments] for arguments, *_ in ASKED.values()]
    return dict(zip(ASKED, ask(cache, *commands), strict=True))


@pytest.mark.parametrize("name", ASKED)
def test_a_command_that_runs_nothing_imports_no_torch(answers, name):
    _, code, says = ASKED[name]
    found, text, modules = answers[name]
    assert (found, says in text) == (code, True), text
    assert not HEAVY & modules
