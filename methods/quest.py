"""Quest: keep everything, read the pages that may matter to this query (Tang et al., ICML 2024, arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from kvcompress.cache.pages import PagedReader, PageIndex, top_pages
from kvcompress.method import Method, ReadAll, Reader, State, Tensor, reduce_group
from kvcompress.method.budget import Budget, is_unlimited

PAGE = 16
GroupChoice = Literal["none", "max", "mean"]


@dataclass(frozen=True)
class QuestReader(PagedReader):
    """The pages whose bound on q·k is highest, chosen anew at every step (section 3.2).

    Attributes:
        budget: tokens to read, a share of the row's prompt or a number; in whole pages, rounded down.
        page_size: tokens to a page.
        group_reduce: "none" chooses per query head, as the released code does for models without groups; "max" and
            "mean" choose once per KV head, by its query heads' bounds.
        skip_layers: first layers whose queries attend to everything.
        min_pages: pages that are read whatever the budget.
        force_last: the newest page is always among them. The released code leaves it to its bound.
        bound_width: 1 ranks by the upper bound, as the paper; 0 by the middle of the bounds; between them by both.
    """

    name: ClassVar[str] = "quest"

    budget: Budget = 1024
    page_size: int = PAGE
    group_reduce: GroupChoice = "none"
    skip_layers: int = 2
    min_pages: int = 3
    force_last: bool = True
    bound_width: float = 1.0

    def __post_init__(self) -> None:
        self.check()
        if self.group_reduce not in get_args(GroupChoice):
            raise ValueError(f"group_reduce={self.group_reduce!r}; valid: {', '.join(get_args(GroupChoice))}")
        if self.skip_layers < 0 or self.min_pages < 1:
            raise ValueError(
                f"skip_layers={self.skip_layers}, min_pages={self.min_pages}: at least 0 layers and 1 page are allowed"
            )

    def reads_layer(self, layer: int) -> bool:
        return layer >= self.skip_layers

    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor:  # type: ignore[override]
        scores, last = index.upper(q, width=self.bound_width), index.pages - 1
        if self.group_reduce == "none":
            group = scores.shape[2]
            scores, last = scores.flatten(1, 2), last.repeat_interleave(group, dim=1)
        else:
            scores = reduce_group(scores, self.group_reduce)
        wanted = self.count(index.real).clamp(min=self.min_pages)
        return top_pages(scores, wanted, last if self.force_last else None)


@dataclass(frozen=True, kw_only=True)
class Quest(Method):
    """Keep every token; each decode step attends to the pages with the highest bounds.

    `budget` is what a step reads per head in the layers that choose, the page bounds beside it not counted
    (`kv.read_bytes_per_token` counts them). Prompts, and later ones, attend to everything.
    """

    family = "reading"
    keeps = "everything; a step reads the pages whose keys may be closest to its query"
    source = "arXiv 2406.10774; mit-han-lab/Quest"
    differences = "newest page always read (`force_last=false` as there); softmax over the chosen pages in float32"

    budget_kind: ClassVar[Literal["read_tokens"]] = "read_tokens"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"force_last": True},
        "code": {"force_last": False},
    }

    page_size: int = PAGE
    group_reduce: GroupChoice = "none"
    skip_layers: int = 2
    min_pages: int = 3
    force_last: bool | None = None
    bound_width: float = 1.0

    def make_reader(self) -> Reader:
        if is_unlimited(self.budget):
            return ReadAll()
        assert self.force_last is not None
        return QuestReader(
            budget=self.budget,
            page_size=self.page_size,
            group_reduce=self.group_reduce,
            skip_layers=self.skip_layers,
            min_pages=self.min_pages,
            force_last=self.force_last,
            bound_width=self.bound_width,
        )
