"""Decoding loop of a session: sampling, stop rules and timing points, independent of transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Tensor = torch.Tensor
ENDED = -1  # what a guide says where a row is as long as it may be


class Guide(Protocol):
    """Rules of one row's output beyond its length, as where thinking has a budget of its own."""

    def __call__(self, tokens: list[int]) -> int | None:
        """Asked once before the first token and after each: the id that comes next whatever the model picks, `ENDED`, or
        None where the model is free."""

    def stops(self, token: int) -> bool:
        """False if a stop token that was picked now does not end the row."""


@dataclass
class Generation:
    """What was generated.

    Attributes:
        tokens: per row, without the stop token.
        finished: per row, "stop" or "length"; "nan" where its logits were not numbers, which ends a row of several.
        step_s: seconds of each decode forward, device work included.
        pending: LongTensor `[B, 1]`, the last token picked for each row, which no forward has seen yet.
        forced: per row, whether a guide put in a token; empty without guides.
    """

    tokens: list[list[int]]
    finished: list[str]
    step_s: list[float] = field(default_factory=list)
    pending: Tensor | None = None
    forced: list[bool] = field(default_factory=list)


def pick(logits: Tensor, temperature: float, top_p: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """Next token of each row from `logits [B, V]` → LongTensor `[B]`; greedy at temperature 0."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k > 0:
        floor = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if top_p < 1.0:
        ordered, index = logits.softmax(-1).sort(dim=-1, descending=True)
        # a token is dropped if the tokens before it already reach top_p
        dropped = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, index, dropped), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def check_sampling(max_new_tokens: int, temperature: float, top_p: float, top_k: int) -> None:
    """Raise ValueError for settings outside their range, before any token is fed."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; at least 1")
    if not temperature >= 0 or not 0.0 < top_p <= 1.0 or top_k < 0:
        raise ValueError(f"temperature={temperature}, top_p={top_p}, top_k={top_k}: need >= 0, in (0, 1], >= 0")


def generate(
    step: Callable[[Tensor, Tensor | None], Tensor],
    logits: Tensor,
    max_new_tokens: int,
    stop: Iterable[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    watch: Callable[[], None] | None = None,
    min_new_tokens: int = 0,
    until: Callable[[list[int]], bool] | None = None,
    on_logits: Callable[[int, Tensor], None] | None = None,
    guides: Sequence[Guide | None] = (),
) -> Generation:
    """Decode from `logits [B, V]` with `step(ids [B, 1], real [B] or None) -> logits`.

    The last picked token of each row is not fed: the cache holds exactly the tokens before it. A finished row goes on
    as padding, which gets no position. `watch` is called after every step, outside of what is timed. `until` is asked
    with a row's tokens so far and ends the row with "stop"; the token that made it true is kept.
    `on_logits` gets a token's number and the logits it is picked from. `guides`, one per row or none at all, are made for
    this call: a token that a guide puts in takes the place of the picked one, and `ENDED` ends the row with "length".

    Raises:
        ValueError: for settings outside their range, or where the logits of every row have become NaN.
    """
    check_sampling(max_new_tokens, temperature, top_p, top_k)
    batch, stops = logits.shape[0], set(stop)
    ruling = [None if guide is None else guide([]) for guide in guides] or [None] * batch
    generator = None
    if temperature > 0 and seed is not None:
        generator = torch.Generator(device=logits.device).manual_seed(seed)
    result = Generation([[] for _ in range(batch)], ["length"] * batch, forced=[False] * len(guides))
    alive, last = torch.ones(batch, dtype=torch.bool), [0] * batch
    barred = torch.tensor(sorted(stops), dtype=torch.long).to(logits.device) if stops and min_new_tokens > 0 else None
    for number in range(max_new_tokens):
        if on_logits is not None:
            on_logits(number, logits)
        if number < min_new_tokens and barred is not None:
            logits = logits.index_fill(1, barred, float("-inf"))
        bad = logits.isnan().any(-1)
        sound = logits if temperature == 0.0 else logits.masked_fill(bad[:, None], 0.0)
        tokens = pick(sound, temperature, top_p, top_k, generator)
        for row, ruled in enumerate(ruling):
            if ruled is not None and ruled >= 0:
                tokens[row], result.forced[row] = ruled, True
        tokens = tokens.masked_fill(bad, -1)
        for row, token in enumerate(tokens.tolist()):
            if not alive[row]:
                continue
            if token < 0:
                alive[row] = False
                result.finished[row] = "nan"
                continue
            last[row] = token
            guide = guides[row] if guides else None
            if token in stops and ruling[row] is None and (guide is None or guide.stops(token)):
                alive[row] = False
                result.finished[row] = "stop"
                continue
            result.tokens[row].append(token)
            if until is not None and until(result.tokens[row]):
                alive[row] = False
                result.finished[row] = "stop"
            elif guide is not None:
                ruling[row] = guide(result.tokens[row])
                alive[row] = ruling[row] != ENDED
        if all(how == "nan" for how in result.finished):
            raise ValueError(f"the logits of {'every row' if batch > 1 else 'the model'} are NaN after {number} tokens")
        if not bool(alive.any()) or number == max_new_tokens - 1:
            break
        start = time.perf_counter()
        logits = step(tokens.clamp(min=0)[:, None], None if bool(alive.all()) else alive)
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        result.step_s.append(time.perf_counter() - start)
        if watch is not None:
            watch()
    result.pending = torch.tensor(last, dtype=torch.long)[:, None].to(logits.device)
    return result
