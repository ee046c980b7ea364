"""Pareto fronts: score against bytes held, bytes read and time per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompress.common.text import for_figure
from kvcompress.report.curves import about
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry, budget_of, label, named
from kvcompress.report.series import CONTEXT, Record, spread
from kvcompress.report.stats import pareto
from kvcompress.report.styles import BASE, styles
from kvcompress.sweep.baseline import is_baseline

SIZE = 8
# key of a record, what the axis says, and what one unit of it is
COSTS = (
    ("kv.ratio", "bytes held on the device, share of the full cache", 1.0),
    ("kv.read_bytes_per_token", "bytes read per decoded token (MiB)", 2.0**20),
    ("time.tpot_s", "time per decoded token (ms)", 1e-3),
)


def fronts(group: Sequence[Record]) -> list[dict[str, Any]]:
    """One panel per cost that at least two runs of comparable ones have.

    Returns:
        {"key", "label", "points": [(cost in units of the axis, score, record)], "front": places of points on the front,
        by rising cost}
    """
    found = []
    for key, text, unit in COSTS:
        points = [
            (float(record[key]) / unit, float(record["score"]), record)
            for record in group
            if record["status"] == "ok" and record.get(key) is not None
        ]
        if len(points) > 1:
            front = pareto([(cost, score) for cost, score, _ in points])
            found.append({"key": key, "label": text, "points": points, "front": front})
    return found


def draw_fronts(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Write a figure per sweep and setting into `folder`."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for entry in entries:
        groups.setdefault((entry.sweep, str(entry.record.get("protocol.pair"))), []).append(entry.record)
    written: list[Path] = []
    for (sweep, pair), group in sorted(groups.items()):
        if panels := fronts(group):
            stem = folder / figure_stem(sweep, "", group[0]["task"], pair, "pareto")
            written += save(_figure(panels, f"{sweep}: {group[0]['model']} · {about(group)}"), stem)
    return written


def _figure(panels: Sequence[dict[str, Any]], title: str) -> Any:
    plt = plotting()
    figure, grid = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), layout="constrained", squeeze=False)
    shown = {named(p["points"][i][2]) for p in panels for i in p["front"] if not is_baseline(p["points"][i][2])}
    looks = styles(shown)
    for axes, panel in zip(grid[0], panels, strict=True):
        front = [panel["points"][i] for i in panel["front"]]
        axes.step(
            [x for x, _, _ in front], [y for _, y, _ in front], where="post", color="#777777", lw=1, ls="--", zorder=1
        )
        for x, y, record in panel["points"]:
            base = is_baseline(record)
            look = BASE if base else looks.get(named(record))
            style = {"color": CONTEXT, "marker": "o"} if look is None else look.line()
            axes.plot([x], [y], **style | {"ms": 6 if base else 5, "lw": 0, "zorder": 2 + (look is not None)})
        axes.set_xlim(left=0)
        scores = [y for _, y, _ in panel["points"]]
        axes.set_ylim(math.floor(10 * min(scores)) / 10 - 0.04, math.ceil(10 * max(scores) - 1e-9) / 10 + 0.04)
        name_points(axes, front, [point for point in panel["points"] if is_baseline(point[2])])
        axes.set_xlabel(panel["label"], fontsize=SIZE)
        metric = str(panel["points"][0][2].get("metric")).partition("/")[0]
        axes.set_ylabel(for_figure(f"score ({metric})"), fontsize=SIZE)
        light_axes(axes, SIZE)
    suptitle(figure, title, 10)
    return figure


def name_points(axes: Any, front: Sequence[Any], bases: Sequence[Any]) -> None:
    """Names of the points of the front and of the full cache, apart from each other whatever lies beside what."""
    named_so_far: str | None = None
    texts: list[tuple[float, float, str]] = []
    for x, y, record in front:
        texts.append((x, y, label(record) if named(record) != named_so_far else budget_of(record)))
        named_so_far = named(record)
    texts += [(x, y, label(record)) for x, y, record in bases if (x, y) not in {(a, b) for a, b, _ in texts}]
    low, high = axes.get_ylim()
    heights = [(y - low) / (high - low) for _, y, _ in texts]
    gap = 1.25 * (SIZE - 1) / 72 / (0.72 * axes.figure.get_figheight())
    left, right = axes.get_xlim()
    for (x, y, text), place in zip(texts, spread([h - 0.03 for h in heights], gap, 0.02, 0.98), strict=True):
        axes.annotate(
            for_figure(text), (x, y), xytext=(x + 0.015 * (right - left), place), textcoords=("data", "axes fraction"),
            fontsize=SIZE - 1, va="center",
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "lw": 0.5, "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip
