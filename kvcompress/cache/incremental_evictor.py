"""IncrementalEvictor: decode with a full cache, where each step appends and evicts one token per head.

The mask of candidates is updated as the protected window slides, not worked out anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompress.cache.layouts import Store
from kvcompress.method.budget import Protection
from kvcompress.method.selection import candidates, check_nan, last_lowest

Tensor = torch.Tensor


@dataclass
class IncrementalEvictor:
    """Candidates for eviction in the next step, kept up to date as the window slides by one token a step.

    Attributes:
        target: the `[B, H_kv]` counts it was made for.
        counts: what the store counted then, to see that nothing else happened in between.
        blocked: bool `[B, H_kv, P + left + 1]`: empty, protected, or yet to come.
        leaving: LongTensor `[B, H_kv, 1]`, the slot that the window leaves with the next token.
        left: steps until the holes are to be closed.
    """

    target: Tensor
    counts: Tensor
    blocked: Tensor
    leaving: Tensor
    left: int

    @classmethod
    def of(cls, store: Store, target: Tensor, protection: Protection, most: int) -> IncrementalEvictor | None:
        """For the steps until `most` slots are empty; None where empty slots lie in a window."""
        left = most - store.holes
        positions = store.get("positions").expand(-1, store.heads, -1)
        length = positions.shape[2]
        window = protection.window.to(positions.device)[..., None]
        inside = torch.arange(length, device=positions.device) >= length - window
        if left <= 0 or bool((inside & (positions < 0)).any()):
            return None
        blocked = positions.new_ones((*positions.shape[:2], length + left + 1), dtype=torch.bool)
        blocked[..., :length] = ~candidates(positions, protection)
        return cls(target, store.settle(), blocked, length - window, left)

    def is_valid(self, store: Store, target: Tensor | None) -> bool:
        """True if all that happened since is that every head got one token."""
        return self.left > 0 and target is self.target and store.grown_by_one(self.counts)

    def choose(self, scores: Tensor) -> Tensor:
        """The slot each head gives up, `[B, H_kv, 1]`: the lowest score; of ties the latest position goes."""
        self.left -= 1
        self.blocked.scatter_(2, self.leaving, False)
        self.leaving += 1
        slot = last_lowest(scores, self.blocked[..., : scores.shape[-1]])
        if scores.device.type == "cpu":  # elsewhere a look would wait for the device
            lowest = scores.gather(-1, slot)
            if bool(lowest.isnan().any()):
                check_nan(lowest.isnan().flatten(1).any(1))
        self.blocked.scatter_(2, slot, True)
        return slot
