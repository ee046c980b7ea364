"""Long generation: bytes held along it, and whether a decode step stays as fast.

Tokens are seeded random ids: neither bytes nor time depend on what they say, and every method is fed the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcompress.hook.session import compress
from kvcompress.measure.measuring import Timer, quartiles
from kvcompress.method import Method

Tensor = torch.Tensor
PLAIN = "plain"  # transformers itself, with a DynamicCache
TARGET = 1.1  # highest ratio of late to early time per token, where a decode schedule holds the cache small
BLOCK = 32  # tokens timed at a stretch before another contestant has its turn


@dataclass(frozen=True)
class Trace:
    """What was held after the prompt and after each decoded token.

    `seen` tokens of the row, `tokens` held by the fullest head of any layer, and bytes: `valid` of keys, values and
    positions held, `allocated` of their storage, `full` what a DynamicCache would hold.
    """

    name: str
    budget: int
    every: int | None
    seen: list[int]
    tokens: list[int]
    valid: list[int]
    allocated: list[int]
    full: list[int]

    def broken(self) -> list[int]:
        """Where more was held than may be: the row itself until the first compression, budget + interval after it."""
        first = next((i for i in range(len(self.seen)) if self.tokens[i] < self.seen[i]), len(self.seen))
        most = self.budget + (self.every or 0)
        return [i for i, n in enumerate(self.tokens) if n > (self.seen[i] if i < first else most)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Flat:
    """Seconds per decoded token in the second quarter of a generation (`early`) and in the last (`late`)."""

    name: str
    early: float
    late: float
    ratio: float
    spread: tuple[float, float]  # quartiles of the ratio over rounds
    target: float | None

    @property
    def missed(self) -> bool:
        return self.target is not None and self.ratio > self.target

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "missed": self.missed}


def random_tokens(model: PreTrainedModel, length: int, seed: int) -> Tensor:
    """`[1, length]` ids on the model's device."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary // 8, vocabulary, (1, length), generator=generator).to(model.device)


