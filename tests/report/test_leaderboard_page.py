"""The leaderboard of the documentation: ranges of ranks, intervals and stars are those of the records."""

from __future__ import annotations

import pytest
from boards import run
from helpers import load_script

from kvcompress.report.leaderboard_page import BEGIN, END, tables
from kvcompress.report.run_index import gather


@pytest.fixture
def results(tmp_path):
    run(tmp_path / "r", "full", 1.0, [1.0] * 12)
    for name, scores in (("good", [1.0] * 12), ("fair", [1.0] * 11 + [0.0]), ("bad", [0.0] * 12)):
        run(tmp_path / "r", name, 0.25, scores)
    return tmp_path / "r"


def test_methods_that_cannot_be_told_apart_share_a_range_of_ranks_and_a_sure_loss_has_a_star(results):
    lines = [
        line.split(" | ")
        for line in tables(gather([results])).splitlines()
        if line.startswith("| ") and "25.0%" in line
    ]
    assert [(line[0], line[1]) for line in lines] == [("| 1–2", "good"), ("| 1–2", "fair"), ("| 3", "bad")]
    assert "✱" in lines[2][3] and "✱" not in lines[1][3] and lines[1][2].startswith("0.917 .6")


def test_a_score_between_two_runs_is_marked_as_joined(results):
    run(results, "line", 0.5, [1.0] * 12)
    run(results, "line", 0.1, [0.0] * 12)
    (line,) = [line for line in tables(gather([results])).splitlines() if "| line |" in line and "interpolated" in line]
    assert line.count("–") >= 3 and "0.375" in line


def test_the_command_writes_between_its_marks_and_refuses_a_page_without_them(results, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    script = load_script("leaderboard")
    assert script.main([str(results), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text and "| bad |" in text
    page.write_text("no marks")
    assert script.main([str(results), "--page", str(page)]) == 1 and "no place" in capsys.readouterr().err
    assert script.main([str(tmp_path / "empty"), "--page", str(page)]) == 1
