"""KeyDiff: keys that differ from the mean key are attended to (Park et al., 2025, arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from kvcompress.method import Chunked, LayerView, Method, Observed, OneShot, Prefill, Schedule, Scorer, State, Tensor


@dataclass(frozen=True)
class KeyDifferenceScorer(Scorer):
    """Minus the cosine of a key to the anchor: the mean of all held keys of its head, each scaled to length 1."""

    sinks: int = 0
    recent: int = 0
    traceable: ClassVar[bool] = True

    def window(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, self.recent)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        keys = view.keys.float().masked_fill((view.positions < 0)[..., None], 0.0)
        # written once: what would scale them to length 1 is put into sum and product
        scale = keys.norm(dim=-1, keepdim=True).clamp(min=1e-12).reciprocal()
        anchor = F.normalize(scale.transpose(2, 3) @ keys, dim=-1)
        return -(keys @ anchor.transpose(2, 3) * scale).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Method):
    """Keep the tokens whose keys point away from the mean key, per KV head (paper section 4).

    The paper reads a prompt in blocks and evicts after each, so that no more than budget plus block is ever held, and
    goes on in decode; the anchor is that of what is held at the time. With a share as budget each block is cut to its
    share of the tokens seen so far.

    Attributes:
        block: tokens per block of the prompt, 0 for the whole prompt at once. kvpress's press does that.
        decode: evict after every decoded token.
        sinks, window: first and last tokens that are always kept. The paper protects none: a new token may go at once.
    """

    family = "keys and values"
    keeps = "keys that point away from the mean key"
    reads = "keys"
    source = "arXiv 2504.15364; no official code, kvpress"
    differences = (
        "a share as budget cuts each block to its share of the tokens so far; cosines in float32, padding is no "
        "part of the mean"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"block": 128, "decode": True},
        "code": {"block": 128, "decode": True},
        "kvpress": {"block": 0, "decode": False},
    }

    block: int | None = None
    decode: bool | None = None
    sinks: int = 0
    window: int = 0

    def check(self) -> None:
        assert self.block is not None
        for name in ("block", "sinks", "window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; at least 0")

    def reserved(self) -> int:
        return self.sinks + self.window

    def make_scorer(self) -> KeyDifferenceScorer:
        return KeyDifferenceScorer(self.sinks, self.window)

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)

    def make_prefill(self) -> Prefill:
        return Chunked(self.block) if self.block else OneShot()
