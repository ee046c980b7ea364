"""Data of the HTML board: rows, groups of comparable rows, and what its figures draw."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

import numpy as np

from kvcompress.common.hashing import digest
from kvcompress.report import stats
from kvcompress.report.averages import ranked, suites
from kvcompress.report.command import Commands
from kvcompress.report.frame import MEASURED, measured
from kvcompress.report.heatmap import grid
from kvcompress.report.run_index import Loaded, named, ordered
from kvcompress.report.series import series
from kvcompress.report.styles import styles
from kvcompress.report.table import title
from kvcompress.sweep.baseline import is_baseline

Record = dict[str, Any]
POINTS = 64  # of a line along a generation
DEPTHS = 24  # rows of a heat map
PARTS = ("scorer", "allocator", "codec", "prefill", "reader", "schedule", "preset")
# name in the page → key of a record
NUMBERS = {
    "n": "n_samples", "score": "score", "se": "score_stderr", "lo": "score_low", "hi": "score_high",
    "delta": "delta_full", "dlo": "delta_low", "dhi": "delta_high", "dn": "delta_n", "p": "p_value", "pc": "p_corrected",
    "ratio": "kv.ratio", "held": "kv.bytes_held", "peak": "kv.bytes_peak", "full": "kv.bytes_full",
    "read": "kv.read_bytes_per_token", "moved": "kv.moved_bytes_per_token", "kept": "kv.kept_tokens_mean",
    "ttft": "time.ttft_s", "tpot": "time.tpot_s", "compress": "time.compress_s", "kl": "metrics.kl",
    "ppl": "metrics.perplexity_ratio", "words4": "metrics.score_0-4k", "words8": "metrics.score_4-8k", "words9": "metrics.score_8k+",
}  # fmt: skip
DETAILS = (
    *("seed", "dtype", "device", "metric", "versions.git_commit", "versions.torch", "versions.transformers"),
    *("versions.cpu", "versions.device", "protocol.kernel", "protocol.decoding"),
)


def number(value: Any, digits: int = 5) -> Any:
    """A finite number with so many significant digits, whole ones as int; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits}g}")


def protocol(record: Mapping[str, Any]) -> str:
    """How it was asked, in the words of a cell: what tells settings of one task apart."""
    question = record.get("protocol.question")
    found = [f"question {question}" if question else None]
    found += [record.get(f"protocol.{key}") for key in ("haystack", "source", "texts")]
    turns = record.get("protocol.turns")
    found.append(None if turns in (None, "single") else f"{record.get('protocol.questions')} questions {turns}")
    found.append(f"template {record['protocol.template']}" if record.get("protocol.template") else None)
    return ", ".join(str(part) for part in found if part) or "–"


def samples_file(record: Mapping[str, Any]) -> str:
    """Name of the file with a run's samples; nothing of a record's text becomes part of a path."""
    return f"run-{digest([record.get('sweep'), record['run_id']])}.js"


