"""Decode attention over chosen pages on a GPU, read where they lie: pages are the lanes of `triton_decode`."""

from __future__ import annotations

import torch

from kvcompress.kernels import triton_decode
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.launch import LEAST

Tensor = torch.Tensor


def usable(q: Tensor, keys: Tensor, values: Tensor, heads: int) -> bool:
    """True if the kernel can read pages of these pools, chosen by `heads` KV heads or query heads of each row.

    Where `triton_decode` can, and a page holds a power of 2 of tokens from 16 on.
    """
    size = keys.shape[1]
    return size >= LEAST and size & (size - 1) == 0 and triton_decode.usable(q, keys, values, heads)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    chosen: Tensor,
    asked: Tensor,
    features: AttentionParams,
) -> Tensor:
    """Softmax attention of single queries over pages, summed in float32; nothing is gathered first.

    Args:
        q: `[B, H, 1, D]`.
        keys, values: pool of blocks `[blocks, size, D]` and `[blocks, size, D_v]`.
        positions: int32 `[B, H_kv or 1, pages * size]`, -1 where a slot is empty.
        table: LongTensor `[B, H_kv, pages]`, the block of each page.
        chosen: LongTensor `[B, H_kv or H, n]`, pages of each row and head, -1 = none.
        asked: int `[B or 1, 1]`, positions of the queries, below 0 = padding, which sees all that was chosen.
        features: scaling, window and soft cap are applied; no sinks.

    Returns:
        `[B, H, 1, D_v]`; 0 where nothing was chosen.

    Raises:
        KernelUnusable: see `launch.launching`.
    """
    batch, heads, _ = chosen.shape
    size, group = keys.shape[1], heads // table.shape[1]
    head = torch.arange(heads, device=q.device) // group
    row = torch.arange(batch, device=q.device)[:, None]
    page = chosen.clamp(min=0)
    blocks = table[row[..., None], head[None, :, None], page].masked_fill(chosen < 0, -1)
    shown, capacity = positions.shape[1], positions.shape[2] // size
    first = (row * shown + (head if shown > 1 else torch.zeros_like(head))) * capacity
    places = first[..., None] + page
    oldest = torch.zeros(batch, heads, dtype=torch.int32, device=q.device)
    if features.window is not None:
        oldest += (asked[:, -1:] - features.window + 1).clamp(min=0).int()
    tables = (x.flatten(0, 1).int().contiguous() for x in (blocks, places))
    at, where = tables
    oldest = oldest.flatten().contiguous()
    return triton_decode.decode(q, keys, values, positions.view(-1, size), at, features, where, oldest)
