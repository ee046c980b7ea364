"""Measured points that feed a capacity simulation, and the real batched run that checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from kvcompress.common.memory import release
from kvcompress.measure import footprint
from kvcompress.measure.latency import FULL, OURS, again, batch_ids, request
from kvcompress.measure.measuring import synchronize, timed
from kvcompress.measure.serving_simulation import Costs, simulate
from kvcompress.measure.timing import Laps, in_turn, ratio


@dataclass
class Points:
    """One round of one side.

    Attributes:
        prefill_s: a prompt by itself, compression included.
        steps_s: mean seconds of a step by number of requests, over a whole output.
        batch_s: seconds of the real batched run, prompts prefilled at once.
        compressed, end: reports of a single request.
    """

    prefill_s: float
    steps_s: dict[int, float]
    batch_s: float
    compressed: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def points(session: Any, ids: Sequence[int], output: int, batches: Sequence[int], check: int) -> Points:
    """Measure one round in an open session.

    Args:
        batches: numbers of requests whose step is timed; check: requests of the real batched run.
    """
    device = session.model.device
    prompt = batch_ids(ids, 1, device)
    synchronize(device)
    prefilled, seconds = timed(lambda: session.prefill(prompt), device)
    one, compressed = prefilled.cache, session.report(kept_map=True)
    steps: dict[int, float] = {}
    end: dict[str, Any] = {}
    for batch in batches:
        session.cache = footprint.rows(one, batch)
        token, laps = session.cache.logits.argmax(-1), Laps(device)
        laps.lap()
        for _ in range(output - 1):
            token = session.step(token[:, None]).argmax(-1)
            laps.lap()
        steps[batch] = sum(laps.seconds()) / (output - 1)
        if batch == batches[0]:
            end = session.report()
    session.cache = one = None
    release()
    real = request(session, batch_ids(ids, check, device), output)
    return Points(seconds, steps, real.total_s, compressed, end)


def rounds(
    session: Any, ids: Sequence[int], output: int, batches: Sequence[int], check: int, count: int, warmup: int
) -> tuple[dict[str, list[Points]], dict[str, Exception]]:
    """Points of the method of an unopened session and of the full cache, in turn."""

    def side(full: bool) -> Callable[[], Points]:
        def run() -> Points:
            with again(session, full) as opened:
                return points(opened, ids, output, batches, check)

        return run

    return in_turn({OURS: side(False), FULL: side(True)}, count, warmup)


def costs(found: Sequence[Points], prefill_bytes: int, weights: int) -> Costs:
    """Medians over rounds."""
    held = found[-1].end["kv"]["bytes_allocated"] // min(found[0].steps_s)  # of as many rows
    steps = tuple((batch, median(one.steps_s[batch] for one in found)) for batch in sorted(found[0].steps_s))
    return Costs(median(one.prefill_s for one in found), steps, held, prefill_bytes, weights)


def prefill_bytes(session: Any, ids: Sequence[int], full: bool) -> int:
    """What one prompt needs at its highest above the weights."""
    with again(session, full) as opened:
        found, *_ = footprint.footprint(opened, batch_ids(ids, 1, opened.model.device), 2)
    return found.prefill_growth


def agreement(found: Sequence[Points], check: int, output: int) -> dict[str, Any]:
    """Throughput of `check` requests that come at once, simulated over really run: prompts one by one against at once.

    Each round's simulation is fed with that round's own points, so that a slow spell of the machine falls on both. `check`
    may lie between the measured numbers: its step is then what the simulation believes, not what was measured.
    """
    said = [check * output / simulate(costs([one], 0, 0), check, [0.0] * check, output).seconds for one in found]
    real = [check * output / one.batch_s for one in found]
    spread = ratio(said, real)
    assert spread is not None
    figures = {"simulated_tokens_per_s": median(said), "real_tokens_per_s": median(real)}
    return {"batch": check, **figures, "ratio": spread.median, "ratio_q1": spread.q1, "ratio_q3": spread.q3}
