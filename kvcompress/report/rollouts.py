"""Tables and figures of rollouts: the off-policy gap with intervals and by position, sample size, reward, bytes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from kvcompress.common.text import for_figure
from kvcompress.report import stats
from kvcompress.report.figure import figure_stem, light_axes, plotting, save, suptitle
from kvcompress.report.run_index import Entry, label, ordered
from kvcompress.report.series import Record
from kvcompress.report.styles import styles

CURVES = (("metrics.curve_q50", "median of Δ"), ("metrics.curve_q1", "1% quantile of Δ"))


def is_sampled(record: Record) -> bool:
    """True for a finished record of rollouts that has gaps."""
    finished = record["status"] in ("ok", "inactive")
    return finished and bool(record.get("metrics.curve_position")) and "metrics.gap_k3" in record


def sampled(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Record]]:
    """Finished records of rollouts by (sweep, pair), in the order of boards."""
    found: dict[tuple[str, str], list[Record]] = {}
    for entry in entries:
        if is_sampled(entry.record):
            found.setdefault((entry.sweep, str(entry.record.get("protocol.pair"))), []).append(entry.record)
    return {key: ordered(records) for key, records in sorted(found.items())}


COLUMNS = {
    "gap_k3": "k3, nats per token ↓",
    "gap_ess_token": "effective share of tokens ↑",
    "reward_mean": "mean reward ↑",
}  # of each group of samples from one prompt: the units that intervals are made of
SHARES = {
    "gap_ratio_share": "ratio outside [0.5, 2] ↓",
    "gap_seq_reject": "samples with a ratio below 0.001 ↓",
    "gap_ess": "effective share of samples ↑",
    "distinct": "distinct ↑",
}


def markdown(entries: Sequence[Entry]) -> str:
    """Two tables per group of comparable rollouts; nothing where there are none.

    Intervals are 95% bootstrap intervals of the mean over prompts, each with all its samples.
    """
    by_run = {id(entry.record): entry for entry in entries}
    return "\n".join(_tables([by_run[id(record)] for record in group]) for group in sampled(entries).values())


def _tables(entries: Sequence[Entry]) -> str:
    first = entries[0].record
    about = f"{first['n_samples']} prompts, {first['metrics.gap_samples']} samples, {first['metrics.gap_tokens']} tokens per run"
    lines = [f"### {first['model']} · {first['task']} · off-policy gap · {about}", ""]
    heads = ["method", *COLUMNS.values(), *SHARES.values(), "bytes of a group, MiB ↓", "unshared / shared"]
    lines += [f"| {' | '.join(heads)} |", "| :--- |" + " ---: |" * (len(heads) - 1)]
    for entry in entries:
        record, scores = entry.record, [row["scores"] for row in entry.rows().values()]
        cells = [label(record)]
        for key in COLUMNS:
            per_prompt = [_of_prompt(row, key) for row in scores]
            cells.append(_interval([value for value in per_prompt if value is not None]))
        cells += [_number(record.get(f"metrics.{key}"), ".3f") for key in SHARES]
        held = record.get("metrics.bytes_group")
        cells += ["–" if held is None else f"{held / 2**20:.1f}", _number(record.get("metrics.bytes_ratio"), ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    at = first["metrics.curve_position"]
    lines += ["", "1% quantile of Δ = log π − log μ (nats), by position in the output:", ""]
    lines += [f"| method | {' | '.join(f'{x:.0f}' for x in at)} |", "| :--- |" + " ---: |" * len(at)]
    for entry in entries:
        curve = entry.record.get("metrics.curve_q1") or [None] * len(at)
        lines.append(f"| {label(entry.record)} | {' | '.join(_number(value, '.2f') for value in curve)} |")
    return "\n".join(lines) + "\n"


def _of_prompt(scores: Record, key: str) -> float | None:
    """A group's value of a column; its mean reward is its score, where there are rewards."""
    if key == "reward_mean":
        return float(scores["score"]) if "reward_0" in scores else None
    return None if scores.get(key) is None else float(scores[key])


def _interval(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = float(np.mean(values))
    if len(values) == 1:
        return f"{mean:.3g}"
    low, high = stats.bootstrap(np.asarray(values, dtype=np.float64))
    return f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


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
    looks = styles(names)
    budgets = sorted({float(record["budget"]) for record in records}, reverse=True)
    dashes = dict(zip(budgets, cycle(("-", "--", ":")), strict=False))
    for (key, about), axes in zip(CURVES, panels[0], strict=True):
        for record in records:
            at, values = record["metrics.curve_position"], record.get(key) or []
            points = [(x, y) for x, y in zip(at, values, strict=False) if y is not None]
            colour = looks[str(record["method"])].colour
            style = dashes[float(record["budget"])]
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
        look = looks[name].line()
        for axes, x, y in (
            (weighing, "budget", "metrics.gap_ess_token"),
            (paying, "metrics.bytes_group", "metrics.reward_mean"),
        ):
            points = sorted((float(r[x]), float(r[y])) for r in own if r.get(x) is not None and r.get(y) is not None)
            if points:
                axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1, **look)
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
