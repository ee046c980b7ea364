"""ChunkKV: neighbouring tokens stay or go together (Liu et al., NeurIPS 2025, arXiv 2502.00299)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import LayerView, Observed, State, Tensor
from kvcompress.method.scorers import ScorerOver
from kvcompress.methods.snapkv import SnapKV


@dataclass(frozen=True)
class ChunkScorer(ScorerOver):
    """Every token scores what its chunk does: the sum or mean of another scorer's scores over the chunk's held tokens.

    Chunks begin at multiples of `size` in the sequence, whatever has been evicted. As equal scores go by position, the
    best chunks stay whole and one is cut, so that the budget is met exactly.

    Attributes:
        combine: "sum", by which a chunk that is only partly held or judged is worth less, or "mean".
        together: all KV heads of a layer keep the same chunks, by the sum of their scores.
        reuse: only every `reuse`-th layer decides; those after it keep the same tokens (paper section 3.3).
    """

    size: int = 10
    combine: str = "sum"
    together: bool = False
    reuse: int = 1

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        leading = view.leader(self.reuse)
        if leading is not None:
            return member(view.positions, leading).float()
        scores = self.base.score(view, observed, state)
        counted = (view.positions >= 0) & scores.isfinite()
        chunk = view.positions.clamp(min=0).long() // self.size
        number = int(chunk.max()) + 1 if chunk.numel() else 1
        sums = scores.new_zeros((*scores.shape[:2], number)).scatter_add_(2, chunk, scores.masked_fill(~counted, 0.0))
        sizes = torch.zeros_like(sums).scatter_add_(2, chunk, counted.float())
        if self.together:
            sums, sizes = (x.sum(1, keepdim=True).expand_as(sums) for x in (sums, sizes))
        if self.combine == "mean":
            sums = sums / sizes.clamp(min=1)
        return sums.gather(2, chunk).masked_fill(~counted, float("-inf"))


def member(positions: Tensor, kept: Tensor) -> Tensor:
    """Which of `positions [B, H, P]` are among `kept [B, H, K]`, both -1 where empty; bool `[B, H, P]`."""
    last = int(torch.maximum(positions.max(), kept.max())) + 1
    table = torch.zeros((*positions.shape[:2], last + 1), dtype=torch.bool, device=positions.device)
    table.scatter_(2, kept.long() + 1, True)
    return table.gather(2, positions.long() + 1) & (positions >= 0)


@dataclass(frozen=True, kw_only=True)
class ChunkKV(SnapKV):
    """Keep whole chunks of the prefix, those the last `window` prompt queries attend to most, and the window.

    At prompt end (paper section 3.2). The paper's algorithm is written for one head; here each KV head chooses. Where
    the budget is no whole number of chunks, the next best chunk is kept in part, its first tokens: paper and kvpress
    round down to whole chunks, and kvpress so misses its budget.

    Attributes:
        size: tokens per chunk: 10 in the paper, 20 in kvpress. 1 is SnapKV without pooling.
        combine, together: how a chunk's score is made: see `ChunkScorer`. kvpress takes means, and one choice for all
            heads of a layer.
        reuse: full-attention layers that share one choice, 1 for none. The paper reports 2 and more.
        window, kernel, pooling, group_reduce, reduce_first: of the tokens' scores, as in SnapKV. The paper's algorithm
            does not pool and leaves the window open: 32 is SnapKV's. kvpress takes any scorer; its SnapKV stands here.
    """

    family = "attention"
    keeps = "whole chunks of 10 tokens that the last queries attend to, and these queries"
    source = "arXiv 2502.00299; kvpress"
    differences = (
        "the budget is filled to the token, with a part of the next chunk; one choice per KV head; chunks lie at "
        "multiples of the original positions; a chunk that reaches into the window is scored by its tokens before it "
        "(kvpress counts the window's as the highest score there is)"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 32, "kernel": 1, "pooling": "avg", "reduce_first": True}
        | {"size": 10, "combine": "sum", "together": False},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": False}
        | {"size": 20, "combine": "mean", "together": True},
    }

    size: int | None = None
    combine: str | None = None
    together: bool | None = None
    reuse: int = 1

    def check(self) -> None:
        super().check()
        assert self.size is not None
        if self.size < 1:
            raise ValueError(f"size={self.size}; a chunk has at least 1 token")
        if self.combine not in ("sum", "mean"):
            raise ValueError(f"combine={self.combine!r}; valid: sum, mean")
        if self.reuse < 1:
            raise ValueError(f"reuse={self.reuse}; at least 1 layer, which is no reuse")
        if self.reuse > 1 and self.allocator is not None and not self.allocator.uniform:
            raise ValueError(f"reuse={self.reuse} needs equal numbers in every layer and head: use allocator=uniform")

    def make_scorer(self) -> ChunkScorer:  # type: ignore[override]
        assert self.size is not None and self.combine is not None
        return ChunkScorer(super().make_scorer(), self.size, self.combine, bool(self.together), self.reuse)
