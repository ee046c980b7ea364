"""Rotary embedding of a layer, as `compat.rotations` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvcompress.common.constants import Constant

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rotation:
    """How one layer rotates its keys (RoPE): not at all, in half-split pairs, or in interleaved pairs.

    Only relative angles are used, so a scale that the model multiplies into its rotation stays in the keys.

    Attributes:
        style: "none", "half" or "interleaved".
        inv_freq: float32 `[R / 2]`; the first R of the head's dimensions are rotated.
    """

    style: str
    inv_freq: Tensor | None = None

    @cached_property
    def _frequencies(self) -> Constant:
        assert self.inv_freq is not None
        return Constant(self.inv_freq)

    @cached_property
    def _last(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return []

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate `keys [B, H, n, D]` by `positions`, integers that broadcast to `[B, H, n]`."""
        if self.style == "none":
            return keys
        angle = self._angle(positions.to(keys.device))
        return self._turn(keys, angle.cos(), angle.sin())

    def _angle(self, positions: Tensor) -> Tensor:
        return positions[..., None].float() * self._frequencies.on(positions.device)

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = 2 * cos.shape[-1]
        x, rest = keys[..., :r].float(), keys[..., r:]
        if self.style == "half":
            a, b = x.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        turned = turned.to(keys.dtype)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines `[..., R / 2]` of `positions`, for keys that are rotated by them again and again.

        On a CPU, where it costs more than to compare, those of the last positions are found again: layers that hold the
        same tokens ask one after the other.
        """
        if self.style == "none":
            return None
        alike = positions.device.type == "cpu" and type(positions) is Tensor  # no stand-in, whose content is not known
        for known, cos, sin in self._last if alike else ():
            if torch.equal(known, positions):
                return cos, sin
        angle = self._angle(positions)
        found = angle.cos(), angle.sin()
        if alike:
            self._last[:] = [(positions, *found)]
        return found

    def rotate_by(self, keys: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        """`rotate` by what `table` gave."""
        return keys if table is None else self._turn(keys, *table)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo `rotate`."""
        return self.rotate(keys, -positions)

    def mean_matrix(self, positions: Tensor, dim: int) -> Tensor:
        """Mean over `positions [B, F]` of the `dim` x `dim` matrix that rotates a column vector, `[B, dim, dim]`."""
        one = torch.eye(dim, device=positions.device).expand(positions.shape[0], -1, -1)
        if self.style == "none":
            return one
        angle = self._angle(positions)
        return self._turn(one, angle.cos().mean(1, keepdim=True), angle.sin().mean(1, keepdim=True)).transpose(1, 2)
