"""QueryWindow: the last queries of each row, kept for scorers that observe their attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompress.cache.forward import Forward

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class QueryWindow:
    """The last real queries of each row, newest last.

    Attributes:
        queries: `[B, H, n, D]`, as attention used them.
        positions: LongTensor `[B, n]`, -1 where the row has fewer.
    """

    queries: Tensor
    positions: Tensor

    @classmethod
    def of(cls, before: QueryWindow | None, q: Tensor, forward: Forward, size: int) -> QueryWindow:
        """The last `size` real queries of `before` and a forward's new ones, `q [B, H, n, D]`; copies."""
        positions = forward.on("positions", q.device).expand(q.shape[0], -1).long()
        if before is not None:
            q = torch.cat([before.queries, q[:, :, -size:] if forward.real is None else q], dim=2)
            new = positions[:, -size:] if forward.real is None else positions
            positions = torch.cat([before.positions, new], dim=1)
        if forward.real is None and before is None:
            q, positions = q[:, :, -size:], positions[:, -size:]
        elif positions.shape[1] > size or bool((positions < 0).any()):
            # real queries to the right, in order: the last `size` columns are then the last `size` real ones
            order = torch.sort((positions >= 0).to(torch.uint8), dim=1, stable=True).indices[:, -size:]
            positions = positions.gather(1, order)
            q = q.gather(2, order[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        return cls(q.clone(), positions.clone())

    def last(self, size: int) -> tuple[Tensor, Tensor]:
        """The last `size` queries and their positions; views."""
        return self.queries[:, :, -size:], self.positions[:, -size:]

    def cut(self, size: int) -> QueryWindow:
        """A copy of the last `size` queries."""
        queries, positions = self.last(size)
        return QueryWindow(queries.clone(), positions.clone())

    def select(self, index: Tensor) -> QueryWindow:
        """Rows `index` (LongTensor), copied."""
        return QueryWindow(*(x.index_select(0, index.to(x.device)) for x in (self.queries, self.positions)))

    def fork(self) -> QueryWindow:
        return QueryWindow(self.queries.clone(), self.positions.clone())

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.queries, self.positions
