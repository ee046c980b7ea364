"""Decode attention over packed codes on a GPU: read, unpacked and scaled in one pass; exact tokens join at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvcompress.kernels.blockwise import Features, group_queries, logits_block
from kvcompress.kernels.triton_decode import MOST_SPLITS, PROGRAMS

if TYPE_CHECKING:
    from kvcompress.cache.layouts.quantized_groups import Unit

Tensor = torch.Tensor

BLOCK = 64  # tokens read at a time
LEAST = 4 * BLOCK  # a split reads at least these


def decode(q: Tensor, unit: Unit, features: Features) -> Tensor:
    """Softmax attention of single queries `[b, H, 1, D]` over a unit of a packed codec, summed in float32.

    Where keys and values are both coded the kernel reads them packed; the tail, whose values are exact, is a partial
    sum made in torch; all partial sums meet over their common maximum.
    """
    keys, values = unit.tail()
    batch, all_heads, _, dim = q.shape
    heads, width = values.shape[1], values.shape[3]
    group, segments, tokens = all_heads // heads, batch * heads, unit.counts["values"]
    if not tokens:
        splits = 0
    else:
        splits = max(1, min(MOST_SPLITS, -(-PROGRAMS // segments), -(-tokens // LEAST)))
    sums = torch.empty(segments, splits + 1, group, width, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(segments, splits + 1, group, dtype=torch.float32, device=q.device) for _ in range(2))
    if keys.shape[2]:
        logits = logits_block(q, keys, None, features).view(segments, group, -1)
        tops[:, splits] = top = logits.amax(-1)
        p = (logits - top[..., None]).exp()
        totals[:, splits] = p.sum(-1)
        sums[:, splits] = torch.matmul(p.to(values.dtype), values.flatten(0, 1)).float()
    else:
        tops[:, splits], totals[:, splits], sums[:, splits] = -math.inf, 0.0, 0.0
    output = torch.empty(batch, all_heads, 1, width, dtype=q.dtype, device=q.device)
    from kvcompress.kernels import triton_kernels as kernels  # only where Triton is installed

    if splits:
        _launch(kernels, q, unit, features, (sums, tops, totals), splits)
    kernels.merge[(segments * group,)](
        sums,
        tops,
        totals,
        output,
        splits + 1,
        G=group,
        DV=width,
        BLOCK_S=kernels.power_of_2(splits + 1),
        BLOCK_DV=max(16, kernels.power_of_2(width)),
    )
    return output


def _launch(
    kernels: object, q: Tensor, unit: Unit, features: Features, partial: tuple[Tensor, ...], splits: int
) -> None:
    coded_keys, coded_values, codec = unit.coded["keys"], unit.coded["values"], unit.codec
    heads, dim, tokens = unit.left["keys"].shape[1], q.shape[3], unit.counts["values"]
    width, group = partial[0].shape[3], q.shape[1] // heads
    queries = group_queries(q, heads).contiguous()
    names = ("codes", "scale", "zero")
    per_split = -(-tokens // (splits * BLOCK)) * BLOCK
    kernels.packed_sums[(q.shape[0] * heads, splits)](  # type: ignore[attr-defined]
        queries,
        *(coded_keys[name].tensor for name in names),
        *(coded_values[name].tensor for name in names),
        *partial,
        features.scaling,
        features.softcap or 1.0,
        tokens,
        per_split,
        splits,
        coded_keys["codes"].tensor.stride(1),
        coded_keys["scale"].tensor.stride(1),
        coded_values["codes"].tensor.stride(1),
        coded_values["scale"].tensor.stride(1),
        G=group,
        D=dim,
        DV=width,
        BITS=codec.bits,  # type: ignore[attr-defined]
        GROUP=codec.group,
        BLOCK=BLOCK,
        BLOCK_G=max(16, kernels.power_of_2(group)),  # type: ignore[attr-defined]
        BLOCK_D=max(16, kernels.power_of_2(dim)),  # type: ignore[attr-defined]
        BLOCK_DV=max(16, kernels.power_of_2(width)),  # type: ignore[attr-defined]
        SOFTCAP=features.softcap is not None,
        UPCAST=not q.is_cuda,
    )
