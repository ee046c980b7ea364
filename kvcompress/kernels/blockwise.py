"""Blockwise attention over blocks of queries, exact, summed in float32: memory grows with L x block, never L x L."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

BLOCK_ELEMENTS = 1 << 19  # logits of one query block: 2 MiB in float32, near a CPU core's own cache
GPU_ELEMENTS = 1 << 24  # the same on a GPU, where each block costs launches: 64 MiB
MASK_ELEMENTS = 1 << 26  # bytes of a mask, twice that as the bias in half precision that SDPA makes of it
MIN_BLOCK = 16  # queries: smaller blocks would leave matrix units idle


@dataclass(frozen=True)
class AttentionParams:
    """What a model asks of one attention call beyond softmax(q k^T).

    Attributes:
        scaling: factor on the logits.
        window: sliding window in tokens, or None.
        softcap: logits become softcap * tanh(logits / softcap), or None.
        sinks: one extra logit per query head `[H]` that takes probability and gives no value, or None.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if SDPA can do it."""
        return self.softcap is None and self.sinks is None


def visible(positions: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which slots a query sees.

    Args:
        positions: int `[B, H_kv or 1, P]`, -1 = empty.
        queries: int `[B or 1, n]`, -1 = padding; such a query sees everything, so that its row stays finite.
        window: sliding window in tokens, or None.

    Returns:
        bool `[B, H_kv or 1, n, P]`.
    """
    slot, query = positions[:, :, None, :], queries[:, None, :, None]
    allowed = (slot >= 0) & (slot <= query)
    if window is not None:
        allowed &= slot > query - window
    return allowed | (query < 0)


ALL = (slice(None), slice(None), slice(None))


def units(q: Tensor, k: Tensor) -> list[tuple[slice, slice, slice]]:
    """(rows, KV heads, query heads) to work through one after the other.

    On a CPU one row and KV head at a time, whose product is one plain matrix product and whose block stays in the
    cache: 1.4 times as fast on two threads as all heads at once. Elsewhere everything together.
    """
    if q.device.type != "cpu":
        return [ALL]
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    return [
        (slice(b, b + 1), slice(h, h + 1), slice(h * group, (h + 1) * group))
        for b in range(k.shape[0])
        for h in range(heads)
    ]


def blocks(n: int, q: Tensor, k: Tensor, logits: bool = True) -> list[slice]:
    """Cut n queries so that one block's logits stay under BLOCK_ELEMENTS, on a GPU under GPU_ELEMENTS.

    Where a kernel on a GPU makes no `logits`, its mask, one for all KV heads, stays under MASK_ELEMENTS: few launches.
    """
    width = q.shape[0] * q.shape[1] * k.shape[2]
    if q.device.type == "cpu":
        size = min(n, max(MIN_BLOCK, BLOCK_ELEMENTS // max(1, width)))
    elif logits:
        size = min(n, max(MIN_BLOCK, GPU_ELEMENTS // max(1, width)))
    else:
        size = min(n, max(MIN_BLOCK, MASK_ELEMENTS * k.shape[1] // max(1, width)))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def group_queries(q: Tensor, heads: int) -> Tensor:
    """`[B, H, n, D]` → `[B, H_kv, G * n, D]`: a KV head's queries side by side, so keys are never repeated."""
    batch, all_heads, n, dim = q.shape
    return q.reshape(batch, heads, (all_heads // heads) * n, dim)


def sdpa_block(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scaling: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    mask = allowed
    if allowed is not None and q.shape[2] > 1 and group > 1:
        mask = allowed[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    output = F.scaled_dot_product_attention(group_queries(q, k.shape[1]), k, v, attn_mask=mask, scale=scaling)
    return output.view(*q.shape[:3], v.shape[-1])


def capped(logits: Tensor, features: AttentionParams) -> Tensor:
    """Logits after the soft cap, where there is one."""
    return logits if features.softcap is None else torch.tanh(logits / features.softcap) * features.softcap


def probabilities(logits: Tensor, features: AttentionParams) -> Tensor:
    """Softmax of logits `[B, H_kv, G, n, P]`, of which attention sinks take their share where there are some."""
    if features.sinks is None:
        return torch.softmax(logits, dim=-1)
    batch, heads, group, n, _ = logits.shape
    sinks = features.sinks.to(logits.device).float().view(1, heads, group, 1, 1).expand(batch, -1, -1, n, 1)
    return torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]


def logits_block(
    q: Tensor, k: Tensor, allowed: Tensor | None, features: AttentionParams, masked_from: int = 0
) -> Tensor:
    """Scaled and soft-capped logits `[B, H_kv, G, n, P]` float32, -inf where a query may not look.

    Arguments as of `softmax_block`.
    """
    batch, all_heads, n, _ = q.shape
    heads = k.shape[1]
    # scaled before the product, which would leave float16's range otherwise
    scaled = (q.float() * features.scaling).to(q.dtype)
    logits = capped(torch.matmul(group_queries(scaled, heads), k.transpose(2, 3)).float(), features)
    logits = logits.view(batch, heads, all_heads // heads, n, -1)
    if allowed is not None:
        logits[..., masked_from:].masked_fill_(~allowed[:, :, None], float("-inf"))
    return logits


def softmax_block(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, features: AttentionParams, masked_from: int = 0
) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32 with soft cap and sinks.

    Args:
        q: `[B, H, n, D]`; k, v `[B, H_kv, P, D]`.
        allowed: bool broadcasting to `[B, H_kv, n, P - masked_from]`, or None for all.
        masked_from: columns before it are seen by every query of the block.

    Returns:
        output `[B, H, n, D]`, probabilities `[B, H_kv, G, n, P]` float32.
    """
    batch, all_heads, n, _ = q.shape
    logits = logits_block(q, k, allowed, features, masked_from)
    p = probabilities(logits, features)
    output = torch.matmul(p.to(v.dtype).flatten(2, 3), v)
    return output.view(batch, all_heads, n, -1), p


def softmax_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    asked: Tensor,
    features: AttentionParams,
    spans: Iterable[tuple[slice, int, int]],
    mass: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """`softmax_block` over blocks of queries, output `[B, H, n, D_v]`; what each slot got is added to `mass`.

    Args:
        positions, asked: as of `visible`.
        spans: for each block its queries, the columns before which all are seen, and those from which none is.
        mass: float32 `[B, H_kv, G, P]`.
        weights: float32 `[B or 1, n]`, what each query counts in `mass`; None for 1.
    """
    output = q.new_empty(*q.shape[:3], v.shape[-1])
    parts = units(q, k)
    for rows, start, last in spans:
        allowed = visible(positions[..., start:last], asked[:, rows], features.window)
        for batch, kv, heads in parts:
            mine = allowed[batch if allowed.shape[0] > 1 else ALL[0], kv if allowed.shape[1] > 1 else ALL[1]]
            part = replace(features, sinks=features.sinks[heads]) if features.sinks is not None else features
            found, p = softmax_block(q[batch, heads, rows], k[batch, kv, :last], v[batch, kv, :last], mine, part, start)
            output[batch, heads, rows] = found
            if mass is None:
                continue
            if weights is None:
                mass[batch, kv, :, :last] += p.sum(3)
            else:
                w = weights[batch if weights.shape[0] > 1 else ALL[0], rows]
                mass[batch, kv, :, :last] += torch.matmul(w[:, None, None, None], p).squeeze(3)
    return output
