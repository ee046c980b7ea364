"""Tables of external results, apart from what was measured here, each row with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvcompress.common.text import cell, for_markdown
from kvcompress.report.external import belongs
from kvcompress.report.table import MISSING

Row = dict[str, Any]
HEAD = "numbers of others: not measured here, never averaged with what is"


def relevant(rows: Iterable[Row], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows to show beside these records: imported ones all, published ones of a model and task that was measured."""
    shapes = {(r.get("model"), r.get("task"), r.get("metric"), r.get("protocol.question")): r for r in records}
    return [
        row for row in rows if row["origin"] != "published" or any(belongs(row, record) for record in shapes.values())
    ]


def _budget(row: Row) -> str:
    budget = row.get("budget")
    return MISSING if budget is None else f"{budget} tok" if isinstance(budget, int) else f"{budget:g}"


def _score(row: Row) -> str:
    if row.get("score") is None:
        value = row.get("metrics.value")
        return MISSING if value is None else f"({value:g})"  # not on the scale of scores
    error = row.get("score_stderr")
    return f"{row['score']:.3f}" + ("" if error is None else f" ±{error:.2f}")


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("origin", lambda row: str(row["origin"])),
    ("model", lambda row: str(row.get("model") or MISSING)),
    ("task", lambda row: str(row.get("task") or MISSING)),
    ("method", lambda row: str(row.get("method") or MISSING)),
    ("budget", _budget),
    ("score", _score),
    ("metric", lambda row: str(row.get("metric") or MISSING)),
    ("n", lambda row: str(row.get("n_samples") or MISSING)),
    ("source", lambda row: str(row.get("source") or MISSING)),
)


def order(rows: Iterable[Row]) -> list[Row]:
    def key(row: Row) -> tuple[Any, ...]:
        budget = row.get("budget")
        place = (budget is None, not isinstance(budget, float), -(budget or 0))
        return (*(str(row.get(name)) for name in ("origin", "model", "task", "metric", "method")), place)

    return sorted(rows, key=key)


def print_external(rows: Sequence[Row], console: Console) -> None:
    """Print the rows dimmed in a table of their own."""
    if not rows:
        return
    table = Table(title=HEAD, title_justify="left", title_style="bold dim", box=box.SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    for name, _ in COLUMNS:
        table.add_column(name, justify="right" if name in ("budget", "score", "n") else "left", overflow="fold")
    for row in order(rows):
        table.add_row(*(cell(value(row), "dim") for _, value in COLUMNS))
    console.print(table)


def external_markdown(rows: Sequence[Row]) -> str:
    """The same as a markdown table; empty where there are none."""
    if not rows:
        return ""
    lines = [f"### {HEAD[0].upper()}{HEAD[1:]}", "", "| " + " | ".join(name for name, _ in COLUMNS) + " |"]
    lines.append(
        "|" + "|".join(" ---: " if name in ("budget", "score", "n") else " :--- " for name, _ in COLUMNS) + "|"
    )
    for row in order(rows):
        cells = (for_markdown(value(row)) for _, value in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
