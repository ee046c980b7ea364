"""Online-softmax attention of single queries over keys and values that are decoded piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvcompress.kernels.blockwise import AttentionParams, capped, group_queries, probabilities

Tensor = torch.Tensor


def piecewise_attention(
    q: Tensor, keys: Iterable[Tensor], values: Iterable[Tensor], features: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Softmax attention of single queries over all pieces together, summed in float32.

    The logits of one query are few, so they are all there before the first value is asked for; keys and values may be
    cut at different places.

    Args:
        q: `[b, H, 1, D]`.
        keys: pieces `[b, h, m, D]` in order; values likewise, as many slots in all.

    Returns:
        output `[b, H, 1, D_v]`, probabilities `[b, h, G, P]` float32.
    """
    batch, all_heads = q.shape[:2]
    logits = []
    for piece in keys:
        heads = piece.shape[1]
        # scaled before the product, which would leave float16's range otherwise
        scaled = group_queries((q.float() * features.scaling).to(piece.dtype), heads)
        logits.append(torch.matmul(scaled, piece.transpose(2, 3)).float())
    found = capped(torch.cat(logits, dim=-1), features)
    p = probabilities(found[:, :, :, None], features)[:, :, :, 0]
    output, start = None, 0
    for piece in values:
        stop = start + piece.shape[2]
        part = torch.matmul(p[..., start:stop].to(piece.dtype), piece).float()
        output, start = part if output is None else output + part, stop
    assert output is not None
    return output.to(q.dtype).view(batch, all_heads, 1, -1), p
