"""Score-sorted layout of a layer while its prompt runs: slots in the order in which they would be kept."""

from __future__ import annotations

import torch

from kvcompress.cache.layouts.dense import BLOCK, DenseStore, gather_slots

Tensor = torch.Tensor

PIECES = 8


class ScoreSortedStore:
    """Named channels in pieces `[B, H, n_i, ...]` along the rank of a slot, best first.

    Where a layer's budget shrinks again and again while later layers run, it lets its last pieces go: nothing is copied
    between the first cut and the end of the prompt. What it holds beyond `counts` is less than a piece, an eighth of
    what it held at first (or one block). Nobody attends to it before `finish` has put it into positional order.
    """

    kind = "ranked"

    def __init__(self, channels: dict[str, Tensor], shown: Tensor, counts: Tensor):
        """Copy the best `counts [B, H]` (on the CPU) slots of channels `[B, H or 1, P, ...]`.

        Args:
            shown: `[B, H, P]`, what slots are ranked by; of equal ones the earlier is the better.
        """
        longest = int(counts.max())
        best = shown.sort(dim=-1, descending=True, stable=True)
        self.shown = best.values[..., :longest].clone()
        self.size = max(BLOCK, -(-longest // PIECES))
        order = best.indices[..., :longest].split(self.size, dim=-1)
        self._pieces = [{name: gather_slots(value, index) for name, value in channels.items()} for index in order]
        self.counts = counts
        self._forget()

    def cut(self, counts: Tensor) -> None:
        """Hold only the best `counts [B, H]` (on the CPU), at most as many as before."""
        self.counts = counts
        longest = int(counts.max())
        del self._pieces[-(-longest // self.size) :]
        self.shown = self.shown[..., :longest]
        self._forget()

    def _forget(self) -> None:
        """Mark what lies beyond a row's or head's own count, where these differ."""
        if int(self.counts.min()) < self.shown.shape[-1]:
            beyond = torch.arange(self.shown.shape[-1]) >= self.counts[..., None]
            self.shown = self.shown.masked_fill(beyond.to(self.shown.device), float("-inf"))

    @property
    def heads(self) -> int:
        return self.counts.shape[1]

    @property
    def length(self) -> int:
        return self.shown.shape[-1]

    @property
    def channels(self) -> dict[str, Tensor]:
        """All pieces together: a copy."""
        return {name: torch.cat([piece[name] for piece in self._pieces], dim=2) for name in self._pieces[0]}

    def finish(self) -> DenseStore:
        """The slots in positional order, empty ones at the left; this store is used up."""
        channels, self._pieces = self.channels, []
        positions = channels["positions"]
        beyond = torch.arange(positions.shape[2]) >= self.counts[..., None]
        positions.masked_fill_(beyond.to(positions.device), -1)
        order = positions.argsort(dim=-1)[..., positions.shape[2] - self.length :]
        return DenseStore({name: gather_slots(value, order) for name, value in channels.items()}, self.counts)
