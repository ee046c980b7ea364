"""Decode attention over lanes or pages on a GPU: the same sums as `lanes.lane_attention`, nothing copied or padded."""

from __future__ import annotations

import torch

from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.launch import HALF, fits, launching, on_gpu, refused, tile

Tensor = torch.Tensor

PROGRAMS = 512  # aimed at: a few for every multiprocessor of a large GPU
MOST_SPLITS = 64
LEAST_LANES = 4  # a split reads at least these, or merging would cost more than it gains


def usable(q: Tensor, k: Tensor, v: Tensor, heads: int) -> bool:
    """True if the kernel can answer queries `[B, H, 1, D]` over lanes of `heads` KV heads (or query heads) per row.

    On CUDA with Triton, in half precision or float32, where the card has room for a lane of `k` and `v` and the queries.
    """
    shape = _shape(q, k, v, heads)
    typed = q.dtype in (*HALF, torch.float32) and k.dtype == q.dtype == v.dtype
    return on_gpu(q) and typed and fits(q, shared_bytes(*shape, q.element_size())) and not refused("lanes", q, *shape)


def _shape(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[int, int, int, int]:
    return tile(q.shape[1] // heads), k.shape[1], tile(q.shape[-1]), tile(v.shape[-1])


def shared_bytes(group: int, slots: int, dim: int, width: int, size: int) -> int:
    """Shared memory of a block in bytes: one lane of keys and values, queries, weights; all are sizes of tiles.

    Args:
        group: queries of a KV head; slots: of a lane; dim, width: of keys and values.
        size: bytes of a number.
    """
    return size * (slots * (dim + width) + group * (dim + slots)) + 8 * slots


def warps(dim: int, width: int, size: int) -> int:
    """Warps of a block: twice as many where 4 would spill registers."""
    return 8 if size == 4 or max(dim, width) > 256 else 4


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

    Raises:
        KernelUnusable: see `launch.launching`.
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
    block_group, slots, block_dim, block_width = shape = _shape(q, k, v, segments // batch)
    with launching("lanes", q, *shape):
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
            SLOTS=slots,
            BLOCK_G=block_group,
            BLOCK_D=block_dim,
            BLOCK_DV=block_width,
            SOFTCAP=features.softcap is not None,
            UPCAST=not q.is_cuda,
            num_warps=warps(block_dim, block_width, q.element_size()),
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
            BLOCK_DV=block_width,
        )
    return output
