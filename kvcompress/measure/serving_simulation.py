"""Serving simulation: a discrete-event simulation of continuous batching at fixed memory, fed with measured times and bytes.

The engine it stands for: requests come one by one (Poisson), wait in order, and are admitted as soon as their cache fits
beside those that are running. An admitted prompt is prefilled by itself, while all others wait; its end is the first
token. Between prompts all running requests take a step together, whose time depends on how many they are. Nothing else
takes time. It is a model: what it says is simulated, and labelled so.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcompress.measure.timing import Spread


@dataclass(frozen=True)
class Costs:
    """What a method's requests cost, all of one length.

    Attributes:
        prefill_s: seconds of a prompt by itself, compression included.
        step_s: seconds of a decode step by how many take it: `(requests, seconds)`, the numbers rising.
        held: bytes of cache that a request holds at its end; prefill: bytes that a running prompt needs at its highest.
        weights: bytes of the model.
    """

    prefill_s: float
    step_s: tuple[tuple[int, float], ...]
    held: int
    prefill: int
    weights: int

    def __post_init__(self) -> None:
        numbers = [number for number, _ in self.step_s]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1:
            raise ValueError(f"step_s={self.step_s}: numbers of requests from 1 on, rising, with their seconds")

    def slots(self, memory: int) -> int:
        """Requests that fit at once into `memory` bytes, of which one is in its prompt; 0 where none does."""
        room = memory - self.weights - self.prefill
        return 0 if room < 0 else 1 + room // max(1, self.held)

    def step(self, running: int) -> float:
        """Seconds of a step of `running` requests: straight between measured numbers, and on beyond them."""
        points = self.step_s
        if len(points) == 1:
            return points[0][1] * max(1.0, running / points[0][0])  # in proportion: no better is known
        place = min(max(1, bisect.bisect_left([number for number, _ in points], running)), len(points) - 1)
        (low, at_low), (high, at_high) = points[place - 1], points[place]
        return max(0.0, at_low + (at_high - at_low) * (running - low) / (high - low))


@dataclass
class Served:
    """One request: when it came, got its first token, and was done; how many tokens it got."""

    arrived: float
    first: float | None = None
    done: float | None = None
    tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token, waiting included."""
        assert self.first is not None
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Mean seconds of the further tokens; other requests' prompts in between are part of it."""
        assert self.first is not None and self.done is not None
        return (self.done - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Result:
    """What became of all requests.

    Attributes:
        requests: in order of arrival; those without `done` were waiting or running when time was up.
        seconds: from the first arrival to the end.
        busy: seconds in which a prompt or a step ran; most: requests that ran at once at most.
        area: sum of running requests times seconds.
    """

    requests: tuple[Served, ...]
    seconds: float
    busy: float
    most: int
    area: float

    @property
    def completed(self) -> list[Served]:
        return [one for one in self.requests if one.done is not None]

    def goodput(self, ttft: float, tpot: float) -> float:
        """Completed requests per second that met both targets, in seconds."""
        return sum(one.ttft <= ttft and one.tpot <= tpot for one in self.completed) / self.seconds

    def attained(self, ttft: float, tpot: float) -> float:
        """Share of all requests that met both."""
        return sum(one.ttft <= ttft and one.tpot <= tpot for one in self.completed) / max(1, len(self.requests))

    def figures(self, ttft: float, tpot: float) -> dict[str, Any]:
        done = self.completed
        spreads = {"ttft_s": [one.ttft for one in done], "tpot_s": [one.tpot for one in done]}
        return {
            "requests": len(self.requests),
            "completed": len(done),
            "requests_per_s": len(done) / self.seconds,
            "tokens_per_s": sum(one.tokens for one in self.requests) / self.seconds,
            "goodput_per_s": self.goodput(ttft, tpot),
            "attained": self.attained(ttft, tpot),
            "busy": self.busy / self.seconds,
            "running_mean": self.area / self.seconds,
            "running_most": self.most,
            **{name: None if (found := Spread.of(v)) is None else found.as_dict() for name, v in spreads.items()},
        }


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Times of `count` arrivals at `rate` per second, the first at 0."""
    rng, now, found = random.Random(f"capacity:{seed}"), 0.0, []
    for _ in range(count):
        found.append(now)
        now += rng.expovariate(rate)
    return found


def simulate(costs: Costs, slots: int, arrivals: Sequence[float], output: int, until: float | None = None) -> Result:
    """Serve requests of `output` tokens each that come at `arrivals`.

    Args:
        slots: requests that run at once at most.
        until: seconds after which nothing more is begun; None: until all are done.

    Raises:
        ValueError: no slot, no arrival, times that do not rise, or no token.
    """
    if slots < 1 or output < 1:
        raise ValueError(f"slots={slots}, output={output}: at least 1; with no slot no request is ever served")
    if not arrivals or any(b < a for a, b in zip(arrivals, arrivals[1:], strict=False)):
        raise ValueError("arrivals: one time or more, in order")
    requests = [Served(at) for at in arrivals]
    waiting: deque[Served] = deque()
    running: list[Served] = []
    now, busy, area, most, coming = arrivals[0], 0.0, 0.0, 0, 0

    def spend(seconds: float, present: int) -> None:
        nonlocal now, busy, area
        now, busy, area = now + seconds, busy + seconds, area + seconds * present

    while coming < len(requests) or waiting or running:
        if until is not None and now - arrivals[0] >= until:
            break
        while coming < len(requests) and requests[coming].arrived <= now:
            waiting.append(requests[coming])
            coming += 1
        if waiting and len(running) < slots:
            one = waiting.popleft()
            most = max(most, len(running) + 1)
            spend(costs.prefill_s, len(running) + 1)
            one.first, one.tokens = now, 1
            if output == 1:
                one.done = now
            else:
                running.append(one)
        elif running:
            spend(costs.step(len(running)), len(running))
            for one in running:
                one.tokens += 1
                if one.tokens == output:
                    one.done = now
            running = [one for one in running if one.done is None]
        else:  # nothing to do until the next one comes
            now = requests[coming].arrived
    return Result(tuple(requests), max(now - arrivals[0], 1e-12), busy, most, area)


def saturated(costs: Costs, slots: int, output: int, count: int = 0) -> Result:
    """All requests there from the beginning: what the engine can do at most."""
    return simulate(costs, slots, [0.0] * (count or max(64, 4 * slots)), output)


TRIES = 24  # rates that are tried on the way down


def highest_rate(
    attained: Callable[[float], float], ceiling: float, share: float = 0.9, steps: int = 12, fall: float | None = None
) -> float:
    """The highest rate, up to `ceiling`, at which `share` of the requests meet their targets, by halving; 0 if none.

    Args:
        fall: go down from the ceiling by this factor until a rate is met, `TRIES` times at most, and halve above it. Where
            arrivals come in bursts a rate may fail that a higher one meets: halving alone then finds any of the borders.
    """
    low, high = 0.0, ceiling
    if attained(ceiling) >= share:
        return ceiling
    if fall is not None:
        for _ in range(TRIES):
            low = high * fall
            if attained(low) >= share:
                break
            low, high = 0.0, low
        else:
            return 0.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) >= share else (low, middle)
    return low


def serve(
    costs: Costs, memory: int, output: int, ttft: float, tpot: float, rates: Sequence[float], count: int, seed: int
) -> dict[str, Any]:
    """Everything that is said of one method at one memory.

    Args:
        ttft, tpot: targets in seconds; rates: arrivals per second, as shares of the saturated throughput.
        count: requests of a simulation.

    Returns:
        `slots`, `saturated`, by rate what happened, `goodput_rate` (the highest arrival rate at which 90% of the requests
        meet both targets), and `simulated`: true.
    """
    slots = costs.slots(memory)
    found: dict[str, Any] = {"simulated": True, "slots": slots, "memory": memory, "costs": asdict(costs)}
    if slots < 1:
        return found | {"saturated": None, "rates": [], "goodput_rate": 0.0}
    full = saturated(costs, slots, output)
    peak = len(full.completed) / full.seconds

    def at(rate: float) -> Result:
        return simulate(costs, slots, poisson(rate, count, seed), output)

    return found | {
        "saturated": full.figures(ttft, tpot),
        "rates": [{"rate": rate * peak, "share": rate, **at(rate * peak).figures(ttft, tpot)} for rate in rates],
        "goodput_rate": highest_rate(lambda rate: at(rate).attained(ttft, tpot), 2 * peak),
    }
