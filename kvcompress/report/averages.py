"""Averages over the data sets of a suite, and ranks at equal measured bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcompress.report import stats
from kvcompress.report.frame import MEASURED, method_key
from kvcompress.sweep.record import read_rows, scores_of

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]
Scores = Callable[[Row], Mapping[str, float]]  # of a row's samples by id
# what must be equal before results on different data sets are put side by side
SETTING = ("sweep", "model", "dtype", "device", "seed", "protocol.question", "protocol.turns")


def suite(task: str) -> str | None:
    """`longbench` of `longbench/qasper`; None for a task that stands alone."""
    name, slash, _ = task.partition("/")
    return name if slash else None


def suites(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One table per suite and setting: a row per method and budget, a column per data set.

    A data set is named by its `protocol.pair`, so that other prompts or another version of a metric are another column.
    Where a task comes in two forms, no average is given at all: it would mix them. A row without a score in every
    column has none either, and its missing cells are None.

    Returns:
        {"suite", "setting", "tasks": [{"task", "metric", "pair"}], "mixed": [tasks in two forms], "rows": [{"method",
        "budget", "cells": [row or None per task], "average" or None}]}
    """
    tables: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("origin") == MEASURED and row["status"] == "ok" and suite(row["task"]):
            tables.setdefault((suite(row["task"]), *(row.get(key) for key in SETTING)), []).append(row)
    found = []
    for (name, *setting), members in sorted(tables.items(), key=lambda item: str(item[0])):
        columns = sorted({(r["task"], str(r.get("metric")), str(r.get("protocol.pair"))) for r in members})
        tasks = [task for task, _, _ in columns]
        mixed = sorted({task for task in tasks if tasks.count(task) > 1})
        lines: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
        for row in members:
            key = (method_key(row), row.get("budget"))
            lines.setdefault(key, {}).setdefault(str(row.get("protocol.pair")), []).append(row)
        table = []
        for (_, budget), by_pair in lines.items():
            # two runs of one cell differ in what is not in the key: none of them is taken
            cells = [by_pair[pair][0] if len(by_pair.get(pair, ())) == 1 else None for _, _, pair in columns]
            scores = [cell["score"] for cell in cells if cell is not None]
            whole = len(scores) == len(columns) and not mixed
            first = next(iter(by_pair.values()))[0]
            table.append(
                {
                    "method": first["method"],
                    "variant": first.get("variant"),
                    "budget": budget,
                    "cells": cells,
                    "average": fmean(scores) if whole else None,
                }
            )
        found.append(
            {
                "suite": name,
                "setting": dict(zip(SETTING, setting, strict=True)),
                "tasks": [{"task": task, "metric": metric, "pair": pair} for task, metric, pair in columns],
                "mixed": mixed,
                "rows": table,
            }
        )
    return found


def ranked(rows: Sequence[Row], target: float, scores: Scores | None = None) -> list[dict[str, Any]]:
    """Methods of one `protocol.pair` by their score at a share of bytes held, the best first.

    Runs on the board only; joined by straight lines where a method has none at the target (`interpolated`), and never
    beyond its runs: such a method has no rank and no score. Equal scores share a rank.

    Args:
        scores: of a row's samples. With them `rank_low` and `rank_high` say where the rank may lie (`stats.rank_bounds`),
            and `n` on how many samples; methods whose ranges overlap are not told apart.

    Raises:
        ValueError: rows of several pairs.
    """
    pairs = {(row.get("sweep"), row.get("protocol.pair")) for row in rows}
    if len(pairs) > 1:
        raise ValueError(f"rows of {len(pairs)} protocols cannot be ranked together: choose one protocol.pair")
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("origin") == MEASURED and row["status"] == "ok" and row.get("baseline") != row["run_id"]:
            lines.setdefault(method_key(row), []).append(row)
    found: list[dict[str, Any]] = []
    mixed: list[Mapping[str, float]] = []
    for members in lines.values():
        known = [row for row in members if row.get("kv.ratio") is not None]
        points = [(float(row["kv.ratio"]), float(row["score"])) for row in known]
        value = stats.at_bytes(points, target) or {"score": None, "interpolated": False}
        one = {"method": members[0]["method"], "variant": members[0].get("variant"), **value}
        one |= {"rank_low": None, "rank_high": None, "n": None}
        found.append(one)
        weights = stats.weights_at(points, target) if scores is not None else None
        mixed.append(
            {} if weights is None or scores is None else _mixed({at: scores(known[at]) for at in weights}, weights)
        )
    _bound(found, mixed)
    found.sort(key=lambda one: (one["score"] is None, -(one["score"] or 0.0), str(one["method"])))
    for one in found:
        better = sum(other["score"] is not None and other["score"] > (one["score"] or 0.0) for other in found)
        one["rank"] = None if one["score"] is None else better + 1
    return found


def _mixed(runs: Mapping[int, Mapping[str, float]], weights: Mapping[int, float]) -> dict[str, float]:
    """Scores of the samples that all of these runs have, in the shares that the runs have in a score."""
    common = set.intersection(*(set(run) for run in runs.values()))
    return {name: sum(share * runs[at][name] for at, share in weights.items()) for name in sorted(common)}


def _bound(found: Sequence[dict[str, Any]], mixed: Sequence[Mapping[str, float]]) -> None:
    """Add the ranges of ranks, in place; without common samples nothing is told apart."""
    known = [at for at, scores in enumerate(mixed) if scores]
    if not known:
        return
    common = sorted(set.intersection(*(set(mixed[at]) for at in known)))
    bounds = [(1, len(known))] * len(known)
    if len(common) > 1:
        bounds = stats.rank_bounds([np.array([mixed[at][name] for name in common]) for at in known])
    for at, (low, high) in zip(known, bounds, strict=True):
        found[at] |= {"rank_low": low, "rank_high": high, "n": len(common)}


def rank(frame: pd.DataFrame, target: float) -> pd.DataFrame:
    """`ranked` of a frame of `kvcompress.report.load`, as a frame; samples are read from the folders of its runs.

    Example:
        >>> frame = kvcompress.report.load("results/eviction")
        >>> rank(frame[frame["protocol.question"] == "seen"], 0.25)
    """
    import pandas as pd

    from kvcompress.report.frame import as_rows

    columns = ["rank", "rank_low", "rank_high", "method", "variant", "score", "interpolated", "n"]
    return pd.DataFrame(ranked(as_rows(frame), target, samples_of), columns=columns)


def samples_of(row: Row) -> dict[str, float]:
    """Scores of a row's samples by id, from the folder of its run; nothing where it has none."""
    path = row.get("path")
    return scores_of(read_rows(Path(path) / "samples.jsonl")) if path else {}
