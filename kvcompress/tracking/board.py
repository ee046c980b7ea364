"""A sweep's leaderboard as trackers take it: a table, and figures in a folder that lasts as long as they are sent."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.common.text import for_tracker
from kvcompress.report.run_index import Entry, flags, gather, ordered

SAID = ("model", "task", "method", "variant", "budget")  # of every run
MEASURED = (  # only of runs that count
    *("score", "score_stderr", "delta_full", "delta_stderr", "kv.ratio", "kv.bytes_held", "kv.kept_tokens_mean"),
    *("kv.read_bytes_per_token", "time.ttft_s", "time.tpot_s", "memory.prefill_peak", "memory.decode_peak"),
)
ASKED = ("n_samples", "metric", "protocol.question", "protocol.pair", "status", "run_id")


@dataclass(frozen=True)
class Board:
    """A leaderboard.

    Attributes:
        figures: kind (heat, pareto, curves) and file of each.
        counts: runs by status.
    """

    sweep: str
    columns: list[str]
    rows: list[list[Any]]
    figures: list[tuple[str, Path]]
    counts: dict[str, int]


@contextmanager
def board(sweep: Path) -> Iterator[Board]:
    """The leaderboard of the records in a sweep's folder; its figures are gone afterwards.

    Raises:
        ValueError: there is no record.
    """
    entries = gather([sweep]).entries
    if not entries:
        raise ValueError(f"{sweep}: no record")
    columns, rows = table(entries)
    counts = Counter(entry.record["status"] for entry in entries)
    with tempfile.TemporaryDirectory() as folder:
        yield Board(sweep.name, columns, rows, draw(entries, Path(folder)), dict(counts))


def table(entries: list[Entry]) -> tuple[list[str], list[list[Any]]]:
    """Columns and a line per run, comparable ones together; a run that does not count has no numbers."""
    columns = [*SAID, *MEASURED, "flags", *ASKED]
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(str(entry.record.get("protocol.pair")), []).append(entry.record)
    lines = []
    for _, group in sorted(groups.items()):
        for record in ordered(group):
            shown = {key: record.get(key) for key in (*SAID, *ASKED)} | {"flags": ", ".join(flags(record))}
            if record["status"] == "ok":
                shown |= {key: record.get(key) for key in MEASURED}
            lines.append([for_tracker(shown.get(key)) for key in columns])
    return columns, lines


def draw(entries: list[Entry], folder: Path) -> list[tuple[str, Path]]:
    """Every figure the records allow, as PNG."""
    from kvcompress.report.curves import about, draw_curves
    from kvcompress.report.figure import figure_stem
    from kvcompress.report.heatmap import draw_heatmap
    from kvcompress.report.pareto import draw_fronts

    found: list[tuple[str, Path]] = []
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(str(entry.record.get("protocol.pair")), []).append(entry)
    for pair, group in sorted(groups.items()):
        records = [entry.record for entry in group]
        title = f"{group[0].sweep}: {records[0]['model']} · {about(records)}"
        path = folder / "heat" / f"{figure_stem('', '', records[0]['task'], pair, '')}.png"
        if draw_heatmap(group, title, path):
            found.append(("heat", path))
    found += [("pareto", path) for path in draw_fronts(entries, folder / "pareto")]
    found += [("curves", path) for path in draw_curves(entries, folder / "curves")]
    return [(kind, path) for kind, path in found if path.suffix == ".png"]
