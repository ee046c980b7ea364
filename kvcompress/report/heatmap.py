"""Needle heat maps: score by depth and method for one prompt length, or by depth and length for each method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvcompress.common.text import for_figure
from kvcompress.report.figure import plotting, save, suptitle, wrapped
from kvcompress.report.run_index import Entry, budget_of, label, named, ordered

COLOURS = "cividis"  # even in lightness and made for colour-blind readers; bright is good


def grid(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, float], float]:
    """Mean score per (length, depth) of samples that have both."""
    cells: dict[tuple[int, float], list[float]] = {}
    for row in rows:
        meta = row.get("meta") or {}
        length, depth = meta.get("length"), meta.get("depth")
        if isinstance(length, (int, float)) and isinstance(depth, (int, float)):  # of some tasks lengths are names
            cells.setdefault((int(length), depth), []).append(float(row["score"]))
    return {key: fmean(values) for key, values in cells.items()}


def draw_heatmap(entries: Sequence[Entry], title: str, path: Path) -> bool:
    """Write a heat map of comparable finished runs to `path`; False where no sample has a length and a depth."""
    plt = plotting()

    by_id = {id(entry.record): entry for entry in entries if entry.record["status"] == "ok"}
    runs = []
    for record in ordered(entry.record for entry in by_id.values()):
        cells = grid(list(by_id[id(record)].rows().values()))
        if cells:
            runs.append((record, cells))
    if not runs:
        return False
    lengths = sorted({length for _, cells in runs for length, _ in cells})
    depths = sorted({depth for _, cells in runs for _, depth in cells})
    figure = _methods(plt, runs, lengths[0], depths) if len(lengths) == 1 else _grids(plt, runs, lengths, depths)
    suptitle(figure, title, 10, ha="center")
    save(figure, path.with_suffix(""))
    return True


def _paint(axes: Any, table: list[list[float]], x: Sequence[str], depths: Sequence[float]) -> Any:
    """One panel: depth runs down from the start of the context to its end, as one reads."""
    image = axes.imshow(table, cmap=COLOURS, vmin=0.0, vmax=1.0, aspect="auto", origin="upper")
    axes.set_xticks(range(len(x)), x)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}%" for depth in depths])
    axes.tick_params(length=0)
    axes.set_xticks([i - 0.5 for i in range(1, len(x))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if len(x) * len(depths) <= 400:
        for i, line in enumerate(table):
            for j, value in enumerate(line):
                if not math.isnan(value):
                    text = f"{value:.2f}".rstrip("0").rstrip(".")
                    axes.text(
                        j, i, text, ha="center", va="center", fontsize=7, color="black" if value > 0.55 else "white"
                    )
    return image


def _methods(plt: Any, runs: Sequence[tuple[Any, Any]], length: int, depths: Sequence[float]) -> Any:
    """One panel: depth x method and budget, the methods named above their budgets."""
    table = [[cells.get((length, depth), math.nan) for _, cells in runs] for depth in depths]
    means = [fmean(v for v in column if not math.isnan(v)) for column in zip(*table, strict=True)]
    ticks = [f"{budget_of(record)}\n({mean:.2f})" for (record, _), mean in zip(runs, means, strict=True)]
    size = (max(5.0, 0.55 * len(runs) + 2.0), max(3.0, 0.36 * len(depths) + 1.7))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = _paint(axes, table, ticks, depths)
    axes.tick_params(axis="x", labelsize=8)
    names = [named(record) for record, _ in runs]
    starts = [at for at in range(len(runs)) if at == 0 or names[at] != names[at - 1]]
    for start, end in zip(starts, [*starts[1:], len(runs)], strict=True):
        block = end - start
        # a long name over a single column would run into its neighbours
        turn = {"rotation": 30, "ha": "left"} if len(names[start]) > 9 * block else {"ha": "center"}
        axes.text((start + end - 1) / 2, -0.62, for_figure(names[start]), va="bottom", fontsize=9, **turn)
        if start:
            axes.axvline(start - 0.5, color="black", linewidth=1.5)
    axes.set_ylabel("depth of the needle")
    axes.set_xlabel(f"budget (mean score), prompts of {length:,} tokens")
    figure.colorbar(image, ax=axes, label="score", fraction=0.05, pad=0.02)
    return figure


def _grids(plt: Any, runs: Sequence[tuple[Any, Any]], lengths: Sequence[int], depths: Sequence[float]) -> Any:
    """A panel per run, depth x length: methods one below the other, their budgets side by side."""
    names = list(dict.fromkeys(named(record) for record, _ in runs))
    by_method = [[run for run in runs if named(run[0]) == name] for name in names]
    columns = max(map(len, by_method))
    wide = max(2.4, 0.45 * len(lengths) + 0.8)
    size = (columns * wide + 1.2, len(names) * max(1.9, 0.28 * len(depths) + 0.8) + 0.6)
    figure, panels = plt.subplots(
        len(names), columns, figsize=(max(5.0, size[0]), size[1]), layout="constrained", squeeze=False
    )
    image = None
    for line, group in enumerate(by_method):
        for column, panel in enumerate(panels[line]):
            if column >= len(group):
                panel.set_axis_off()
                continue
            record, cells = group[column]
            table = [[cells.get((length, depth), math.nan) for length in lengths] for depth in depths]
            image = _paint(panel, table, [f"{length:,}" for length in lengths], depths)
            panel.set_title(wrapped(f"{for_figure(label(record))} · mean {record['score']:.2f}", wide, 9), fontsize=9)
            panel.tick_params(labelsize=8)
            if column == 0:
                panel.set_ylabel("depth")
    figure.supxlabel("prompt length (tokens)", fontsize=10)
    figure.colorbar(image, ax=panels, label="score", fraction=0.04, pad=0.02, aspect=40)
    return figure
