"""Variable-length decode attention: single queries over keys in equal segments, each owned by one row and KV head.

Exact, in the manner of flash-decoding: every lane gives a partial sum over its slots, and a segment's lanes meet over
their common maximum. One batched product for all rows and heads, whatever their lengths.
"""

from __future__ import annotations

import torch

from kvcompress.kernels.blockwise import AttentionParams, capped, group_queries
from kvcompress.kernels.coded_rows import Rows

Tensor = torch.Tensor


def lane_attention(
    q: Tensor,
    k: Tensor | Rows,
    v: Tensor | Rows,
    empty: Tensor,
    owners: Tensor,
    heads: int,
    features: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over lanes, summed in float32.

    Args:
        q: `[B, H, 1, D]`.
        k, v: `[lanes, slots, D]` and `[lanes, slots, D_v]`, or rows `[1, lanes, slots, ...]`.
        empty: bool `[lanes, slots]`, slots that hold nothing.
        owners: LongTensor `[lanes]`, `b * heads + h` of the row and KV head each lane belongs to.
        heads: KV heads.

    Returns:
        output `[B, H, 1, D_v]` (0 for a head that holds nothing), probabilities `[lanes, G, slots]` float32.
    """
    batch, all_heads = q.shape[:2]
    group, segments = all_heads // heads, batch * heads
    # scaled before the product, which would leave float16's range otherwise
    scaled = q.float() * features.scaling
    queries = group_queries(scaled, heads).flatten(0, 1).index_select(0, owners)
    if isinstance(k, Tensor):
        logits = torch.bmm(queries.to(q.dtype), k.transpose(1, 2)).float()
    else:
        logits = k.dot(queries[None])[0]
    logits = capped(logits, features)
    logits.masked_fill_(empty[:, None], float("-inf"))
    # the start keeps a head without tokens finite
    if features.sinks is None:
        top = logits.new_full((segments, group), torch.finfo(torch.float32).min)
    else:
        top = features.sinks.to(q.device).float().view(heads, group).repeat(batch, 1)
    sinks = top
    top = top.scatter_reduce(0, owners[:, None].expand(-1, group), logits.amax(-1), "amax")
    p = logits.sub_(top.index_select(0, owners)[..., None]).exp_()
    total = torch.zeros_like(top) if features.sinks is None else (sinks - top).exp()
    total.index_add_(0, owners, p.sum(-1))
    total.clamp_(min=torch.finfo(torch.float32).tiny)
    sums = torch.bmm(p.to(v.dtype), v).float() if isinstance(v, Tensor) else v.weigh(p[None])[0]
    output = sums.new_zeros(segments, group, v.shape[-1]).index_add_(0, owners, sums).div_(total[..., None])
    return output.to(q.dtype).view(batch, all_heads, 1, -1), p.div_(total.index_select(0, owners)[..., None])
