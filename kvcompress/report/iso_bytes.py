"""Scores and divergences at equal bytes: methods of all families on one axis of measured bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from kvcompress.common.text import for_figure
from kvcompress.report.curves import SIZE, End, Panel, about, get, label_ends, limits, name_full, y_axis
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry, by_model
from kvcompress.report.series import Record, series, unlimited
from kvcompress.report.styles import styles

FEWER = ("lowrank", "think", "gqapool")  # codecs that hold fewer numbers, not shorter ones
TICKS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.06, 0.03)


def kind(record: Record) -> str:
    """What saves the bytes of a record."""
    codec, evicts = str(record.get("parts.codec")), record.get("parts.scorer") not in (None, "none")
    if record.get("parts.reader") not in (None, "all"):
        return "pages"
    if codec in ("None", "plain"):
        return "eviction"
    if evicts:
        return "eviction and another form"
    if codec in FEWER:
        return "low rank and quantisation" if "bits=" in str(record.get("variant")) else "low rank"
    return "quantisation"


def draw_equal(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """A figure per sweep and model in which at least two kinds of saving were measured, one panel per setting."""
    written: list[Path] = []
    for sweep, model, groups in by_model(entries):
        panels = [_panel(group) for group in groups if len(_kinds(group)) > 1]
        if panels := sorted((one for one in panels if one.drawable), key=lambda one: (one.log_y, one.title)):
            stem = folder / figure_stem(sweep, model, "", None, "equal-bytes")
            written += save(_figure(panels, f"{sweep}: {model}"), stem)
    return written


def _kinds(group: Sequence[Record]) -> set[str]:
    return {kind(record) for one in series(group) for record in one.records if not unlimited(record)}


def _panel(group: list[Record]) -> Panel:
    label = "keys, values, positions and page bounds on the device, measured, share of the full cache"
    return Panel(about(group), group, x=partial(get, "kv.ratio"), x_label=label, **y_axis(group))


def _figure(panels: Sequence[Panel], title: str) -> Any:
    plt = plotting()
    height = 4.2
    size = (6.6 * len(panels), height + 0.8)
    figure, grid = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        _paint(axes, panel, height)
    suptitle(figure, title)
    return figure


def _paint(axes: Any, panel: Panel, height: float) -> None:
    low, high = limits(panel)
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_ylim(low / 1.3 if panel.log_y else low, high)
    axes.set_xscale("log")
    lines = [one for one in panel.lines if panel.points(one)]
    shares = [x for one in lines for x, _, _ in panel.points(one)]
    least = min(shares)
    axes.set_xlim(1.05 * max(1.0, *shares), least / 1.12)
    axes.set_xticks([tick for tick in TICKS if tick >= least / 1.12])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.4g}%")
    base = panel.baseline
    if base is not None and not panel.log_y and panel.y(base) is not None:
        name_full(axes, panel.y(base))
    ends, looks = [], styles(one.name for one in lines)
    for one in lines:
        found = [(x, max(y, low if panel.log_y else y), r) for x, y, r in panel.points(one) if not unlimited(r)]
        if not found:
            continue
        look = looks[one.name]
        xs, ys = [x for x, _, _ in found], [y for _, y, _ in found]
        style = {"lw": 1.5} if one.ordered else {"lw": 0}
        axes.plot(xs, ys, ms=4.5, zorder=3, **look.line() | style)
        ends.append(End(one.name, look, xs[-1], ys[-1], fmean(ys)))
    label_ends(axes, ends, height, panel.log_y)
    axes.set_title(for_figure(panel.title), fontsize=SIZE + 1, loc="left")
    axes.set_xlabel(panel.x_label, fontsize=SIZE)
    axes.set_ylabel(for_figure(panel.y_label), fontsize=SIZE)
    light_axes(axes, SIZE)
