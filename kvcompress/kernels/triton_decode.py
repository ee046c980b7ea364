"""Decode attention over lanes or pages on a GPU: the same sums as `lanes.lane_attention`, nothing copied or padded."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from kvcompress.kernels.blockwise import AttentionParams

Tensor = torch.Tensor

PROGRAMS = 512  # aimed at: a few for every multiprocessor of a large GPU
MOST_SPLITS = 64
LEAST_LANES = 4  # a split reads at least these, or merging would cost more than it gains


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(q: Tensor) -> bool:
    """True if queries like `q` can be answered by the kernel: on CUDA, with Triton installed."""
    return q.is_cuda and _installed()


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    features: AttentionParams,
    places: Tensor | None = None,
    oldest: Tensor | None = None,
) -> Tensor:
    """Softmax attention of single queries over lanes, summed in float32.

    Args:
        q: `[B, H, 1, D]`.
        k, v: `[lanes, slots, D]` and `[lanes, slots, D_v]`; slots a power of 2, at least 16.
        positions: int32 `[lanes, slots]`, below 0 where a slot holds nothing.
        table: int32 `[segments, most]`, lanes of each row and KV head (or query head), -1 where there is none.
        places: of the same shape, where each lane's positions lie; by default as `table`.
        oldest: int32 `[segments]`, the first position that counts; by default 0.

    Returns:
        `[B, H, 1, D_v]`; 0 for a head that holds nothing.
    """
    from kvcompress.kernels import triton_kernels as kernels  # only where Triton is installed

    batch, heads, _, dim = q.shape
    segments, most = table.shape
    group, width = batch * heads // segments, v.shape[-1]
    splits = max(1, min(MOST_SPLITS, -(-PROGRAMS // segments), -(-most // LEAST_LANES)))
    q, k, v, positions = (x.contiguous() for x in (q, k, v, positions))
    places = table if places is None else places
    if oldest is None:
        oldest = torch.zeros(segments, dtype=torch.int32, device=q.device)
    sums = torch.empty(segments, splits, group, width, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(segments, splits, group, dtype=torch.float32, device=q.device) for _ in range(2))
    output = torch.empty(batch, heads, 1, width, dtype=q.dtype, device=q.device)
    kernels.partial_sums[(segments, splits)](
        q,
        k,
        v,
        positions,
        table,
        places,
        oldest,
        sums,
        tops,
        totals,
        features.scaling,
        features.softcap or 1.0,
        most,
        -(-most // splits),
        splits,
        G=group,
        D=dim,
        DV=width,
        SLOTS=k.shape[1],
        BLOCK_G=max(16, kernels.power_of_2(group)),
        BLOCK_D=max(16, kernels.power_of_2(dim)),
        BLOCK_DV=max(16, kernels.power_of_2(width)),
        SOFTCAP=features.softcap is not None,
        UPCAST=not q.is_cuda,
    )
    kernels.merge[(segments * group,)](
        sums,
        tops,
        totals,
        output,
        splits,
        G=group,
        DV=width,
        BLOCK_S=kernels.power_of_2(splits),
        BLOCK_DV=max(16, kernels.power_of_2(width)),
    )
    return output
