"""Q-Filters: one direction per head says which keys are attended to (Godey et al., 2025, arXiv 2503.02812)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kvcompress.calibrate import query_filters
from kvcompress.method import LayerView, Method, Observed, Schedule, Scorer, State, Tensor
from kvcompress.method.latents import Factor


@dataclass(frozen=True, eq=False)
class FilterScorer(Scorer):
    """Projection of keys on their head's filter, `filters [layers, H_kv, D]`, which points where its queries do."""

    filters: Factor
    recent: int = 0

    def window(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, self.recent)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        keys = view.keys.float()
        return (keys @ self.filters.like(keys)[view.layer][..., None]).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class QFilters(Method):
    """Keep the tokens whose keys reach furthest in the direction of their head's queries, per KV head (section 3).

    The directions are the model's, not the prompt's: `scripts/calibrate_qfilters.py` computes them once and stores them
    in a file that is found by the model's weights; SmolLM2's ships with the package. The released code and kvpress
    store them with the opposite sign and take minus the projection.

    Attributes:
        window: most recent tokens that are always kept. The released cache takes it as an argument, 64 in its example;
            kvpress has none.
        decode: evict after every decoded token, as the released cache does.
        filters: `[layers, H_kv, D]` to use instead of the model's file, one row per layer of the model.
    """

    family = "keys and values"
    keeps = "keys that reach furthest in the direction of their head's queries, and a window"
    reads = "keys"
    needs_data = "filters of the model"
    source = "arXiv 2503.02812; NathanGodey/qfilters and kvpress"
    differences = "filters computed here, from all queries of a text the model writes itself; sign as in the paper"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 64, "decode": True},
        "code": {"window": 64, "decode": True},
        "kvpress": {"window": 0, "decode": False},
    }

    window: int | None = None
    decode: bool | None = None
    filters: Tensor | None = field(default=None, repr=False, compare=False)

    def check(self) -> None:
        assert self.window is not None
        if self.window < 0:
            raise ValueError(f"window={self.window}; at least 0")

    def reserved(self) -> int:
        assert self.window is not None
        return self.window

    def bind(self, model: Any) -> Method:
        bound = super().bind(model)
        if self.filters is not None or not self.limited:
            return bound
        return bound.replace(filters=query_filters.stored(model))

    def make_scorer(self) -> FilterScorer:
        filters = torch.zeros(0) if self.filters is None else self.filters  # bind() fills them in
        return FilterScorer(Factor(filters), self.window or 0)

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
