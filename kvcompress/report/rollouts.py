"""Figures of rollouts: the off-policy gap by position, effective sample size by budget, reward by bytes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from kvcompress.common.text import for_figure
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry, label, ordered
from kvcompress.report.series import COLOURS, MARKERS, Record

MORE = ("#8B5E3C", "#7A7A7A", "#6A3D9A")  # of methods beyond the palette
CURVES = (("metrics.curve_q50", "median of Δ"), ("metrics.curve_q1", "1% quantile of Δ"))


def sampled(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Record]]:
    """Finished records of rollouts by (sweep, pair), in the order of boards."""
    found: dict[tuple[str, str], list[Record]] = {}
    for entry in entries:
        record = entry.record
        if record["status"] in ("ok", "inactive") and record.get("metrics.curve_position"):
            if "metrics.gap_k3" in record:
                found.setdefault((entry.sweep, str(record.get("protocol.pair"))), []).append(record)
    return {key: ordered(records) for key, records in sorted(found.items())}


def draw_rollouts(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Write one figure per group of comparable rollouts; returns what was written."""
    written = []
    for (sweep, pair), records in sampled(entries).items():
        path = folder / figure_stem(sweep, "", str(records[0]["task"]), pair, "off-policy")
        _draw(records, f"{sweep}: {records[0]['model']}, {records[0]['metrics.gap_samples']} samples per run", path)
        written.append(path.with_name(f"{path.name}.png"))
    return written


def _draw(records: Sequence[Record], title: str, path: Path) -> None:
    plt = plotting()
    figure, panels = plt.subplots(2, 2, figsize=(11.0, 8.0), layout="constrained")
    names = sorted({str(record["method"]) for record in records}, key=lambda name: (name != "full", name))
    look = dict(zip(names, zip(cycle((*COLOURS, *MORE)), cycle(MARKERS), strict=False), strict=False))
    budgets = sorted({float(record["budget"]) for record in records}, reverse=True)
    styles = dict(zip(budgets, cycle(("-", "--", ":")), strict=False))
    for (key, about), axes in zip(CURVES, panels[0], strict=True):
        for record in records:
            at, values = record["metrics.curve_position"], record.get(key) or []
            points = [(x, y) for x, y in zip(at, values, strict=False) if y is not None]
            colour, _ = look[str(record["method"])]
            style = styles[float(record["budget"])]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    linestyle=style,
                    linewidth=1.4,
                    label=for_figure(label(record)),
                )
        axes.set_xlabel("position in the output (tokens)")
        axes.set_ylabel(f"{about} = log π − log μ (nats)")
    weighing, paying = panels[1]
    for name in names:
        own = [record for record in records if record["method"] == name]
        colour, marker = look[name]
        for axes, x, y in (
            (weighing, "budget", "metrics.gap_ess_token"),
            (paying, "metrics.bytes_group", "metrics.reward_mean"),
        ):
            points = sorted((float(r[x]), float(r[y])) for r in own if r.get(x) is not None and r.get(y) is not None)
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1)
    weighing.set_xlabel("budget")
    weighing.set_ylabel("effective share of samples (truncated token weights)")
    paying.set_xlabel("bytes of a group, shared storage once (MiB)")
    paying.set_ylabel("mean reward")
    paying.xaxis.set_major_formatter(lambda value, _: f"{value / 2**20:.3g}")
    for axes in panels.flat:
        light_axes(axes, 9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    suptitle(figure, title)
    save(figure, path)
