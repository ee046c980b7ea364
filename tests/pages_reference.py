"""Slow references of readers of pages: plain loops over captured queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def watch(monkeypatch: Any, reader: type) -> list[tuple[int, Tensor, Tensor]]:
    """(layer, query, chosen pages) of every selection that readers of this class make from here on."""
    seen: list[tuple[int, Tensor, Tensor]] = []
    select = reader.select  # type: ignore[attr-defined]

    def watched(self, q, index, state):
        chosen = select(self, q, index, state)
        seen.append((index.layer, q.clone(), chosen.clone()))
        return chosen

    monkeypatch.setattr(reader, "select", watched)
    return seen


def attended(chosen: Tensor) -> set[int]:
    """Pages in a row `[n]` of a selection; none twice."""
    pages = [int(page) for page in chosen if page >= 0]
    assert len(pages) == len(set(pages))
    return set(pages)


def mask_of(chosen: Tensor, lengths: list[int], size: int, columns: int) -> Tensor:
    """The columns of left-padded rows that lie in the chosen pages `[B, H, n]`, bool `[B, H, columns]`."""
    keep = torch.zeros(*chosen.shape[:2], columns, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for h in range(chosen.shape[1]):
            for page in attended(chosen[b, h]):
                first = max(lengths) - length + page * size
                keep[b, h, first : first + size] = True
    return keep


def loop_bounds(queries: list[Tensor], keys: Tensor, size: int, reduce: str, width: float = 1.0) -> list[float]:
    """Score of every page of `keys [n, D]`, reduced over the queries: `width` of the way from its middle to its bound."""
    asked, found = torch.stack(queries), []
    for start in range(0, len(keys), size):
        page = keys[start : start + size]
        low, high = asked * page.min(0).values, asked * page.max(0).values
        upper, middle = torch.maximum(low, high).sum(1), (low + high).sum(1) / 2
        bounds = (middle + width * (upper - middle)).tolist()
        found.append(sum(bounds) / len(bounds) if reduce == "mean" else max(bounds))
    return found


def loop_top(
    queries: list[Tensor], keys: Tensor, size: int, k: int, reduce: str = "max", last: bool = True, width: float = 1.0
) -> set[int]:
    """The k pages of the highest bounds; with `last` the newest one is always among them."""
    bounds = loop_bounds(queries, keys, size, reduce, width)
    if last:
        bounds[-1] = float("inf")
    return set(sorted(range(len(bounds)), key=lambda page: (-bounds[page], page))[:k])
