"""Ada-KV: heads whose attention is spread out get more of a layer's budget (Feng et al., 2024, arXiv 2407.11550)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import Allocator, Tensor
from kvcompress.method.apportion import evenly, largest_remainder, occupancy
from kvcompress.methods.snapkv import SnapKV


@dataclass(frozen=True)
class Ada(Allocator):
    """The best scores of all heads of a layer, pooled, say how many tokens each head gets; a floor protects every head.

    Layers get equal totals; what a head protects comes first and the rest is handed out.

    Attributes:
        alpha: share of a head's even part that it has for sure. 1 is the same for every head.
        safeguard: "mix" takes alpha of the even part and 1 - alpha of what the pooled scores give, as the paper does;
            "first" gives each head its own best alpha (protected ones included) and the rest to the best of what is
            left, as kvpress does.
        rounding: "exact" adds up (largest remainder); "nearest" rounds each head by itself, as the released code does,
            and is off by up to half a token per head.
        normalise: weigh a head's scores by the share of them that its best ones hold.
    """

    alpha: float = 0.2
    safeguard: str = "mix"
    rounding: str = "exact"
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha={self.alpha}; a share in [0, 1]")
        if self.safeguard not in ("mix", "first"):
            raise ValueError(f"safeguard={self.safeguard!r}; valid: mix, first")
        if self.rounding not in ("exact", "nearest"):
            raise ValueError(f"rounding={self.rounding!r}; valid: exact, nearest")

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        held, protected = occupancy(scores[0])
        totals = total // n_layers
        heads = held.shape[1]
        free = (totals - protected.sum(1)).clamp(min=0)
        floor = (totals // heads * self.alpha).long()[:, None] - protected if self.safeguard == "first" else 0 * held
        hits = self._hits(scores[0], free, floor.clamp(min=0))
        counts = [
            self._row(*row)
            for row in zip(
                hits.tolist(), held.tolist(), protected.tolist(), totals.tolist(), free.tolist(), strict=True
            )
        ]
        return [torch.tensor(counts)]

    def _hits(self, scores: Tensor, free: Tensor, floor: Tensor) -> Tensor:
        """How many of a row's best `free [B]` scores each head has, its own best `floor [B, H]` counted as the best."""
        batch, heads, slots = scores.shape
        candidate = scores.isfinite()
        ranked = scores.masked_fill(~candidate, float("-inf"))
        if self.normalise or bool(floor.any()):
            best = ranked.sort(dim=-1, descending=True, stable=True)
            rank = torch.arange(slots, device=scores.device)
            if self.normalise:
                mass = best.values.clamp(min=0.0)
                own = (free // heads).to(scores.device)[:, None, None]
                ratio = mass.masked_fill(rank >= own, 0.0).sum(-1) / mass.sum(-1).clamp(min=1e-12)
                ranked = torch.where(candidate, ranked * ratio[..., None], ranked)
            sure = torch.zeros_like(candidate).scatter_(2, best.indices, rank < floor.to(scores.device)[..., None])
            ranked = ranked.masked_fill(sure & candidate, float("inf"))
        order = ranked.flatten(1).sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.arange(heads * slots, device=scores.device) < free.to(scores.device)[:, None]
        marked = torch.zeros_like(chosen).scatter_(1, order, chosen).view(batch, heads, slots)
        return (marked & candidate).sum(-1).cpu()

    def _row(self, hits: list[int], held: list[int], protected: list[int], total: int, free: int) -> list[int]:
        """Tokens of each head of one row."""
        heads = len(held)
        if total >= sum(held):  # everything stays, with room to grow
            return [n + more for n, more in zip(held, evenly(total - sum(held), heads), strict=True)]
        even = free / heads
        shares = [float(n) for n in hits]
        if self.safeguard == "mix":
            shares = [n * (1 - self.alpha) + even * self.alpha for n in hits]
        least = [0 if p else 1 for p in protected]  # no head is emptied
        room = [n - p for n, p in zip(held, protected, strict=True)]
        if self.rounding == "nearest":
            floor = int(even * self.alpha)
            counts = [
                min(max(round(n * (1 - self.alpha) + floor), low), most)
                for n, low, most in zip(hits, least, room, strict=True)
            ]
        else:
            counts = largest_remainder(shares, least, room, free)
        return [n + p for n, p in zip(counts, protected, strict=True)]


@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """SnapKV with budgets per head within a layer (paper section 4), at prompt end. What is evicted is freed.

    Attributes:
        alpha: share of the even part that every head keeps: 0.2 in the paper and kvpress, 0.5 by default in the code.
        safeguard: how alpha enters: "mix" (paper, code) or "first" (kvpress).
        rounding: "exact" totals per layer, or "nearest" per head as in the code.
        normalise: weigh heads by how concentrated their scores are (an option in a later port).
        window, kernel, pooling, reduce_first: of the scores, as in SnapKV; 32, 7 and "max" in paper and code.
    """

    family = "head budgets"
    keeps = "SnapKV's choice; heads of a layer share its budget by their scores"
    source = "arXiv 2407.11550; FFY0/AdaKV"
    differences = (
        "totals per layer are exact (largest remainder) unless rounding=nearest; one budget per KV head; evicted "
        "tokens are freed in every head"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 32, "kernel": 7, "pooling": "max", "reduce_first": True}
        | {"alpha": 0.2, "safeguard": "mix", "rounding": "exact"},
        "code": {"window": 32, "kernel": 7, "pooling": "max", "reduce_first": True}
        | {"alpha": 0.5, "safeguard": "mix", "rounding": "nearest"},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": False}
        | {"alpha": 0.2, "safeguard": "first", "rounding": "exact"},
    }

    alpha: float | None = None
    safeguard: str | None = None
    rounding: str | None = None
    normalise: bool = False

    def make_allocator(self) -> Allocator:
        assert self.alpha is not None and self.safeguard is not None and self.rounding is not None
        return Ada(self.alpha, self.safeguard, self.rounding, self.normalise)
