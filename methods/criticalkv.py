"""CriticalKV: what eviction does to the attention's output (Feng et al., ICML 2026, arXiv 2502.03805)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress.method import GroupReduce, LayerView, Needs, Observed, Scorer, Tensor, reduce_group
from kvcompress.method.scorers import ScorerOver
from kvcompress.methods.h2o import H2O
from kvcompress.methods.snapkv import SnapKV
from kvcompress.methods.tova import TOVA


@dataclass(frozen=True)
class PerturbationScorer(ScorerOver):
    """Another scorer's best tokens, then those whose loss would move the output most: its score times |W_o v|.

    The score should be attention, which is never negative. |.| is the L1 norm of the value after the output
    projection, per query head. Allocators see the other scorer's scores, so each head has its two stages within
    its own number of tokens.

    Attributes:
        first_share: share of the tokens kept that the other scorer picks.
        protected_first: protected tokens count as picked by it.
        epsilon: added to a score before it is multiplied.
        group_reduce: how the norms of a KV head's query heads are combined.
    """

    first_share: float = 0.5
    protected_first: bool = False
    epsilon: float = 1e-4
    group_reduce: GroupReduce = "mean"

    @property
    def needs(self) -> Needs:
        return self.base.needs | Needs(output=True)

    def second(self, scores: Tensor, view: LayerView, observed: Observed) -> Tensor:
        norms = reduce_group(observed.output_norms, self.group_reduce)
        return (scores + self.epsilon).mul(norms).where(scores.isfinite(), scores)


@dataclass(frozen=True, kw_only=True)
class CriticalKV(SnapKV):
    """Half of the budget by attention, half by attention times the projected value's norm (paper section 4).

    At prompt end. With `allocator=Ada()` it is the paper's CriticalAdaKV.

    Attributes:
        base: whose scores the attention is: "snapkv" with the fields below, or "h2o" or "tova" with their defaults.
        first_share: share of the budget that goes by attention alone (all sources: 0.5).
        protected_first: the window counts as part of it, as in the released code and kvpress; in the paper's
            algorithm all that is handed out competes.
        epsilon: added to the attention, as the mean over the window's queries, before it is multiplied.
        group_reduce: of attention and norms.
        window, kernel, pooling, reduce_first: as in SnapKV; 32, 5 and "avg" in the released code.
    """

    family = "attention"
    keeps = "half by the last queries' attention, half by attention times the projected value's norm"
    source = "arXiv 2502.03805; FFY0/DefensiveKV"
    differences = "one set per KV head; any scorer can stand first (`base`), any allocator beside it"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 32, "kernel": 5, "pooling": "avg", "reduce_first": True, "protected_first": False},
        "code": {"window": 32, "kernel": 5, "pooling": "avg", "reduce_first": False, "protected_first": True},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": False, "protected_first": True},
    }

    base: str = "snapkv"
    first_share: float = 0.5
    protected_first: bool | None = None
    epsilon: float = 1e-4

    def check(self) -> None:
        super().check()
        if self.base not in ("snapkv", "h2o", "tova"):
            raise ValueError(f"base={self.base!r}; valid: snapkv, h2o, tova")
        if not 0.0 <= self.first_share <= 1.0:
            raise ValueError(f"first_share={self.first_share}; a share in [0, 1]")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon={self.epsilon}; at least 0")

    def reserved(self) -> int:
        return super().reserved() if self.base == "snapkv" else 0

    def make_scorer(self) -> PerturbationScorer:  # type: ignore[override]
        assert self.window is not None
        base: Scorer
        epsilon = self.epsilon
        if self.base == "snapkv":  # whose scores are sums over the window
            base, epsilon = super().make_scorer(), epsilon * self.window
        else:
            base = {"h2o": H2O, "tova": TOVA}[self.base](budget=self.budget).make_scorer()  # type: ignore[assignment]
        return PerturbationScorer(base, self.first_share, bool(self.protected_first), epsilon, self.group_reduce)  # type: ignore[arg-type]
