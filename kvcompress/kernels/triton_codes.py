"""Decode attention over codes on a GPU: read, turned into numbers and attended to in one pass; see `coded_rows`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import torch

from kvcompress.kernels import launch
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.coded_rows import CodedRows, Rows
from kvcompress.kernels.launch import on_gpu
from kvcompress.kernels.triton_decode import LEAST_LANES, MOST_SPLITS, PROGRAMS

Tensor = torch.Tensor

BLOCK = 64  # slots of a buffer that a program reads at a time; of lanes, those of a lane
SMALL_BLOCK = 32  # where 64 take more registers than there are: compiled for sm80 and sm90
TILES = {torch.float16: 2.5, torch.bfloat16: 2.5, torch.float32: 1.5}  # shared memory in blocks of keys, and of values
BESIDE = ("high", "scale", "zero")


def usable(q: Tensor, keys: Rows, values: Rows, features: AttentionParams) -> bool:
    """True if the kernel can answer queries `q [B, H, 1, D]` over these rows on the device that they are on."""
    if not on_gpu(q):
        return False
    room = launch.shared_memory(q.device) - launch.SPARE
    reason = unsupported_reason(q.dtype, keys, values, features, room)
    return reason is None and not launch.refused("codes", q, *_shape(q, keys, values))  # type: ignore[arg-type]


def unsupported_reason(
    dtype: torch.dtype, keys: Rows, values: Rows, features: AttentionParams, shared: int
) -> str | None:
    """Why the kernel cannot read these rows on a card with `shared` bytes of shared memory per block, or None."""
    if features.sinks is not None:
        return "attention sinks take a share of the softmax"
    if dtype not in TILES:
        return f"queries are {dtype}"
    if not _plain(keys) or not _plain(values):
        return "rows are made of more than codes, scales and zeros of a token"
    if keys.shape[1] != values.shape[1]:
        return "keys and values have different heads"
    needed = shared_memory(dtype, keys, values)
    return None if needed <= shared else f"blocks take {needed} bytes of shared memory, the card has {shared}"


def shared_memory(dtype: torch.dtype, keys: CodedRows, values: CodedRows) -> int:
    """Bytes of shared memory that a program takes at most."""
    widths = sum(max(16, 1 << (rows.shape[3] - 1).bit_length()) for rows in (keys, values))
    return int(TILES[dtype] * block_size(dtype, keys, values) * widths * dtype.itemsize)


def block_size(dtype: torch.dtype, keys: CodedRows, values: CodedRows) -> int:
    """Slots of a buffer that a program reads at a time."""
    width, bits = max(keys.shape[3], values.shape[3]), max(_bits(keys), _bits(values))
    wide = width * dtype.itemsize > 256 or (bits == 3 and width > 64)
    return SMALL_BLOCK if wide else BLOCK


def _plain(rows: Rows) -> TypeGuard[CodedRows]:
    return isinstance(rows, CodedRows)


def _shape(q: Tensor, keys: CodedRows, values: CodedRows) -> tuple[int, ...]:
    return q.shape[1], keys.shape[3], values.shape[3], _bits(keys), _bits(values)


def decode(
    q: Tensor,
    keys: CodedRows,
    values: CodedRows,
    positions: Tensor,
    features: AttentionParams,
    table: Tensor | None = None,
    oldest: Tensor | None = None,
) -> Tensor:
    """Softmax attention of single queries over codes, summed in float32.

    Args:
        q: `[B, H, 1, D]`.
        keys, values: rows `[B, h, P, ...]`; with a `table` `[1, lanes, slots, ...]`, slots a power of 2, at least 16.
        positions: int32 `[B, 1 or h, P]`, or `[lanes, slots]`; below 0 where a slot holds nothing.
        table: int32 `[segments, most]`, lanes of each row and KV head, -1 where there is none.
        oldest: int32 `[segments]`, the first position that counts; by default 0.

    Returns:
        `[B, H, 1, D_v]`; 0 for a head that holds nothing.

    Raises:
        KernelUnusable: see `launch.launching`.
    """
    from kvcompress.kernels import code_kernels, triton_kernels  # only where Triton is installed

    batch, all_heads, _, dim = q.shape
    (keys, values), capacity = _aligned(keys, values)
    if table is None:
        heads, tokens = keys.shape[1:3]
        segments, block = batch * heads, block_size(q.dtype, keys, values)
        most = -(-tokens // block)
        strides = positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0
    else:
        segments, most = table.shape
        heads, tokens, block, strides = segments // batch, 0, keys.shape[2], (0, 0)
        positions = positions.contiguous()
    group, width = batch * all_heads // segments, values.shape[3]
    splits = max(1, min(MOST_SPLITS, -(-PROGRAMS // segments), -(-most // LEAST_LANES)))
    if oldest is None:
        oldest = torch.zeros(segments, dtype=torch.int32, device=q.device)
    sums = torch.empty(segments, splits, group, width, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(segments, splits, group, dtype=torch.float32, device=q.device) for _ in range(2))
    output = torch.empty(batch, all_heads, 1, width, dtype=q.dtype, device=q.device)
    rounded = {
        name: max(16, triton_kernels.power_of_2(size))
        for name, size in (("BLOCK_G", group), ("BLOCK_D", dim), ("BLOCK_DV", width))
    }
    with launch.launching("codes", q, *_shape(q, keys, values)):
        code_kernels.coded_sums[(segments, splits)](
            q.contiguous(),
            *_tensors(keys, q.device),
            *_tensors(values, q.device),
            positions,
            positions if table is None else table,
            oldest,
            sums,
            tops,
            totals,
            features.scaling,
            features.softcap or 1.0,
            tokens,
            capacity,
            heads,
            *strides,
            most,
            -(-most // splits),
            splits,
            G=group,
            D=dim,
            DV=width,
            KEY_BITS=_bits(keys),
            VALUE_BITS=_bits(values),
            KEY_SCALE=keys.scale is not None,
            KEY_ZERO=keys.zero is not None,
            VALUE_SCALE=values.scale is not None,
            VALUE_ZERO=values.zero is not None,
            LANES=table is not None,
            BLOCK=block,
            SOFTCAP=features.softcap is not None,
            UPCAST=not q.is_cuda,
            **rounded,
        )
        triton_kernels.merge[(segments * group,)](
            sums,
            tops,
            totals,
            output,
            splits,
            G=group,
            DV=width,
            BLOCK_S=triton_kernels.power_of_2(splits),
            BLOCK_DV=rounded["BLOCK_DV"],
        )
    return output


def _bits(rows: CodedRows) -> int:
    return 0 if rows.meaning is None else rows.meaning.bits


def _tensors(rows: CodedRows, device: torch.device) -> tuple[Any, ...]:
    """Codes, high bits, scale, zero and levels; the codes once more in place of what there is not."""
    meaning = None if rows.meaning is None else rows.meaning.values.on(device)
    return tuple(rows.codes if x is None else x for x in (rows.codes, rows.high, rows.scale, rows.zero, meaning))


def _aligned(*sides: CodedRows) -> tuple[list[CodedRows], int]:
    """Rows whose tensors all lie in buffers of equal capacity, and this capacity; copied where they do not."""
    found = {_capacity(x) for rows in sides for x in _held(rows)}
    if len(found) == 1 and None not in found:
        return list(sides), found.pop() or 0
    copied = [
        replace(
            rows,
            codes=rows.codes.contiguous(),
            **{name: x.contiguous() for name in BESIDE if (x := getattr(rows, name)) is not None},
        )
        for rows in sides
    ]
    return copied, sides[0].shape[2]


def _held(rows: CodedRows) -> list[Tensor]:
    return [rows.codes, *(x for name in BESIDE if (x := getattr(rows, name)) is not None)]


def _capacity(x: Tensor) -> int | None:
    """Slots from one row and head to the next of a channel `[B, h, n, w]`; None if they do not lie in one buffer."""
    batch, heads, slots, width = x.shape
    if x.stride(3) != 1 or (slots > 1 and x.stride(2) != width) or x.stride(1) % width:
        return None
    return x.stride(1) // width if batch == 1 or x.stride(0) == heads * x.stride(1) else None
