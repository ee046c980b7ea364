"""A method's costs from its own sessions: prompts of several lengths with and without a reused prefix, and decode steps.

A prompt that reuses p tokens is timed as a second prompt behind a first one of p tokens, whose cache the method has
compressed; a method that reuses chunks has the first p tokens in its store. Rows of a step have two lengths in turn, as a
server's have several: rows of one length need no mask and no padding, and a step of theirs is up to a third cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from kvcompress.common.memory import release
from kvcompress.measure import footprint
from kvcompress.measure.latency import FULL, OURS, again, batch_ids
from kvcompress.measure.measuring import synchronize, timed
from kvcompress.measure.serving.costs import Line, MethodCosts, attended, fit
from kvcompress.measure.timing import Laps, in_turn
from kvcompress.method import Method
from kvcompress.method.budget import is_unlimited

SHORTER = 0.6  # length of every second row of a step, beside the prompt's
WARM = 1  # steps before those that are timed: a reader arranges pages in the first


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: tokens of prompts; shares: of a prompt that is reused, beside none.
        batches: rows of decode steps, those of two and more in two lengths; steps: of each that are timed.
        rounds, warmup: of each side, and those thrown away before.
    """

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    shares: tuple[float, ...] = (0.5, 0.75)
    batches: tuple[int, ...] = (1, 3, 8)
    steps: int = 8
    rounds: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < 2 or min(self.lengths) < 8:
            raise ValueError(
                f"lengths={list(self.lengths)}: two or more, of at least 8 tokens, or no line can be fitted"
            )
        if len(set(self.batches)) < 2 or min(self.batches) < 1:
            raise ValueError(f"batches={list(self.batches)}: two or more, of at least 1 row")
        if any(not 0 < share < 1 for share in self.shares):
            raise ValueError(f"shares={list(self.shares)}: of a prompt that is reused, above 0 and below 1")
        if self.steps < 2 or self.rounds < 1 or self.warmup < 0:
            raise ValueError(f"steps={self.steps}, rounds={self.rounds}, warmup={self.warmup}: at least 2, 1 and 0")


@dataclass
class Points:
    """One round of one side.

    Attributes:
        prompts: (tokens, of these reused) → seconds of the model's work, seconds of compressing.
        steps: (prompt tokens, rows) → seconds of a step, tokens kept by all rows.
        held: (prompt tokens, generated) → bytes held, tokens kept, bytes read per step, bytes of the full cache; of one row.
    """

    prompts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    steps: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[float, float, float, float]] = field(default_factory=dict)
    compressed: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def points(session: Any, ids: Sequence[int], plan: Plan) -> Points:
    """Measure one round in an open session, with the first of `ids` as prompts."""
    found, device = Points(), session.model.device
    for length in sorted(set(plan.lengths)):
        prompt = batch_ids(ids[:length], 1, device)
        for reused in sorted({int(share * length) for share in plan.shares}, reverse=True):
            found.prompts[length, reused] = _behind(session, prompt, reused)
        session.cache = None
        synchronize(device)
        prefilled, seconds = timed(lambda prompt=prompt: session.prefill(prompt), device)  # type: ignore[misc]
        spent = session.compressor.stats.seconds
        found.prompts[length, 0] = max(1e-9, seconds - spent), spent
        one, found.compressed = prefilled.cache, session.report(kept_map=True)
        session.cache, pair = None, _pair(session, prompt) if max(plan.batches) > 1 else None
        for batch in sorted(set(plan.batches)):
            session.cache = _rows(pair, batch) if batch > 1 else footprint.rows(one, 1)
            token = session.step(session.cache.logits.argmax(-1)[:, None]).argmax(-1)
            if batch == min(plan.batches):
                found.held[length, WARM] = _held(session, batch)
            laps = Laps(device)
            laps.lap()
            for _ in range(plan.steps):
                token = session.step(token[:, None]).argmax(-1)
                laps.lap()
            found.end = session.report()
            kept = found.end["kv"]["kept_tokens_mean"] - (plan.steps - 1) / 2 * _growth(
                found, length, session, batch, plan
            )
            found.steps[length, batch] = sum(laps.seconds()) / plan.steps, batch * kept
        session.cache = one = pair = None
        release()
    return found


def _pair(session: Any, prompt: torch.Tensor) -> Any:
    """A cache of two rows: the prompt, and what it ends with, padded."""
    length = prompt.shape[1]
    mask = torch.ones(2, length, dtype=torch.long, device=prompt.device)
    mask[1, : length - int(SHORTER * length)] = 0
    return session.prefill(prompt.repeat(2, 1) * mask, attention_mask=mask).cache


def _rows(pair: Any, batch: int) -> Any:
    """A copy of a cache of two rows with `batch` rows, which are these two in turn."""
    copy = pair.fork()
    copy.batch_select_indices(torch.arange(batch) % 2)
    return copy


def _behind(session: Any, prompt: torch.Tensor, reused: int) -> tuple[float, float]:
    """Seconds of the model's work and of compressing for what follows `reused` tokens."""
    device, first, rest = session.model.device, prompt[:, :reused], prompt[:, reused:]
    if session.method.parts().prefill.needs_segments:
        session.precompute([first, rest])
        work: Callable[[], Any] = lambda: session.prefill([first, rest])  # noqa: E731
    else:
        session.prefill(first)
        held = session.cache
        held.keep_pending(None)
        work = lambda: session.prefill(rest, cache=held)  # noqa: E731
    synchronize(device)
    _, seconds = timed(work, device)
    spent = session.compressor.stats.seconds
    session.cache = None
    return max(1e-9, seconds - spent), spent


