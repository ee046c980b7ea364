"""Modelled tiers as figures: what page sizes leave of a link, and when loading a prefix beats computing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcompress.common.text import for_figure
from kvcompress.measure.offload_cost_model import modelled
from kvcompress.measure.tiers import dimensions, entry, figures, path
from kvcompress.measure.transfers import threshold
from kvcompress.report.figure import light_axes, plotting, save, suptitle
from kvcompress.report.styles import COLOURS

SIZE = 8
PIECES = [4096 * 2**power for power in range(15)]  # bytes: 4 KiB to 64 MiB
TOKENS = [256 * 2**power for power in range(10)]


def draw_pages(links: Sequence[str], stem: Path, source: Mapping[str, Any] | None = None) -> list[Path]:
    """Effective bandwidth by bytes of a copy, with each link's latency and without."""
    figure, axes = plotting().subplots(figsize=(7.4, 4.2), layout="constrained")
    for number, link in enumerate(links):
        colour = COLOURS[number % len(COLOURS)]
        way, bare = path(link, source=source), path(link, latency=False, source=source)
        total = 1 << 30
        assumed = isinstance(entry("links", link, source).get("latency"), Mapping)
        label = f"{link}{' (latency assumed)' if assumed and way.latency else ''}"
        axes.plot(PIECES, [way.effective(total, piece) / 1e9 for piece in PIECES], color=colour, lw=1.4, label=label)
        axes.plot(PIECES, [bare.effective(total, piece) / 1e9 for piece in PIECES], color=colour, lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(PIECES[::2], [_bytes(piece) for piece in PIECES[::2]])
    axes.set_xlabel("bytes of a copy", fontsize=SIZE)
    axes.set_ylabel("GB/s of payload", fontsize=SIZE)
    light_axes(axes, SIZE)
    axes.legend(frameon=False, fontsize=SIZE)
    suptitle(figure, "What small copies leave of a link (modelled, one copy after another; dotted: without latency)", 9)
    return save(figure, stem)


def draw_thresholds(
    ratios: Mapping[str, float], device: str, model: str, links: Sequence[str], stem: Path, count: int = 8
) -> list[Path]:
    """By tokens of a prefix the bandwidth above which loading it beats computing it on `count` devices, a border per
    method's bytes."""
    figure, axes = plotting().subplots(figsize=(7.4, 4.2), layout="constrained")
    shape, flops = dimensions(model), count * float(entry("devices", device)["flops"])
    for number, (method, ratio) in enumerate(ratios.items()):
        border = [threshold(n, shape.width, shape.gqa, shape.itemsize, flops, ratio) / 1e9 for n in TOKENS]
        axes.plot(
            TOKENS,
            border,
            color=COLOURS[number % len(COLOURS)],
            lw=1.4,
            label=for_figure(f"{method} ({ratio:.2f} of the bytes)"),
        )
        if not number:
            axes.fill_between(TOKENS, border, 1e3, color=COLOURS[0], alpha=0.06, lw=0)
    lines: dict[float, list[str]] = {}
    for link in links:
        lines.setdefault(path(link).bandwidth / 1e9, []).append(link)
    for reached, names in lines.items():
        axes.axhline(reached, color="#888888", lw=0.7, ls=":")
        said = {"ha": "right", "fontsize": SIZE - 1, "color": "#555555", "textcoords": "offset points"}
        axes.annotate(", ".join(names), (TOKENS[-1], reached), (-2, 2), **said)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.5, 1000)
    axes.set_xlim(TOKENS[0], TOKENS[-1])
    axes.set_xlabel("tokens of the prefix", fontsize=SIZE)
    axes.set_ylabel("bandwidth of the link, GB/s", fontsize=SIZE)
    light_axes(axes, SIZE)
    axes.legend(frameon=False, fontsize=SIZE, loc="lower left", title="above its line: load", title_fontsize=SIZE)
    suptitle(figure, f"Load a prefix or compute it again: {model} on {count} x {device} at their peak (modelled)", 9)
    return save(figure, stem)


def draw_token_times(records: Sequence[Mapping[str, Any]], device: str, links: Sequence[str], stem: Path) -> list[Path]:
    """Modelled time per token by link: what is read, and of what is moved that which reading hides and that which it does not."""
    rows = [record for record in records if record.get("kv.read_bytes_per_token") is not None]
    if not rows:
        return []
    figure, axes = plotting().subplots(figsize=(8.2, 0.45 * len(rows) * len(links) + 1.6), layout="constrained")
    labels: list[str] = []
    for record in rows:
        for link in links:
            time = modelled(
                record["kv.read_bytes_per_token"], record.get("kv.moved_bytes_per_token") or 0, device, link
            )
            hidden = min(time.moved, time.read)
            parts = (time.read - hidden, hidden, time.moved - hidden)
            left = 0.0
            for part, colour, label in zip(
                parts, COLOURS, ("read", "read, moved beside it", "moved, exposed"), strict=False
            ):
                axes.barh(len(labels), 1e6 * part, left=1e6 * left, color=colour, label=label if not labels else None)
                left += part
            labels.append(for_figure(f"{record['method']} {record.get('variant') or ''} · {link}"))
    axes.set_yticks(range(len(labels)), labels, fontsize=SIZE - 1)
    axes.set_xlabel("µs per token, keys and values alone: no TPOT, a step also reads the weights", fontsize=SIZE)
    light_axes(axes, SIZE, "x")
    axes.legend(frameon=False, fontsize=SIZE)
    suptitle(figure, f"Time per token by link on {device} (bytes measured, times modelled)", 9)
    return save(figure, stem)


def _bytes(value: int) -> str:
    return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"


LINKS = tuple(figures()["links"])
