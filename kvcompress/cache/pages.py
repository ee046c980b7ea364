"""PagedReader: a reader that chooses pages for each decode query, and the index of pages that it is shown.

Nothing is dropped. A page is `page_size` consecutive tokens of those that a row and KV head holds; two bounds per
channel on its keys limit what any query can score there (Quest, arXiv 2406.10774, section 3.2). A layer is put into
pages at the first decode step after a prompt, and back when another prompt begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvcompress.common.transfer import upload
from kvcompress.method.budget import Budget, NotTogether, cap, check_budget
from kvcompress.method.parts import Reader
from kvcompress.method.view import State

Tensor = torch.Tensor


@dataclass
class PageIndex:
    """What a reader of pages may look at.

    Attributes:
        layer: index of the layer in the model.
        size: tokens to a page.
        pages: LongTensor `[B, H_kv]`, pages of each row and head, the last of which may be partial.
        bounds: `[B, H_kv, P, 2D]`: of each page the largest key and the largest negated key, by channel.
        real: LongTensor `[B]`, real tokens of each row when its prompt ended.
        step: LongTensor `[B]` on the CPU, which decode step of its row this is since the last longer forward, from 1;
            -1 for a row that has no token in it.
        scaling: the model's factor on q·k.
        keys: gives the keys `[B, H_kv, slots, D]` of all pages as attention sees them.
        scored: heads whose bounds were read; `ranked`: all keys were read.
    """

    layer: int
    size: int
    pages: Tensor
    bounds: Tensor
    real: Tensor
    step: Tensor
    scaling: float = 1.0
    keys: Callable[[], Tensor] | None = None
    scored: int = field(default=0, init=False)
    ranked: bool = field(default=False, init=False)

    def upper(self, q: Tensor, heads: Tensor | None = None, width: float = 1.0) -> Tensor:
        """At least the largest q·k of each page, `[B, H_kv, G, P]` float32; -inf where there is no page.

        sum_d max(q_d min_d, q_d max_d), before the model's scaling: the middle of the bounds, and half their distance
        on top, sum_d q_d (max_d + min_d) / 2 + |q_d| (max_d - min_d) / 2.

        Args:
            q: `[B, H, 1, D]`.
            heads: LongTensor, the KV heads wanted; all by default.
            width: share of that half distance that counts; below 1 it is no upper bound any more, 0 the middle.
        """
        batch, kv = self.pages.shape
        asked = q.view(batch, kv, -1, q.shape[-1])
        bounds, pages = self.bounds, self.pages
        if heads is not None:
            asked, bounds, pages = (x.index_select(1, heads) for x in (asked, bounds, pages))
        self.scored += asked.shape[1]
        both = torch.cat([asked.clamp(min=0), asked.neg().clamp_(min=0)], dim=-1)
        if width != 1.0:
            both = torch.lerp(torch.cat([asked, -asked], dim=-1) / 2, both, width)
        scores = torch.matmul(both.float(), bounds.float().transpose(2, 3))
        beyond = torch.arange(scores.shape[-1], device=q.device) >= pages[..., None]
        return scores.masked_fill_(beyond[:, :, None], float("-inf"))

    def products(self, q: Tensor) -> Tensor:
        """q·k of all slots, before the model's scaling: `[B, H_kv, G, slots]` float32 of `q [B, H, 1, D]`.

        -inf behind a head's last page. Every key is read, and counted so; with pages of one token a slot is a page.
        """
        assert self.keys is not None
        self.ranked = True
        queries = q.view(*self.pages.shape, -1, q.shape[-1])
        scores = torch.matmul(queries.float(), self.keys().float().transpose(2, 3))
        beyond = torch.arange(scores.shape[-1], device=q.device) >= self.pages[..., None] * self.size
        return scores.masked_fill_(beyond[:, :, None], float("-inf"))


def top_pages(scores: Tensor, wanted: Tensor, last: Tensor | None = None) -> Tensor:
    """The best pages per head, LongTensor `[B, h, n]`, -1 where a row wants or has fewer; the first of equal ones.

    Args:
        scores: `[B, h, P]`, -inf where there is no page.
        wanted: LongTensor `[B]` on the CPU.
        last: LongTensor `[B, h]`: a page that is always among them.
    """
    n = min(int(wanted.max()), scores.shape[2])
    fewer = int(wanted.min()) < n
    if last is not None:
        scores = scores.scatter(2, last[..., None], float("inf"))
    ordered = fewer or scores.device.type != "cpu"  # where a look at equal ones would wait for the device
    if not ordered:
        found, order = scores.topk(min(n + 1, scores.shape[2]), dim=-1)
        equal = (found[..., n - 1 : n] == found[..., n:]) & (found[..., n:] > float("-inf"))
        ordered = bool(equal.any())
    if ordered:  # which of equal ones is chosen matters
        found, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    none = found[..., :n] == float("-inf")
    if fewer:
        none |= torch.arange(n, device=scores.device) >= upload(wanted, scores.device)[:, None, None]
    return order[..., :n].masked_fill(none, -1)


class PagedReader(Reader):
    """A reader that chooses pages.

    Attributes:
        page_size: tokens to a page.
        budget: tokens to read per step, per head: a share of the row's prompt or a number.
        bound_width: share of the distance from the middle of a page's bounds to the upper one that counts in its score.
    """

    in_pages: ClassVar[bool] = True
    across_heads: ClassVar[bool] = False  # heads share something of a token, and so must hold the same tokens
    bounded: ClassVar[bool] = True  # wants `PageIndex.bounds`
    page_size: int
    budget: Budget
    bound_width: float = 1.0

    def reads_layer(self, layer: int) -> bool:
        """False for a layer whose queries attend to all that it holds."""
        return True

    def offloaded(self, layer: int) -> tuple[int, ...]:
        """KV heads of a layer that keep on the device only what `hold` says, and everything on the host."""
        return ()

    @abstractmethod
    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor | None:  # type: ignore[override]
        """Pages to attend to, for query `q [B, H, 1, D]`: LongTensor `[B, H_kv or H, n]` (-1 = none), or None for all.

        `state` is the reader's own for this layer, until the next prompt; dim 0 of every tensor is the row.
        """

    def begin(self, keys: Tensor, counts: Tensor, state: State) -> Tensor | None:
        """For a reader without bounds, when a layer is put into pages; `state["summaries"]` counts as summaries.

        Args:
            keys: `[B, H_kv, n, D]` as attention sees them, of which the first `counts [B, H_kv]` (LongTensor on the CPU)
                are of the prompt and what was appended to it; behind them lies the token of the first step.

        Returns:
            pages `[B, H_kv, m]` (-1 = none) that offloaded heads hold at first; None for all.
        """
        return None

    def hold(self, index: PageIndex, state: State) -> Tensor | None:
        """After the step's attention: pages `[B, H_kv, m]` that offloaded heads hold from now on; None for no change."""
        return None

    def host_numbers(self, key: int, value: int) -> int:
        """Numbers of a token and head that go to the host, of a key of `key` numbers and a value of `value`."""
        return key + value if self.rank is None else value

    def count(self, real: Tensor) -> Tensor:
        """Pages that `budget` is for rows of `real [B]` tokens, LongTensor `[B]` on the CPU; at least 1."""
        tokens = cap(self.budget, real.cpu())
        assert tokens is not None
        return torch.div(tokens, self.page_size, rounding_mode="floor").clamp(min=1)

    def check(self) -> None:
        """Raises:
        ValueError: a page without tokens, or a number of tokens that is less than a page.
        """
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size}; a page holds at least 1 token (the papers: 16)")
        check_budget(self.budget)
        if isinstance(self.budget, int) and self.budget < self.page_size:
            raise NotTogether(
                f"budget={self.budget} tokens is less than one page of page_size={self.page_size}, so that no page is "
                f"read (K = 0): give at least {self.page_size}"
            )
        if isinstance(self.budget, float) and self.budget == 1.0:
            raise ValueError("budget=1.0 reads everything: leave the reader out, or give a share below 1")
        if not 0.0 <= self.bound_width <= 1.0:
            raise ValueError(
                f"bound_width={self.bound_width} is not in [0, 1]: 1 ranks pages by their upper bound (the papers), 0 by the "
                "middle of their bounds"
            )


def host_bytes(reader: PagedReader, layers: Sequence[int], rows: int, tokens: int, per_token: int) -> int:
    """Bytes of the host tier for prompts of `tokens` tokens; `per_token` bytes of a token's keys and values per head."""
    heads = sum(len(reader.offloaded(layer)) for layer in layers)
    return heads * rows * tokens * per_token


def check_host(reader: PagedReader, layers: Sequence[int], rows: int, tokens: int, per_token: int) -> None:
    """Raises:
    ValueError: the host tier of a prompt would not fit into free memory. Arguments as of `host_bytes`.
    """
    wanted = host_bytes(reader, layers, rows, tokens, per_token)
    if wanted == 0:
        return
    free = free_memory()
    if wanted > free:
        raise ValueError(
            f"the host tier needs {wanted / 2**30:.2f} GiB for {rows} x {tokens} tokens, but {free / 2**30:.2f} GiB of "
            "memory are free: shorten the prompt, take a smaller batch, or offload fewer heads (reader.unstable)"
        )


def free_memory() -> int:
    """Bytes of main memory that a process can still take."""
    import psutil  # comes with accelerate

    return int(psutil.virtual_memory().available)
