"""Random eviction: the floor every other method must stay above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress.method import LayerView, Method, Observed, Scorer, State, Tensor


@dataclass(frozen=True)
class RandomScorer(Scorer):
    """Scores that depend on seed, layer, head and position alone, so that a row gets what it gets alone in a batch."""

    seed: int = 0
    traceable: ClassVar[bool] = True

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        heads = torch.arange(view.positions.shape[1], device=view.positions.device)[None, :, None]
        x = (view.positions.long() + 1) * 1000003 + heads * 7919 + view.layer * 104729 + self.seed * 15485863
        for _ in range(3):  # integer mixing within 31 bits
            x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        return (x ^ (x >> 12)).float() / 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Keep tokens at random, independently per layer and KV head, at prompt end.

    Attributes:
        seed: of the choice.
    """

    family = "baseline"
    keeps = "random tokens, per layer and head"
    source = "a control"
    differences = "has no published code: the floor every method must stay above"

    seed: int = 0

    def make_scorer(self) -> RandomScorer:
        return RandomScorer(self.seed)
