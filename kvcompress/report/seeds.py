"""Runs that differ in their seed alone, as one row each: how many runs of how many samples, and one interval over them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from kvcompress.common.text import cell, for_markdown
from kvcompress.report import stats
from kvcompress.report.frame import method_key
from kvcompress.report.run_index import Entry, budget_of, named, ordered
from kvcompress.report.table import plain_table, with_interval
from kvcompress.sweep import stored_config

# what runs have in common that differ in their seed; `protocol.pair` and `seed` are not among it
SETTING = (
    *("model", "task", "metric", "dtype", "device", "protocol.question", "protocol.turns", "protocol.questions"),
    *("protocol.template", "protocol.lengths", "protocol.haystack", "protocol.max_length", "protocol.truncation"),
    *("protocol.think", "protocol.think_tokens", "protocol.sampling", "protocol.data"),
)
STORED = ("model", "task", "limit", "dtype", "kernel", "think", "think_tokens")  # likewise, of the stored configuration
HEAD = ("method", "budget", "score", "runs", "of each")
LEGEND = "runs that differ in their seed: mean and 95% interval over samples, of which each counts once however often it was run"


def over_seeds(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Finished runs by setting, method and budget, where there are several seeds of them.

    Runs of one seed that a record does not tell apart are left out: they are no repetitions.

    Returns:
        {"sweep", "model", "task", "method", "variant", "budget", "record", "pooled", "runs": score of each by seed}.
    """
    found: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        record = entry.record
        if record["status"] == "ok" and entry.scores:
            setting = (*(str(record.get(key)) for key in SETTING), _stored(entry))
            found.setdefault((entry.sweep, *setting, *method_key(record), record["budget"]), []).append(entry)
    rows = []
    for members in found.values():
        seeds = [entry.record.get("seed") for entry in members]
        if len(seeds) < 2 or len(set(seeds)) < len(seeds):
            continue
        record = members[0].record
        rows.append(
            {key: record.get(key) for key in ("model", "task", "method", "variant", "budget")}
            | {
                "sweep": members[0].sweep,
                "record": record,
                "pooled": stats.pooled([entry.scores for entry in members]),
                "runs": {entry.record.get("seed"): float(entry.record["score"]) for entry in members},
            }
        )
    return rows


def _stored(entry: Entry) -> str:
    """The settings of a run beside its seed, as its folder has them; nothing where it has none."""
    found = stored_config.read(entry.path.parent / "config.yaml") or {}
    return json.dumps([_unseeded(found.get(key)) for key in STORED], sort_keys=True, default=str)


def _unseeded(value: Any) -> Any:
    return {key: _unseeded(one) for key, one in value.items() if key != "seed"} if isinstance(value, dict) else value


def tables(entries: Iterable[Entry]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """A title and rows of text per sweep, model and task."""
    rows = over_seeds(entries)
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["sweep"], str(row["model"]), str(row["task"])), []).append(row)
    made = []
    for place, members in sorted(found.items()):
        place_of = {id(row["record"]): row for row in members}
        lines = [_line(place_of[id(record)]) for record in ordered(row["record"] for row in members)]
        made.append((" · ".join((*place, "several seeds")), lines))
    return made


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    together: stats.Pooled = row["pooled"]
    each = ", ".join(f"{score:.3f}" for _, score in sorted(row["runs"].items()))
    return (
        named(row["record"]),
        budget_of(row["record"]),
        with_interval(together.mean, together.low, together.high),
        together.counted,
        each,
    )


def print_seeds(entries: Sequence[Entry], console: Console) -> None:
    """Print the tables, where there are any."""
    found = tables(entries)
    for title, lines in found:
        console.print(plain_table(title, HEAD, lines))
    if found:
        console.print(cell(LEGEND, "dim"))


def seeds_markdown(entries: Sequence[Entry]) -> str:
    """The same as markdown, "" where there is none."""
    text: list[str] = []
    for title, lines in tables(entries):
        text += [f"### {for_markdown(title)}", "", "| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
        text += ["| " + " | ".join(map(for_markdown, line)) + " |" for line in lines]
        text.append("")
    return "\n".join([*text, LEGEND, ""]) if text else ""
