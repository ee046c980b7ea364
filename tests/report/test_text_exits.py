"""Names and answers are text at every exit: terminal, markdown, csv, figures, page and tracker."""

from __future__ import annotations

import csv
import html.parser
import io
import re
import unicodedata
import xml.etree.ElementTree
from pathlib import Path

import pytest
from boards import run, sample
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from kvcompress.commands.report import main
from kvcompress.common import text
from kvcompress.report import external_tables, figure, table
from kvcompress.report.figure import figure_stem, plotting
from kvcompress.report.run_index import gather
from kvcompress.tracking import board, content

NASTY = [
    "[red]bold[/red] [/nothing]",
    "cost $x_1$ and $\\frac{",
    "\x1b[2J\x1b]0;title\x07\x9b31m",
    "=cmd|'/c calc'!A0",
    "<img src=x onerror=alert(1)></script>",
    "a\n| b |\n# c",
    "back\\|tick ` *x* _y_ ~~z~~",
    "[click](javascript:alert) ![i](http://x)",
    ":smile: {b} {rich|x}",
    "\u202etxt.exe",
    "half \ud83d pair",
    "_hidden",
    "../../etc/passwd",
    "x" * 5000,
]
nasty = st.one_of(
    st.sampled_from(NASTY), st.text(max_size=40), st.lists(st.sampled_from(NASTY[:-1]), max_size=3).map("".join)
)
ACTING = {"Cc", "Cs"}


def shows_only(made: str, keep: str = "\n") -> bool:
    """True if no character of a text acts instead of showing."""
    return all(char in keep or unicodedata.category(char) not in ACTING for char in made) and "\u202e" not in made


def printed(*renderables, console=None) -> str:
    out = io.StringIO()
    console = console or Console(file=out, force_terminal=True, width=400, color_system=None)
    console.file = out
    for one in renderables:
        console.print(one)
    return out.getvalue()


@given(nasty)
@settings(max_examples=150, deadline=None)
def test_a_terminal_shows_a_name_and_obeys_nothing_in_it(name):
    grid = Table(title=text.cell(name, "bold"))
    grid.add_column(text.cell("head"), no_wrap=True)
    grid.add_row(text.cell(name))
    plain = text.PlainConsole(file=io.StringIO(), width=6000)
    for made in (printed(grid), printed(name, console=plain)):
        assert shows_only(made)
    assert text.printable(name).split() == printed(text.cell(name)).split() or len(name) > 300


@given(nasty)
@settings(max_examples=150, deadline=None)
def test_markdown_holds_a_name_in_one_cell_and_no_html(name):
    made = text.for_markdown(name)
    assert "\n" not in made and "<" not in made and ">" not in made and shows_only(made, "")
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", made)) == 0, "no border"
    assert not re.search(r"(?<!\\)\]\(", made) and not re.search(r"(?<!\\)(?:\\\\)*[$`*]", made)


@pytest.mark.parametrize(
    "name", ["SnapKV", "tiny · needle · 1,000 tokens", "lowrank rank=0.5 rope_dims=8", "AT&T", "a - b"]
)
def test_usual_names_are_what_they_were_at_every_exit(name):
    assert name == text.for_markdown(name) == text.for_csv(name) == text.for_figure(name) == text.for_terminal(name)


@given(nasty)
@example("-1+2")
@example("＝1")
@example(" =1")
@settings(max_examples=150, deadline=None)
def test_a_spreadsheet_takes_no_text_for_a_formula(name):
    out = io.StringIO()
    csv.writer(out).writerow([text.for_csv(name), text.for_csv([name]), text.for_csv(-0.5)])
    first, second, number = next(csv.reader(io.StringIO(out.getvalue(), newline="")))
    assert not first.lstrip(" \n").startswith(("=", "+", "-", "@", "\t", "\r", "＝")) and number == "-0.5"
    assert second.startswith("[")
    out.getvalue().encode("utf-8")


@given(nasty)
@settings(max_examples=60, deadline=None)
def test_matplotlib_draws_a_name_without_reading_it(name):
    from matplotlib.cbook import is_math_text
    from matplotlib.text import Text

    made = text.for_figure(name)
    assert shows_only(made) and not made.startswith("_") and len(made) <= 2 * text.LONGEST_LABEL
    assert not is_math_text(made)
    assert Text(text=made)._preprocess_math(made)[1] is False


