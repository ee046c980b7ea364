"""Rollouts: a group of samples drawn from one compressed cache, their log-probabilities, and the bytes of the group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompress.data.task import Turn
from kvcompress.measure.measuring import synchronize

Tensor = torch.Tensor


@dataclass(frozen=True)
class Group:
    """Samples of one prompt.

    Attributes:
        tokens: per sample, without the end token; finished: "stop" or "length".
        sampled: per sample, all that was drawn, the end token included: what log-probabilities belong to.
        logprobs: natural logarithms of the tempered distribution each token was drawn from, per sample.
        entropy: of these distributions, in nats.
        step_s: seconds of each decode step.
    """

    tokens: list[list[int]]
    finished: list[str]
    sampled: list[list[int]]
    logprobs: list[list[float]]
    entropy: list[list[float]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def joined(self, other: Group) -> Group:
        """Both groups' samples, in order; steps are those of `other` alone."""
        return Group(
            self.tokens + other.tokens,
            self.finished + other.finished,
            self.sampled + other.sampled,
            self.logprobs + other.logprobs,
            self.entropy + other.entropy,
            other.step_s,
        )


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the tempered distribution over the whole vocabulary, float32, from logits `[..., V]`."""
    return (logits.float() / temperature).log_softmax(-1)


def inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens `[B]` drawn from `logprobs [B, V]` by the inverse of the cumulative distribution at `uniform [B]` in [0, 1).

    One number per row decides, so that a row's token does not depend on the rows beside it.
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    at = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)


@torch.no_grad()
def drawn(session: Any, turn: Turn, temperature: float, seeds: Sequence[int]) -> Group:
    """Sample from the session's current cache, whose rows are forks of one prompt, one generator per row."""
    cache, device, rows = session.cache, session.model.device, len(seeds)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stops = torch.tensor(sorted(turn.stop), device=device, dtype=torch.long)
    session.prepare(turn.max_new_tokens)
    logits, alive = cache.logits, torch.ones(rows, dtype=torch.bool, device=device)
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    seconds: list[float] = []
    for number in range(turn.max_new_tokens):
        logprobs = log_distribution(logits, temperature)
        uniform = torch.cat([torch.rand(1, generator=one, dtype=torch.float64) for one in generators])
        tokens = inverse_cdf(logprobs, uniform.to(device))
        entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
        steps.append((tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropy, alive))
        alive = alive & ~torch.isin(tokens, stops)
        if number == turn.max_new_tokens - 1 or not bool(alive.any()):  # host: a group ends when its last row does
            break
        start = time.perf_counter()
        logits = session.step(tokens[:, None], None if bool(alive.all()) else alive.cpu())
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    tokens, logprobs, entropy, counted = (torch.stack(one, 1).cpu() for one in zip(*steps, strict=True))
    sampled = [tokens[row][counted[row]].tolist() for row in range(rows)]
    ended = [bool(one) and one[-1] in turn.stop for one in sampled]
    return Group(
        [one[:-1] if end else one for one, end in zip(sampled, ended, strict=True)],
        ["stop" if end else "length" for end in ended],
        sampled,
        [logprobs[row][counted[row]].tolist() for row in range(rows)],
        [entropy[row][counted[row]].tolist() for row in range(rows)],
        seconds,
    )


@torch.no_grad()
def teacher_forced(
    session: Any, segments: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]], temperature: float, rows: int
) -> list[list[float]]:
    """Log-probabilities that an open session gives to sampled tokens behind a prompt, `rows` samples at a time.

    The ids are those that were sampled, never text that was tokenised again. Where
    they are more than `rows`, those of similar length go together.
    """
    device = session.model.device
    session.prefill([torch.tensor([list(one)], device=device) for one in segments])
    prompt = session.cache
    found: list[list[float]] = [[] for _ in sampled]
    order = list(range(len(sampled)))
    if len(order) > rows:
        order.sort(key=lambda number: len(sampled[number]))
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        part = [sampled[number] for number in numbers]
        session.cache = prompt.fork()
        if len(part) > 1:
            session.cache.batch_repeat_interleave(len(part))
        longest = max(map(len, part))
        # behind a row's last token come copies of it, which no token before them can see
        ids = torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in part], device=device)
        scores, at = [], 0
        for logits in session.follow(ids):
            here = ids[:, at : at + logits.shape[1], None]
            scores.append(log_distribution(logits, temperature).gather(2, here)[..., 0].cpu())
            at += logits.shape[1]
        whole = torch.cat(scores, 1)
        for row, number in enumerate(numbers):
            found[number] = whole[row, : len(sampled[number])].tolist()
    return found


def bytes_of_group(prompt: Any, cache: Any) -> tuple[int, int]:
    """Bytes that a decoded batch holds, and those of each row that all rows share as they came from the prompt.

    Counted on live tensors: the rows' own storage, and of it the share of layers in which every row still holds exactly
    the prompt entries that the compressed prompt held. A layer that evicted any of them while decoding shares nothing.
    A codec's residual tokens count as shared though they are encoded later.

    Args:
        prompt: cache `[1, …]` after the prompt; cache: `[k, …]` after decoding.
    """
    held, before = cache.nbytes(), prompt.nbytes()
    total = held["valid"] + held["other_layers"]
    intact = kept = 0
    length = int(prompt.get_seq_length())
    for index, layer in enumerate(cache.layers):
        if not hasattr(layer, "store"):
            continue  # a sliding window moves on: nothing of it is shared in the end
        first, now = prompt.positions(index), cache.positions(index)
        count = int((first >= 0).sum())
        kept += count
        same = all(_held(now[row], length) == _held(first[0], length) for row in range(now.shape[0]))
        intact += count if same else 0
    share = intact / kept if kept else 0.0
    return total, min(round(before["valid"] * share), total // cache.positions(0).shape[0] if kept else 0)


def _held(positions: Tensor, length: int) -> list[list[int]]:
    """Prompt positions `[H_kv, P]` that each head holds, sorted."""
    return [sorted(position for position in head if 0 <= position < length) for head in positions.tolist()]