def check(model: PreTrainedModel, prompt: int, tokens: int) -> None:
    """Raise ValueError where prompt and output do not fit the model, before any work."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if prompt < 1 or tokens < 4 or (limit is not None and prompt + tokens > limit):
        raise ValueError(
            f"prompt={prompt} and tokens={tokens}: at least 1 and 4, and within the model's {limit} positions"
        )


@torch.no_grad()
def trace(
    model: PreTrainedModel,
    name: str,
    method: Method,
    prompt: int = 64,
    tokens: int = 2000,
    seed: int = 0,
    progress: Callable[[int], None] = lambda steps: None,
) -> Trace:
    """Measure what `method`, with an int budget, holds after each of `tokens` decoded tokens; progress every 50."""
    check(model, prompt, tokens)
    if not isinstance(method.budget, int):
        raise ValueError(f"budget={method.budget}: the bound of a trace is in tokens, an int")
    found = Trace(name, method.budget, method.parts().schedule.every, [], [], [], [], [])
    ids = random_tokens(model, prompt + tokens, seed)
    with compress(model, method) as session:
        cache = session.prefill(ids[:, :prompt]).cache
        for step in range(tokens + 1):
            if step:
                session.step(ids[:, prompt + step - 1 : prompt + step])
                if step % 50 == 0:
                    progress(50)
            held = cache.nbytes()
            found.seen.append(prompt + step)
            found.tokens.append(int(cache.kept_tokens().max()))
            for key in ("valid", "allocated", "full"):
                getattr(found, key).append(held[key])
    return found


class _Contestant:
    """One method, or transformers itself, at two places of one generation."""

    def __init__(self, model: PreTrainedModel, name: str, method: Method | None) -> None:
        self.model, self.name, self.method = model, name, method
        self.caches: list[Any] = []
        self.seconds: list[list[float]] = [[], []]

    @torch.no_grad()
    def reach(self, ids: Tensor, prompt: int, places: Sequence[int], progress: Callable[[int], None]) -> None:
        """Caches after each of two numbers of decoded tokens."""
        if self.method is None:
            for place in places:
                cache = DynamicCache(config=self.model.config)
                self.model(input_ids=ids[:, : prompt + place], cache=cache, use_cache=True, logits_to_keep=1)
                self.caches.append(cache)
            return
        with compress(self.model, self.method) as session:
            cache = session.prefill(ids[:, :prompt]).cache
            for step in range(places[-1] + 1):
                if step in places:
                    self.caches.append(cache.fork())
                session.step(ids[:, prompt + step : prompt + step + 1])
                if step % 50 == 49:
                    progress(50)

    def run(self, place: int, ids: Tensor) -> None:
        """Decode `ids [1, n]` at one of the places, timed."""
        if self.method is None:
            self.seconds[place].append(self._decode(self.caches[place], ids))
            return
        with compress(self.model, self.method):
            self.seconds[place].append(self._decode(self.caches[place], ids))

    @torch.no_grad()
    def _decode(self, cache: Any, ids: Tensor) -> float:
        with Timer(self.model.device) as timer:
            for at in range(ids.shape[1]):
                self.model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True, logits_to_keep=1)
        return timer.seconds / ids.shape[1]

    def result(self, per_round: int) -> Flat:
        """Late to early, over all blocks and per round of blocks."""
        early, late = (sum(times) / len(times) for times in self.seconds)
        rounds = [
            sum(self.seconds[1][i : i + per_round]) / sum(self.seconds[0][i : i + per_round])
            for i in range(0, len(self.seconds[0]), per_round)
        ]
        held = self.method is not None and self.method.limited and self.method.parts().schedule.in_decode
        return Flat(self.name, early, late, late / early, quartiles(rounds), TARGET if held else None)


def flatness(
    model: PreTrainedModel,
    contestants: Mapping[str, Method],
    prompt: int = 64,
    tokens: int = 2048,
    interval: int = 128,
    seed: int = 0,
    progress: Callable[[int], None] = lambda steps: None,
) -> list[Flat]:
    """Time per token in the second and in the last quarter of `tokens` decoded ones, beside plain transformers.

    Both quarters of all contestants are decoded by turns, a block at a time, so that a slow spell of the machine falls
    on all of them alike. A round is `interval` tokens: of a method with that schedule it holds one compression.

    Raises:
        ValueError: a generation that does not fit the model, or whose quarters hold no round.
    """
    check(model, prompt, tokens)
    quarter = tokens // 4
    if quarter % BLOCK or interval % BLOCK or quarter < interval:
        raise ValueError(f"tokens={tokens}: a quarter needs a multiple of {BLOCK} and at least interval={interval}")
    ids = random_tokens(model, prompt + tokens + 1, seed)
    places = (quarter, 3 * quarter)
    runners = [_Contestant(model, PLAIN, None), *(_Contestant(model, *item) for item in contestants.items())]
    for runner in runners:
        runner.reach(ids, prompt, places, progress)
    gc.collect()
    for number, start in enumerate(range(0, quarter, BLOCK)):
        for runner in runners if number % 2 else runners[::-1]:
            for at in (0, 1) if number % 2 else (1, 0):
                first = prompt + places[at] + start
                runner.run(at, ids[:, first : first + BLOCK])
                progress(BLOCK)
    return [runner.result(interval // BLOCK) for runner in runners]


def steps(contestants: int, tokens: int) -> int:
    """Tokens that `flatness` decodes, for a progress bar."""
    return contestants * (3 * tokens // 4 // 50 * 50) + (contestants + 1) * 2 * (tokens // 4)


def trace_words(trace: Trace) -> str:
    """What a trace shows, in rich's markup."""
    broken = trace.broken()
    return (
        f"{trace.name}: at most {max(trace.tokens)} tokens per head and {max(trace.valid) / 2**20:.1f} MiB held "
        f"({max(trace.allocated) / 2**20:.1f} allocated); a full cache ends at {trace.full[-1] / 2**20:.1f} MiB; "
        + (f"[red]above budget + interval after {broken[0]} tokens[/red]" if broken else "within budget + interval")
    )


def flat_words(flat: Flat) -> str:
    """How flat the times per token were, in rich's markup."""
    low, high = flat.spread
    verdict = "" if flat.target is None else " [red]missed[/red]" if flat.missed else " [green]met[/green]"
    return (
        f"{flat.name}: {1000 * flat.early:.1f} ms per token in the second quarter, {1000 * flat.late:.1f} in the last, "
        f"ratio {flat.ratio:.3f} ({low:.3f}–{high:.3f})"
        + ("" if flat.target is None else f", target ≤ {flat.target}{verdict}")
    )
