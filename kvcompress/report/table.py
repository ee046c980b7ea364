"""Leaderboards as tables: terminal, markdown, csv."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from kvcompress.common.text import PlainConsole, cell, for_csv, for_markdown
from kvcompress.report.run_index import flags, named, ordered, several

Record = dict[str, Any]
MISSING = "–"
MOST_NAMED = 6  # runs that a line of power names
FEW = 50  # samples below which no difference seen says little


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def _mib(value: float | None) -> str:
    return MISSING if value is None else format(value / 2**20, ".1f")


def _score(record: Record) -> str:
    """The mean with its interval; a standard error only where the samples are not at hand."""
    if record.get("score_low") is not None:
        return with_interval(record.get("score"), record["score_low"], record["score_high"])
    error = record.get("score_stderr")
    return _number(record.get("score"), ".3f") + (f" ±{error:.2f}" if error else "")


def with_interval(mean: float | None, low: float | None, high: float | None) -> str:
    """A score and its interval: `0.600 .23–.88`."""
    if low is None or high is None:
        return _number(mean, ".3f")
    return f"{_number(mean, '.3f')} {_short(low)}–{_short(high)}"


def _short(share: float) -> str:
    """A share in two digits without the zero before them."""
    return f"{share:.2f}".removeprefix("0") if share < 0.995 else "1.0"


def _delta(record: Record) -> str:
    if record.get("baseline") == record["run_id"]:
        return "baseline"
    return _number(record.get("delta_full"), "+.3f")


def _budget(record: Record) -> str:
    budget = record.get("budget")
    return MISSING if budget is None else f"{budget} tok" if isinstance(budget, int) else f"{budget:g}"


def _seconds(key: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = record.get(key)
        return MISSING if value is None else f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"

    return show


COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("method", lambda record: str(record.get("method"))),
    ("budget", _budget),
    ("score", _score),
    ("Δ full", _delta),
    ("KV bytes", lambda record: _number(record.get("kv.ratio"), ".1%")),
    ("kept", lambda record: _number(record.get("kv.kept_tokens_mean"), ".0f")),
    ("TTFT", _seconds("time.ttft_s")),
    ("TPOT", _seconds("time.tpot_s")),
    ("n", lambda record: str(record.get("n_samples") or 0)),
    ("notes", lambda record: ", ".join(flags(record))),
)
# after the difference to the full cache, where a task measured it
DIVERGENCE: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("KL", lambda record: _number(record.get("metrics.kl"), ".3g")),
    ("perplexity", lambda record: _number(record.get("metrics.perplexity_ratio"), ".2f")),
)
# likewise, of rollouts
GAP: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("gap k3", lambda record: _number(record.get("metrics.gap_k3"), ".3g")),
    ("reject", lambda record: _number(record.get("metrics.gap_seq_reject"), ".0%")),
    ("ESS", lambda record: _number(record.get("metrics.gap_ess_token"), ".1%")),
    ("MiB/group", lambda record: _mib(record.get("metrics.bytes_group"))),
)
# mean score by length, where a task has LongBench-E's buckets
BUCKETS: tuple[tuple[str, str], ...] = (
    ("0–4k", "metrics.score_0-4k"),
    ("4–8k", "metrics.score_4-8k"),
    ("8k+", "metrics.score_8k+"),
)
# multiples of the full cache's figure in the same run, where a task measured any
RATIOS: tuple[tuple[str, str], ...] = (
    ("TTFT ×", "metrics.ratio_ttft"),
    ("TPOT ×", "metrics.ratio_tpot"),
    ("peak ×", "metrics.ratio_prefill_growth"),
    ("steady ×", "metrics.ratio_steady_growth"),
    ("served ×", "metrics.ratio_tokens_per_s"),
    ("goodput ×", "metrics.ratio_goodput_rate"),
)
AA = ("metrics.ratio_aa_ttft", "metrics.ratio_aa_tpot")  # the full cache measured twice, by its own first figure
# which way is better, at the heading
BETTER = {
    **dict.fromkeys(("score", "Δ full", "ESS", "served ×", "goodput ×", *(name for name, _ in BUCKETS)), "↑"),
    **dict.fromkeys(("KV bytes", "TTFT", "TPOT", "KL", "perplexity", "gap k3", "reject", "MiB/group"), "↓"),
    **dict.fromkeys(("TTFT ×", "TPOT ×", "peak ×", "steady ×", "reads"), "↓"),
}
PIPE = 1000  # characters of a line where there is no terminal: nothing is wrapped or cut for the sake of a width
SENTENCE = 120  # characters of a line of text below a table
LEGEND = (
    "↑ more is better, ↓ less · "
    "score: mean and its 95% interval, 0 to 1 · Δ full: paired difference on the same samples · KV bytes: measured keys, "
    "values and positions on the device after compression, as a share of what the full cache holds; of readers of pages in "
    "decode, bounds and tables included"
)
TIMES_LEGEND = " · TTFT includes compression, TPOT is per decoded token, both medians"
NO_TIMES_LEGEND = " · no times: prefills were shared (hydra/launcher=basic measures each cell)"
RATIOS_LEGEND = (
    " · ×: as a multiple of the full cache in the same run, median over the grid (peak and steady: memory above the weights; "
    "served and goodput: simulated)"
)
BUCKETS_LEGEND = " · 0–4k, 4–8k, 8k+: mean score of samples with as many words (LongBench-E)"
AA_LEGEND = " · A/A: TTFT and TPOT of the full cache against itself; a × no farther from 1 says nothing"
DIVERGENCE_LEGEND = (
    " · KL: mean divergence of the next-token distribution from the full cache's, in nats · perplexity: as a multiple of "
    "the full cache's"
)
GAP_LEGEND = (
    " · gap k3: how far sampled tokens lie from the full model's policy, nats per token · reject: samples with a token whose "
    "ratio is below 0.001 · ESS: effective share of tokens after truncated weights · MiB/group: samples of a prompt, "
    "shared storage once"
)


def heading(name: str, gap: str = " ") -> str:
    """A column's name with an arrow that says which way is better."""
    return f"{name}{gap}{BETTER[name]}" if name in BETTER else name


