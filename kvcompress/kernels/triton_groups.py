"""Decode attention over packed codes on a GPU: read, unpacked and scaled in one pass; exact tokens join at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcompress.kernels.blockwise import AttentionParams, group_queries, logits_block
from kvcompress.kernels.launch import HALF, fits, launching, on_gpu, refused, tile
from kvcompress.kernels.triton_decode import MOST_SPLITS, PROGRAMS

Tensor = torch.Tensor

BLOCK = 64  # tokens read at a time
LEAST = 4 * BLOCK  # a split reads at least these


@dataclass(frozen=True)
class PackedTokens:
    """Packed codes of a segment's oldest tokens, and its newest tokens as they are.

    Attributes:
        keys, values: `codes`, `scale` and `zero`, each `[b, h, capacity, ...]`: buffers of which the first are in use.
        tokens: tokens whose keys and values are both coded.
        bits, group: of a code, and numbers that share a scale (keys: tokens of a channel, values: channels of a token).
        tail: keys and values `[b, h, m, D]` of the tokens after these.
    """

    keys: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    tokens: int
    bits: int
    group: int
    tail: tuple[Tensor, Tensor]


def usable(q: Tensor, heads: int, width: int, bits: int) -> bool:
    """True if the kernel can answer queries `[b, H, 1, D]` over codes of `heads` KV heads and `width` value channels.

    On CUDA with Triton, in half precision, where the card has room for a block of tokens: in float32 the unpacked
    numbers do not fit the registers.
    """
    shape = _shape(q, heads, width, bits)
    typed = q.dtype in HALF and fits(q, shared_bytes(*shape, q.element_size()))
    return on_gpu(q) and typed and not refused("groups", q, *shape)


def _shape(q: Tensor, heads: int, width: int, bits: int) -> tuple[int, int, int, int]:
    return tile(q.shape[1] // heads), tile(q.shape[3]), tile(width), bits


def shared_bytes(group: int, dim: int, width: int, bits: int, size: int) -> int:
    """Shared memory of a block in bytes: codes with their scales and zeros, queries, weights; sizes of tiles.

    Codes of 8 bits are unpacked there too. `size`: bytes of a number.
    """
    coded = 1 + 2 * size + (size if bits == 8 else 0)
    return BLOCK * (dim + width) * coded + size * group * (dim + BLOCK)


def warps(dim: int, width: int) -> int:
    """Warps of a block: twice as many where 4 would spill registers."""
    return 8 if max(dim, width) > 64 else 4


def decode(q: Tensor, held: PackedTokens, features: AttentionParams) -> Tensor:
    """Softmax attention of single queries `[b, H, 1, D]` over packed codes and a tail of exact tokens, in float32.

    Where keys and values are both coded the kernel reads them packed; the tail, whose values are exact, is a partial
    sum made in torch; all partial sums meet over their common maximum.

    Raises:
        KernelUnusable: see `launch.launching`.
    """
    keys, values = held.tail
    batch, all_heads, _, dim = q.shape
    heads, width = values.shape[1], values.shape[3]
    group, segments, tokens = all_heads // heads, batch * heads, held.tokens
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

    with launching("groups", q, *_shape(q, heads, width, held.bits)):
        if splits:
            _launch(kernels, q, held, features, (sums, tops, totals), splits)
        kernels.merge[(segments * group,)](
            sums,
            tops,
            totals,
            output,
            splits + 1,
            G=group,
            DV=width,
            BLOCK_S=kernels.power_of_2(splits + 1),
            BLOCK_DV=tile(width),
        )
    return output


def _launch(
    kernels: object, q: Tensor, held: PackedTokens, features: AttentionParams, partial: tuple[Tensor, ...], splits: int
) -> None:
    coded_keys, coded_values, tokens = held.keys, held.values, held.tokens
    heads, dim = held.tail[0].shape[1], q.shape[3]
    width = partial[0].shape[3]
    group, (block_group, block_dim, block_width, _) = q.shape[1] // heads, _shape(q, heads, width, held.bits)
    queries = group_queries(q, heads).contiguous()
    names = ("codes", "scale", "zero")
    per_split = -(-tokens // (splits * BLOCK)) * BLOCK
    kernels.packed_sums[(q.shape[0] * heads, splits)](  # type: ignore[attr-defined]
        queries,
        *(coded_keys[name] for name in names),
        *(coded_values[name] for name in names),
        *partial,
        features.scaling,
        features.softcap or 1.0,
        tokens,
        per_split,
        splits,
        coded_keys["codes"].stride(1),
        coded_keys["scale"].stride(1),
        coded_values["codes"].stride(1),
        coded_values["scale"].stride(1),
        G=group,
        D=dim,
        DV=width,
        BITS=held.bits,
        GROUP=held.group,
        BLOCK=BLOCK,
        BLOCK_G=block_group,
        BLOCK_D=block_dim,
        BLOCK_DV=block_width,
        SOFTCAP=features.softcap is not None,
        UPCAST=not q.is_cuda,
        num_warps=warps(block_dim, block_width),
    )
