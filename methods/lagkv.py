"""LagKV: a token is kept if it is unusual for the chunk that follows (Liang et al., 2025, arXiv 2504.04704).

The paper keeps a fixed share of every chunk; what that makes of a whole prompt depends on its length, since sinks and
the last one to two lags stay whole. Our budget is the total: sinks and the last `lag` tokens are protected, tokens
between them and the last full chunk come next, and what is left goes to the chunks by rank within each, so that every
chunk keeps the same number, give or take one. Keeping a share r inside chunks is thus a budget of sinks + tail + r x
(chunked tokens). Where the budget cannot hold a lag beside one token, the lag shrinks to what can be protected, and
where fewer than two chunks fit, the most recent tokens are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import LayerView, Method, Observed, Schedule, Scorer, State, Tensor
from kvcompress.method.budget import protect

EPSILON = 1e-6  # of a channel that does not vary within a reference chunk


@dataclass(frozen=True)
class LagScorer(Scorer):
    """Rank within a chunk by the spread of a token's channels, relative to their range in the next chunk."""

    sinks: int = 16
    lag: int = 128
    value_weight: float = 1.0
    cross: bool = False

    def window(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, self.lag)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        scores = torch.zeros(view.positions.shape, dtype=torch.float32, device=view.positions.device)
        guard = protect(view.kept, self.sinks, self.window(view.kept))
        held = view.positions >= 0
        order = torch.sort(held.to(torch.uint8), dim=-1, stable=True).indices  # held slots last, in order
        counts = held.sum(-1).tolist()
        for b, (sinks, lag) in enumerate(zip(guard.sinks.tolist(), guard.window.tolist(), strict=True)):
            for count in set(counts[b]):  # one, unless heads differ
                heads = [h for h, n in enumerate(counts[b]) if n == count]
                slots = order[b, heads, order.shape[-1] - count :]
                index = slots[..., None].expand(-1, -1, view.keys.shape[-1])
                keys = view.keys[b, heads].gather(1, index).float()
                values = view.values[b, heads].gather(1, slots[..., None].expand(-1, -1, view.values.shape[-1])).float()
                scores[b, heads] = scores[b, heads].scatter(1, slots, self.order(keys, values, sinks, lag))
        return scores

    def order(self, keys: Tensor, values: Tensor, sinks: int, lag: int) -> Tensor:
        """Scores `[H, n]` of tokens in order: in (0, 1] inside chunks, 2 to 3 after them and rising."""
        heads, n, _ = keys.shape
        chunks = max((n - sinks) // lag, 1) if lag else 1  # the last one is a reference only
        scores = 2 + torch.arange(n, device=keys.device).expand(heads, n) / n
        if chunks == 1:
            return scores
        inside = slice(sinks, sinks + (chunks - 1) * lag)
        spread = _spread(keys, sinks, chunks, lag) + self.value_weight * _spread(values, sinks, chunks, lag)
        if self.cross:
            ranks = spread / (1 + self.value_weight)
        else:
            best_first = spread.sort(dim=2, descending=True, stable=True).indices
            rank = torch.arange(lag, device=keys.device).expand_as(best_first)
            ranks = 1 - torch.empty_like(rank).scatter_(2, best_first, rank) / lag
        scores = scores.clone()
        scores[:, inside] = ranks.flatten(1)
        return scores


def _spread(x: Tensor, sinks: int, chunks: int, lag: int) -> Tensor:
    """Softmax over a chunk of the deviation over channels, scaled to the next chunk's range: `[H, chunks - 1, lag]`."""
    x = x[:, sinks : sinks + chunks * lag].unflatten(1, (chunks, lag))
    low, high = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
    return ((x[:, :-1] - low) / (high - low + EPSILON)).std(-1).softmax(-1)


@dataclass(frozen=True, kw_only=True)
class LagKV(Method):
    """Keep, of every chunk of `lag` tokens, those that differ from the chunk after it; by keys and values alone.

    At prompt end, and in decode whenever `lag` more tokens have come (paper section 3).

    Attributes:
        sinks: first tokens that are always kept: 16, in kvpress 4.
        lag: tokens per chunk, and last tokens that are always kept: 128 as in kvpress and the authors' generation code,
            1024 in their first repository.
        value_weight: of the values' score beside the keys'.
        cross: compare scores across chunks instead of ranks within each (an option in kvpress).
        decode: compress in decode.
    """

    family = "keys and values"
    keeps = "16 sinks, the last 128 tokens, and of every 128 between them those unusual for the next 128"
    reads = "keys, values"
    source = "arXiv 2504.04704; AI-Lab-China-Merchants-Bank/LagKV"
    differences = (
        "the budget is a total that is shared by rank among chunks, where the released code keeps a fixed share "
        "of each; channels that do not vary are guarded; softmax in float32"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"sinks": 16, "lag": 128, "decode": True},
        "code": {"sinks": 16, "lag": 1024, "decode": True},
        "kvpress": {"sinks": 4, "lag": 128, "decode": False},
    }

    sinks: int | None = None
    lag: int | None = None
    value_weight: float = 1.0
    cross: bool = False
    decode: bool | None = None

    def check(self) -> None:
        assert self.sinks is not None and self.lag is not None
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}; at least 0")
        if self.lag < 2:
            raise ValueError(f"lag={self.lag}; a chunk has at least 2 tokens")
        if self.value_weight < 0:
            raise ValueError(f"value_weight={self.value_weight}; at least 0")

    def reserved(self) -> int:
        assert self.sinks is not None and self.lag is not None
        return self.sinks + self.lag

    def make_scorer(self) -> LagScorer:
        assert self.sinks is not None and self.lag is not None
        return LagScorer(self.sinks, self.lag, self.value_weight, self.cross)

    def make_schedule(self) -> Schedule:
        assert self.lag is not None
        return Schedule(every=self.lag if self.decode else None)
