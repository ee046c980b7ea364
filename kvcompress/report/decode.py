"""Figures of long generations: bytes held token by token, and tokens per second against output length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

from kvcompress.common.text import for_figure
from kvcompress.report.figure import plotting, save, wrapped
from kvcompress.report.run_index import Entry, label, ordered
from kvcompress.report.styles import COLOURS

SHORTEST = 256  # tokens an output needs for its speed to be drawn
STRETCH = 64  # tokens whose median is one point


def draw_sawtooth(traces: Sequence[Any], title: str, path: Path) -> None:
    """Write a figure of what traces (`kvcompress.bench.longrun.Trace`, or dicts of one) held, in MiB and tokens per head.

    The full cache's line leaves the panel: the axis ends where the budget and one interval are seen well.
    """
    plt = plotting()

    found = [trace if isinstance(trace, Mapping) else trace.as_dict() for trace in traces]
    figure, axes = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
    first, start = found[0], found[0]["seen"][0]
    # measured bytes per token and head, all layers and heads together, turn one axis into the other
    token = max(first["valid"]) / max(first["tokens"])
    for one, colour, style in zip(found, cycle(COLOURS), cycle(("-", "--", "-.")), strict=False):  # lines may coincide
        steps = [seen - start for seen in one["seen"]]
        mib = [n / 2**20 for n in one["valid"]]
        axes.plot(steps, mib, color=colour, linestyle=style, linewidth=1, label=for_figure(one["name"]))
    steps = [seen - start for seen in first["seen"]]
    axes.plot(
        steps, [n / 2**20 for n in first["full"]], color="#888888", linewidth=1, linestyle=":", label="full cache"
    )
    most = first["budget"] + (first["every"] or 0)
    for tokens, name, away in ((first["budget"], "budget", -11), (most, "budget + interval", 3)):
        axes.axhline(tokens * token / 2**20, color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.annotate(
            f"{name}, {tokens}",
            (1.0, tokens * token / 2**20),
            xycoords=("axes fraction", "data"),
            xytext=(-4, away),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    axes.set_ylim(0, 1.35 * max(max(one["valid"]) for one in found) / 2**20)
    axes.set_xlim(0, steps[-1])
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("keys, values and positions held (MiB)")
    right = axes.secondary_yaxis("right", functions=(partial(mul, 2**20 / token), partial(mul, token / 2**20)))
    right.set_ylabel("tokens per head")
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    axes.set_title(wrapped(for_figure(title), 0.9 * figure.get_figwidth(), 10), fontsize=10)
    save(figure, path.with_suffix(""))


def generations(row: Mapping[str, Any]) -> Iterator[list[float]]:
    """Seconds of each decode step of every answer of a finished sample; none where answers were decoded together."""
    out = row.get("out") or {}
    seconds = out.get("tpot_s") or []
    if not isinstance(seconds, list) or not all(seconds):  # a figure of the whole answer, or a step of no time
        return
    # after a stop token nothing is fed; at the limit the last token is not
    lengths = [
        len(tokens) - (end == "length")
        for tokens, end in zip(out.get("tokens", []), out.get("finished", []), strict=False)
    ]
    if sum(lengths) != len(seconds):
        return
    start = 0
    for length in lengths:
        yield seconds[start : start + length]
        start += length


def speeds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(tokens generated, tokens per second) in the middle of each stretch, the median over all answers that long."""
    stretches: dict[int, list[float]] = {}
    for row in rows:
        for seconds in generations(row):
            for at, value in enumerate(seconds):
                stretches.setdefault(at // STRETCH, []).append(value)
    return [(number * STRETCH + STRETCH // 2, 1 / median(values)) for number, values in sorted(stretches.items())]


def draw_speed(entries: Sequence[Entry], title: str, path: Path) -> bool:
    """Write tokens per second against output length of comparable finished runs; False where outputs are short."""
    plt = plotting()

    by_id = {id(entry.record): entry for entry in entries if entry.record["status"] == "ok"}
    lines = []
    for record in ordered(entry.record for entry in by_id.values()):
        points = [] if record.get("protocol.shared") else speeds(list(by_id[id(record)].rows().values()))
        if points and points[-1][0] >= SHORTEST - STRETCH:
            lines.append((label(record), points))
    if not lines:
        return False
    figure, axes = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
    styles = cycle((colour, style) for style in ("-", "--", ":") for colour in COLOURS)
    for (name, points), (colour, style) in zip(lines, styles, strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=1.5, label=for_figure(name))
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("tokens per second (median)")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(wrapped(for_figure(title), 0.9 * figure.get_figwidth(), 10), fontsize=10)
    save(figure, path.with_suffix(""))
    return True
