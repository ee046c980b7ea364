"""Serving board: hit rates and goodput by memory, the distribution of the first token. All simulated."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvcompress.common.text import for_csv, for_figure, for_markdown
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry
from kvcompress.report.styles import COLOURS, styles

Row = dict[str, Any]
SIZE = 8
FULL = "full"


def rows_of(trace: str, memory: str, said: Mapping[str, Any], costs: Mapping[str, Any]) -> list[Row]:
    """A row per side of what `task=serving` found on a trace at a memory; `costs` by side."""
    found = []
    for side, one in said["sides"].items():
        found.append(
            {
                "trace": Path(trace).name.partition(".")[0],
                "memory": memory,
                "memory_bytes": said["memory"],
                "method": costs[side]["name"],
                "reuse": one["reuse"] if one["store"] == "compressed" else "exact store",
                "ratio": one["ratio"],
                "source": costs[side]["source"],
                "goodput": one["goodput_rate"],
                "to_full": one["to_base"],
                "load": one["load"],
                "hit_rate": one["at"]["hit_rate"],
                "unlimited": one["unlimited"],
                "own_unlimited": one["curve"].get("own"),
                "of_unlimited": one["share_of_unlimited"],
                **{key: one["at"][key] for key in NUMBERS},
                "bound": one["at"]["bound"],
                "extrapolated": "+".join(one["extrapolated"]),
                "ttft_target": said["targets"]["ttft"],
                "tbt_target": said["targets"]["tbt"],
                "quantiles": one["at"]["ttft_quantiles"],
                "curve": one["curve"],
            }
        )
    return found


NUMBERS = (
    "requests", "speedup_bound", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "attained", "running_most", "preemptions",
    "load_wait_s", "busy",
)  # fmt: skip
DRAWN = ("quantiles", "curve")  # of a row, for figures alone


def of_entries(entries: Sequence[Entry]) -> dict[str, list[Row]]:
    """By sweep the rows of its records, the full cache of each trace and memory once."""
    found: dict[str, list[Row]] = {}
    for entry in entries:
        if entry.record.get("task") != "serving" or entry.record["status"] != "ok":
            continue
        rows = found.setdefault(entry.sweep, [])
        for sample in entry.rows().values():
            for trace, memories in sample["out"]["serving"].items():
                for memory, said in memories.items():
                    rows += [
                        row
                        for row in rows_of(trace, memory, said, sample["out"]["costs"])
                        if row["method"] != FULL
                        or not any(_place(row) == _place(one) and one["method"] == FULL for one in rows)
                    ]
    return {sweep: rows for sweep, rows in found.items() if rows}


def _place(row: Row) -> tuple[str, str]:
    return row["trace"], row["memory"]


def name(row: Row) -> str:
    """The method, and that its policy is a bound."""
    return f"{row['method']} (bound)" if row["bound"] else str(row["method"])


# ---------------------------------------------------------------------- table


def markdown(rows: Sequence[Row]) -> str:
    """A table per trace and memory."""
    lines: list[str] = []
    titles = "method,reuse,bytes,goodput/s,to full,hit rate,of unlimited,TTFT p50,TTFT p99,TBT p50,loads waited,outside".split(
        ","
    )
    for place in dict.fromkeys(map(_place, rows)):
        group = [row for row in rows if _place(row) == place]
        first = group[0]
        trace, memory = map(for_markdown, place)
        lines += [
            f"### Simulated: {trace}, {_gib(first['memory_bytes'])} ({memory}), {first['requests']} requests",
            "",
            f"Targets: first token {first['ttft_target']:.3g} s, longest tenth of gaps {first['tbt_target']:.3g} s; hit rate "
            f"and times at {first['load']:.3g} requests/s for all.",
            "",
            "| " + " | ".join(titles) + " |",
            "|" + "|".join(" :--- " if title in ("method", "reuse", "outside") else " ---: " for title in titles) + "|",
        ]
        for row in group:
            cells = [
                name(row),
                row["reuse"],
                f"{row['ratio']:.3f}",
                f"{row['goodput']:.3g}",
                "–" if row["to_full"] is None else f"{row['to_full']:.2f}",
                f"{row['hit_rate']:.3f}",
                "–" if row["of_unlimited"] is None else f"{row['of_unlimited']:.2f}",
                *(f"{row[key]:.3g} s" for key in ("ttft_p50", "ttft_p99", "tbt_p50")),
                f"{row['load_wait_s']:.3g} s",
                row["extrapolated"] or "–",
            ]
            lines.append("| " + " | ".join(map(for_markdown, cells)) + " |")
        lines.append("")
    return "\n".join(lines)


def to_csv(rows: Iterable[Row]) -> str:
    """Every number of every row."""
    rows = [{key: value for key, value in row.items() if key not in DRAWN} | {"simulated": True} for row in rows]
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(for_csv, rows[0]))
    writer.writerows([for_csv(row.get(key, "")) for key in rows[0]] for row in rows)
    return text.getvalue()


def _gib(value: float) -> str:
    return f"{value / 2**30:.3g} GiB of cache"


# ---------------------------------------------------------------------- figures


def draw_serving(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Figures of every sweep of `task=serving`, as PNG and SVG in `folder`."""
    written: list[Path] = []
    for sweep, rows in of_entries(entries).items():
        written += draw(rows, folder / figure_stem(sweep, "", "", None, "serving"))
    return written


