"""Low-rank keys of pages (ShadowKV): coordinates in a basis of the prompt, from which a page's keys are rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcompress.common.transfer import upload

Tensor = torch.Tensor
Rotate = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LowRankKeyPages:
    """Keys before rotation of all heads of a token together, projected on the directions they use most.

    Attributes:
        size: tokens to a page.
        coordinates: `[B, n, r]` of the tokens of each row's full pages, zeros beyond.
        basis: `[B, r, H, D]`, orthonormal rows of length H x D.
        at: int32 `[B, n]`, the position id by which each token's keys were rotated.
        full: LongTensor `[B]` on the CPU, pages of each row that can be rebuilt.
        rotate: keys `[1, 1, m, D]` before rotation and position ids `[1, 1, m]` → rotated keys.
        dtype: of the model's keys.
    """

    size: int
    coordinates: Tensor
    basis: Tensor
    at: Tensor
    full: Tensor
    rotate: Rotate
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: Tensor, at: Tensor, counts: Tensor, size: int, rank: int, rotate: Rotate) -> LowRankKeyPages:
        """The best of rank `rank` in the least-squares sense (Eckart and Young), from float32 products.

        Args:
            keys: `[B, H, n, D]` before rotation; row b holds `counts[b]` tokens, the first ones.
            at: `[B, n]`, their position ids.
            counts: LongTensor `[B]` on the CPU.
        """
        batch, heads, n, width = keys.shape
        full = torch.div(counts, size, rounding_mode="floor")
        real = torch.arange(n)[None] < counts[:, None]
        flat = keys.transpose(1, 2).flatten(2).float() * real[..., None].to(keys.device)
        # eigenvectors of the products of channels are the right singular vectors, largest last
        basis = torch.linalg.eigh(flat.mT @ flat).eigenvectors[..., -min(rank, heads * width) :]
        coordinates = (flat @ basis).to(keys.dtype)
        most = int(full.max()) * size
        return cls(
            size,
            coordinates[:, :most].contiguous(),
            basis.mT.reshape(batch, -1, heads, width).to(keys.dtype).contiguous(),
            at[:, :most].int().contiguous(),
            full,
            rotate,
            keys.dtype,
        )

    def pages(self, wanted: Tensor) -> Tensor:
        """Keys `[m, size, D]` of the pages marked in `wanted [B, H, P]` (bool on the CPU), in their order."""
        b, h, page = (upload(x, self.basis.device) for x in wanted.nonzero(as_tuple=True))
        token = page[:, None] * self.size + torch.arange(self.size, device=page.device)
        before = torch.einsum("msr,mrd->msd", self.coordinates[b[:, None], token], self.basis[b, :, h])
        turned = self.rotate(before.flatten(0, 1)[None, None], self.at[b[:, None], token].flatten()[None, None].long())
        return turned.view(before.shape).to(self.dtype)

    def rows(self, index: Tensor) -> LowRankKeyPages:
        """The same for some rows of the batch."""
        there = index.to(self.basis.device)
        coordinates, basis, at = (x.index_select(0, there) for x in (self.coordinates, self.basis, self.at))
        return LowRankKeyPages(
            self.size, coordinates, basis, at, self.full.index_select(0, index), self.rotate, self.dtype
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of the coordinates of a page's tokens."""
        return self.size * self.coordinates.shape[2] * self.coordinates.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of the basis, and of coordinates and position ids of the tokens that there are."""
        token = self.page_bytes // self.size + self.at.element_size()
        return self.basis.numel() * self.basis.element_size() + int(self.full.sum()) * self.size * token

    @property
    def allocated(self) -> int:
        """Bytes of the storage of all."""
        return sum(x.untyped_storage().nbytes() for x in (self.coordinates, self.basis, self.at))
