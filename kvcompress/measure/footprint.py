"""Memory footprint: peaks of a request, the largest shape that fits, and a linear model that predicts both.

Moments: the prefill's peak, what is left after the compression, the decode's peak, the steady state at the end. A
figure is the growth above what there was before the request; with the weights it is what the request needs. On CUDA the
allocator counts; on a CPU the resident memory of the process, which rounds to pages and to what the C library holds back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvcompress.common.memory import is_oom, release
from kvcompress.measure.latency import Shape, again, batch_ids
from kvcompress.measure.machine import exact_heap, memory_now
from kvcompress.measure.measuring import PeakMemory, synchronize, trim

Tensor = torch.Tensor
GIB = 2**30
STEPS = 4  # decoded tokens of a run that only asks whether it fits
WARM = 64  # tokens of the run before the measured one: kernels are chosen, libraries loaded, buffers made


def weight_bytes(model: Any) -> int:
    """Bytes of the distinct storages behind parameters and buffers."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def stated_room(memory: float | None, weights: int) -> int | None:
    """Bytes of `task.memory`, GiB for weights and all else; None where nothing has to fit.

    Raises:
        ValueError: the weights alone take as much.
    """
    if memory is None:
        return None
    if memory * GIB <= weights:
        raise ValueError(f"task.memory={memory} GiB: the weights alone take {weights / GIB:.3g} GiB")
    return round(memory * GIB)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one request.

    Attributes:
        weights: of the model.
        prefill_growth, decode_growth: highest above the start, in the prompt (compression included) and in decode.
        prefill_peak, decode_peak: the same as the device or process had it, with all that was there before.
        after_growth, steady_growth: above the start after the compression, and at the end.
        cache_after, cache_end: storage of the cache then, spare room included; held_after, held_end: of it what tokens take.
        cache_full: what the full cache would hold after the prompt.
        prefill_rest, decode_rest: growth that is not the cache: activations, workspaces, keys that were evicted later.
        reserved: highest that torch's allocator took from the device; None elsewhere.
        moments: what each counter said at `start`, `after` and `end` (`machine.memory_now`).
        method: how peaks were measured (`PeakMemory.method`).
    """

    weights: int
    prefill_growth: int
    decode_growth: int
    prefill_peak: int
    decode_peak: int
    after_growth: int
    steady_growth: int
    cache_after: int
    cache_end: int
    held_after: int
    held_end: int
    cache_full: int
    prefill_rest: int
    decode_rest: int
    reserved: int | None
    moments: dict[str, dict[str, int]]
    method: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _counted(views: dict[str, int]) -> int:
    """What `PeakMemory` counts in: resident memory, on CUDA tensors."""
    return views["rss"] if "rss" in views else views["allocated"]


def _settled(device: torch.device) -> dict[str, int]:
    release()
    trim()
    synchronize(device)
    return memory_now(device)


@torch.no_grad()
@exact_heap()
def footprint(session: Any, ids: Tensor, output: int) -> tuple[Footprint, dict[str, Any], dict[str, Any], list[int]]:
    """Run one request in an open session and look at memory at each moment.

    Args:
        ids: `[B, n]`; output: tokens generated for each row, at least 2.

    Returns:
        the footprint, the session's reports after the compression and at the end, and the first row's tokens.
    """
    device = session.model.device
    session.prefill(ids[:, :WARM])
    session.step(ids[:, :1])
    session.cache = None
    start = _settled(device)
    with PeakMemory(device) as prefill:
        token = session.prefill(ids).logits.argmax(-1)
    after = _settled(device)
    compressed = session.report(kept_map=True)
    tokens = [token]
    with PeakMemory(device) as decode:
        for _ in range(output - 1):
            token = session.step(token[:, None]).argmax(-1)
            tokens.append(token)
    steady, end = _settled(device), session.report()
    base = _counted(start)
    kv, last = compressed["kv"], end["kv"]
    prefill_growth, decode_growth = max(0, prefill.peak - base), max(0, decode.peak - base)
    reserved = [peak.reserved for peak in (prefill, decode) if peak.reserved is not None]
    found = Footprint(
        weights=weight_bytes(session.model),
        prefill_growth=prefill_growth,
        decode_growth=decode_growth,
        prefill_peak=prefill.peak,
        decode_peak=decode.peak,
        after_growth=max(0, _counted(after) - base),
        steady_growth=max(0, _counted(steady) - base),
        cache_after=kv["bytes_allocated"],
        cache_end=last["bytes_allocated"],
        held_after=kv["bytes_held"],
        held_end=last["bytes_held"],
        cache_full=kv["bytes_full"],
        prefill_rest=max(0, prefill_growth - kv["bytes_allocated"]),
        decode_rest=max(0, decode_growth - last["bytes_allocated"]),
        reserved=max(reserved, default=None),
        moments={"start": start, "after": after, "end": steady},
        method=prefill.method,
    )
    return found, compressed, end, torch.stack(tokens, 1)[0].tolist()


# ---------------------------------------------------------------------------------------------- what fits


def prompt_of(ids: Sequence[int], length: int) -> list[int]:
    """`length` ids, those given over and over."""
    return [ids[place % len(ids)] for place in range(length)]


class Needs:
    """What requests of a method need at their highest, weights included, in bytes: really run, a few tokens decoded.

    Args:
        session: not open.
        ids: a prompt to make others of.
    """

    def __init__(self, session: Any, ids: Sequence[int]) -> None:
        self.session, self.ids = session, ids
        self.weights = weight_bytes(session.model)
        self.runs = 0

    def together(self, length: int, batch: int) -> int | None:
        """Of a batch whose prompts are prefilled at once; None where memory ran out."""

        def work(opened: Any) -> None:
            ids = batch_ids(prompt_of(self.ids, length), batch, opened.model.device)
            self._decode(opened, opened.prefill(ids).logits)

        return self._needed(work)

    def apart(self, length: int, batch: int) -> int | None:
        """Of a batch whose prompts are prefilled one by one beside what the others hold, and decoded together."""

        def work(opened: Any) -> None:
            ids = batch_ids(prompt_of(self.ids, length), 1, opened.model.device)
            opened.prefill(ids)
            held = rows(opened.cache, batch - 1)
            last = opened.prefill(ids).cache  # the last one, beside the others
            del held
            opened.cache = rows(last, batch)
            self._decode(opened, opened.cache.logits)

        return self._needed(work)

    @staticmethod
    def _decode(opened: Any, logits: Tensor) -> None:
        for _ in range(STEPS):
            logits = opened.step(logits.argmax(-1)[:, None])

    @torch.no_grad()
    @exact_heap()
    def _needed(self, work: Callable[[Any], None]) -> int | None:
        self.runs += 1
        device = self.session.model.device
        try:
            with again(self.session) as opened:
                opened.prefill(torch.tensor([list(self.ids[:WARM])], device=device))
                opened.cache = None
                release()
                with PeakMemory(device) as peak:
                    work(opened)
        except Exception as fault:
            if not is_oom(fault):
                raise
            return None
        finally:
            release()
        return peak.reserved if peak.reserved is not None else self.weights + peak.growth


def rows(cache: Any, batch: int) -> Any:
    """A copy of a cache of one row with that row `batch` times; None for no row."""
    if batch < 1:
        return None
    copy = cache.fork()
    if batch > 1:
        copy.batch_repeat_interleave(batch)
    return copy


@dataclass(frozen=True)
class Line:
    """`fixed + slope * size`, least squares over measured points: what a request needs beside the weights."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Raises:
        ValueError: fewer than two sizes.
        """
        sizes = [size for size, _ in points]
        if len(set(sizes)) < 2:
            raise ValueError(f"a line through {len(set(sizes))} size: measure two at least")
        mean_x, mean_y = sum(sizes) / len(points), sum(y for _, y in points) / len(points)
        above = sum((x - mean_x) * (y - mean_y) for x, y in points)
        slope = max(0.0, above / sum((x - mean_x) ** 2 for x in sizes))
        return cls(mean_y - slope * mean_x, slope)

    def at(self, size: float) -> float:
        return self.fixed + self.slope * size

    def largest(self, room: float, most: int) -> int:
        """The largest size whose need is within `room`, 0 where not even 1 is; `most` at most."""
        if self.slope <= 0.0:
            return most if self.fixed <= room else 0
        return max(0, min(most, int((room - self.fixed) / self.slope + 1e-9)))


@dataclass(frozen=True)
class Fit:
    """The largest size that fits.

    Attributes:
        found: by runs; predicted: by the model; runs: how many it took.
        exact: one more does not fit, or is not allowed (`most`); False where the runs allowed were used up.
        bytes: needed at `found`, None where nothing fits.
    """

    found: int
    predicted: int
    runs: int
    exact: bool
    bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SEARCHED, SEARCHES = 6, 3  # runs that predict, and searches, of `fits`


def search(need: Callable[[int], int | None], room: int, predicted: int, most: int, tries: int, grain: int = 1) -> Fit:
    """The largest `n` in 1..most with `need(n) <= room`, by runs, from a prediction on.

    Args:
        need: bytes, or None where memory ran out; taken to grow with n.
        tries: runs at most.
        grain: sizes are told apart to this many.
    """
    low, high, used, at_low = 0, most + 1, 0, None
    guess, stride = max(1, min(most, predicted)), max(grain, predicted // 8)
    while used < tries and high - low > (grain if low else 1):
        used += 1
        needed = need(guess)
        if needed is not None and needed <= room:
            low, at_low = guess, needed
            guess = low + stride if high > most else (low + high) // 2
        else:
            high = guess
            guess = high - stride if low == 0 and high - stride > 0 else (low + high) // 2
        stride *= 2
        guess = max(low + 1, min(guess, high - 1, most))
    return Fit(low, predicted, used, high - low <= grain or low == most, at_low)


def fits(
    session: Any, ids: Sequence[int], shape: Shape, memory: int, most: int, longest: int, tries: int
) -> dict[str, Any]:
    """The largest batches of prompts of `shape.prompt` tokens, and the longest prompt of `shape.batch` rows, in `memory` bytes.

    Predictions come from runs of half a prompt and a whole one, by one and by two: a request needs the weights, and
    beside them something fixed and something per token (activations, keys and values), or per row that is held.

    Args:
        most: rows of a batch that are tried at most; longest: tokens of a prompt; tries: runs per search.

    Returns:
        `batch_together` (prefilled at once), `batch_apart` (prefilled one by one, decoded together) and `context`, each
        a `Fit` as a dict; `model`, the lines that predict; `memory`.
    """
    need, length = Needs(session, ids), shape.prompt
    half = max(1, length // 2)
    points = [(b * n, need.together(n, b)) for n, b in ((half, 1), (length, 1), (length, 2))]
    held = [(b, need.apart(length, b)) for b in (1, 2, 3)]
    lines = {name: _line(measured, need.weights) for name, measured in (("token", points), ("row", held))}
    token, row = lines["token"], lines["row"]
    room = memory - need.weights

    def guess(line: Line | None, unit: int, limit: int) -> int:
        return 0 if line is None else min(limit, line.largest(room, limit * unit) // unit)

    found = {
        "batch_together": search(lambda b: need.together(length, b), memory, guess(token, length, most), most, tries),
        "batch_apart": search(lambda b: need.apart(length, b), memory, guess(row, 1, most), most, tries),
        "context": search(
            lambda n: need.together(n, shape.batch), memory, guess(token, shape.batch, longest), longest, tries,
            grain=max(1, longest // 128),
        ),
    }  # fmt: skip
    return {
        **{name: fit.as_dict() for name, fit in found.items()},
        "model": {name: None if line is None else asdict(line) for name, line in lines.items()},
        "memory": memory,
        "runs": need.runs,
    }


def _line(points: Sequence[tuple[int, int | None]], weights: int) -> Line | None:
    """Through the points that ran; None where fewer than two sizes did."""
    ran = [(float(size), float(needed - weights)) for size, needed in points if needed is not None]
    return Line.through(ran) if len({size for size, _ in ran}) > 1 else None