@given(nasty, nasty)
@settings(max_examples=150, deadline=None)
def test_a_file_name_stays_in_its_folder_and_tells_names_apart(one, other):
    made = [figure_stem(name, name, name, "p", "kind") for name in (one, other)]
    assert all("/" not in stem and "\0" not in stem and not stem.startswith(".") for stem in made)
    assert all(len(stem.encode()) < 250 for stem in made)
    pair = [text.for_filename(name) for name in (one, other)]
    assert (pair[0] == pair[1]) == (one == other) or "" in (one, other)


@given(nasty)
@settings(max_examples=60, deadline=None)
def test_a_tracker_gets_names_that_only_show_and_values_that_can_be_stored(name):
    made = content.summary({"status": "ok", "method": name, name: 1.0, "error": name})
    assert all(shows_only(key, "") for key in made) and isinstance(made["method"].encode("utf-8"), bytes)
    assert made["method"] == name or "\ud83d" in name or any("\ud800" <= char <= "\udfff" for char in name)
    assert all(shows_only(tag, "") for tag in content.tags(dict.fromkeys(("model", "method", "task", "status"), name)))


# ---------------------------------------------------------------------- whole boards


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    """A sweep in which every string that may be a user's is nasty: its folder and records."""
    folder = tmp_path_factory.mktemp("exits")
    whole = " ".join(NASTY[:-1])
    rows = [sample(f"{whole} {at}", 0.5 * at, text=whole) for at in (0, 1, 2)]
    about = {"model": whole, "task": whole, "metric": whole, "notes": [whole], "error": whole}
    about |= {f"protocol.{key}": whole for key in ("haystack", "source", "texts", "template")}
    about |= {"metrics.kl": 0.1, f"metrics.{whole}": 1}
    run(folder, "full", 1.0, rows, **about)
    for name in NASTY:
        run(folder, name, 0.5, rows, **about, variant=f"a={name}")
    return folder, [entry.record for entry in gather([folder]).entries]


def test_a_board_is_printed_as_text(boards):
    _, records = boards
    assert len(records) == 1 + len(NASTY)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=400, color_system=None)
    table.leaderboard(records, console)
    external_tables.print_external(
        [record | {"origin": "kvpress", "source": record["model"]} for record in records], console
    )
    assert shows_only(out.getvalue())


def test_markdown_and_csv_keep_one_line_per_run(boards):
    _, records = boards
    made = table.leaderboard_markdown([records])
    lines = [line for line in made.splitlines() if line.startswith("|")]
    assert (
        len(lines) == 3 + len(NASTY)
        and len({len(re.findall(r"(?<!\\)\|", line.replace("\\\\", ""))) for line in lines}) == 1
    )
    assert "<" not in made and shows_only(made)
    rows = list(csv.DictReader(io.StringIO(table.to_csv(records), newline="")))
    assert len(rows) == 1 + len(NASTY) and not any(
        value.startswith(("=", "@")) for row in rows for value in row.values() if value
    )
    assert table.to_csv(records).encode("utf-8")


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout", "ignore:.*layout not applied")
def test_every_file_of_a_board_is_written_whatever_its_names(boards, tmp_path, capfd, monkeypatch):
    folder, _ = boards
    monkeypatch.setattr(figure, "KINDS", ("svg",))
    assert main([str(folder), "--all", str(tmp_path)]) == 0
    assert shows_only(capfd.readouterr().err)
    figures = list((tmp_path / "figures").iterdir())
    assert figures
    for path in figures:
        xml.etree.ElementTree.parse(path)
    page = (tmp_path / "board.html").read_text(encoding="utf-8")

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert tag != "img" and not any(key.startswith("on") for key, _ in attributes)

    Reader().feed(page)
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == [
        "board.csv", "board.html", "board.md", "board_samples", "figures",
    ]  # fmt: skip


def test_a_leaderboard_for_a_tracker_can_be_stored(boards):
    folder, _ = boards
    _, rows = board.table(gather([folder]).entries)
    assert all(value.encode("utf-8") for row in rows for value in row if value and isinstance(value, str))


def test_a_figure_with_dollars_in_its_labels_is_saved(tmp_path):
    plt = plotting()
    drawn, axes = plt.subplots(figsize=(2, 2))
    axes.plot([0, 1], [0, 1], label=text.for_figure("_$x_1$ $\\frac{"))
    assert axes.get_legend_handles_labels()[1], "a name that begins with an underscore has its line in the legend"
    axes.legend()
    drawn.savefig(tmp_path / "x.png")
    plt.close(drawn)
