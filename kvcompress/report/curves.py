"""Figures over budgets: score and divergence by bytes held, and divergence by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from kvcompress.common.text import for_figure
from kvcompress.report.external import external_points
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry, by_model, several
from kvcompress.report.series import (
    CONTEXT,
    Record,
    Series,
    by_family,
    is_plain,
    series,
    spread,
    unlimited,
)
from kvcompress.report.styles import Style, styles
from kvcompress.sweep.baseline import is_baseline

FLOOR = 1e-6  # divergences below are rounding of float32 logits
SIZE = 8  # of text, in points
OTHERS = "#767676"  # numbers of others: grey, and no method of ours
NAMED = 24  # of them at most are named; more names would lie over each other


@dataclass
class Panel:
    """One column of a figure: what is drawn of which runs."""

    title: str
    records: list[Record]
    y: Callable[[Record], Any]
    y_label: str
    x: Callable[[Record], Any]
    x_label: str
    log_y: bool = False
    bytes_x: bool = False  # megabytes on a log scale; else shares of the full cache
    others: list[tuple[float, float, Record]] = field(default_factory=list)  # x, y and row of numbers of others
    band: tuple[str, str] | None = None  # keys of the ends of y's interval

    @property
    def lines(self) -> list[Series]:
        return series(self.records)

    def points(self, one: Series) -> list[tuple[float, float, Record]]:
        """x as drawn, y, and the record of each run that has both."""
        unit = 1e6 if self.bytes_x else 1.0
        return [(x / unit, y, record) for x, y, record in one.points(self.x, self.y)]

    @property
    def drawable(self) -> bool:
        return any(self.points(one) for one in self.lines)

    @property
    def baseline(self) -> Record | None:
        return next((record for record in self.records if is_baseline(record)), None)


class End(NamedTuple):
    """A line as its label needs it: its last point and its mean."""

    name: str
    look: Style
    x: float
    y: float
    mean: float


def draw_curves(entries: Sequence[Entry], folder: Path, others: Sequence[Record] = ()) -> list[Path]:
    """Every figure the records allow, as PNG and SVG in `folder`.

    Per sweep and model, where some method has two budgets or more: score and divergence by budget; per setting, the
    same against peak and mean bytes along the decode; for divergences, the curve by position. Numbers of `others` on
    the same model and task are grey points beside the scores.
    """
    written: list[Path] = []
    for sweep, model, groups in by_model(entries):
        usable = [group for group in groups if any(map(varied, series(group)))]
        heading = f"{sweep}: {model}"
        panels = sorted((by_budget(group, others) for group in usable), key=lambda panel: (panel.log_y, panel.title))
        if panels := [panel for panel in panels if panel.drawable]:
            written += save(_figure(panels, heading), folder / figure_stem(sweep, model, "", None, "budget"))
        for group in usable:
            name = figure_stem(sweep, model, group[0]["task"], str(group[0].get("protocol.pair")), "")
            if panels := [panel for panel in by_bytes(group) if panel.drawable]:
                written += save(_figure(panels, heading), folder / f"{name}-bytes")
            if any(record.get("metrics.curve_kl") and not unlimited(record) for record in group):
                written += save(_by_position(group, f"{heading} · {about(group)}"), folder / f"{name}-position")
    return written


def varied(one: Series) -> bool:
    """True if a method was run with two budgets or more, or held different shares of the cache."""
    return len({(record["budget"], round(record.get("kv.ratio") or 0.0, 3)) for record in one.records}) > 1


def about(group: Sequence[Record]) -> str:
    """What the runs of a group were asked, and on how many samples."""
    record = group[0]
    counts = sorted({r["n_samples"] for r in group if r["n_samples"]})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"
    asked = [str(record[f"protocol.{key}"]) for key in ("haystack", "source", "texts") if record.get(f"protocol.{key}")]
    if record.get("protocol.question"):
        asked.append(f"question {record['protocol.question']}")
    if several(record):
        asked.append(str(several(record)))
    return ", ".join([str(record["task"]), *asked, f"{many} samples"])


def divergence(group: Sequence[Record]) -> bool:
    return any(record.get("metrics.kl") is not None for record in group)


def get(key: str, record: Record) -> Any:
    """A value of a record."""
    return record.get(key)


def y_axis(group: Sequence[Record]) -> dict[str, Any]:
    """What stands on the y axis of a panel, as its arguments."""
    if divergence(group):
        return {"y": partial(get, "metrics.kl"), "y_label": "KL(full ‖ compressed), nats per token", "log_y": True}
    label = f"score ({str(group[0].get('metric')).partition('/')[0]}), 95% interval"
    return {"y": partial(get, "score"), "y_label": label, "band": ("score_low", "score_high")}


def by_budget(group: list[Record], others: Sequence[Record] = ()) -> Panel:
    """Score or divergence by the share of bytes measured; where it is not the nominal budget a thin line leads there."""
    label = (
        "bytes held after compression, measured, share of the full cache\n"
        "(a thin line leads there from a nominal budget that differs)"
    )
    beside = [] if divergence(group) else external_points(group, others)
    if beside:
        label += "\n(grey ×: numbers of others, at the share they asked for)"
    return Panel(about(group), group, x=partial(get, "kv.ratio"), x_label=label, others=beside, **y_axis(group))


def by_bytes(group: list[Record]) -> list[Panel]:
    """The same by peak and by mean bytes held from the end of the prompt to the end of the decode."""
    return [
        Panel(
            f"{about(group)} · {kind} bytes",
            group,
            x=partial(get, f"kv.bytes_{kind}"),
            x_label=f"{kind} bytes held from the prompt's end to the last token (MB)",
            bytes_x=True,
            **y_axis(group),
        )
        for kind in ("peak", "mean")
    ]


# ---------------------------------------------------------------------- a row per family, a column per panel


def _figure(panels: Sequence[Panel], title: str) -> Any:
    plt = plotting()

    names = {one.name: one for panel in panels for one in panel.lines}
    lines = sorted(names.values(), key=lambda one: (one.family, one.name))
    families = by_family(lines)
    looks = styles(names)
    height = 2.7
    size = (5.9 * len(panels), height * len(families) + 0.7)
    figure, grid = plt.subplots(len(families), len(panels), figsize=size, layout="constrained", squeeze=False)
    for column, panel in enumerate(panels):
        bounds = limits(panel)
        for line, (name, members) in enumerate(families):
            axes = grid[line][column]
            drawn = {one.name: one for one in panel.lines}
            wanted = [(one.name, drawn.get(one.name)) for one in members]
            _paint(axes, panel, wanted, bounds, height, looks)
            axes.set_title(for_figure(name), fontsize=SIZE + 1, loc="left")
            if line == 0:
                axes.set_title(f"{for_figure(panel.title)}\n\n{for_figure(name)}", fontsize=SIZE + 1, loc="left")
            axes.set_ylabel(for_figure(panel.y_label), fontsize=SIZE)
            if line == len(families) - 1:
                axes.set_xlabel(panel.x_label, fontsize=SIZE)
    suptitle(figure, title)
    return figure


def limits(panel: Panel) -> tuple[float, float]:
    """Limits of y, the same for all families: of scores what the points and their intervals take, in steps of a tenth."""
    if not panel.log_y:
        return fitted(panel)
    values = [y for one in panel.lines for _, y, r in panel.points(one) if y > 0 and not unlimited(r)]
    low = max(FLOOR, 10 ** math.floor(math.log10(min(values)))) if values else FLOOR
    return low, 2 * max([*values, 10 * low])


def fitted(panel: Panel) -> tuple[float, float]:
    """The part of 0 to 1 that scores and their intervals take, with room above and below."""
    points = [record for one in panel.lines for _, _, record in panel.points(one)]
    if panel.baseline is not None:
        points.append(panel.baseline)
    found = [
        float(value) for record in points for value in (panel.y(record), *_ends(panel, record)) if value is not None
    ]
    low = math.floor(10 * min(found, default=0.0) + 1e-9) / 10
    high = math.ceil(10 * max(found, default=1.0) - 1e-9) / 10
    room = 0.04 * max(high - low, 0.1)
    return low - room, high + room


def _ends(panel: Panel, record: Record) -> tuple[Any, ...]:
    return tuple(record.get(key) for key in panel.band or ())


def _paint(
    axes: Any,
    panel: Panel,
    members: Sequence[tuple[str, Series | None]],
    bounds: tuple[float, float],
    height: float,
    looks: Mapping[str, Style],
) -> None:
    low, high = bounds
    names = {name for name, _ in members}
    for other in panel.lines:
        if other.name not in names:
            found = panel.points(other)
            axes.plot([x for x, _, _ in found], [max(y, low) for _, y, _ in found], color=CONTEXT, lw=0.8, zorder=1)
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_ylim(low / 1.3 if panel.log_y else low, high)
    _scale_x(axes, panel)
    base = panel.baseline
    if base is not None and panel.y(base) is not None:
        if not panel.log_y:
            name_full(axes, panel.y(base))
        if panel.bytes_x and panel.x(base):
            axes.axvline(panel.x(base) / 1e6, color="#555555", lw=0.8, ls=(0, (4, 3)), zorder=1)
            axes.text(panel.x(base) / 1e6, 0.1, "full ", fontsize=SIZE - 1, color="#555555", ha="right",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    ends: list[End] = []
    for name, one in members:
        found = panel.points(one) if one is not None else []
        if one is None or not found:
            continue
        look = looks[name]
        colour = look.colour
        xs = [x for x, _, _ in found]
        ys = [max(y, low) for _, y, _ in found]
        style = {"lw": 1.5} if one.ordered else {"lw": 0}
        axes.plot(xs, ys, ms=3.5, zorder=3, **look.line() | style)
        draw_band(axes, panel, found, colour, one.ordered)
        if not panel.bytes_x:
            for x, y, record in found:
                if _nominal(record) and abs(x - record["budget"]) > 0.01:
                    axes.plot([record["budget"], x], [max(y, low)] * 2, color=colour, lw=0.6, zorder=2)
                    axes.plot([record["budget"]], [max(y, low)], marker="|", ms=5, color=colour, zorder=2)
        ends.append(End(name, look, xs[-1], ys[-1], fmean(y for _, y, _ in found)))
    axes.plot(
        [x for x, _, _ in panel.others], [y for _, y, _ in panel.others], color=OTHERS, marker="x", ms=4, lw=0, zorder=2
    )
    for x, y, row in panel.others if len(panel.others) <= NAMED else ():
        axes.annotate(
            for_figure(row.get("method")), (x, y), (3, 3), textcoords="offset points", fontsize=6, color=OTHERS
        )
    label_ends(axes, ends, height, panel.log_y)
    light_axes(axes, SIZE, "y")


def name_full(axes: Any, score: float) -> None:
    """A dashed line at the score of the full cache, with its name."""
    axes.axhline(score, color="#555555", lw=0.8, ls=(0, (4, 3)), zorder=1)
    axes.annotate("full", (0, score), xytext=(3, -3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=SIZE - 1, color="#555555", va="top")  # fmt: skip


def draw_band(axes: Any, panel: Panel, found: Sequence[tuple[float, float, Record]], colour: str, joined: bool) -> None:
    """The interval of each point: a band along a line, a bar at points that no line joins."""
    if panel.band is None:
        return
    ends = [(x, *(record.get(key) for key in panel.band)) for x, _, record in found]
    known = [(x, low, high) for x, low, high in ends if low is not None and high is not None]
    if not known:
        return
    xs, lows, highs = zip(*known, strict=True)
    if joined and len(known) > 1:
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.12, lw=0, zorder=1)
    else:
        axes.vlines(xs, lows, highs, color=colour, lw=0.8, alpha=0.5, zorder=2)


def _nominal(record: Record) -> bool:
    """True where the budget says what share of bytes was asked for: not of a codec's, nor of one beside an eviction."""
    return isinstance(record["budget"], float) and (is_plain(record) or record["budget"] < 1.0 and not _evicts(record))


