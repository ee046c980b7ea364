"""TOVA, token omission via attention (Oren et al., EMNLP 2024, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress.method import LayerView, Method, Needs, Observed, Schedule, Scorer, State, Tensor


@dataclass(frozen=True)
class LastQueryScorer(Scorer):
    """Attention of the last query, averaged over all heads of the layer: every head keeps the same tokens."""

    protect_last: bool = False
    traceable: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(window=1)

    def window(self, kept: Tensor) -> Tensor:
        return kept.clamp(max=1) if self.protect_last else kept * 0

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        attention, _ = observed.window(1)
        return attention[..., 0, :].mean(dim=(1, 2))[:, None].expand(view.positions.shape).contiguous()


@dataclass(frozen=True, kw_only=True)
class TOVA(Method):
    """Drop the token the current query attends to least, at prompt end and after every decoded token.

    Attributes:
        protect_last: always keep the newest token, as kvpress does; in the released code it competes.
        decode: evict after every decoded token.
    """

    family = "attention"
    keeps = "what the last query attends to, the same for all heads of a layer"
    source = "arXiv 2401.06104; schwartz-lab-NLP/TOVA"
    differences = "the one attention row is computed beside a fused kernel; rows of a batch are independent"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"protect_last": False, "decode": True},
        "code": {"protect_last": False, "decode": True},
        "kvpress": {"protect_last": True, "decode": False},
    }

    protect_last: bool | None = None
    decode: bool | None = None

    def reserved(self) -> int:
        return int(bool(self.protect_last))

    def make_scorer(self) -> LastQueryScorer:
        return LastQueryScorer(bool(self.protect_last))

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
