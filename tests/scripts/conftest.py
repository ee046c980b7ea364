"""A clone of the tree, and commands that run in it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path) -> Path:
    """A copy of the tree whose own files are imported, as from a clone of its own."""
    for name in ("kvcompress", "methods", "tasks", "conf", "scripts", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("methods", "tasks", "conf"):  # where a wheel has them
        (tmp_path / "kvcompress" / name).symlink_to(tmp_path / name)
    return tmp_path


# without --long: one size of model, and not every invariant of the engine
FEW = {} if LONG else {"PYTEST_ADDOPTS": "-k 'not sizes1 and not sizes2 and not sizes3'"}


# Each command is a process of its own, forked from one that has the packages (and nothing of this tree) imported already.
STARTER = """
import importlib, json, os, runpy, shlex, sys, tempfile
import datasets, hydra, hypothesis, matplotlib.pyplot, pandas, pytest, rich.console, torch, transformers, xdist
import transformers.generation, transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama
sys.dont_write_bytecode = False  # the copied sources are compiled once
assert not [name for name in sys.modules if name.partition(".")[0] == "kvcompress"]
for line in sys.stdin:
    number, command, where = json.loads(line)
    program, *words = shlex.split(command)
    assert program == "python", command
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        os.chdir(where)
        importlib.invalidate_caches()
        module = words[0] == "-m"
        sys.argv = words[module:]
        sys.path[:0] = [where if module else os.path.dirname(os.path.join(where, words[0])), where]
        code = 0
        try:
            if module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read().decode())
    print(json.dumps([number, code, *texts]), flush=True)
"""


@pytest.fixture(scope="session")
def run():
    """Run a command, `python …`, in a folder as from a clone: its exit code and what it printed."""
    environment, numbers = {**os.environ, "OMP_NUM_THREADS": "1", **FEW}, itertools.count()
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as starter:

        def go(command: str, where: Path) -> subprocess.CompletedProcess[str]:
            number = next(numbers)
            starter.stdin.write(json.dumps([number, command, str(where)]) + "\n")
            starter.stdin.flush()
            while True:  # what a test that ran out of time left is an answer to another command
                answered, *found = json.loads(starter.stdout.readline())
                if answered == number:
                    return subprocess.CompletedProcess(command, *found)

        yield go
        starter.stdin.close()
