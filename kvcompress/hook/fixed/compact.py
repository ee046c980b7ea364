"""SinkRotation: compact positions in a step with fixed shapes. Only the sinks are turned."""

from __future__ import annotations

import torch

from kvcompress.hook.fixed.form import StepRows, Tensors
from kvcompress.models.compat import Rotation

Tensor = torch.Tensor


class SinkRotation:
    """Keys as the model rotates them, and sinks turned to lie right before the oldest of the others.

    Attention sees only differences of positions. Behind the sinks tokens follow each other without a gap, so that their
    ranks differ from their positions by one number, the same for the query; the sinks are turned by what is left.

    Attributes:
        tensors: the sinks' keys before rotation `[B, H_kv, n, D]`, and their slots, LongTensor `[B, H_kv, n]`.
    """

    def __init__(self, rope: Rotation, keys: Tensor, sinks: int):
        shape = (*keys.shape[:2], sinks)
        self.rope, self.sinks = rope, sinks
        slots = torch.zeros(shape, dtype=torch.long, device=keys.device)
        self.tensors = [keys.new_zeros(*shape, keys.shape[3]), slots]

    def load(self, keys: Tensor, positions: Tensor, order: Tensor) -> None:
        """Take keys `[B, H_kv, P, D]` before rotation, and rotate them in place."""
        before, slots = self.tensors
        held = (positions >= 0).sum(-1, keepdim=True)
        first = (order.shape[2] - held + torch.arange(self.sinks, device=order.device)).clamp(max=order.shape[2] - 1)
        slots.copy_(order.gather(2, first))
        before.copy_(keys.gather(2, self._spread(slots, keys)))
        keys.copy_(self.rope.rotate(keys, positions.clamp(min=0)))

    def turn(self, tensors: Tensors, keys: Tensor, positions: Tensor, rows: StepRows) -> None:
        """Turn the sinks among `keys` to where a query at the rows' positions sees them at their ranks."""
        if not self.sinks:
            return
        before, slots = tensors
        rank = torch.arange(self.sinks, device=keys.device)
        oldest = rows.position.long() + 1 - (positions >= 0).sum(-1, keepdim=True)
        keys.scatter_(2, self._spread(slots, keys), self.rope.rotate(before, oldest + rank))

    def settle(self, keys: Tensor, positions: Tensor) -> None:
        """Give all keys back as they were before rotation, in place."""
        before, slots = self.tensors
        keys.copy_(self.rope.unrotate(keys, positions.clamp(min=0)))
        if self.sinks:
            keys.scatter_(2, self._spread(slots, keys), before)

    @staticmethod
    def _spread(slots: Tensor, keys: Tensor) -> Tensor:
        return slots[..., None].expand(-1, -1, -1, keys.shape[3])
