"""Several questions on one context: what records say of them, and why they may not batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

ORDERS = ("independent", "session", "gold")


def cannot_batch(turns: str) -> str | None:
    """Why samples whose questions are asked in this order cannot be rows of one batch, or None."""
    return None if turns == "independent" else f"task.turns={turns} leaves answers of different lengths in the cache"


def scores(found: Sequence[float]) -> dict[str, float]:
    """The mean of a sample's questions, and each one's own as `turn_1`, `turn_2`, …"""
    return {"score": fmean(found), **{f"turn_{at}": value for at, value in enumerate(found, 1)}}


def by_turn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean score of each place in the order of questions, and how many samples have one there."""
    most = max(sum(name.startswith("turn_") for name in row["scores"]) for row in rows)
    listed = [[r["scores"][f"turn_{at}"] for r in rows if f"turn_{at}" in r["scores"]] for at in range(1, most + 1)]
    return {"score_by_turn": [fmean(one) for one in listed], "n_by_turn": [len(one) for one in listed]}