def draw(rows: Sequence[Row], stem: Path, note: str = "") -> list[Path]:
    """Hit rate by memory, goodput by memory, and the first token's distribution, a panel per trace."""
    written = save(_hits(rows, note), stem.with_name(f"{stem.name}-hits"))
    written += save(_goodput(rows, note), stem.with_name(f"{stem.name}-goodput"))
    return written + save(_first_tokens(rows, note), stem.with_name(f"{stem.name}-first-token"))


def _traces(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["trace"] for row in rows))


def _panels(rows: Sequence[Row], height: float = 4.0) -> tuple[Any, list[Any]]:
    traces = _traces(rows)
    figure, axes = plotting().subplots(
        1, len(traces), figsize=(5.2 * len(traces) + 2.4, height), squeeze=False, layout="constrained"
    )
    for one, trace in zip(axes[0], traces, strict=True):
        one.set_title(for_figure(trace), fontsize=SIZE + 1)
        light_axes(one, SIZE)
    return figure, list(axes[0])


def _looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Arguments of `plot` by method; the full cache in a thicker line."""
    return {
        method: look.line() | {"lw": 2.0 if look.place is None else 1.3} for method, look in styles(methods).items()
    }


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=SIZE)


def _hits(rows: Sequence[Row], note: str) -> Any:
    figure, panels = _panels(rows)
    methods = list(dict.fromkeys(map(name, rows)))
    for axes, trace in zip(panels, _traces(rows), strict=True):
        of = [row for row in rows if row["trace"] == trace]
        middle = sorted({row["memory_bytes"] for row in of})
        for method in methods:
            row = next((r for r in of if name(r) == method and r["memory_bytes"] == middle[len(middle) // 2]), None)
            if row is None or not row["curve"]["hit"]:
                continue
            label = for_figure(f"{method} ({row['reuse']})")
            axes.plot(
                [m / 2**30 for m in row["curve"]["memory"]],
                row["curve"]["hit"],
                ms=4,
                label=label,
                **_looks(methods)[method],
            )
        limits = {"any prefix": of[0]["unlimited"]}
        whole = next((row["own_unlimited"] for row in of if row["reuse"] == "whole"), None)
        if whole is not None:
            limits["whole prompts only"] = whole
        for (what, value), style in zip(limits.items(), ("--", ":"), strict=False):
            if value is not None:
                axes.axhline(value, color="#555555", lw=0.9, ls=style)
                axes.annotate(f"unlimited, {what}: {value:.3f}", (0.02, value), (0, 3), xycoords=("axes fraction", "data"),
                              textcoords="offset points", fontsize=SIZE - 1, color="#555555")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("memory for the cache of earlier prompts (GiB)", fontsize=SIZE)
        axes.set_ylabel("prompt tokens that hit, share", fontsize=SIZE)
    _legend(figure, panels)
    suptitle(
        figure,
        f"Hit rate by memory, replayed without time (simulated; n = {rows[0]['requests']} requests each). {note}",
        9,
    )
    return figure


def _goodput(rows: Sequence[Row], note: str) -> Any:
    figure, panels = _panels(rows)
    methods = list(dict.fromkeys(map(name, rows)))
    for axes, trace in zip(panels, _traces(rows), strict=True):
        for method in methods:
            of = sorted((r for r in rows if r["trace"] == trace and name(r) == method), key=lambda r: r["memory_bytes"])
            if of:
                xs, ys = [row["memory_bytes"] / 2**30 for row in of], [row["goodput"] for row in of]
                axes.plot(xs, ys, ms=4, label=for_figure(f"{method} ({of[0]['reuse']})"), **_looks(methods)[method])
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("memory for caches (GiB)", fontsize=SIZE)
        axes.set_ylabel("requests/s at which 90% meet both targets", fontsize=SIZE)
    _legend(figure, panels)
    suptitle(figure, f"Goodput by memory (simulated; n = {rows[0]['requests']} requests each). {note}", 9)
    return figure


def _first_tokens(rows: Sequence[Row], note: str) -> Any:
    figure, panels = _panels(rows)
    methods = list(dict.fromkeys(map(name, rows)))
    for axes, trace in zip(panels, _traces(rows), strict=True):
        memories = sorted({row["memory_bytes"] for row in rows if row["trace"] == trace})
        at = memories[len(memories) // 2]
        of = [row for row in rows if row["trace"] == trace and row["memory_bytes"] == at]
        for row in of:
            shares = [index / (len(row["quantiles"]) - 1) for index in range(len(row["quantiles"]))]
            style = _looks(methods)[name(row)] | {"marker": ""}
            axes.plot([max(1e-4, value) for value in row["quantiles"]], shares, label=for_figure(name(row)), **style)
        axes.axvline(of[0]["ttft_target"], color="#555555", lw=0.9, ls=":")
        axes.annotate("target", (of[0]["ttft_target"], 0.02), (3, 0), textcoords="offset points", fontsize=SIZE - 1)
        axes.set_xscale("log")
        axes.set_title(f"{for_figure(trace)}, {at / 2**30:.3g} GiB, {of[0]['load']:.3g} requests/s", fontsize=SIZE + 1)
        axes.set_xlabel("seconds to the first token", fontsize=SIZE)
        axes.set_ylabel("share of requests", fontsize=SIZE)
    _legend(figure, panels)
    suptitle(
        figure,
        f"First token at the load that the full cache can bear (simulated; n = {rows[0]['requests']} each). {note}",
        9,
    )
    return figure


def draw_classes(
    unlimited: Mapping[str, tuple[float, float]], classes: Mapping[str, Sequence[str]], stem: Path, note: str = ""
) -> list[Path]:
    """What an unlimited cache hits, by trace, if any prefix or only whole prompts can be reused; and which method is which.

    Args:
        unlimited: by trace the share by token for "prefix" and "whole"; classes: names of methods by class.
    """
    figure, (left, right) = plotting().subplots(
        1, 2, figsize=(10.5, 4.2), layout="constrained", gridspec_kw={"width_ratios": [1, 1.25]}
    )
    for place, (_, values) in enumerate(unlimited.items()):
        for offset, value, colour, kind in zip((-0.2, 0.2), values, COLOURS, ("prefix", "whole"), strict=False):
            left.bar(place + offset, value, 0.38, color=colour, label=kind if not place else None, zorder=2)
            left.annotate(
                f"{value:.4f}", (place + offset, value), (0, 3), ha="center", textcoords="offset points", fontsize=SIZE
            )
    left.set_xticks(range(len(unlimited)), list(map(for_figure, unlimited)), fontsize=SIZE)
    left.set_ylabel("prompt tokens that hit an unlimited cache, share", fontsize=SIZE)
    left.set_ylim(0, 1.35 * max(max(values) for values in unlimited.values()))
    left.legend(frameon=False, fontsize=SIZE, loc="upper left", title="what can be reused", title_fontsize=SIZE)
    light_axes(left, SIZE, "y")
    right.axis("off")
    for column, (kind, names) in enumerate(classes.items()):
        said = {"prefix": "prefix: any beginning of a prompt", "whole": "whole: only an earlier prompt as it was"}[kind]
        right.text(0.5 * column, 1.0, said, fontsize=SIZE, color=COLOURS[column], va="top", weight="bold")
        right.text(
            0.5 * column, 0.93, "\n".join(map(for_figure, sorted(names))), fontsize=SIZE, va="top", linespacing=1.35
        )
    suptitle(
        figure,
        f"What of a compressed cache another prompt can use (each method's class is tested by running it). {note}",
        9,
    )
    return save(figure, stem)


def gains(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By method the median over memories of its goodput over the full cache's, for each trace."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["to_full"] is not None:
            found.setdefault(name(row), {}).setdefault(row["trace"], []).append(row["to_full"])
    return {method: {trace: median(values) for trace, values in of.items()} for method, of in found.items()}
