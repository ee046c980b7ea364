"""Command lines that run nothing answer without importing torch or transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import SHORT

from kvcompress.commands import memo
from kvcompress.commands.run import main

ROOT = Path(__file__).resolve().parents[2]
# what a process has imported when its command has ended, however it ends
PROBE = """
import atexit, json, sys
atexit.register(lambda: open(sys.argv.pop(1), "w").write(json.dumps(sorted(sys.modules))))
from pathlib import Path
report = Path(sys.argv[1])
from kvcompress.commands.run import main
raise SystemExit(main(sys.argv[2:]))
"""
CELLS = ("-m", *SHORT, "limit=1", "method=full,snapkv", "budget=0.5")


def ask(folder: Path, cache: Path, *arguments: str) -> tuple[int, str, set[str]]:
    """Exit code, output and imported modules of a command in a process of its own."""
    environment = os.environ | {"KVCOMPRESS_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    command = [sys.executable, "-c", PROBE, str(folder / "modules.json"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=280)
    return done.returncode, done.stdout + done.stderr, set(json.loads((folder / "modules.json").read_text()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache folder with the index of schemas, as the first command leaves it."""
    folder = tmp_path_factory.mktemp("cache")
    code, _, modules = ask(folder, folder, "method=snapvk")
    assert code == 2 and "torch" in modules, "the first command makes the index"
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


def asked(name: str, finished: Path) -> list[str]:
    return {
        "help": ["--help"],
        "a mistyped key": ["metod=h2o"],
        "an unknown method": ["method=snapvk"],
        "status": [f"status={finished / 'test'}"],
        "a dry run of a finished sweep": [*CELLS, f"paths.results={finished}", "dry=true"],
    }[name]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("help", 0, "snapkv"),
        ("a mistyped key", 2, "did you mean method?"),
        ("an unknown method", 2, "did you mean snapkv?"),
        ("status", 0, "2 ok"),
        ("a dry run of a finished sweep", 0, "nothing to do: all 2 cells are finished"),
    ],
)
def test_a_command_that_runs_nothing_imports_no_torch(tmp_path, cache, finished, name, code, says):
    found, text, modules = ask(tmp_path, cache, *asked(name, finished))
    assert (found, says in text) == (code, True), text
    assert not {"torch", "transformers", "numpy", "kvcompress.methods", "kvcompress.tasks"} & modules
