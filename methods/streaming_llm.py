"""StreamingLLM: attention sinks and the most recent tokens (Xiao et al., ICLR 2024, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress.method import LayerView, Method, Observed, Schedule, Scorer, State, Tensor


@dataclass(frozen=True)
class RecencyScorer(Scorer):
    """A token's score is its position: the most recent are kept, beside the sinks."""

    sinks: int = 4
    traceable: ClassVar[bool] = True

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Keep the first `sinks` tokens and the most recent ones, at prompt end and after every decoded token.

    Attributes:
        sinks: first tokens that are always kept (paper: 4).
        positions: "compact" re-rotates what is kept to positions 0, 1, … as the paper and its code do; "original"
            keeps each token's own position, as kvpress does. Only compact goes beyond the model's trained length.
        decode: evict after every decoded token; otherwise decoded tokens are appended beyond the budget.
    """

    family = "recency"
    keeps = "the first 4 tokens and the most recent ones"
    source = "arXiv 2309.17453; mit-han-lab/streaming-llm"
    differences = (
        "a long prompt is attended to as a whole before its middle is evicted, not token by token; the budget counts "
        "sinks and recent tokens together"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"positions": "compact", "decode": True},
        "code": {"positions": "compact", "decode": True},
        "kvpress": {"positions": "original", "decode": False},
    }

    sinks: int = 4
    positions: str | None = None
    decode: bool | None = None

    def check(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}; at least 0")
        if self.positions not in ("original", "compact"):
            raise ValueError(f"positions={self.positions!r}; valid: original, compact")

    def reserved(self) -> int:
        return self.sinks

    @property
    def compact_positions(self) -> bool:
        return self.positions == "compact"

    def make_scorer(self) -> RecencyScorer:
        return RecencyScorer(self.sinks)

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
