"""Baseline of a sweep's records: the run that compressed nothing, and the score of others less its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kvcompress.sweep.record import FINISHED, RunFolder


def is_baseline(record: Mapping[str, Any]) -> bool:
    """True for a finished run in which nothing was compressed by any part: what the others are measured against."""
    untouched = {"scorer": "none", "codec": "plain", "reader": "all"}
    return (
        record.get("status") == "ok"
        and all(record.get(f"parts.{part}") == value for part, value in untouched.items())
        and record.get("parts.prefill") in ("oneshot", "chunked")
    )


def paired_delta(
    rows: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]
) -> tuple[float, float | None] | None:
    """Mean difference in score on the samples both have, and its standard error; None without a common sample."""
    common = sorted(rows.keys() & base.keys())
    if not common:
        return None
    deltas = [float(rows[key]["score"]) - float(base[key]["score"]) for key in common]
    return fmean(deltas), stdev(deltas) / math.sqrt(len(deltas)) if len(deltas) > 1 else None


def fill_deltas(sweep: Path, changed: str | None = None) -> None:
    """Fill `delta_full` and `baseline` of every record in a sweep whose baseline is in it.

    Args:
        changed: run id of the only record that is new, so that the samples of others are not read again; None: any.
    """
    found: list[tuple[RunFolder, dict[str, Any]]] = []
    for path in sorted(sweep.glob("*/record.json")):
        if path.parent.is_symlink():
            continue  # nothing is written there
        folder = RunFolder(sweep.parent, sweep.name, path.parent.name)
        record = folder.record()
        if record is not None:
            found.append((folder, record))
    bases = {record.get("protocol.pair"): folder for folder, record in found if is_baseline(record)}
    for folder, record in found:
        base = bases.get(record.get("protocol.pair"))
        if base is None or record["status"] not in FINISHED:
            continue
        if changed not in (None, folder.run_id, base.run_id) and record.get("baseline") == base.run_id:
            continue
        delta = paired_delta(folder.rows(), base.rows())
        if delta is not None and (record.get("baseline"), record.get("delta_full")) != (base.run_id, delta[0]):
            folder.finish(record | {"delta_full": delta[0], "baseline": base.run_id})
