"""scripts/new_method.py makes files that work, and docs/new_method.md is true to the letter."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG, load_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# without --long: one size of model, and not every invariant of the engine
FEW = {} if LONG else {"PYTEST_ADDOPTS": "-k 'not sizes1 and not sizes2 and not sizes3'"}


def script():
    return load_script("new_method")


@pytest.fixture
def clone(tmp_path) -> Path:
    """A copy of the tree whose own files are imported, as from a clone of its own."""
    for name in ("kvcompress", "methods", "tasks", "conf", "scripts", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with what is compiled: times of files stay
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("methods", "tasks", "conf"):  # where a wheel has them
        (tmp_path / "kvcompress" / name).symlink_to(tmp_path / name)
    return tmp_path


# Each command is a process of its own, forked from one that has the packages (and nothing of this tree) imported already.
STARTER = """
import importlib, json, os, runpy, shlex, sys, tempfile
import datasets, hydra, hypothesis, matplotlib.pyplot, pandas, pytest, rich.console, torch, transformers, xdist
import transformers.generation, transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama
sys.dont_write_bytecode = False  # the copied sources are compiled once
assert not [name for name in sys.modules if name.partition(".")[0] == "kvcompress"]
for line in sys.stdin:
    command, where = json.loads(line)
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
    print(json.dumps([code, *texts]), flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Run a command, `python …`, in a folder as from a clone: its exit code and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **FEW}
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as starter:

        def go(command: str, where: Path) -> subprocess.CompletedProcess[str]:
            starter.stdin.write(json.dumps([command, str(where)]) + "\n")
            starter.stdin.flush()
            return subprocess.CompletedProcess(command, *json.loads(starter.stdout.readline()))

        yield go
        starter.stdin.close()


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(clone, run):
    """Files are written and commands run in the page's order; all succeed, and the method gets its row and its record.

    As made, before the page fills it in, the method works; the table of methods refuses it until it is described.
    """
    described = False
    for language, path, text in BLOCKS:
        if path:
            if not described:
                described, table = True, run("python scripts/method_table.py", clone)
                assert table.returncode == 1
                assert "LongKeys" in table.stderr and "family, keeps, source, differences" in table.stderr
            assert (clone / path).exists(), "new_method.py made every file that the page fills in"
            (clone / path).write_text(text, encoding="utf-8")
        else:
            assert language == "bash"
            for command in text.splitlines():
                if "test_invariants" in command and not LONG:
                    continue
                done = run(command, clone)
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
                assert "pytest" not in command or "passed" in done.stdout
    assert "| `longkeys` |" in (clone / "README.md").read_text() and "longkeys" in done.stdout


def test_the_page_fills_in_every_file_that_is_made():
    assert {path for _, path, _ in BLOCKS if path} == set(script().files("LongKeys"))


@pytest.mark.parametrize("name", ["longKeys", "Long_Keys", "Long-Keys", "1Keys", "None", "", "../Keys", "Schlüssel"])
def test_a_name_that_is_no_class_name_is_refused(name, tmp_path, capsys):
    assert script().main([name, "--root", str(tmp_path)]) == 1
    assert repr(name) in capsys.readouterr().err and not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "by"), [("SnapKV", "SnapKV"), ("Snapkv", "SnapKV"), ("Scorer", "imports")])
def test_a_taken_name_is_refused_and_nothing_is_written(name, by, tmp_path, capsys):
    assert script().main([name, "--root", str(tmp_path)]) == 1
    assert by in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_file_that_is_there_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "fresh.yaml").write_text("mine")
    assert script().main(["Fresh", "--root", str(tmp_path)]) == 1
    assert "conf/method/fresh.yaml is there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["fresh.yaml"]