def _evicts(record: Record) -> bool:
    return record.get("parts.scorer") not in (None, "none")


def _scale_x(axes: Any, panel: Panel) -> None:
    """Budgets fall to the right, so that a slope is seen as one."""
    from matplotlib.ticker import LogLocator, NullLocator

    found = [x for one in panel.lines for x, _, _ in panel.points(one)]
    found += [x for x, _, _ in panel.others]
    if panel.bytes_x:
        axes.set_xscale("log")
        full = panel.x(panel.baseline) if panel.baseline else None
        axes.set_xlim(1.4 * max([*found, (full or 0) / 1e6]), min(found) / 1.15)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        high, low = max(found, default=1.0), min(found, default=0.0)
        room = 0.03 * max(high - low, 0.1)
        axes.set_xlim(high + room, max(low - room, 0.0))
        axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f}%")


def label_ends(axes: Any, ends: Sequence[End], height: float, tied: bool) -> None:
    """Each line's name right of the panel, in its colour and behind its marker.

    Tied to its last point where lines end apart; scores mostly end together at nothing, so there the name of the line
    that stays up longest (the highest mean) stands at the top.
    """
    gap = 1.35 * SIZE / 72 / (0.72 * height)
    if tied:
        to_axes = axes.transData + axes.transAxes.inverted()
        wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    else:
        best = sorted(ends, key=lambda end: (-end.mean, end.name))
        wanted = [0.95 - gap * best.index(end) for end in ends]
    for end, place in zip(ends, spread(wanted, gap, 0.0, 1.0), strict=True):
        line = {
            "arrowstyle": "-",
            "color": end.look.colour,
            "lw": 0.5,
            "alpha": 0.6,
            "shrinkA": 8,
            "shrinkB": 2,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            for_figure(end.name),
            (end.x, end.y),
            xytext=(1.06, place),
            textcoords="axes fraction",
            color=end.look.colour,
            fontsize=SIZE,
            va="center",
            annotation_clip=False,
            arrowprops=line if tied else None,
        )
        axes.plot([1.04], [place], transform=axes.transAxes, clip_on=False, ms=4.5, mew=1.0, **end.look.line())


