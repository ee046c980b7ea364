"""The console command finds its commands, and says what is meant where there is none."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress.commands import demo
from kvcompress.commands.door import COMMANDS, main
from kvcompress.commands.program import program
from kvcompress.sweep import config

ROOT = Path(__file__).parents[2]
# every command's help in one process; what is imported by then
PROBE = """
import contextlib, io, sys
from kvcompress.commands.door import COMMANDS, main
for name in COMMANDS.keys() - {'run'}:  # tests/scripts/test_start.py asks it
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            code = main([name, "--help"])
        except SystemExit as end:
            code = end.code
    assert not code and f"kvcompress {name}" in said.getvalue(), (name, code, said.getvalue())
print(*sorted({"torch", "transformers", "pandas", "matplotlib"} & set(sys.modules)))
"""


def test_help_of_every_command_names_it_and_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rum"], "did you mean run?"),
        (["new_method"], "did you mean new-method?"),
        (["method=h2o"], "kvcompress run method=h2o"),
        (["-m", "method=h2o"], "belongs to a run"),
        ([], "usage: kvcompress COMMAND"),
        (["--shell-completion"], "install=bash"),
    ],
)
def test_what_is_no_command_is_refused_with_what_is_meant(arguments, says, capsys):
    assert main(arguments) == 2 and says in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)


def test_the_reference_of_commands_names_every_command():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "wanted", "without"),
    [
        ("kvcompress re", ["report"], ["run"]),
        ("kvcompress run method=sn", ["method=snapkv"], ["method=base_snapkv"]),
        ("kvcompress run -m method=snapkv method.win", ["method.window="], []),
        ("kvcompress report resu", [], ["method="]),
    ],
)
def test_commands_choices_and_settings_are_completed(line, wanted, without, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    words = capsys.readouterr().out.split()
    assert set(wanted) <= set(words) and not set(without) & set(words)
    assert os.environ["COMP_LINE"] == line


def test_completion_is_installed_for_the_console_command(capsys):
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion kvcompress")


def test_flags_stand_anywhere_among_the_settings():
    place = config.folder()
    assert config.expand_suites(["budget=0.5", "--cfg", "job", "seed=1"], place) == [
        "--cfg",
        "job",
        "budget=0.5",
        "seed=1",
    ]
    assert config.expand_suites(["--info", "seed=1", "-cn", "x"], place) == ["--info=all", "-cn", "x", "seed=1"]
    assert config.expand_suites(["seed=1", "-m", "--cfg", "job"], place) == ["--cfg", "job", "seed=1"]
    assert config.expand_suites(["seed=1", "--multirun"], place) == ["-m", "seed=1"]


def test_a_configuration_is_shown_where_it_is_asked_for_at_the_end(capsys):
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    assert main(["run", "method=snapkv", "budget=0.5", "--cfg", "job"]) == 0
    GlobalHydra.instance().clear()
    said = capsys.readouterr().out
    assert "budget: 0.5" in said and "window: " in said


def test_help_of_a_run_has_no_name_that_is_internal(capsys):
    assert main(["run", "method=snapkv", "--help"]) == 0
    said = capsys.readouterr().out
    assert "snapkv" in said and "longbench/… (21)" in said and "window: " in said
    assert "base_" not in said and "_target_" not in said


def test_a_script_is_called_by_its_own_name_in_help(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/report.py"])
    assert program("report") == "report.py"
    monkeypatch.setattr(sys, "argv", ["/x/kvcompress/__main__.py"])
    assert program("report") == "kvcompress report"


def test_the_demonstration_fetches_runs_both_sweeps_and_writes_their_board(monkeypatch, tmp_path):
    called = []
    for name in ("run", "report"):
        module = importlib.import_module(f"kvcompress.commands.{name}")
        monkeypatch.setattr(module, "main", lambda words, name=name: called.append((name, *words)) or 0)
    monkeypatch.setattr(demo, "fetch", lambda name: called.append(("fetch", name)) or 0)
    assert demo.main(["--results", str(tmp_path)]) == 0
    assert [one[:3] for one in called] == [
        ("fetch", "smollm2"),
        ("run", "-m", "experiment=demo"),
        ("run", "-m", "experiment=demo_speed"),
        ("report", str(tmp_path / "demo"), str(tmp_path / "demo_speed")),
    ]
    monkeypatch.setattr(demo, "fetch", lambda name: 3)
    called.clear()
    assert demo.main([]) == 3 and not called, "without the model nothing is run"
