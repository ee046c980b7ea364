"""Latency: time to first token, time per output token, throughput.

A request is a batch of prompts of one length, prefilled, compressed and decoded greedily to a fixed length: no token
ends it. The clock starts when the prompt is on the device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch

from kvcompress.common.memory import is_oom, release
from kvcompress.common.prose import Encoder, prose_ids
from kvcompress.hook.session import Session, compress
from kvcompress.measure import machine
from kvcompress.measure.measuring import synchronize
from kvcompress.measure.timing import Laps, Spread, by_place, in_turn, quarters, ratio, slope
from kvcompress.method import Method

Tensor = torch.Tensor
SOURCES = ("random", "text")
OURS, FULL, AGAIN = "method", "full", "full again"


@dataclass(frozen=True)
class Shape:
    """A cell of the grid: tokens of each prompt, prompts in the batch, tokens generated for each."""

    prompt: int
    batch: int
    output: int

    @property
    def name(self) -> str:
        return f"L{self.prompt}-B{self.batch}-N{self.output}"


def grid(prompts: Sequence[int], batches: Sequence[int], outputs: Sequence[int]) -> list[Shape]:
    """Every combination, the smallest first, so that what fits is known before memory runs out.

    Raises:
        ValueError: a number below 1 or an empty list; an output of one token has no time per output token.
    """
    for name, values, least in (("lengths", prompts, 1), ("batches", batches, 1), ("outputs", outputs, 2)):
        if not values or min(values) < least:
            raise ValueError(f"task.{name}={list(values)}: one or more numbers of at least {least} are needed")
    shapes = {Shape(*numbers) for numbers in product(prompts, batches, outputs)}
    return sorted(shapes, key=lambda shape: (shape.prompt * shape.batch, shape.prompt, shape.output))


def prompt_ids(tokenizer: Any, length: int, source: str = "random", seed: int = 0) -> tuple[int, ...]:
    """A prompt of exactly `length` ids: drawn from the vocabulary without special tokens, or built-in prose.

    Raises:
        ValueError: an unknown source.
    """
    if source not in SOURCES:
        raise ValueError(f"task.source={source!r}; valid: {', '.join(SOURCES)}")
    if source == "random":
        special, rng = set(tokenizer.all_special_ids), random.Random(f"latency:{seed}:{length}")
        vocabulary = [token for token in range(len(tokenizer)) if token not in special]
        return tuple(rng.choices(vocabulary, k=length))
    return tuple(prose_ids(Encoder(tokenizer), length, seed)[:length])


def batch_ids(ids: Sequence[int], batch: int, device: machine.Device = "cpu") -> Tensor:
    """`[batch, n]`: the prompt, and the same turned on by a part of it in each further row."""
    row = torch.tensor(ids, dtype=torch.long)
    return torch.stack([row.roll(-(number * len(ids)) // batch) for number in range(batch)]).to(device)


def again(session: Session, full: bool = False) -> Session:
    """Another session of the same model, method, kernel and way to take steps, not open yet; `full`: one that compresses nothing."""
    kernel = "blockwise" if session.compressor.blockwise else "auto"
    method = Method() if full else session.method
    return compress(session.model, method, kernel, session.tokenizer, decode=session.decode)


@dataclass
class Request:
    """One request, measured.

    Attributes:
        ttft_s: from the prompt on the device to the first token, compression included.
        compress_s: deciding and evicting within it; prefill_s: the rest, the model's own work.
        steps_s: seconds of each further token.
        tokens: ids of the first row.
        compressed, end: `session.report()` after the compression and at the end, made outside of what is timed.
    """

    ttft_s: float
    compress_s: float
    steps_s: list[float]
    tokens: list[int] = field(default_factory=list)
    compressed: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill_s(self) -> float:
        return self.ttft_s - self.compress_s

    @property
    def decode_s(self) -> float:
        return sum(self.steps_s)

    @property
    def tpot_s(self) -> float:
        """Mean seconds of an output token after the first."""
        return self.decode_s / len(self.steps_s)

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.decode_s


@torch.no_grad()
def request(session: Any, ids: Tensor, output: int, looks: bool = False) -> Request:
    """Run and time one request in an open session.

    Args:
        ids: `[B, n]`, on the session's device.
        output: tokens generated for each row, at least 2; none of them ends it.
        looks: also make the reports of the session, outside of what is timed.
    """
    device = session.model.device
    synchronize(device)
    start = time.perf_counter()
    token = session.prefill(ids).logits.argmax(-1)
    synchronize(device)
    ttft = time.perf_counter() - start
    compressed = session.report(kept_map=True) if looks else {}
    session.prepare(output - 1)  # what is compiled is compiled here, and no part of any figure but its own
    synchronize(device)
    tokens, laps = [token], Laps(device)
    laps.lap()
    for _ in range(output - 1):
        token = session.step(token[:, None]).argmax(-1)
        tokens.append(token)
        laps.lap()
    seconds = laps.seconds()
    end = session.report() if looks else {}
    first = torch.stack(tokens, 1)[0].tolist()
    return Request(ttft, session.compressor.stats.seconds, seconds, first, compressed, end)


def runs(session: Any, ids: Sequence[int], shape: Shape, aa: bool = False) -> dict[str, Callable[[], Request]]:
    """A request of the method of an unopened session, of the full cache, and of that once more where A/A is wanted."""

    def one(full: bool) -> Request:
        with again(session, full) as opened:
            prompts = batch_ids(ids, shape.batch, opened.model.device)
            return request(opened, prompts, shape.output, looks=True)  # both: what looking leaves behind is the same

    found: dict[str, Callable[[], Request]] = {OURS: lambda: one(False), FULL: lambda: one(True)}
    return found | ({AGAIN: lambda: one(True)} if aa else {})


def side(requests: Sequence[Request], shape: Shape) -> dict[str, Any]:
    """Figures of one side: medians with quartiles, seconds by quarter of the output, tokens per second."""
    places = by_place([one.steps_s for one in requests])
    growth = slope(places)
    spreads = {
        "ttft_s": [one.ttft_s for one in requests],
        "prefill_s": [one.prefill_s for one in requests],
        "compress_s": [one.compress_s for one in requests],
        "tpot_s": [one.tpot_s for one in requests],
        "total_s": [one.total_s for one in requests],
        "tokens_per_s": [shape.batch * shape.output / one.total_s for one in requests],
        "decode_tokens_per_s": [shape.batch / one.tpot_s for one in requests],
    }
    found: dict[str, Any] = {name: Spread.of(values).as_dict() for name, values in spreads.items()}  # type: ignore[union-attr]
    return found | {
        "tpot_quarters_s": quarters(places),
        "tpot_slope_s_per_1k": None if growth is None else 1000 * growth,
    }


def ratios(found: dict[str, list[Request]]) -> dict[str, Any]:
    """The method's figures over the full cache's, round by round, and the full cache's over its own (`aa_…`)."""
    made: dict[str, Any] = {}
    for prefix, above in (("", OURS), ("aa_", AGAIN)):
        for figure in ("ttft_s", "tpot_s", "total_s"):
            both = [[getattr(one, figure) for one in found.get(name, ())] for name in (above, FULL)]
            spread = ratio(*both)
            made[f"{prefix}{figure.removesuffix('_s')}"] = None if spread is None else spread.as_dict()
    return made