def legend(records: Iterable[Record]) -> str:
    records = list(records)
    timed = any(record.get("time.ttft_s") is not None for record in records)
    shared = any(record.get("protocol.shared") for record in records)
    text = LEGEND + (TIMES_LEGEND if timed else NO_TIMES_LEGEND if shared else "")
    beside = [name for name, _ in _ratio_columns(records)]
    if any(record.get("parts.reader") not in (None, "all") for record in records):
        text += " · reads: bytes per decoded token, as a share of the full cache's"
    text += BUCKETS_LEGEND if _columns_of(BUCKETS, records, ".3f") else ""
    text += (RATIOS_LEGEND if beside else "") + (AA_LEGEND if "A/A" in beside else "")
    text += GAP_LEGEND if any(record.get("metrics.gap_k3") is not None for record in records) else ""
    return text + (DIVERGENCE_LEGEND if any(record.get("metrics.kl") is not None for record in records) else "")


def _columns_of(
    known: Sequence[tuple[str, str]], group: Sequence[Record], form: str
) -> list[tuple[str, Callable[[Record], str]]]:
    """Columns of heading and key that any record of a group has."""

    def show(key: str) -> Callable[[Record], str]:
        return lambda record: _number(record.get(key), form)

    return [(name, show(key)) for name, key in known if any(record.get(key) is not None for record in group)]


def _ratio_columns(group: Sequence[Record]) -> tuple[tuple[str, Callable[[Record], str]], ...]:
    """Columns of `RATIOS` that any record of a group has."""
    shown = _columns_of(RATIOS, group, ".2f")
    if any(record.get(key) is not None for key in AA for record in group):
        shown.append(("A/A", lambda record: ", ".join(_number(record.get(key), ".2f") for key in AA)))
    return tuple(shown)