def _held(session: Any, batch: int) -> tuple[float, float, float, float]:
    kv = session.report()["kv"]
    return kv["bytes_held"] / batch, kv["kept_tokens_mean"], kv["read_bytes_per_token"], kv["bytes_full"] / batch


def _growth(found: Points, length: int, session: Any, batch: int, plan: Plan) -> float:
    """Tokens that a step adds to those kept."""
    if batch == min(plan.batches):
        found.held[length, WARM + plan.steps] = _held(session, batch)
    first, last = found.held[length, WARM], found.held[length, WARM + plan.steps]
    return max(0.0, (last[1] - first[1]) / plan.steps)


def rounds(session: Any, ids: Sequence[int], plan: Plan) -> tuple[dict[str, list[Points]], dict[str, Exception]]:
    """Points of the method of an unopened session and of the full cache, in turn."""

    def side(full: bool) -> Callable[[], Points]:
        def run() -> Points:
            with again(session, full) as opened:
                return points(opened, ids, plan)

        return run

    return in_turn({OURS: side(False), FULL: side(True)}, plan.rounds, plan.warmup)


def label(method: Method) -> str:
    """What costs of a method go by: its name, settings of its own and budget, as "snapkv 0.25" or "kivi bits=4"."""
    budget = "" if is_unlimited(method.budget) else str(method.budget)
    return " ".join(
        filter(None, [type(method).__name__.lower() if method.family else "full", method.variant(), budget])
    )


def costs(name: str, reuse: Any, found: Sequence[Points], layers: int, store: str = "compressed") -> MethodCosts:
    """Fits through the medians over rounds."""
    prompts = {key: [median(one.prompts[key][i] for one in found) for i in (0, 1)] for key in found[0].prompts}
    steps = {key: [median(one.steps[key][i] for one in found) for i in (0, 1)] for key in found[0].steps}
    held, r2 = found[-1].held, {}
    token_bytes = median(full / (n + g) for (n, g), (_, _, _, full) in held.items())
    lines = [_line({key: value[index] for key, value in held.items()}) for index in (0, 1)]
    left = min(1.0, lines[1].per_prompt) if reuse == "whole" else 1.0
    columns = [[1.0, n - p, attended(n, p, left), p] for n, p in prompts]
    prefill, r2["prefill"] = fit(columns, [seconds for seconds, _ in prompts.values()])
    whole = reuse == "whole"
    spent = {n if whole else n - p: max(1e-9, seconds) for (n, p), (_, seconds) in prompts.items() if not (whole and p)}
    compress, r2["compress"] = fit([[1.0, n] for n in spent], list(spent.values()))
    alone = [(kept, seconds) for (_, rows), (seconds, kept) in steps.items() if rows == 1]
    several = [(rows, kept, seconds) for (_, rows), (seconds, kept) in steps.items() if rows > 1]
    apart = len(alone) > 1 and len({rows for rows, _, _ in several}) > 1
    points = several if apart else [(rows, kept, seconds) for (_, rows), (seconds, kept) in steps.items()]
    step, r2["step"] = fit([[1.0, rows, kept] for rows, kept, _ in points], [seconds for *_, seconds in points])
    step_alone: tuple[float, float] | None = None
    if apart:
        (a0, a1), r2["step alone"] = fit([[1.0, kept] for kept, _ in alone], [seconds for _, seconds in alone])
        step_alone = a0, a1
    read = median(read / (kept * token_bytes) for _, kept, read, _ in held.values())
    ranges = {
        "prompt": (float(min(n for n, _ in prompts)), float(max(n for n, _ in prompts))),
        "rows": (float(min(rows for _, rows in steps)), float(max(rows for _, rows in steps))),
        "kept": (min(kept for _, kept in steps.values()), max(kept for _, kept in steps.values())),
    }
    return MethodCosts(
        name=name,
        reuse=reuse,
        held=lines[0],
        kept=lines[1],
        token_bytes=token_bytes,
        layers=layers,
        prefill=(prefill[0], prefill[1], prefill[2], prefill[3]),
        compress=(compress[0], compress[1]),
        step=(step[0], step[1], step[2]),
        step_alone=step_alone,
        read_ratio=read,
        store=store,
        r2=r2,
        ranges=ranges,
    )


def medians(found: Sequence[Points]) -> dict[str, list[list[float]]]:
    """What the fits go through: (tokens, reused, seconds, of compressing), and (tokens, rows, seconds of a step, kept)."""
    return {
        name: [
            [*key, *(median(getattr(one, name)[key][i] for one in found) for i in (0, 1))]
            for key in getattr(found[0], name)
        ]
        for name in ("prompts", "steps")
    }


def _line(points: dict[tuple[int, int], float]) -> Line:
    """Through values at (prompt tokens, generated tokens)."""
    (fixed, prompt, output), _ = fit([[1.0, n, g] for n, g in points], [max(1e-9, value) for value in points.values()])
    return Line(fixed, prompt, output)