def build(
    found: Loaded,
    foreign: Sequence[Record],
    page: Path,
    commands: Commands,
    visit: Callable[[str, str, str, list[Record]], None] = lambda *_: None,
) -> dict[str, Any]:
    """The whole of the page's data: {"rows", "groups", "suites", "skipped", "styles", "shapes": one mapping per group}.

    Args:
        visit: called for each run with the name of its file, sweep, pair and samples, which are read once for all.
    """
    rows = measured(found)
    entries = {id(row): entry for row, entry in zip(rows, found.entries, strict=True)}
    tables: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        tables.setdefault((row["sweep"], str(row.get("protocol.pair"))), []).append(row)
    shown: list[Record] = []
    groups: list[Record] = []
    shapes: list[Record] = []
    asked = Counter(_place(members[0])[:-1] for members in tables.values())
    for (sweep, pair), members in sorted(tables.items(), key=lambda item: _place(item[1][0])):
        # lengths, sample limits or prompt versions differ: rows that may not be compared must not look alike
        name = protocol(members[0]) + (f", setting {pair[:6]}" if asked[_place(members[0])[:-1]] > 1 else "")
        number_of = len(groups)
        names = {id(record): one.name for one in series(members) for record in one.records}
        families = {id(record): one.family for one in series(members) for record in one.records}
        drawn: dict[str, Any] = {}
        members = [row for row in ordered(members) if row["on_board"]] + [
            r for r in ordered(members) if not r["on_board"]
        ]
        for row in members:
            entry = entries[id(row)]
            item = cells(row, page.parent, commands.line(entry.path.parent, row))
            item |= {
                "g": number_of,
                "protocol": name,
                "name": names.get(id(row)) or named(row),
                "family": families.get(id(row), ""),
            }
            samples = list(entry.rows().values())
            visit(item["file"], sweep, pair, samples)
            if row["on_board"]:
                drawn[str(len(shown))] = shape(samples, row)
            shown.append(item)
        base = next((row for row in members if is_baseline(row)), None)
        groups.append(
            {
                "sweep": sweep,
                "pair": pair,
                "model": members[0]["model"],
                "task": members[0]["task"],
                "protocol": name,
                "metric": members[0].get("metric"),
                "title": title(members[0]),
                "baseline": None if base is None else base["run_id"],
                "compared": sum(row.get("p_value") is not None for row in members),
                "divergence": any(row.get("metrics.kl") is not None for row in members),
                "ranks": [
                    {"at": target, "rows": ranked(members, target, lambda row: entries[id(row)].scores)}
                    for target in sorted({r["budget"] for r in members if _share(r["budget"])}, reverse=True)[:24]
                ],
            }
        )
        groups[-1]["least"] = stats.least_samples(groups[-1]["compared"]) if groups[-1]["compared"] else None
        shapes.append(drawn)
    shown += [
        cells(row, page.parent, None) | {"g": None, "name": str(row.get("method")), "family": ""} for row in foreign
    ]
    return {
        "rows": shown,
        "groups": groups,
        "suites": [_suite(table) for table in suites(rows)],
        "skipped": list(found.damaged),
        "shapes": shapes,
        "styles": looks(shown),
    }


