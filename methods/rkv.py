"""R-KV: keep what is attended to and not said again (Cai et al., NeurIPS 2025, arXiv 2505.24133).

Made for long outputs: chains of thought repeat themselves, and repeated sentences attend to each other, so attention
alone takes them for important. Positions here are always in order; the released code stores what it kept in order of
score, and from its second compression on pools over neighbours, and finds the last copy, in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import LayerView, Method, Needs, Observed, Schedule, State, Tensor, reduce_group
from kvcompress.methods.snapkv import WindowScorer

BLOCK_ELEMENTS = 1 << 22  # similarities held at once, all rows and heads together: 16 MiB


def redundancy(keys: Tensor, held: Tensor, threshold: float, duplicates: str) -> Tensor:
    """How much each key is like the others of its head: softmax over held slots of the mean cosine `[B, H, P]`.

    Every token overlooks one near-duplicate of it (cosine above `threshold`): the newest, so that one copy survives.

    Args:
        keys: `[B, H, P, D]`, slots in positional order; held: bool `[B, H, P]`, what lies elsewhere is ignored.
        duplicates: "newest" overlooks it where it is newer than the token itself, so that of two copies the later one
            looks unlike any other. "published" overlooks it wherever it is (of exactly two copies, both are overlooked)
            and the first slot where there is none, as the released code does.
    """
    unit = keys.float().masked_fill(~held[..., None], 0.0)  # empty slots hold garbage
    unit = unit / (unit.norm(dim=-1, keepdim=True) + 1e-8)
    batch, heads, slots, _ = keys.shape
    total = torch.zeros(batch, heads, slots, device=keys.device)
    first = held.to(torch.uint8).argmax(-1, keepdim=True)
    numbers = torch.arange(slots, device=keys.device)
    size = max(1, BLOCK_ELEMENTS // (batch * heads * slots))
    for start in range(0, slots, size):
        rows = numbers[start : start + size]
        similar = unit[:, :, start : start + size] @ unit.transpose(2, 3)  # [B, H, block, P]
        similar[:, :, rows - start, rows] = 0.0
        alike = similar > threshold
        newest = slots - 1 - alike.flip(-1).to(torch.uint8).argmax(-1)  # the last slot where there is none
        found = alike.any(-1)
        if duplicates == "published":
            newest, found = torch.where(found, newest, first), torch.ones_like(found)
        else:
            found &= newest > rows
        overlooked = similar.gather(3, newest[..., None]).masked_fill(found[..., None], 0.0)
        total += similar.scatter_(3, newest[..., None], overlooked).sum(2)
    mean = total / held.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~held, float("-inf")).softmax(-1)


@dataclass(frozen=True)
class RedundancyScorer(WindowScorer):
    """`lam` x importance - (1 - `lam`) x redundancy, both in float32; the window is protected.

    Importance: logits of a KV head's query heads reduced to one, softmax over the prefix, mean over the window's
    queries, max-pooled over neighbours.
    """

    lam: float = 0.1
    threshold: float = 0.5
    duplicates: str = "newest"

    @property
    def needs(self) -> Needs:
        return Needs(window=max(self.size, 2))  # logits of the current query alone are not kept

    def votes(self, view: LayerView, observed: Observed) -> Tensor:
        logits, valid = observed.logits(self.size)
        logits = reduce_group(logits, self.group_reduce)
        attention = logits.masked_fill(~self.prefix(view)[:, :, None], float("-inf")).softmax(-1)
        attention = attention.nan_to_num(0.0) * valid[:, None, :, None]  # a query may see no prefix token at all
        return (attention.sum(2) / valid.sum(1).clamp(min=1)[:, None, None])[:, :, None]

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        if self.lam == 1:
            return super().score(view, observed, state)
        scores = (self.lam - 1) * redundancy(view.keys, view.positions >= 0, self.threshold, self.duplicates)
        if self.lam:
            scores = scores + self.lam * super().score(view, observed, state)
        return scores


@dataclass(frozen=True, kw_only=True)
class RKV(Method):
    """Keep what the last `window` queries attend to and what is not repeated later, at prompt end and in decode.

    A prompt longer than the budget is compressed when it ends, then a row whenever it holds budget + `interval`
    tokens. `schedule=Schedule(newline=True, until="</think>", …)` compresses at line breaks instead, and stops after
    the thinking part, as the released code can.

    Attributes:
        lam: weight of importance beside redundancy: 0.1 in the paper, 0.07 in the code. 1 is attention alone.
        window: last tokens, which observe and are always kept (paper and code: 8).
        interval: tokens between two compressions in decode (128).
        threshold: cosine above which two keys are near-duplicates (0.5 in the code; the paper names no value).
        kernel: of the max-pooling over positions (7).
        group_reduce: how the logits of a KV head's query heads become one, before the softmax: "max" or "mean".
        duplicates: of near-duplicates, which each token overlooks: see `redundancy`.
        window_inside: the window is part of the budget, as in the code and every method here; else it is added to it,
            as the paper counts.
        align: "row" counts from what a row holds; "total" fires at multiples of its total length, as the code does (one
            token after each of them, and counting on from one sample to the next).
    """

    family = "attention"
    keeps = "what the last 8 queries attend to and no newer token repeats, and these"
    source = "arXiv 2505.24133; Zefan-Cai/R-KV"
    differences = (
        "works for batches, each row on its own count; kept tokens stay in order of position; of two exact copies the "
        "later one stays (preset `code`: as released); similarity in blocks and scores in float32"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"lam": 0.1, "duplicates": "newest", "align": "row"},
        "code": {"lam": 0.07, "duplicates": "published", "align": "total"},
    }

    lam: float | None = None
    window: int = 8
    interval: int = 128
    threshold: float = 0.5
    kernel: int = 7
    group_reduce: str = "max"
    duplicates: str | None = None
    window_inside: bool = True
    align: str | None = None

    def check(self) -> None:
        assert self.lam is not None
        if not 0.0 <= self.lam <= 1.0:
            raise ValueError(f"lam={self.lam}; a weight in [0, 1]")
        if self.window < 1:
            raise ValueError(f"window={self.window}; at least 1 query must observe")
        if self.interval < 1:
            raise ValueError(f"interval={self.interval}; at least 1 token lies between two compressions")
        if not 0.0 <= self.threshold < 1.0:
            raise ValueError(f"threshold={self.threshold}; a cosine in [0, 1)")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}; an odd number, 1 for no pooling")
        if self.duplicates not in ("newest", "published"):
            raise ValueError(f"duplicates={self.duplicates!r}; valid: newest, published")
        reduce_group(torch.zeros(1, 1, 1), self.group_reduce)  # type: ignore[arg-type]

    def reserved(self) -> int:
        return self.window if self.window_inside else 0

    def cap(self, real: Tensor) -> Tensor | None:
        kept = super().cap(real)
        return kept if kept is None or self.window_inside else kept + self.window

    def make_scorer(self) -> RedundancyScorer:
        assert self.lam is not None and self.duplicates is not None
        return RedundancyScorer(
            size=self.window,
            kernel=self.kernel,
            pooling="max",
            group_reduce=self.group_reduce,  # type: ignore[arg-type]
            lam=self.lam,
            threshold=self.threshold,
            duplicates=self.duplicates,
        )

    def make_schedule(self) -> Schedule:
        assert self.align is not None
        return Schedule(every=self.interval, align=self.align)  # type: ignore[arg-type]
