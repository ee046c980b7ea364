"""CacheBlend: reuse the keys and values of chunks, recompute those that differ most (Yao et al., EuroSys 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from kvcompress.method import Method, Prefill, Tensor
from kvcompress.reuse import chunk_loader, selective_recompute
from kvcompress.reuse.kv_store import KVStore, store_of

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"ratio": 0.15, "deviation": "kv", "selection": "gradual", "mix": False},
    "code": {"ratio": 0.16, "deviation": "v", "selection": "oneshot", "mix": False},
    "lmcache": {"ratio": 0.15, "deviation": "k", "selection": "oneshot", "mix": True},
}
START = 4 / 3  # times the ratio: gradual filtering starts "slightly" above it, and the paper gives no number


@dataclass(frozen=True)
class Blended(Prefill):
    """Chunks prefilled alone are put side by side, and the tokens whose keys and values deviate most computed anew.

    Every layer up to the check layer is computed for all tokens. There the computed rows are compared with the reused
    ones, and `ratio` of the context tokens go on; the question always does. At ratio 0 all of the context is reused in
    the layers behind, at 1 the result is a full prefill. A method that evicts by its last queries sees the last ones
    that were computed.

    Attributes:
        ratio: share of the context tokens that are recomputed behind the check layer, averaged over the layers.
        check_layer: from 1; keys and values of layer 0 follow from the token alone, so that nothing deviates there.
        deviation: squared distance of values ("v"), keys ("k") or both ("kv"), summed over KV heads.
        selection: "oneshot" selects once, at the check layer; "gradual" selects a few more there and, in each layer
            behind it, fewer of those that it recomputed (paper, section 4.3).
        start: ratio that gradual filtering begins with, at most twice `ratio`: the last layer ends as far below `ratio`
            as the first is above. None: 4/3 of `ratio`.
        mix: the check layer holds the reused rows of unselected tokens, as LMCache does, instead of the computed ones.
        preset: the paper's, the released code's or LMCache's settings for what is None.
    """

    name: ClassVar[str] = "cacheblend"
    needs_segments: ClassVar[bool] = True
    all_queries: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = ("ratio",)

    ratio: float | None = None
    check_layer: int = 1
    deviation: str | None = None
    selection: str | None = None
    start: float | None = None
    mix: bool | None = None
    preset: str = "paper"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"prefill cacheblend has no preset {self.preset!r}; valid: {', '.join(PRESETS)}")
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        assert self.ratio is not None
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}; a share of the context from 0 (reuse all) to 1 (recompute all)")
        if self.check_layer < 1:
            raise ValueError(
                f"check_layer={self.check_layer}; at least 1: keys and values of layer 0 depend on no other token, so "
                "that nothing deviates there"
            )
        if self.deviation not in ("v", "k", "kv"):
            raise ValueError(f"deviation={self.deviation!r}; valid: v, k, kv")
        if self.selection not in ("oneshot", "gradual"):
            raise ValueError(f"selection={self.selection!r}; valid: oneshot, gradual")
        if self.start is not None and not self.ratio <= self.start <= min(1.0, 2 * self.ratio):
            raise ValueError(
                f"start={self.start}; from ratio={self.ratio} to {min(1.0, 2 * self.ratio):g}, twice that and at most 1, "
                "or None"
            )

    def run(self, session, segments, mask):
        return selective_recompute.prefill(session, segments, mask, self)  # type: ignore[arg-type]  # set by the preset

    def open_store(self, model: Any) -> KVStore:
        return store_of(model, "chunks")

    def precompute(self, session, segments):
        return chunk_loader.precompute(session, segments[:-1])[1]

    def distance(self, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> Tensor:
        """Squared distance of computed from reused rows, `[1, H_kv, n, D]` each, summed over heads: float32 `[n]`."""
        sides = {"k": [keys], "v": [values], "kv": [keys, values]}[str(self.deviation)]
        return torch.stack([(a.float() - b.float()).square().sum((0, 1, 3)) for a, b in sides]).sum(0)

    def selected(self, layer: int, n_layers: int, context: int) -> int:
        """How many of the context tokens the layer after `layer` computes; `n_layers - 1` computes what the one before did.

        A linear schedule whose mean over the layers behind the check layer is `ratio`.
        """
        assert self.ratio is not None
        steps = n_layers - 2 - self.check_layer
        if self.selection == "oneshot" or steps < 1:
            return int(context * self.ratio)
        start = min(1.0, START * self.ratio) if self.start is None else self.start
        end = 2 * self.ratio - start
        return int(context * (start + (end - start) * min(1.0, (layer - self.check_layer) / steps)))


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Method):
    """Nothing is dropped: the prompt's keys and values come from those of its segments, prefilled alone (`Blended`).

    `session.prefill([prefix or first chunk, chunk, …, question])`; the last segment is the question. With a method that
    evicts: `SnapKV(budget=0.5, prefill=Blended())`, `prefill=cacheblend` on the command line. `budget` has no effect.

    Attributes:
        ratio, check_layer, deviation, selection, start, mix: as of `Blended`.
    """

    family = "reuse"
    keeps = "everything; chunks of the prompt are reused, and the tokens that deviate most recomputed"
    source = "arXiv 2405.16444; YaoJiayi/CacheBlend"
    differences = (
        "a recomputed query sees exactly the tokens up to its own position (the released code and LMCache let it see "
        "later ones); the whole question is recomputed; gradual filtering, which neither code has"
    )

    said: ClassVar[tuple[str, ...]] = ("ratio",)
    budget_kind: ClassVar[Literal["none"]] = "none"
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    ratio: float | None = None
    check_layer: int = 1
    deviation: str | None = None
    selection: str | None = None
    start: float | None = None
    mix: bool | None = None

    def make_prefill(self) -> Blended:
        return Blended(self.ratio, self.check_layer, self.deviation, self.selection, self.start, self.mix, self.preset)
