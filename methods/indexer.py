"""Indexer: all heads of a layer read the same k tokens, as with DeepSeek Sparse Attention, chosen by exact scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvcompress.cache.pages import PagedReader, PageIndex, top_pages
from kvcompress.method import Method, ReadAll, Reader, State, Tensor
from kvcompress.method.budget import Budget, is_unlimited


@dataclass(frozen=True)
class IndexerReader(PagedReader):
    """The tokens that all query heads together attend to most: what DSA's indexer is trained to predict.

    Its scores are the attention itself, softmax per head over all that is held and summed over heads, so that it bounds
    from above what an indexer of any kind can choose. It holds nothing beside the cache: a step reads every key, and the
    values of the tokens that it chooses.

    Attributes:
        budget: tokens to read, a share of the row's prompt or a number.
    """

    name: ClassVar[str] = "indexer"
    across_heads: ClassVar[bool] = True
    bounded: ClassVar[bool] = False  # ranked by keys themselves
    page_size: ClassVar[int] = 1  # type: ignore[misc]  # a page is a token

    budget: Budget = 2048

    def __post_init__(self) -> None:
        self.check()

    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor:  # type: ignore[override]
        attention = torch.softmax(index.products(q) * index.scaling, dim=-1)
        exists = torch.arange(attention.shape[-1], device=q.device) < index.pages[:, :1, None]
        scores = torch.where(exists, attention.sum((1, 2))[:, None], float("-inf"))
        return top_pages(scores, self.count(index.real)).expand(-1, index.pages.shape[1], -1)


@dataclass(frozen=True, kw_only=True)
class Indexer(Method):
    """Keep every token; each decode step attends to the `budget` tokens that its layer's heads together need most.

    The upper bound of DeepSeek Sparse Attention on a model that was not trained for it: a trained indexer predicts the
    same sum over heads from a small vector per token (DeepSeek-V3.2-Exp, section 2.1, the target of its warm-up).
    """

    family = "reading"
    keeps = "everything; a step reads the tokens that a layer's heads together attend to most"
    source = "DeepSeek-V3.2-Exp report; deepseek-ai/DeepSeek-V3.2-Exp"
    differences = "exact attention in place of a trained indexer; prompts are dense"

    budget_kind: ClassVar[Literal["read_tokens"]] = "read_tokens"

    def make_reader(self) -> Reader:
        return ReadAll() if is_unlimited(self.budget) else IndexerReader(budget=self.budget)
