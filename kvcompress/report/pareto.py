"""Pareto fronts: which runs give the best score for what they cost, in bytes held, bytes read or time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcompress.record import is_baseline
from kvcompress.report.heatmap import label
from kvcompress.report.series import COLOURS, MARKERS, Record, spread

# key in records, what the axis says, and by what its values are divided
COSTS: tuple[tuple[str, str, float], ...] = (
    ("kv.bytes_held", "bytes held after compression (MB)", 1e6),
    ("kv.read_bytes_per_token", "bytes read per decoded token (MB)", 1e6),
    ("time.tpot_s", "time per decoded token (ms)", 1e-3),
)
SIZE = 8  # of text, in points


class Point(NamedTuple):
    """A run at its cost, in the record's unit, and its score."""

    cost: float
    score: float
    record: Record


def points(records: Sequence[Record], cost: str) -> list[Point]:
    """Runs that count and have both a score and this cost, above 0."""
    return [
        Point(float(record[cost]), float(record["score"]), record)
        for record in records
        if record["status"] == "ok" and record.get("score") is not None and (record.get(cost) or 0) > 0
    ]


def front(found: Sequence[Point]) -> list[Point]:
    """The points that no other beats: nothing has a lower cost and at least their score; by rising cost.

    Of equals, all stay.
    """
    best: list[Point] = []
    for point in sorted(found, key=lambda p: (p.cost, -p.score)):
        if not best or point.score > best[-1].score or point[:2] == best[-1][:2]:
            best.append(point)
    return best


def draw_pareto(records: Sequence[Record], title: str, path: Path) -> bool:
    """Write a panel per cost of comparable runs, the front in a line, to `path` and beside it as SVG.

    Returns:
        False where fewer than two runs have a cost; nothing is written then.
    """
    panels = [(cost, about, unit, found) for cost, about, unit in COSTS if len(found := points(records, cost)) > 1]
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvcompress"  # the same records give the same file
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(str(r["method"]) for r in sorted(records, key=lambda r: not is_baseline(r))))
    n = len(COLOURS)  # after the last colour the markers move on by one, so that no pair comes twice
    look = {name: (COLOURS[i % n], MARKERS[(i + i // n) % len(MARKERS)]) for i, name in enumerate(methods)}
    size = (5.4 * len(panels) + 1.5, 3.8)
    figure, grid = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axes, (_, about, unit, found) in zip(grid[0], panels, strict=True):
        _paint(axes, found, unit, look)
        axes.set_xlabel(about, fontsize=SIZE)
    grid[0][0].set_ylabel(f"score ({str(records[0].get('metric')).partition('/')[0]})", fontsize=SIZE)
    handles = [
        plt.Line2D([], [], color=colour, marker=marker, lw=0, ms=4, label=name)
        for name, (colour, marker) in look.items()
    ]
    figure.legend(handles=handles, fontsize=SIZE, frameon=False, loc="outside right upper")
    figure.suptitle(f"{title}\nline: no run costs less at this score", fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    return True


def _paint(axes: Any, found: Sequence[Point], unit: float, look: dict[str, tuple[str, str]]) -> None:
    best = front(found)
    for point in found:
        colour, marker = look[str(point.record["method"])]
        on = point in best
        axes.plot(
            [point.cost / unit], [point.score], color=colour, marker=marker, ms=6 if on else 4, alpha=1 if on else 0.45,
            lw=0, zorder=3,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.05)
    costs = [point.cost / unit for point in found]
    axes.set_xlim(min(costs) / 1.15, 1.15 * max(costs))
    # up to the next point of the front nothing better is known, so the line goes in steps
    right = 1.15 * max(costs)
    axes.step(
        [*(point.cost / unit for point in best), right], [*(point.score for point in best), best[-1].score],
        where="post", color="#777777", lw=1, zorder=2,
    )  # fmt: skip
    places = spread([point.score - 0.05 for point in best], 0.05, 0.03, 1.0)
    for point, place in zip(best, places, strict=True):
        axes.annotate(
            label(point.record), (point.cost / unit * 1.02, place), fontsize=SIZE - 1, ha="left", va="center", zorder=4,
            color=look[str(point.record["method"])][0],
        )  # fmt: skip
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=SIZE)
    axes.grid(axis="y", color="#eeeeee", lw=0.6, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
