"""Fixed orthogonal rotations that spread a vector's energy over all its coordinates before they are quantised."""

from __future__ import annotations

from functools import cache

import torch

Tensor = torch.Tensor


def hadamard(dim: int) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(dim), `[dim, dim]` float32: symmetric and orthogonal.

    Raises:
        ValueError: `dim` is no power of 2.
    """
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"there is no Sylvester Hadamard matrix of {dim} rows: take a power of 2, or orthogonal()")
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / dim**0.5


@cache
def orthogonal(dim: int, seed: int = 0) -> Tensor:
    """A random rotation `[dim, dim]` float32 on the CPU, always the same for a seed; rows are the new axes.

    Hadamard with random signs where `dim` is a power of 2, else the Q of a Gaussian matrix (signs fixed, so that it is
    uniform). Read-only: it is shared.
    """
    draw = torch.Generator().manual_seed(1_000_003 * seed + dim)
    if dim & (dim - 1) == 0:
        signs = torch.randint(0, 2, (dim,), generator=draw) * 2.0 - 1.0
        return hadamard(dim) * signs[None]
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=draw, dtype=torch.float64))
    return (q * r.diagonal().sign()[None]).T.float().contiguous()


@cache
def gaussian(dim: int, seed: int = 0) -> Tensor:
    """A Gaussian matrix `[dim, dim]` float32 on the CPU, always the same for a seed."""
    return torch.randn(dim, dim, generator=torch.Generator().manual_seed(2_000_003 * seed + dim))
