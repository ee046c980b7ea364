"""scripts/new_task.py makes files that work, and docs/new_task.md is true to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import load_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_task.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def script():
    return load_script("new_task")


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(clone, run):
    """Files are written and commands run in the page's order; all succeed, and both tasks come to a leaderboard."""
    made = set(script().files("LastBox"))
    for language, path, text in BLOCKS:
        if path:
            assert path not in made or (clone / path).exists(), "new_task.py made every file that the page fills in"
            (clone / path).write_text(text, encoding="utf-8")
        else:
            assert language == "bash"
            for command in text.splitlines():
                done = run(command, clone)
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "lastbox" in done.stdout and "jsonl" in done.stdout and "streamingllm" in done.stdout


def test_the_page_fills_in_every_file_that_is_made():
    assert {path for _, path, _ in BLOCKS if path} >= set(script().files("LastBox"))


@pytest.mark.slow
def test_what_is_made_passes_its_test(clone, run):
    assert run("python scripts/new_task.py Fresh", clone).returncode == 0
    done = run("python -m pytest -q tests/tasks/test_fresh.py", clone)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "says"), [("Needle", "taken by task=needle"), ("Turn", "imports"), ("lastBox", "capital")]
)
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(name, says, tmp_path, capsys):
    assert script().main([name, "--root", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err and not any(tmp_path.iterdir())