# ---------------------------------------------------------------------- by position


def _by_position(group: Sequence[Record], title: str) -> Any:
    """A small panel per method, a line per budget: does the drift grow along the text?"""
    plt = plotting()

    lines = [(one, [r for r in one.records if r.get("metrics.curve_kl") and not unlimited(r)]) for one in series(group)]
    lines = [(one, records) for one, records in lines if records]
    budgets = sorted({r["budget"] for _, records in lines for r in records})
    if len(budgets) > 6:  # more lines than that are a smear: evenly among them, both ends included
        budgets = [budgets[round(i * (len(budgets) - 1) / 5)] for i in range(6)]
    shades = {b: plt.get_cmap("cividis")(0.9 * i / max(len(budgets) - 1, 1)) for i, b in enumerate(budgets)}
    columns = min(4, len(lines))
    deep = math.ceil(len(lines) / columns)
    figure, grid = plt.subplots(
        deep, columns, figsize=(2.7 * columns + 1.2, 1.9 * deep + 0.9), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    usual = [median(r["metrics.curve_kl"]) for _, records in lines for r in records if r["budget"] in shades]
    low = 10 ** math.floor(math.log10(max(min(usual) / 3, FLOOR)))
    handles: dict[Any, Any] = {}
    for axes, entry in zip(grid.flat, [*lines, *[None] * (deep * columns - len(lines))], strict=True):
        if entry is None:
            axes.set_axis_off()
            continue
        one, records = entry
        for record in sorted(records, key=lambda r: -r["budget"]):
            if record["budget"] in shades:
                points = [max(v, low) for v in record["metrics.curve_kl"]]
                handles[record["budget"]] = axes.plot(
                    record["metrics.curve_position"], points, color=shades[record["budget"]], lw=1.3
                )[0]
        axes.set_title(for_figure(one.name), fontsize=SIZE + 1, loc="left")
        axes.set_yscale("log")
        light_axes(axes, SIZE, "y")
    labels = [f"{b:g}" if isinstance(b, float) else f"{b} tok" for b in budgets if b in handles]
    figure.legend([handles[b] for b in budgets if b in handles], labels, title="budget", fontsize=SIZE,
                  title_fontsize=SIZE, loc="outside right center", frameon=False)  # fmt: skip
    figure.supxlabel("token after the prompt", fontsize=SIZE + 1)
    figure.supylabel("KL(full ‖ compressed), nats", fontsize=SIZE + 1)
    suptitle(figure, title)
    return figure
