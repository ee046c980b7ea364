"""scripts/new_method.py makes files that work, and docs/new_method.md is true to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import LONG, load_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "new_method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def script():
    return load_script("new_method")


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
    assert "| `longkeys` |" in (clone / "docs" / "method_parts.md").read_text() and "longkeys" in done.stdout


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
