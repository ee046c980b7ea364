"""DuoAttention: few heads need the whole context, the others sinks and recent tokens (Xiao et al., ICLR 2025, 2410.10819).

Which heads they are is measured once per model on synthetic passkeys by `scripts/calibrate_duo.py` and kept in
`kvcompress/calibrate/data/duoattention/`; the paper trains a gate per head instead (its section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from kvcompress.calibrate.duo import head_order
from kvcompress.method import Allocator, LayerView, Method, Observed, Schedule, Scorer, State, Tensor
from kvcompress.method.apportion import occupancy
from kvcompress.method.budget import MOST_TOKENS


@dataclass(frozen=True)
class StreamingScorer(Scorer):
    """The first `sinks` tokens and the last `window` rank before all others, those before them by recency.

    Where a head cannot hold all of them it keeps the outermost of both, in the proportion of `sinks` to `window`.
    """

    first: int = 128
    last: int = 256
    traceable: ClassVar[bool] = True

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        positions = view.positions
        back = view.real.to(positions.device)[:, None, None] - positions  # 1 for the newest token
        return -torch.where(positions < self.first, (positions + 1) / max(self.first, 1), back / max(self.last, 1))


@dataclass(frozen=True)
class HeadClasses(Allocator):
    """Retrieval heads keep their whole context, streaming heads `sinks + window` tokens: the budget says how many each.

    A row of n tokens with a mean of b < n per head, over N heads in all layers: every head first gets
    s = min(sinks + window, share x b) tokens (at least what the scorer protects, and 1), and what is left, N (b - s),
    makes the heads that rank highest whole, n - s each. The next in rank gets the remainder, so that the total is
    N x b exactly, for a budget in tokens and for a share alike. A row that fits its budget is not parted into classes.
    In decode a retrieval head goes on growing, beyond the budget; the others stay at what they got.

    What a streaming head keeps is the scorer's choice: sinks and recent tokens with DuoAttention's own, the best of
    their scores with another's. Tokens that an earlier chunk or turn evicted cannot come back when a later one makes
    their head a retrieval head, so such a prompt may hold less than its total.

    Attributes:
        sinks, window: first and most recent tokens of a streaming head.
        share: of the mean budget that a streaming head gets at most, so that a small budget has retrieval heads too.
        heads: "calibrated" takes the file that was made for the model; "random" a fixed random order, as a control;
            else the path of such a file.
        order: rank of every head, per full-attention layer, 0 the first to be a retrieval head. Filled in by `bind`.
    """

    name: ClassVar[str] = "duo"

    sinks: int = 128
    window: int = 256
    share: float = 0.5
    heads: str = "calibrated"
    order: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("sinks", "window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; at least 0")
        if self.sinks + self.window < 1:
            raise ValueError(f"sinks={self.sinks}, window={self.window}; a streaming head needs at least 1 token")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share={self.share}; a share in (0, 1]")

    def bind(self, model: Any) -> HeadClasses:
        """A copy that knows the model's heads.

        Raises:
            ValueError: no file for this model, or one of another; says how to make it.
        """
        return self if self.order is not None else replace(self, order=head_order(self.heads, model))

    def stat(self, view: LayerView, observed: Observed) -> Tensor:
        return view.real

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        assert self.order is not None, "bind() was not called"
        ranks = self.order[layers_seen - 1]
        heads = len(ranks) * n_layers
        protected = occupancy(scores[0])[1].amax(1)
        counts = []
        for cap, real, least in zip((total // heads).tolist(), stats[0].tolist(), protected.tolist(), strict=True):
            streaming, whole, rest = self.numbers(cap, real, heads, least)
            counts.append([real if r < whole else streaming + rest * (r == whole) for r in ranks])
        return [torch.tensor(counts)]

    def numbers(self, cap: int, real: int, heads: int, least: int = 0) -> tuple[int, int, int]:
        """Tokens of a streaming head, number of retrieval heads, and what the next head gets beside its streaming part.

        `cap` tokens per head on average, `real` in the row, `heads` in all layers; a head gets at least `least`.
        """
        streaming = min(self.sinks + self.window, math.floor(cap * self.share))
        streaming = min(max(streaming, least, 1), cap)
        if real <= cap:
            return cap, 0, 0
        whole, rest = divmod(heads * (cap - streaming), real - streaming)
        return streaming, whole, rest

    def limit(self, counts: Tensor, real: Tensor) -> Tensor:
        return counts.masked_fill(counts >= real[:, None], MOST_TOKENS)


@dataclass(frozen=True, kw_only=True)
class DuoAttention(Method):
    """Whole context for retrieval heads, sinks and recent tokens for streaming heads; at prompt end and in decode.

    The budget is the mean over all heads, and says how many are retrieval heads (see HeadClasses); the paper fixes
    their share (a quarter of the heads without, half of them with grouped queries) and lets the memory follow.
    Retrieval heads grow with every decoded token, beyond the budget. A whole prompt is attended to before anything is
    evicted, where the paper's streaming heads attend to sinks and recent tokens already in the prompt.

    Attributes:
        sinks, window: of streaming heads. 128 and 256 where the paper's gates are trained, and in kvpress, 64 and 256
            in the released evaluation scripts.
        share: of the mean budget that a streaming head gets at most.
        heads: "calibrated", "random" (a control) or the path of a file that `scripts/calibrate_duo.py` made.
        decode: streaming heads evict after every decoded token; otherwise decoded tokens are appended, as in kvpress.
    """

    family = "head budgets"
    keeps = "the whole context in retrieval heads, sinks and recent tokens in the others"
    needs_data = "head classes of the model"
    source = "arXiv 2410.10819; mit-han-lab/duo-attention"
    differences = (
        "heads are ranked by a calibration without training, where the paper trains gates; the budget says how "
        "many are retrieval heads; a prompt is attended to as a whole before streaming heads are cut; ties go to "
        "the first layer and head instead of random noise"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"sinks": 128, "window": 256, "decode": True},
        "code": {"sinks": 64, "window": 256, "decode": True},
        "kvpress": {"sinks": 128, "window": 256, "decode": False},
    }

    sinks: int | None = None
    window: int | None = None
    share: float = 0.5
    heads: str = "calibrated"
    decode: bool | None = None

    def check(self) -> None:
        self.make_allocator()

    def reserved(self) -> int:
        assert self.sinks is not None and self.window is not None
        return self.sinks + self.window

    def make_scorer(self) -> StreamingScorer:
        assert self.sinks is not None and self.window is not None
        return StreamingScorer(self.sinks, self.window)

    def make_allocator(self) -> Allocator:
        assert self.sinks is not None and self.window is not None
        return HeadClasses(self.sinks, self.window, self.share, self.heads)

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
