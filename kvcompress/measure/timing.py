"""Laps of a device, interleaved runs of several things, and their medians and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from kvcompress.common.memory import is_oom, release
from kvcompress.measure.machine import Device
from kvcompress.measure.measuring import quartiles, synchronize

Result = TypeVar("Result")


class Laps:
    """Seconds from one call of `lap()` to the next, of the device and not of the host that queues its work.

    On CUDA events are recorded in the stream, so that nothing waits while a sequence is decoded; elsewhere each lap waits
    for the device and reads `time.perf_counter`. The first call starts the clock, when all earlier work is done.
    """

    def __init__(self, device: Device = "cpu") -> None:
        self.device = torch.device(device)
        self._events: list[Any] = []
        self._stamps: list[float] = []

    def lap(self) -> None:
        """What was queued since the last call is one lap."""
        if self.device.type != "cuda":
            synchronize(self.device)
            self._stamps.append(time.perf_counter())
            return
        if not self._events:
            synchronize(self.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Of each lap so far; waits for the device."""
        if self.device.type != "cuda":
            return [b - a for a, b in zip(self._stamps, self._stamps[1:], strict=False)]
        synchronize(self.device)
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some measurements."""

    median: float
    q1: float
    q3: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where nothing was measured."""
        if not values:
            return None
        return cls(statistics.median(values), *quartiles(list(values)), len(values))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def in_turn(
    runs: Mapping[str, Callable[[], Result]],
    rounds: int,
    warmup: int = 1,
    progress: Callable[[], None] | None = None,
) -> tuple[dict[str, list[Result]], dict[str, Exception]]:
    """Run several things one after another, `rounds` times; who comes first goes round.

    A slow spell of the machine falls on all of them, and results of one round may be divided by one another.

    Args:
        warmup: runs of each before the first round, thrown away.

    Returns:
        by name the results, one per round, and what ended a run: it is not run again, the others go on, and of all only
        the rounds before it are comparable by number. Memory that ran out is such an end; any other fault is raised.

    Raises:
        ValueError: no round asked for.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds={rounds}, warmup={warmup}: at least 1 and 0")
    results: dict[str, list[Result]] = {name: [] for name in runs}
    ended: dict[str, Exception] = {}
    names = list(runs)
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in ended:
                continue
            try:
                result = runs[name]()
            except Exception as fault:
                if not is_oom(fault):
                    raise
                ended[name] = fault.with_traceback(None)
                del fault
                release()
                continue
            if number >= 0:
                results[name].append(result)
            if progress is not None:
                progress()
    return results, ended


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread | None:
    """Of `above` to `below`, round by round; None where either measured nothing, or 0."""
    pairs = list(zip(above, below, strict=False))
    return Spread.of([a / b for a, b in pairs]) if all(b > 0 for _, b in pairs) else None


def quarters(values: Sequence[float]) -> list[float]:
    """Medians of the first, second, third and last quarter of `values`; fewer where there are fewer than four."""
    parts = min(4, len(values))
    edges = [round(len(values) * i / parts) for i in range(parts + 1)] if parts else []
    return [statistics.median(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def slope(values: Sequence[float]) -> float | None:
    """By how much `values` grow from one place to the next (least squares); None for fewer than two."""
    if len(values) < 2:
        return None
    return statistics.linear_regression(range(len(values)), values).slope


def by_place(rows: Sequence[Sequence[float]]) -> list[float]:
    """At each place the median over `rows`, as far as all of them reach."""
    return [statistics.median(column) for column in zip(*rows, strict=False)]
