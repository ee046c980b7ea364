"""Chunk reuse (CacheBlend, prefix caching): divergence and score against time to first token, by share recomputed.

Times are those of the very runs that a record is of, which prefilled each prompt in each way: ratios are paired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvcompress.common.text import cell, for_figure, for_markdown
from kvcompress.report.curves import FLOOR, SIZE, about
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry
from kvcompress.report.series import Record
from kvcompress.report.styles import styles

WAYS = {"full": "full prefill", "prefix": "prefix reuse"}
_RATIO = re.compile(r"\b(?:prefill\.)?ratio=([0-9.]+(?:e-?[0-9]+)?)\s*")


def timed_prefills(record: Record) -> bool:
    """True for a finished run that timed its prompts beside a full prefill of them."""
    return record["status"] == "ok" and record.get("metrics.ttft_to_full") is not None


def ratio(record: Record) -> float:
    """The share of context tokens that a run was to recompute: what its settings say, else what was measured."""
    asked = record.get("metrics.reuse.ratio")
    if asked is not None:
        return float(asked)
    found = _RATIO.search(str(record.get("variant") or ""))
    if found:
        return float(found[1])
    computed, reused = (record.get(f"metrics.reuse.tokens_{kind}") or 0.0 for kind in ("recomputed", "reused"))
    return computed / max(computed + reused, 1.0)


def name(record: Record) -> str:
    """Method and settings, but for the ratio."""
    return f"{record['method']} {_RATIO.sub('', str(record.get('variant') or '')).strip()}".strip()


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """Runs that may be compared, by name and rising ratio."""
    found: dict[Any, list[Record]] = {}
    for record in filter(timed_prefills, records):
        found.setdefault(record.get("protocol.pair"), []).append(record)
    return [sorted(group, key=lambda r: (name(r), ratio(r), r["run_id"])) for group in found.values()]


# ---------------------------------------------------------------------- table


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _median(way: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = record.get(f"metrics.ttft{way}_s")
        return "–" if value is None else _seconds(value)

    return show


def _paired(way: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        key = f"metrics.ttft_to_{way}"
        if record.get(key) is None:
            return "–"
        return f"{record[key]:.2f} ({record[f'{key}.q1']:.2f}–{record[f'{key}.q3']:.2f})"

    return show


def _recomputed(record: Record) -> str:
    computed, reused = (record.get(f"metrics.reuse.tokens_{kind}") or 0.0 for kind in ("recomputed", "reused"))
    return f"{computed:.0f} of {computed + reused:.0f}"


COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("method", name),
    ("ratio", lambda r: f"{ratio(r):.2f}".rstrip("0").rstrip(".")),
    ("recomputed", _recomputed),
    ("of the layers", lambda r: f"{r['metrics.reuse.recompute_share']:.1%}"),
    ("KL", lambda r: f"{r['metrics.kl']:.2g}"),
    ("KL first", lambda r: f"{r['metrics.kl_first']:.2g}"),
    ("agreement", lambda r: f"{r['metrics.agreement']:.3f}"),
    ("F1", lambda r: f"{r['score']:.3f}"),
    ("F1 full", lambda r: f"{r['metrics.f1_full']:.3f}"),
    ("TTFT", _median("")),
    ("full prefill", _median("_full")),
    ("prefix reuse", _median("_prefix")),
    ("to full", _paired("full")),
    ("to prefix", _paired("prefix")),
    ("loaded", lambda r: f"{r['metrics.reuse.bytes_loaded'] / 1e6:.0f} MB"),
    ("n", lambda r: str(r["n_samples"])),
)
LEGEND = (
    "recomputed: context tokens, mean over layers · of the layers: tokens through layers, question included, as a share of a "
    "full prefill's · KL: to the full prefill, nats per token along its answer; first: of the answer's first token · TTFT, "
    "full prefill, prefix reuse: medians of the same prompts · to full, to prefix: median of paired ratios (quartiles) · "
    "loaded: bytes of keys and values per prompt, from {tier}"
)


def _title(group: Sequence[Record]) -> str:
    record = group[0]
    tokens = median(r["metrics.prompt_tokens"] for r in group)
    return f"{record['model']} · {about(group)} · {tokens:.0f} tokens per prompt · chunks in {_tier(record)}"


def _tier(record: Record) -> str:
    return str(record.get("protocol.tier") or "memory")


def reuse_markdown(records: Iterable[Record]) -> str:
    """A table per group of comparable runs; empty where none measured its prefills."""
    lines: list[str] = []
    for group in groups(records):
        lines += [f"### Reuse: {for_markdown(_title(group))}", ""]
        lines.append("| " + " | ".join(title for title, _ in COLUMNS) + " |")
        lines.append("|" + "|".join(" :--- " if title == "method" else " ---: " for title, _ in COLUMNS) + "|")
        lines += ["| " + " | ".join(for_markdown(show(record)) for _, show in COLUMNS) + " |" for record in group]
        lines += ["", LEGEND.format(tier=for_markdown(_tier(group[0]))), ""]
    return "\n".join(lines)


def print_reuse(records: Iterable[Record], console: Console) -> None:
    """The same on a terminal, with fewer columns."""
    wanted = ("method", "ratio", "KL", "F1", "TTFT", "full prefill", "prefix reuse", "to full")
    for group in groups(records):
        heading = cell(f"Reuse: {_title(group)}", "bold")
        table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
        shown = [(title, value) for title, value in COLUMNS if title in wanted]
        for title, _ in shown:
            table.add_column(title, justify="left" if title == "method" else "right", no_wrap=title != "method")
        for record in group:
            table.add_row(*(cell(value(record)) for _, value in shown))
        console.print(table)


# ---------------------------------------------------------------------- figure


def draw_reuse(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Per sweep, model and setting divergence and F1 against time to first token, as PNG and SVG in `folder`."""
    written: list[Path] = []
    sweeps: dict[str, list[Record]] = {}
    for entry in entries:
        sweeps.setdefault(entry.sweep, []).append(entry.record)
    for sweep, records in sorted(sweeps.items()):
        for group in groups(records):
            record = group[0]
            stem = figure_stem(sweep, record["model"], record["task"], record.get("protocol.pair"), "reuse")
            written += save(_figure(group, f"{sweep}: {_title(group)}"), folder / stem)
    return written


