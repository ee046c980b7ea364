"""Rollout scheduling, simulated: static against continuous batches, and a learner that takes stale groups.

Everything here is a simulation on given lengths and times; results carry `simulated` in their names.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def static_makespan(lengths: Sequence[int], slots: int, step_s: float) -> float:
    """Seconds until all outputs are done where `slots` of them start together and the next ones wait for the longest."""
    _check(lengths, slots)
    return step_s * sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def continuous_makespan(lengths: Sequence[int], slots: int, step_s: float) -> float:
    """Seconds until all outputs are done where a slot takes the next output as soon as its own ends."""
    _check(lengths, slots)
    ends = [0.0] * min(slots, len(lengths))
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + step_s * length)
    return max(ends)


def _check(lengths: Sequence[int], slots: int) -> None:
    if not lengths or min(lengths) < 0 or slots < 1:
        raise ValueError(f"{len(lengths)} outputs in {slots} slots: at least one of each, lengths from 0")


@dataclass(frozen=True)
class Staleness:
    """What bounded staleness gives a learner.

    Attributes:
        seconds: of all learner steps; utilisation: share of them in which the learner trains.
        dropped: share of finished or aborted groups that were older than allowed when the learner wanted them.
        step_s: mean seconds per learner step.
    """

    seconds: float
    utilisation: float
    dropped: float
    step_s: float


def staleness(
    group_s: Sequence[float],
    workers: int,
    groups: int,
    train_s: float,
    sync_s: float,
    stale: int,
    steps: int,
) -> Staleness:
    """Asynchronous rollouts with staleness bounded by `stale` versions (as in ECHO-2, arXiv 2602.02192).

    Workers sample one group after another with the newest weights they have, and start none that no learner step could
    take any more: with weights of version v, groups for steps up to v + `stale`. A learner step takes `groups` groups whose weights are at
    most `stale` versions old, trains `train_s`, and its weights arrive `sync_s` later; then groups that have grown too old
    are dropped, those under way too. With `stale=0` a step takes rollout + train + sync.

    Args:
        group_s: seconds of a group, taken in turn and around again.

    Raises:
        ValueError: a number below its least.
    """
    if not group_s or min(group_s) <= 0 or workers < 1 or groups < 1 or steps < 1 or stale < 0:
        raise ValueError("staleness needs times above 0, workers, groups and steps from 1, and stale from 0")
    if train_s < 0 or sync_s < 0:
        raise ValueError(f"train_s={train_s}, sync_s={sync_s}: from 0")
    # events: (time, order, kind, worker or version); order keeps equal times in the order they were made
    events: list[tuple[float, int, str, int]] = []
    running: dict[int, int] = {}  # worker -> version of its group
    attempt = dict.fromkeys(range(workers), 0)
    token: dict[int, int] = {}
    ready: list[int] = []  # versions of finished groups
    version, now, order, made, dropped, trained, busy = 0, 0.0, 0, 0, 0, 0, False
    training, taken = 0.0, 0  # seconds that the learner trained; groups that it took

    def push(at: float, kind: str, which: int) -> None:
        nonlocal order
        heapq.heappush(events, (at, order, kind, which))
        order += 1

    def start_workers() -> None:
        nonlocal made
        for worker in range(workers):
            if worker in running or taken + len(ready) + len(running) >= groups * (version + stale + 1):
                continue
            running[worker] = version
            attempt[worker] += 1
            token[order] = attempt[worker]
            push(now + group_s[made % len(group_s)], "group", worker)
            made += 1

    def start_learner() -> None:
        nonlocal busy, taken
        if busy or len(ready) < groups:
            return
        del ready[:groups]
        busy, taken = True, taken + groups
        push(now + train_s, "trained", 0)

    start_workers()
    while trained < steps:
        now, number, kind, worker = heapq.heappop(events)
        if kind == "group":
            if token.pop(number) != attempt[worker] or worker not in running:
                continue  # it was aborted when newer weights came
            ready.append(running.pop(worker))
        elif kind == "trained":
            trained, training = trained + 1, training + train_s
            if stale > 0:
                busy = False
            push(now + sync_s, "weights", trained)
        else:
            version, busy = max(version, worker), False if stale == 0 else busy
            old = [at for at in ready if version - at > stale]
            aborted = [at for at, with_version in running.items() if version - with_version > stale]
            dropped += len(old) + len(aborted)
            ready[:] = [at for at in ready if version - at <= stale]
            for at in aborted:
                del running[at]
                attempt[at] += 1
        start_learner()
        start_workers()
    # the last step's weights still travel: a synchronous loop counts that time in each of its steps
    seconds = now + sync_s if stale == 0 else now
    return Staleness(seconds, training / seconds if seconds else 1.0, dropped / made if made else 0.0, seconds / steps)