def measured(
    session: Any, ids: Sequence[int], shape: Shape, rounds: int, warmup: int, aa: bool
) -> tuple[dict[str, list[Request]], dict[str, Exception], dict[str, Any]]:
    """Requests of each side in turn, what ended any, and the state of the machine before and after.

    Raises:
        ValueError: see `in_turn`.
    """
    before = machine.load(session.model.device)
    start = time.perf_counter()
    found, ended = in_turn(runs(session, ids, shape, aa), rounds, warmup)
    wall = time.perf_counter() - start
    return found, ended, {"before": before, "after": machine.load(session.model.device), "wall_s": wall}


def last_good(works: Callable[[Shape], bool], shape: Shape, tries: int = 12) -> Shape | None:
    """The largest shape on the way down that works: the batch halved, then the prompt; None where none does."""
    for _ in range(tries):
        if shape.batch > 1:
            shape = Shape(shape.prompt, shape.batch // 2, shape.output)
        elif shape.prompt > 1:
            shape = Shape(shape.prompt // 2, 1, shape.output)
        else:
            return None
        if works(shape):
            return shape
    return None


def out_of_memory(session: Any, ids: Sequence[int], shape: Shape, fault: BaseException, full: bool) -> dict[str, Any]:
    """What is recorded of a cell of the grid that memory did not do for: the error, and the last good size."""
    good = last_good(lambda smaller: works(session, ids, smaller, full), shape)
    text = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
    return {"shape": asdict(shape), "error": text, "last_good": None if good is None else asdict(good)}


def works(session: Any, ids: Sequence[int], shape: Shape, full: bool) -> bool:
    """True if memory does for one request of a smaller shape."""
    try:
        with again(session, full) as opened:
            request(opened, batch_ids(ids[: shape.prompt], shape.batch, opened.model.device), shape.output)
    except Exception as fault:
        if not is_oom(fault):
            raise
        return False
    finally:
        release()
    return True