def looks(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Colour, marker, hollow and dash of each name that a row or a suite has, as in every other figure."""
    found = styles({str(row[key]) for row in rows for key in ("name", "method") if row.get(key)})
    return {name: [look.place, look.marker, look.hollow, look.dash] for name, look in found.items()}


def _place(row: Record) -> tuple[Any, ...]:
    return (row["sweep"], row["model"], row["task"], protocol(row), str(row.get("protocol.pair")))


def _share(budget: Any) -> bool:
    return isinstance(budget, float) and budget < 1.0


def cells(row: Mapping[str, Any], folder: Path, command: str | None) -> Record:
    """One row as the page wants it."""
    known = [p for key in ("prefill_peak", "decode_peak") if (p := number(row.get(f"memory.{key}"))) is not None]
    item: Record = {name: number(row.get(key)) for name, key in NUMBERS.items()}
    item |= {
        "origin": row["origin"],
        "sweep": row.get("sweep"),
        "id": row.get("run_id"),
        "ok": bool(row.get("on_board")),
        "status": row.get("status"),
        "flags": row.get("flags") or [],
        "model": row.get("model"),
        "task": row.get("task"),
        "protocol": protocol(row),
        "method": row.get("method"),
        "variant": row.get("variant"),
        "budget": number(row["budget"]) if isinstance(row.get("budget"), (int, float)) else row.get("budget"),
        "share": isinstance(row.get("budget"), float),
        "parts": [None if row.get(f"parts.{part}") is None else str(row[f"parts.{part}"]) for part in PARTS],
        "sig": bool(row.get("significant")),
        "mem": max(known, default=None),
        "base": row["origin"] == MEASURED and row.get("baseline") == row.get("run_id"),
        "details": {key: row[key] for key in DETAILS if row.get(key) is not None},
        "cmd": command,
        "error": None if not row.get("error") else str(row["error"]).strip().splitlines()[-1],
        "source": row.get("source"),
    }
    if row["origin"] == MEASURED:
        item["dir"] = link(Path(str(row["path"])), folder)
        item["file"] = samples_file(row)
    return item


def link(path: Path, folder: Path) -> str:
    """A link from a page in `folder` to `path`: relative, so that both may be moved together."""
    try:
        return quote(Path(os.path.relpath(path, folder)).as_posix())
    except ValueError:  # another drive
        return path.absolute().as_uri()


def shape(rows: Sequence[Record], record: Mapping[str, Any]) -> dict[str, Any]:
    """What figures draw of one run: scores by length and depth, bytes along the generation, tokens kept per layer and
    head, divergence by position. Only what is there."""
    found: dict[str, Any] = {}
    if map_ := grid(coarse(rows)):
        found["heat"] = [[length, depth, number(score, 4)] for (length, depth), score in sorted(map_.items())]
    outs = [row["out"] for row in rows if isinstance(row.get("out"), dict)]
    if held := mean_line([line for out in outs if (line := held_by(out))]):
        found["held"] = held
    ends = [out.get("compressed") or {} for out in outs]
    for name, key in (("layers", "kept_per_layer"), ("heads", "kept_per_head")):
        if mean := _mean_table([end.get(key) for end in ends]):
            found[name] = mean
    if record.get("metrics.curve_kl") and record.get("metrics.curve_position"):
        found["drift"] = [
            [number(p) for p in record["metrics.curve_position"]],
            [number(v, 4) for v in record["metrics.curve_kl"]],
        ]
    return found


def coarse(rows: Sequence[Record]) -> Sequence[Record]:
    """Samples with depths rounded to tenths where there are more of them than a heat map can show."""
    depths = {(row.get("meta") or {}).get("depth") for row in rows} - {None}
    if len(depths) <= DEPTHS:
        return rows
    metas = [row.get("meta") or {} for row in rows]
    rounded = [m | {"depth": round(m["depth"], 1)} if m.get("depth") is not None else m for m in metas]
    return [{"score": row["score"], "meta": meta} for row, meta in zip(rows, rounded, strict=True)]


def held_by(out: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """Bytes held along the generation of one sample, as (tokens generated, bytes); its two ends where that is all.

    Tasks that decode long record every few tokens only: what they have is spread evenly over the tokens there are.
    """
    ends = [((out.get(key) or {}).get("kv") or {}).get("bytes_held") for key in ("compressed", "end")]
    values: list[Any] = out.get("held") or ends
    count = max((len(tokens) for tokens in out.get("tokens") or [] if isinstance(tokens, list)), default=len(values))
    if len(values) < 2 or count < 2 or None in values:
        return None
    last = count - 1 if len(values) == count else count
    return [last * i / (len(values) - 1) for i in range(len(values))], [float(value) for value in values]


def mean_line(lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[list[Any]] | None:
    """The mean of lines (steps, values) over the steps that all of them have, at no more than POINTS of them."""
    if not lines:
        return None
    last = int(min(steps[-1] for steps, _ in lines))
    most = max(len(steps) for steps, _ in lines)
    at = np.unique(np.linspace(0, last, min(POINTS, most, last + 1)).round())
    means = np.mean([np.interp(at, steps, values) for steps, values in lines], axis=0)
    return [[int(step) for step in at], [number(float(value)) for value in means]]


def _mean_table(tables: Sequence[Any]) -> Any:
    """The mean of lists, or of lists of lists, of one shape; None where there is none."""
    tables = [table for table in tables if table]
    if not tables or len({_form(table) for table in tables}) != 1:
        return None
    if isinstance(tables[0][0], list):
        return [_mean_table([table[i] for table in tables]) for i in range(len(tables[0]))]
    return [number(fmean(values), 4) for values in zip(*tables, strict=True)]


def _form(table: Any) -> Any:
    return tuple(_form(item) for item in table) if isinstance(table, list) else 0


def _suite(table: dict[str, Any]) -> dict[str, Any]:
    score: Callable[[Any], Any] = lambda cell: None if cell is None else number(cell["score"])  # noqa: E731
    lines = [line | {"cells": [score(cell) for cell in line["cells"]]} for line in table["rows"]]
    for line in lines:
        line["share"] = isinstance(line["budget"], float)
    return table | {"rows": lines}
