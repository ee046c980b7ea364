"""H2O, the heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import (
    GroupReduce,
    LayerView,
    Method,
    Needs,
    Observed,
    Schedule,
    Scorer,
    State,
    Tensor,
    reduce_group,
)


@dataclass(frozen=True)
class HeavyHitterScorer(Scorer):
    """Attention mass a key has collected from all queries so far; the most recent tokens are protected.

    A query that k later ones of its row followed counts `decay`^k. Normalised, the mass is divided by the number of
    queries that could see the key, each counted as its mass is: then it is the mean attention the key got.
    """

    recent_share: float = 0.5
    group_reduce: GroupReduce = "mean"
    normalise: bool = False
    decay: float = 1.0
    traceable: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(mass=True, decay=self.decay)

    def window(self, kept: Tensor) -> Tensor:
        return (kept * self.recent_share).long()

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        mass = reduce_group(observed.mass, self.group_reduce)
        if not self.normalise:
            return mass
        # number of queries that could see the key: itself and all later tokens of its row
        observers = (view.real.to(mass.device)[:, None, None] - view.positions).clamp(min=1)
        if self.decay != 1.0:
            observers = ((1 - self.decay ** observers.double()) / (1 - self.decay)).float()
        return mass / observers


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Keep heavy hitters and recent tokens, at prompt end and after every decoded token (paper section 4).

    Attributes:
        recent_share: share of what is kept that goes to the most recent tokens; the rest are heavy hitters. The
            released scripts split the budget half and half.
        group_reduce: how the accumulated scores of the query heads of a KV head are combined. The released code has
            no grouped queries.
        normalise: divide by the number of queries that could see the key, as kvpress does.
        decay: what a query's attention is multiplied by with every later query, 1 for no decay (all sources). 0.99
            forgets half after 69 queries. Exact in prompts, in chunks of them and in decode.
        decode: evict after every decoded token.
    """

    family = "attention"
    keeps = "keys that collected the most attention, and the recent half"
    source = "arXiv 2306.14048; FMInference/H2O"
    differences = (
        "attention is summed in float32, per row and per KV head (the released code sums in the model's "
        "precision, over the batch, and has no grouped queries); no attention matrix is built"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"recent_share": 0.5, "normalise": False, "decode": True},
        "code": {"recent_share": 0.5, "normalise": False, "decode": True},
        "kvpress": {"recent_share": 0.0, "normalise": True, "decode": False},
    }

    recent_share: float | None = None
    group_reduce: str = "mean"
    normalise: bool | None = None
    decay: float = 1.0
    decode: bool | None = None

    def check(self) -> None:
        assert self.recent_share is not None
        if not 0.0 <= self.recent_share < 1.0:
            raise ValueError(f"recent_share={self.recent_share}; a share in [0, 1)")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay={self.decay}; above 0, at most 1 (no decay)")
        reduce_group(torch.zeros(1, 1, 1), self.group_reduce)  # type: ignore[arg-type]

    def make_scorer(self) -> HeavyHitterScorer:
        assert self.recent_share is not None
        return HeavyHitterScorer(self.recent_share, self.group_reduce, bool(self.normalise), self.decay)  # type: ignore[arg-type]

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
