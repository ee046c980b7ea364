"""Rotary embedding of a layer, as `compat.rotations` finds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate `keys [B, H, n, D]` by `positions`, integers that broadcast to `[B, H, n]`."""
        if self.style == "none":
            return keys
        angle = self._angle(positions.to(keys.device))
        return self._turn(keys, angle.cos(), angle.sin())

    def _angle(self, positions: Tensor) -> Tensor:
        assert self.inv_freq is not None
        return positions[..., None].float() * self.inv_freq.to(positions.device)

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = 2 * cos.shape[-1]
        x, rest = keys[..., :r].float(), keys[..., r:]
        if self.style == "half":
            a, b = x.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([turned.to(keys.dtype), rest], dim=-1)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines `[..., R / 2]` of `positions`, for keys that are rotated by them again and again."""
        if self.style == "none":
            return None
        angle = self._angle(positions)
        return angle.cos(), angle.sin()

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