def _figure(group: Sequence[Record], title: str) -> Any:
    plt = plotting()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.2), layout="constrained")
    panels: tuple[tuple[Any, Callable[[Record], float], str], ...] = (
        (
            left,
            lambda r: max(r["metrics.kl"], FLOOR),
            f"KL(full prefill ‖ reused), nats per token (below {FLOOR:g}: rounding)",
        ),
        (right, lambda r: r["score"], "F1"),
    )
    for axes, y, label in panels:
        if axes is left:
            axes.set_yscale("log")
        else:
            full = median(r["metrics.f1_full"] for r in group)
            axes.axhline(full, color="#555555", lw=0.8, ls="-.", zorder=1, label="F1 of the full prefill")
        _paint(axes, group, y)
        _baselines(axes, group)
        axes.legend(
            frameon=False, fontsize=SIZE, title="numbers at points: ratio", title_fontsize=SIZE, loc="lower left"
        )
        axes.set_xlim(left=0)
        axes.set_xlabel("time to first token (s), median; bars: quartiles", fontsize=SIZE)
        axes.set_ylabel(label, fontsize=SIZE)
        light_axes(axes, SIZE, "y")
    low, high = right.get_ylim()
    right.set_ylim(min(low, 0.0), max(high, 0.1))
    suptitle(figure, title, 10)
    return figure


def _paint(axes: Any, group: Sequence[Record], y: Callable[[Record], float]) -> None:
    """A line per method and setting through its ratios, each point named by its ratio."""
    looks = styles(map(name, group))
    for label in dict.fromkeys(map(name, group)):
        members = [record for record in group if name(record) == label]
        look = looks[label].line()
        xs, ys = [r["metrics.ttft_s"] for r in members], [y(r) for r in members]
        spread = [
            [r["metrics.ttft_s"] - r["metrics.ttft_s.q1"] for r in members],
            [r["metrics.ttft_s.q3"] - r["metrics.ttft_s"] for r in members],
        ]
        axes.errorbar(
            xs,
            ys,
            xerr=spread,
            ms=4,
            lw=1.3,
            elinewidth=0.8,
            label=for_figure(label),
            zorder=3,
            **look,
        )
        for record, x, at in zip(members, xs, ys, strict=True):
            axes.annotate(
                f"{ratio(record):g}", (x, at), (4, 5), textcoords="offset points", fontsize=SIZE, color=look["color"]
            )


def _baselines(axes: Any, group: Sequence[Record]) -> None:
    """Where the other prefills of the same prompts lie: what they give is the full prefill's."""
    for (way, label), style in zip(WAYS.items(), ("--", ":"), strict=True):
        times = [r[f"metrics.ttft_{way}_s"] for r in group if r.get(f"metrics.ttft_{way}_s") is not None]
        if times:
            axes.axvline(median(times), color="#555555", lw=0.9, ls=style, zorder=1, label=label)
