"""ShadowKV: keys of low rank on the device, values on the host, chunks chosen by landmarks (Sun et al., ICML 2025)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from kvcompress.cache.pages import PagedReader, PageIndex, top_pages
from kvcompress.method import Method, ReadAll, Reader, State, Tensor
from kvcompress.method.budget import Budget, is_unlimited
from kvcompress.models import compat


@dataclass(frozen=True)
class ShadowReader(PagedReader):
    """The chunks whose mean key the query attends to most, beside the last ones and those a mean says least of.

    Section 4 of the paper, chunks being pages. A chunk's landmark is the mean of its rotated keys. `outliers` chunks,
    those in which some key points furthest from the landmark, and the last `local` full ones stay on the device as they
    are, as does what is decoded. Of the others keys are made from factors of rank `rank` and values are fetched.

    Attributes:
        budget: tokens to choose per step, a share of the row's prompt or a number, in whole chunks; those that stay on
            the device are read beside them, as in the paper.
        page_size: tokens to a chunk.
        rank: numbers per token that stand for the keys of all its heads.
        outliers, local: chunks.
        heads: KV heads of the model; `bind` fills it in.
    """

    name: ClassVar[str] = "shadowkv"
    offloads: ClassVar[bool] = True
    across_heads: ClassVar[bool] = True
    bounded: ClassVar[bool] = False

    budget: Budget = 2048
    page_size: int = 8
    rank: int = 160
    outliers: int = 48
    local: int = 4
    heads: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check()
        if self.page_size < 2:
            raise ValueError(
                "page_size=1 makes each key its own landmark; a chunk has at least 2 tokens (the paper: 8)"
            )
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} holds nothing of a key; at least 1 (the paper: 160)")
        if self.outliers < 0 or self.local < 0:
            raise ValueError(f"outliers={self.outliers}, local={self.local}: numbers of chunks, at least 0")

    def bind(self, model: Any) -> ShadowReader:
        return replace(self, heads=compat.kv_heads(model))

    def offloaded(self, layer: int) -> tuple[int, ...]:
        return tuple(range(self.heads))

    def begin(self, keys: Tensor, counts: Tensor, state: State) -> Tensor:
        most, device = int(counts.max()) // self.page_size, keys.device
        chunks = keys[:, :, : most * self.page_size].unflatten(2, (most, self.page_size)).float()
        landmarks = chunks.mean(3)
        state["summaries"] = landmarks.to(keys.dtype)
        first = (counts // self.page_size - self.local).clamp(min=0).to(device)  # of those that stay whatever they are
        closest = torch.nn.functional.cosine_similarity(chunks, landmarks[:, :, :, None], dim=-1).amin(3)
        there = torch.arange(most, device=device) < first[..., None]
        wanted = torch.full((len(keys),), self.outliers)
        state["outliers"] = top_pages((-closest).masked_fill(~there, float("-inf")), wanted)
        state["local"] = first
        last = first[..., None] + torch.arange(self.local, device=device)
        last = last.masked_fill(last >= (counts // self.page_size).to(device)[..., None], -1)
        return torch.cat([state["outliers"], last], dim=2)  # the others are rebuilt from the first step on

    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor:  # type: ignore[override]
        landmarks, outliers, first = (state[f"{name}"] for name in ("summaries", "outliers", "local"))
        batch, kv = index.pages.shape
        logits = q.view(batch, kv, -1, q.shape[-1]).float() @ landmarks.float().mT * index.scaling
        free = torch.arange(landmarks.shape[2], device=q.device) < first[..., None]
        taken = torch.zeros(*free.shape[:2], free.shape[2] + 1, dtype=torch.bool, device=q.device)
        free &= ~taken.scatter(2, outliers % (free.shape[2] + 1), True)[..., :-1]  # -1 falls on the last, which is cut
        logits = logits.masked_fill(~free[:, :, None], float("-inf"))
        scores = torch.softmax(logits, -1).amax(2).masked_fill(~free, float("-inf"))
        last = first[..., None] + torch.arange(int((index.pages - first).max()), device=q.device)
        stay = torch.cat([outliers, last.masked_fill(last >= index.pages[..., None], -1)], dim=2)
        picked = top_pages(scores, self.count(index.real))
        if "picked" in state and bool((index.step < 0).any()):  # a row that has ended fetches nothing
            before, n = state["picked"], max(picked.shape[2], state["picked"].shape[2])  # rows may have gone since
            before, picked = (torch.nn.functional.pad(x, (0, n - x.shape[2]), value=-1) for x in (before, picked))
            picked = torch.where((index.step < 0).to(q.device)[:, None, None], before, picked)
        state["picked"] = picked
        state["chosen"] = torch.cat([stay, picked], dim=2)
        return state["chosen"]

    def hold(self, index: PageIndex, state: State) -> Tensor | None:
        return state["chosen"]  # what the next step chooses as well is not fetched again


@dataclass(frozen=True, kw_only=True)
class ShadowKV(Method):
    """Keep every token: keys as factors on the device, values on the host; a step fetches the values it attends to.

    When a layer goes into pages, at the first decode step, keys before rotation of all heads together are projected on
    the `rank` directions that this sequence's own use most; chunks are read from these factors from that step on.
    `budget` counts the tokens a step chooses. Prompts attend to everything; later ones, and questions, to the keys that
    the factors give. Refused beside evictions per head.

    On a model whose heads have fewer numbers together than `rank` nothing is lost, nor saved, on keys.
    """

    family = "reading"
    keeps = "everything, keys of low rank and values on the host; a step reads chunks whose mean key it attends to"
    source = "arXiv 2410.21465; bytedance/ShadowKV"
    differences = "the model's own scaling, not 1/sqrt(128); a later prompt is factored again; an appended question too"

    budget_kind: ClassVar[Literal["read_tokens"]] = "read_tokens"

    page_size: int = 8
    rank: int = 160
    outliers: int = 48
    local: int = 4

    def make_reader(self) -> Reader:
        if is_unlimited(self.budget):
            return ReadAll()
        return ShadowReader(
            budget=self.budget, page_size=self.page_size, rank=self.rank, outliers=self.outliers, local=self.local
        )
