"""Chunked prefill: bytes held and peak memory, beside the same prompt at once.

Keys and values are counted inside every layer, when attention has run over what is held and eviction is still to come,
and whenever a layer begins: the most that is ever held. Peak memory is that of `PeakMemory`: the process's resident
growth on a CPU, the allocator's on CUDA; activations are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.hook.session import Session, compress
from kvcompress.measure.measuring import PeakMemory, Timer
from kvcompress.method import Chunked, Method, OneShot

Tensor = torch.Tensor


@dataclass
class Held:
    """The most that a cache held at once, in bytes: keys and values of its tokens, and the storage behind them."""

    valid: int = 0
    allocated: int = 0
    samples: int = 0


@contextmanager
def held_bytes(session: Session) -> Iterator[Held]:
    """Sample what the session's cache holds at every layer call within the block."""
    held, compressor, stock = Held(), session.compressor, session.compressor.after_attention

    def sample(*_: Any) -> None:
        if session.cache is not None and (session.cache.forward is None or session.cache.forward.phase != "pass"):
            found = session.cache.nbytes()
            held.valid = max(held.valid, found["keys_values"])
            held.allocated = max(held.allocated, found["allocated"] - found["positions"])
            held.samples += 1

    def watched(*args: Any) -> None:
        sample()
        stock(*args)

    layers = [m for m in session.model.modules() if hasattr(m, "layer_idx")]
    handles = [m.register_forward_pre_hook(sample) for m in layers]
    compressor.__dict__["after_attention"] = watched
    try:
        yield held
    finally:
        del compressor.__dict__["after_attention"]
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Prompt:
    """One prefill: seconds, bytes of peak growth, the most held, and logits `[V]` of the last position."""

    seconds: float
    growth: int
    held: Held
    logits: Tensor = field(repr=False)


@dataclass(frozen=True)
class ChunkedRow:
    """A method's prompt in chunks beside the same at once.

    Attributes:
        limit: keys and values of budget + chunk tokens in all layers, in bytes.
        chunked, oneshot: the prompt in chunks, and at once, at the budget.
        off: largest difference of the last position's logits between the two without limit, in chunks of the same size.
    """

    method: str
    length: int
    budget: int
    chunk: int
    limit: int
    chunked: Prompt
    oneshot: Prompt
    off: float

    @property
    def growth_ratio(self) -> float:
        return self.chunked.growth / max(self.oneshot.growth, 1)

    @property
    def within(self) -> bool:
        """True if no more than budget + chunk tokens' worth was held."""
        return self.chunked.held.valid <= self.limit

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for name in ("chunked", "oneshot"):
            plain[name].pop("logits")
        return {**plain, "growth_ratio": self.growth_ratio, "within": self.within}


def prefill(model: PreTrainedModel, method: Method, ids: Tensor, watch: bool = True) -> Prompt:
    """Run `ids [1, n]` as a prompt. Sampling takes time and a little memory, so peak and seconds go without it."""
    with compress(model, method) as session, PeakMemory(model.device) as memory, Timer(model.device) as timer:
        logits = session.prefill(ids).logits[0].float().cpu()
    held = Held()
    if watch:
        del session
        with compress(model, method) as session, held_bytes(session) as held:
            session.prefill(ids)
    return Prompt(timer.seconds, memory.growth, held, logits)


@torch.no_grad()
def compare(model: PreTrainedModel, method: Method, length: int, chunk: int, seed: int = 0) -> ChunkedRow:
    """Measure `method`, whose budget is a number of tokens, on a prompt of `length` random tokens.

    Raises:
        ValueError: a budget that is not a number of tokens, or a prompt that does not exceed budget + chunk.
    """
    if not isinstance(method.budget, int) or length <= method.budget + chunk:
        raise ValueError(
            f"budget={method.budget}, chunk={chunk}, length={length}; a budget in tokens (an int), and a prompt longer "
            "than budget and chunk together"
        )
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size // 8, config.vocab_size, (1, length), generator=generator).to(model.device)
    in_chunks, at_once = method.replace(prefill=Chunked(chunk)), method.replace(prefill=OneShot())
    with compress(model, method.replace(budget=1.0)) as session:
        session.prefill(ids[:, :1])
        token = session.cache.nbytes()["keys_values"] if session.cache is not None else 0
    free = [prefill(model, m.replace(budget=1.0), ids, watch=False).logits for m in (in_chunks, at_once)]
    return ChunkedRow(
        method=type(method).__name__,
        length=length,
        budget=method.budget,
        chunk=chunk,
        limit=token * (method.budget + chunk),
        chunked=prefill(model, in_chunks, ids),
        oneshot=prefill(model, at_once, ids, watch=False),
        off=float((free[0] - free[1]).abs().max()),
    )


def lines(rows: Sequence[ChunkedRow]) -> list[tuple[str, ...]]:
    """Cells of a table, one line per method: figures in MiB, seconds and ratios."""

    def mib(number: int) -> str:
        return f"{number / 2**20:,.1f}"

    return [
        (
            row.method,
            f"{mib(row.chunked.held.valid)} / {mib(row.chunked.held.allocated)}",
            f"{mib(row.limit)} {'met' if row.within else 'missed'}",
            mib(row.chunked.growth),
            mib(row.oneshot.growth),
            f"{row.growth_ratio:.2f}",
            f"{row.chunked.seconds:.1f} / {row.oneshot.seconds:.1f}",
            f"{row.off:.1e}",
        )
        for row in rows
    ]
