"""Sanity check of a task, before a model is loaded: right answers score 1 and empty ones 0 by its own metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompress.data.task import Sample, Task
from kvcompress.metrics import MISSES

TOLERANCE = 1e-6  # the `rouge` package divides by a sum that is 1e-8 too large
ENOUGH = 5  # samples that all miss are no edge case any more
NAMED = 3  # samples that a note names
REMEMBERED = 64  # checks that are not made again
_passed: dict[Any, Sanity] = {}


@dataclass(frozen=True)
class Sanity:
    """Share of samples whose right answer scores 1 and of those whose empty one scores 0; None where there is none."""

    gold: float | None = None
    empty: float | None = None
    notes: tuple[str, ...] = ()


def scored(task: Task, sample: Sample, texts: Sequence[str]) -> float:
    """Score of these answers to a sample."""
    out: dict[str, Any] = {"text": list(texts), "tokens": [[] for _ in texts], "finished": ["stop"] * len(texts)}
    return task.score(sample, out)["score"]


def check(task: Task, samples: Sequence[Sample]) -> Sanity:
    """Score a right and an empty answer of every sample.

    A metric that is known to miss some (`metrics.MISSES`) leaves a note with how many and why.

    Raises:
        ValueError: there is no sample; or names one whose right answer does not score 1 or whose empty one does not
            score 0.
    """
    if not samples:
        raise ValueError(f"task {task.name} gives no sample with these settings")
    key = (task, tuple((sample.id, tuple(turn.references for turn in sample.turns)) for sample in samples))
    if key not in _passed:  # long summaries take a second each, and a sweep asks for each group of cells
        _passed[key] = _check(task, samples)
        while len(_passed) > REMEMBERED:
            _passed.pop(next(iter(_passed)))
    return _passed[key]


def _check(task: Task, samples: Sequence[Sample]) -> Sanity:
    known = MISSES.get(task.metric)
    missed: dict[str, list[str]] = {"right": [], "empty": []}
    asked = 0
    for sample in samples:
        right = task.gold(sample)
        if right is None:
            continue
        asked += 1
        for kind, texts, wanted in (("right", right, 1.0), ("empty", [""] * len(right), 0.0)):
            stands = f"{sample.where}: " if sample.where else ""
            where = f"{stands}task {task.name}, sample {sample.id}: the {kind} answer {_shown(texts)}"
            try:
                found = scored(task, sample, texts)
            except (ValueError, ArithmeticError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{where} cannot be scored by {task.metric} ({type(error).__name__}: {error})"
                ) from error
            if abs(found - wanted) <= TOLERANCE:
                continue
            missed[kind].append(sample.id)
            if known is None or len(missed[kind]) == asked == min(ENOUGH, len(samples)) == ENOUGH:
                raise ValueError(
                    f"{where} scores {found:g} by {task.metric} where {wanted:g} is due: look at its references"
                )
    if not asked:
        return Sanity()
    notes = tuple(
        f"{kind} answers of {len(ids)} of {asked} samples do not score {due} by {task.metric}: {known} "
        f"({', '.join(ids[:NAMED])}{', …' if len(ids) > NAMED else ''})"
        for (kind, ids), due in zip(missed.items(), (1, 0), strict=True)
        if ids
    )
    return Sanity(1 - len(missed["right"]) / asked, 1 - len(missed["empty"]) / asked, notes)


def _shown(texts: Sequence[str]) -> str:
    text = " | ".join(texts)
    return repr(text if len(text) <= 80 else text[:79] + "…")