def columns(group: Sequence[Record]) -> tuple[tuple[str, Callable[[Record], str]], ...]:
    """What a table of these records shows."""
    divergence = () if all(record.get("metrics.kl") is None for record in group) else DIVERGENCE
    gap = () if all(record.get("metrics.gap_k3") is None for record in group) else GAP
    return (*COLUMNS[:4], *_columns_of(BUCKETS, group, ".3f"), *divergence, *gap, *_ratio_columns(group), *COLUMNS[4:])


def title(record: Record) -> str:
    """What all rows of a table have in common."""
    question, lengths = record.get("protocol.question"), record.get("protocol.lengths")
    parts = [
        record.get("model"),
        record.get("task"),
        f"{lengths} tokens" if lengths else None,
        record.get("protocol.haystack"),
        record.get("protocol.source"),
        record.get("protocol.texts"),
        f"question {question}" if question else None,
        several(record),
        f"template {record['protocol.template']}" if record.get("protocol.template") else None,
        record.get("metric"),
        record.get("dtype"),
        record.get("device"),
        f"seed {record.get('seed')}",
    ]
    return " · ".join(str(part) for part in parts if part is not None)


def on_board(record: Record) -> bool:
    return record["status"] == "ok"


def terminal() -> Console:
    """A console for tables: a pipe or a file has no width of its own, so nothing is cut for its sake."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=max(console.width, PIPE))


def leaderboard(records: Iterable[Record], console: Console, with_legend: bool = True) -> None:
    """Print one table of comparable records per setting, those that do not count last and dimmed; what columns mean."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record.get("protocol.pair"), []).append(record)
    for group in groups.values():
        _print(_split(ordered(group)), console)
    if groups and with_legend:
        print_legend((record for group in groups.values() for record in group), console)


def print_legend(records: Iterable[Record], console: Console) -> None:
    """Print what the columns of the tables of these records mean: once, however many tables there are."""
    console.print(legend(records), style="dim", width=min(console.width, SENTENCE))


def labelled(group: Sequence[Record]) -> list[Record]:
    """Records with what differs from the method's own settings beside its name.

    Two runs that still look alike differ in another setting: their run ids tell them apart.
    """
    told = [r | {"method": named(r)} for r in group]
    count = Counter((r["method"], r.get("budget")) for r in told)
    return [
        r | {"method": f"{r['method']} {r['run_id'][:4]}"} if count[r["method"], r.get("budget")] > 1 else r
        for r in told
    ]


def _split(group: Sequence[Record]) -> list[Record]:
    return [r for r in group if on_board(r)] + [r for r in group if not on_board(r)]


