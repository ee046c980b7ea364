"""ReadAccount: decode steps of each row, and the bytes that they read and moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcompress.cache.forward import Forward

Tensor = torch.Tensor


class ReadAccount:
    """Account of a layer that a reader of pages reads.

    Attributes:
        totals: sums by row, `[B]` each: bytes `read`, decode `steps`, pages `skipped`, bytes moved between tiers by kind.
        step: LongTensor `[B]` (or `[1]`) on the CPU, decode steps of each row since the last longer forward.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.step = torch.zeros(1, dtype=torch.long)

    def begin(self, forward: Forward) -> None:
        """A forward starts: a longer one starts the steps of its rows again."""
        if forward.length > 1 or forward.phase != "decode":
            self.step = self.step * (forward.added == 0)

    def count_step(self, forward: Forward) -> Tensor:
        """One decode step more → the number of each row's, -1 for a row that has no token in it."""
        self.step = self.step + (forward.added > 0)
        return torch.where(forward.added > 0, self.step, -1)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add numbers `[B]` to the totals."""
        for name, value in values.items():
            self.totals[name] = self.totals[name] + value if name in self.totals else value

    def select(self, index: Tensor) -> ReadAccount:
        """Rows `index` (LongTensor), copied."""
        twin = ReadAccount()
        twin.totals = {name: value.index_select(0, index.to(value.device)) for name, value in self.totals.items()}
        twin.step = self.step.clone() if len(self.step) == 1 else self.step.index_select(0, index.cpu())
        return twin

    def fork(self) -> ReadAccount:
        twin = ReadAccount()
        twin.totals, twin.step = {name: value.clone() for name, value in self.totals.items()}, self.step.clone()
        return twin
