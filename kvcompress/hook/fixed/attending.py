"""Attention of a step over dense buffers, and what is noted of it: attention mass, and the last queries in a ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.query_window import QueryWindow
from kvcompress.hook.fixed.form import StepRows, Tensors
from kvcompress.kernels.blockwise import AttentionParams, sdpa_block, softmax_block, visible

Tensor = torch.Tensor


def attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, params: AttentionParams, rows: StepRows, wants: bool
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, 1, D_v]`, and probabilities `[B, H_kv, G, 1, P]` where they are wanted."""
    allowed = visible(positions, rows.query, params.window)
    if params.plain and not wants:
        return sdpa_block(q, keys, values, allowed, params.scaling), None
    return softmax_block(q, keys, values, allowed, params)


def add_mass(mass: Tensor, probabilities: Tensor, decay: float, rows: StepRows) -> None:
    """Add a query's attention `[B, H_kv, G, 1, P]` to the sums `[B, H_kv, P, G]`, which fade first."""
    added = rows.position[..., None] >= 0
    if decay != 1.0:
        mass.mul_(torch.where(added, decay, 1.0))
    mass.add_(probabilities.squeeze(3).transpose(2, 3) * added)


@dataclass(frozen=True)
class QueryRing:
    """The last `size` real queries of each row, in a ring with one place more: the next query's, which counts for nothing.

    Attributes:
        tensors: queries `[B, H, size + 1, D]`, positions `[B, size + 1]` (-1 = none), the next place `[B, 1]`.
    """

    size: int
    tensors: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, layer: CompressedLayer, heads: int, like: Tensor, size: int) -> QueryRing:
        """An empty ring for queries of `heads` heads, as wide as `like [B, H_kv, P, D]`."""
        batch, device = like.shape[0], like.device
        queries = like.new_zeros(batch, heads, size + 1, like.shape[3])
        positions = torch.full((batch, size + 1), -1, dtype=torch.long, device=device)
        return cls(size, (queries, positions, torch.full((batch, 1), size, dtype=torch.long, device=device)))

    def load(self, window: QueryWindow | None) -> None:
        """Hold what a window holds, at most `size` queries."""
        queries, positions, place = self.tensors
        positions.fill_(-1)
        place.fill_(self.size)
        if window is not None:
            last, at = window.last(self.size)
            queries[:, :, self.size - last.shape[2] : self.size] = last
            positions[:, self.size - last.shape[2] : self.size] = at

    def window(self) -> QueryWindow:
        """What it holds, oldest first, copied."""
        queries, positions, place = self.tensors
        order = (place + 1 + torch.arange(self.size, device=place.device)) % (self.size + 1)
        spread = order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
        return QueryWindow(queries.gather(2, spread), positions.gather(1, order))

    @staticmethod
    def write(tensors: Tensors, q: Tensor, rows: StepRows) -> None:
        """Take a query `[B, H, 1, D]`; that of a row which gets no token goes to the place that counts for nothing."""
        queries, positions, place = tensors
        queries.scatter_(2, place[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]), q)
        positions.scatter_(1, place, rows.query.long())
        place.copy_(torch.where(rows.query >= 0, (place + 1) % positions.shape[1], place))
