"""The table of methods is what the classes say, and what is committed is that table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import load_script

from kvcompress.method import Method, Needs, Schedule, Scorer
from kvcompress.methods import CAKE, H2O, METHODS, TOVA, Full, KeyDiff, LagKV, PyramidKV, SnapKV
from kvcompress.sweep import method_table
from kvcompress.sweep.components import method_classes

ROOT = Path(__file__).parents[2]


def script():
    return load_script("method_table")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_its_family_what_it_keeps_its_source_and_differences(name):
    """In its own class: what a parent says is another method's."""
    method_table.check(METHODS[name])


def test_the_committed_tables_are_what_the_generator_makes(capsys):
    assert script().main(["--check"]) == 0, capsys.readouterr().out + "run: python scripts/method_table.py"


def test_every_method_has_one_row_in_both_tables():
    short = (ROOT / "docs" / "method_parts.md").read_text().partition("<!-- end of method table -->")[0]
    for text in (short, (ROOT / "docs" / "methods.md").read_text().split("## Alloc")[0]):
        rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        assert sorted(rows) == sorted(method_classes()) and rows[0] == "full"


def test_rows_have_as_many_cells_as_the_header():
    for table in method_table.page().split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.count(" | ") for line in lines if not line.startswith("| ---")}) <= 1


@pytest.mark.parametrize(
    ("cls", "when", "needs"),
    [
        (Full, "never", "–"),
        (SnapKV, "prompt end", "32 queries"),
        (H2O, "prompt end, every step", "attention mass"),
        (TOVA, "prompt end, every step", "last query"),
        (CAKE, "prompt, layer by layer, every step", "32 queries"),
        (KeyDiff, "blocks of 128, every step", "keys"),
        (LagKV, "prompt end, every 128 steps", "keys, values"),
    ],
)
def test_when_and_needs_follow_from_the_parts(cls, when, needs):
    assert method_table.when(cls) == when and method_table.needs(cls) == needs


def test_presets_show_what_differs_from_the_default_and_join_equal_ones():
    assert method_table.presets(PyramidKV) == (
        "`code`: window=64, kernel=5, pooling=avg, totals=published; "
        "`kvpress`: window=64, kernel=5, pooling=avg, reduce_first=false, totals=rounded, protected_inside=true"
    )
    assert method_table.presets(Full) == "–"
    assert method_table.defaults(TOVA) == "protect_last=false, decode=true"


@dataclass(frozen=True)
class Everything(Scorer):
    @property
    def needs(self):
        return Needs(window=3, hidden=True, prerope=True, extra_passes=2)

    def score(self, view, observed, state):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Quiet(Method):
    """A method that says nothing of itself."""

    def make_scorer(self):
        return Everything()

    def make_schedule(self):
        return Schedule(prompt=False, every=7)


@dataclass(frozen=True, kw_only=True)
class Child(SnapKV):
    """A method whose parent is described, with one thing left to do."""

    family = "attention"
    keeps = "less"
    source = "TODO"


def test_a_method_that_does_not_describe_itself_is_named_with_what_is_missing():
    with pytest.raises(ValueError, match=r"Quiet .*does not say its family, keeps, source, differences"):
        method_table.check(Quiet)
    with pytest.raises(ValueError, match=r"Child .*does not say its source, differences"):
        method_table.check(Child)
    assert method_table.when(Quiet) == "every 7 steps"
    assert method_table.needs(Quiet) == "3 queries, hidden states, queries before rotation, 2 more passes"


def test_a_table_goes_between_its_markers_and_nowhere_else():
    text = f"before\n{method_table.BEGIN}\nold\n{method_table.END}\nafter"
    made = method_table.inserted(text, "| new |\n")
    assert made == f"before\n{method_table.BEGIN}\n| new |\n{method_table.END}\nafter"
    assert method_table.inserted(made, "| new |\n") == made
    with pytest.raises(ValueError, match="no place for the method table"):
        method_table.inserted("no markers", "")


def test_sources_are_linked():
    assert method_table._linked("arXiv 2306.14048; FMInference/H2O") == (
        "[arXiv 2306.14048](https://arxiv.org/abs/2306.14048); [FMInference/H2O](https://github.com/FMInference/H2O)"
    )


def test_check_fails_and_writes_nothing_where_a_table_is_old(tmp_path, monkeypatch, capsys):
    module = script()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "method_parts.md").write_text(f"{method_table.BEGIN}\nold\n{method_table.END}\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.main(["--check"]) == 1 and "old" in (tmp_path / "docs" / "method_parts.md").read_text()
    assert module.main([]) == 0 and module.main(["--check"]) == 0
    assert "docs/methods.md" in capsys.readouterr().out