def _print(group: Sequence[Record], console: Console) -> None:
    counts = {record.get("n_samples") or 0 for record in group}
    head = title(group[0]) + (f" · n={counts.pop()}" if len(counts) == 1 else "")
    hidden = {"n"} if "n=" in head else set()  # 80 columns hold the numbers only if nothing is said twice
    if not any(flags(record) for record in group):
        hidden.add("notes")
    table = Table(title=cell(head, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    if all(record.get("time.tpot_s") is None and record.get("time.ttft_s") is None for record in group):
        hidden |= {"TTFT", "TPOT"}  # a task that times nothing
    shown = [(name, show) for name, show in columns(group) if name not in hidden]
    for name, _ in shown:
        # numbers must never be cut: a narrow terminal wraps the notes
        side: JustifyMethod = "left" if name in ("method", "notes") else "right"
        table.add_column(heading(name, ""), justify=side, no_wrap=name != "notes")
    group = labelled(group)
    scores = [r["score"] for r in group if on_board(r) and r.get("baseline") != r["run_id"]]
    best = max(scores, default=None)
    for record in group:
        counts_in = on_board(record)
        cells = []
        for name, show in shown:
            value = show(record) if counts_in or name in ("method", "budget", "n", "notes") else MISSING
            strong = name == "score" and counts_in and len(scores) > 1 and record.get("score") == best
            cells.append(cell(value, "bold" if strong else "" if counts_in else "dim"))
        table.add_row(*cells)
    console.print(table)
    if power := power_line(group):
        console.print(cell(power, "dim"), width=min(console.width, SENTENCE))


def power_line(group: Sequence[Record]) -> str | None:
    """How many samples would tell runs from the full cache that those there are do not; None where there are none."""
    compared = [record for record in group if on_board(record) and "delta_needed" in record]
    alike = [r for r in compared if r["delta_needed"] is None and (r.get("n_samples") or 0) < FEW]
    short = [r for r in compared if r["delta_needed"] is not None and r["delta_needed"] > (r.get("n_samples") or 0)]
    short.sort(key=lambda record: record["delta_needed"])
    found = []
    if short:
        parts = [f"{record['method']} {_budget(record)}: {record['delta_needed']:,}" for record in short[:MOST_NAMED]]
        if len(short) > MOST_NAMED:
            parts.append(f"{len(short) - MOST_NAMED} more: up to {short[-1]['delta_needed']:,}")
        found.append(
            "samples that would tell a difference to full as large as the one seen, with 80% power over "
            f"{len(compared)} comparisons: {' · '.join(parts)}"
        )
    if alike:
        found.append(
            f"no difference to full seen in {len(alike)} of {len(compared)} runs, which so few samples do not rule out"
        )
    return "; ".join(found) or None


def plain_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of texts in the form of the leaderboards."""
    table = Table(title=cell(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    for name in head:
        table.add_column(name, justify="left" if name in ("method", "of each") else "right", no_wrap=name != "of each")
    for row in rows:
        table.add_row(*(cell(text) for text in row))
    return table


def leaderboard_markdown(groups: Iterable[Sequence[Record]]) -> str:
    """One markdown table per group of comparable records."""
    lines: list[str] = []
    every: list[Record] = []
    for group in groups:
        every += group
        lines += [f"### {for_markdown(title(group[0]))}", ""]
        shown = columns(group)
        lines.append("| " + " | ".join(heading(name) for name, _ in shown) + " |")
        lines.append("|" + "|".join(" :--- " if name in ("method", "notes") else " ---: " for name, _ in shown) + "|")
        for record in labelled(_split(group)):
            cells = [
                show(record) if on_board(record) or name in ("method", "budget", "n", "notes") else MISSING
                for name, show in shown
            ]
            lines.append("| " + " | ".join(map(for_markdown, cells)) + " |")
        lines.append("")
        if power := power_line(labelled(_split(group))):
            lines += [f"{for_markdown(power)}.", ""]
    return "\n".join([*lines, legend(every), ""]) if lines else ""


def _flags(record: Record) -> list[str]:
    foreign = record.get("origin", "measured") != "measured"  # whose sources and storage are not known
    return list(record.get("flags") or ()) if foreign else flags(record)


def to_csv(records: Iterable[Record]) -> str:
    """Every key of every record, one row each; errors in one line. Rows of others say so in `origin`."""
    records = [record | {"flags": " ".join(_flags(record))} for record in records]
    first = [
        *(["origin"] if any("origin" in record for record in records) else []),
        "sweep",
        "model",
        "task",
        "method",
        "budget",
        "seed",
        "status",
        "flags",
        "n_samples",
        "score",
        "score_stderr",
    ]
    first += ["delta_full", "delta_stderr", "kv.ratio"]
    keys = list(dict.fromkeys([*first, *sorted({key for record in records for key in record})]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(for_csv, keys))
    for record in records:
        if record.get("error"):
            record["error"] = str(record["error"]).strip().splitlines()[-1]
        writer.writerow(for_csv(record.get(key, "")) for key in keys)
    return out.getvalue()
