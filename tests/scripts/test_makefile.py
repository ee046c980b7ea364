"""What make says before it begins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def program(folder: Path, body: str) -> Path:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (None, "is not here"),
        ("exit 127", "does not run"),
        ('test "$2" = "" || exit 1', "needs Python 3.11 or newer"),
    ],
)
def test_a_python_that_is_absent_broken_or_old_is_told_as_such(tree, body, says):
    python = tree / "nowhere" if body is None else program(tree, body)
    done = subprocess.run(["make", "env", f"PYTHON={python}"], cwd=tree, text=True, capture_output=True, timeout=60)
    assert done.returncode != 0 and says in done.stderr and str(python) in done.stderr
    assert not (tree / ".venv").exists()
