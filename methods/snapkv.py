"""SnapKV: the end of the prompt attends to what the answer will read (Li et al., NeurIPS 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from kvcompress.method import GroupReduce, LayerView, Method, Needs, Observed, Scorer, State, Tensor, reduce_group
from kvcompress.method.budget import protect


@dataclass(frozen=True)
class WindowScorer(Scorer):
    """Attention of the observation window over the prefix, pooled over neighbours; the window itself is protected."""

    size: int = 32
    kernel: int = 7
    pooling: str = "max"
    group_reduce: GroupReduce = "mean"
    reduce_first: bool = True

    @property
    def needs(self) -> Needs:
        return Needs(window=self.size)

    def window(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, self.size)

    def votes(self, view: LayerView, observed: Observed) -> Tensor:
        """What every key gets from the window's queries, `[B, H_kv, G, P]`: their attention, summed."""
        attention, _ = observed.window(self.size)
        return attention.sum(dim=3)

    def prefix(self, view: LayerView) -> Tensor:
        """Held slots before the window, bool `[B, H_kv, P]`."""
        held = view.positions >= 0
        rank = held.cumsum(-1) - 1
        window = protect(view.kept, self.sinks, self.window(view.kept)).window  # shrinks row by row
        return held & (rank < held.sum(-1, keepdim=True) - window.to(rank.device)[:, None, None])

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        votes, prefix = self.votes(view, observed), self.prefix(view)
        # slots emptied in decode are no neighbours; there the host is not asked whether there are any
        parted = view.phase == "decode" or bool(((prefix[..., :-1] & ~prefix[..., 1:]).sum(-1) > 1).any())
        if self.reduce_first:
            return self._pool(reduce_group(votes, self.group_reduce), prefix, parted)
        return reduce_group(self._pool(votes, prefix[:, :, None].expand_as(votes), parted), self.group_reduce)

    def _pool(self, votes: Tensor, prefix: Tensor, parted: bool) -> Tensor:
        """Pool over held prefix slots; empty slots part no neighbours, and no other slot gives or scores.

        Args:
            parted: empty slots may lie between held ones.
        """
        nothing, slots = float("-inf") if self.pooling == "max" else 0.0, votes.shape[-1]
        place = None
        if parted:
            place = torch.where(prefix, prefix.cumsum(-1) - 1, slots)
            packed = votes.new_full((*votes.shape[:-1], slots + 1), nothing).scatter_(-1, place, votes)[..., :slots]
        else:
            packed = votes.masked_fill(~prefix, nothing)
        pool = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        pooled = pool(packed.flatten(0, -2)[:, None], self.kernel, stride=1, padding=self.kernel // 2).view(votes.shape)
        if place is not None:
            pooled = pooled.gather(-1, place.clamp(max=slots - 1))
        return pooled.masked_fill(~prefix, float("-inf"))


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """Keep the prefix tokens that the last `window` prompt queries attend to, and the window; at prompt end only.

    Decoded tokens are appended beyond the budget, as in the released code.

    Attributes:
        window: observation window, in tokens, part of the budget. Presets: 32 in the paper's LongBench settings, 64
            as the released class's default and in kvpress.
        kernel, pooling: of the 1-D pooling over positions: 7 and "max", or 5 and "avg".
        group_reduce: how the scores of a KV head's query heads are combined; the released code stores a cache per
            query head instead.
        reduce_first: combine before pooling (the two orders differ for max), else after it, as kvpress does.
    """

    family = "attention"
    keeps = "what the last queries of the prompt attend to, pooled over neighbours, and these"
    source = "arXiv 2404.14469; FasterDecoding/SnapKV"
    differences = (
        "one set per KV head instead of per query head (which stores grouped keys several times over); the window "
        "is the last real tokens of each row"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 32, "kernel": 7, "pooling": "max", "reduce_first": True},
        "code": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": True},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": False},
    }

    window: int | None = None
    kernel: int | None = None
    pooling: str | None = None
    group_reduce: str = "mean"
    reduce_first: bool | None = None

    def check(self) -> None:
        assert self.window is not None and self.kernel is not None
        if self.window < 1:
            raise ValueError(f"window={self.window}; at least 1 query must observe")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}; an odd number, 1 for no pooling")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"pooling={self.pooling!r}; valid: max, avg")
        reduce_group(torch.zeros(1, 1, 1), self.group_reduce)  # type: ignore[arg-type]

    def reserved(self) -> int:
        assert self.window is not None
        return self.window

    def make_scorer(self) -> WindowScorer:
        assert self.window and self.kernel and self.pooling
        return WindowScorer(self.window, self.kernel, self.pooling, self.group_reduce, bool(self.reduce_first))  # type: ignore[arg-type]
