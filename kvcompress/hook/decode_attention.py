"""Attention of single queries: one function per form in which a layer holds its tokens, and the choice among them.

SDPA with grouped queries over a dense layout, a batched softmax over the lanes of a ragged one (in Triton on a GPU, as
over pages), a piecewise one over quantised groups, one over codes of which only a block is made into numbers at a time;
a float32 softmax wherever probabilities are wanted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from kvcompress.cache import page_reading
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import QuantizedGroups, RaggedStore
from kvcompress.cache.layouts.quantized_groups import GroupSegment
from kvcompress.cache.pages import PagedReader
from kvcompress.hook.observer import AttentionObserver
from kvcompress.kernels import triton_codes, triton_decode, triton_groups
from kvcompress.kernels.blockwise import AttentionParams, sdpa_block, softmax_block, visible
from kvcompress.kernels.coded_rows import Rows, attend_rows
from kvcompress.kernels.launch import KernelUnusable, on_gpu
from kvcompress.kernels.online_softmax import piecewise_attention
from kvcompress.kernels.varlen_decode import lane_attention

Tensor = torch.Tensor
Attention = tuple[Tensor, Tensor | None]


def decode_attention(
    layer: CompressedLayer, q: Tensor, forward: Forward, params: AttentionParams, observer: AttentionObserver
) -> Attention:
    """Output `[B, H, 1, D]` of one query per row over all that is held, or what the reader selects.

    Also probabilities `[B, H_kv, G, 1, P]` where the method wants them.
    """
    store, reader, encoding = layer.held(), observer.reader, layer.encoding
    if isinstance(reader, PagedReader):
        if forward.phase != "prompt" and reader.reads_layer(layer.index):
            math = observer.blockwise or not params.plain
            output, kernel = page_reading.read_pages(layer, reader, q, forward, params, math)
            observer.stats.note_kernel(kernel)
            return output, None
    elif not reader.reads_all:
        return _over_selection(layer, q, forward, params, observer), None
    if encoding.groups is not None and params.window is None:
        return _over_groups(layer, encoding.groups, q, forward, params, observer)
    if isinstance(store, RaggedStore) and params.window is None and encoding.readable_in_place:
        return _over_lanes(layer, store, q, forward, params, observer)
    return _over_all(layer, q, forward, params, observer)


def _over_all(
    layer: CompressedLayer, q: Tensor, forward: Forward, params: AttentionParams, observer: AttentionObserver
) -> Attention:
    """One query per row over all slots of a dense layout, or of another one padded."""
    store, encoding = layer.held(), layer.encoding
    wants = observer.wants_weights(forward.phase) or not params.plain
    allowed = None
    if params.window is not None or forward.real is not None:
        allowed = visible(layer.positions(), forward.on("positions", q.device), params.window)
    elif not store.full:  # nothing that is held lies ahead of the newest token
        allowed = layer.positions()[:, :, None] >= 0
    rows = encoding.rows(store)
    if rows is not None:
        query = encoding.encode_query(q, forward, store.heads)
        output, found = _over_codes(layer, query, *rows, allowed, forward, params, observer)
        return encoding.decode_output(output, forward, store.heads), found
    observer.stats.note_kernel("blockwise" if wants else "sdpa")
    if layer.current_kv is not None and not encoding.is_encoded:
        query, (keys, values) = q, layer.current_kv
    else:
        query, keys, values = encoding.decode_operands(q, store, forward)
    if allowed is not None and allowed.shape[1] > keys.shape[1]:  # held once for heads that see different slots
        keys, values = (x.expand(-1, allowed.shape[1], -1, -1) for x in (keys, values))
    if not wants:
        output = sdpa_block(query, keys, values, allowed, params.scaling)
        return encoding.decode_output(output, forward, store.heads), None
    output, p = softmax_block(query, keys, values, allowed, params)
    p = p.view(p.shape[0], store.heads, -1, *p.shape[3:])
    return encoding.decode_output(output, forward, store.heads), _counted(layer, p, forward, observer)


def _over_codes(
    layer: CompressedLayer,
    q: Tensor,
    keys: Rows,
    values: Rows,
    allowed: Tensor | None,
    forward: Forward,
    params: AttentionParams,
    observer: AttentionObserver,
) -> Attention:
    """One query per row, in the codec's terms, over codes of which only a block is made into numbers at a time."""
    wants, positions = observer.wants_weights(forward.phase), layer.positions()
    if not wants and triton_codes.usable(q, keys, values, params) and positions.shape[1] in (1, keys.shape[1]):
        oldest = None if params.window is None else _oldest(forward, params.window, keys.shape[1], q.device)
        with suppress(KernelUnusable):
            output = triton_codes.decode(q, keys, values, positions, params, oldest=oldest)  # type: ignore[arg-type]
            observer.stats.note_kernel("triton")
            return output, None
    observer.stats.note_kernel("blockwise" if wants else "codes")
    output, p = attend_rows(q, keys, values, allowed, params)
    if not wants:
        return output, None
    return output, _counted(layer, p.view(len(p), layer.held().heads, -1, 1, p.shape[-1]), forward, observer)


def _counted(layer: CompressedLayer, p: Tensor, forward: Forward, observer: AttentionObserver) -> Tensor:
    """Probabilities `[B, H_kv, G, 1, P]`, added to the slots' mass where that is summed up."""
    if observer.wants_mass:
        real = p if forward.real is None else p * forward.on("real", p.device)[:, None, None, :, None]
        observer.add_mass(layer, real.squeeze(3), forward)
    return p


def _oldest(forward: Forward, window: int, heads: int, device: torch.device) -> Tensor:
    """The first position that each row's query sees, int32 `[B x heads]`."""
    first = (forward.on("positions", device)[:, :1] - window + 1).clamp(min=0)
    return first.int().expand(len(forward.added), heads).flatten()


def _over_groups(
    layer: CompressedLayer,
    groups: QuantizedGroups,
    q: Tensor,
    forward: Forward,
    params: AttentionParams,
    observer: AttentionObserver,
) -> Attention:
    """Single queries over coded groups and what is held exactly, decoded a piece at a time."""
    wants = observer.wants_weights(forward.phase)
    packed = groups.packed and not wants and params.sinks is None
    output, size = torch.empty_like(q), q.shape[1] // groups.heads
    positions, p = layer.positions(), None
    if wants:
        p = q.new_zeros(q.shape[0], groups.heads, size, layer.length, dtype=torch.float32)
    for rows, heads, segment in groups.each():
        of = slice(heads.start * size, heads.stop * size) if heads.start is not None else heads
        if packed and (made := _packed(q[rows, of], segment, params)) is not None:
            output[rows, of] = made
            observer.stats.note_kernel("triton")
            continue
        observer.stats.note_kernel("blockwise" if wants else "groups")
        mine = replace(params, sinks=None if params.sinks is None else params.sinks[of])
        output[rows, of], found = piecewise_attention(
            q[rows, of], segment.pieces("keys"), segment.pieces("values"), mine
        )
        if p is not None:
            held = (positions[rows, heads if positions.shape[1] > 1 else slice(None)] >= 0)[:, :, None]
            place = p[rows, heads]
            place.masked_scatter_(held.expand_as(place), found)
    if p is None:
        return output, None
    if observer.wants_mass:
        real = p if forward.real is None else p * forward.on("real", q.device)[:, None, None, :]
        observer.add_mass(layer, real, forward)
    return output, p[:, :, :, None]


def _packed(q: Tensor, segment: GroupSegment, params: AttentionParams) -> Tensor | None:
    """Queries of a segment over its packed codes by the kernel; None where that cannot be run."""
    width = segment.left["values"]
    if not triton_groups.usable(q, width.shape[1], width.shape[3], segment.codec.bits):  # type: ignore[attr-defined]  # packed
        return None
    with suppress(KernelUnusable):
        return triton_groups.decode(q, segment.packed(), params)
    return None


def _over_lanes(
    layer: CompressedLayer,
    store: RaggedStore,
    q: Tensor,
    forward: Forward,
    params: AttentionParams,
    observer: AttentionObserver,
) -> Attention:
    """Single queries over segments of different lengths, read where they lie."""
    owners, encoding = store.owners(), layer.encoding
    positions, rows = store.in_lanes("positions"), encoding.lane_rows(store)
    k: Tensor | Rows
    v: Tensor | Rows
    wants = observer.wants_weights(forward.phase)
    apart = not wants and params.sinks is None
    if rows is not None and (not apart or not on_gpu(q) or triton_codes.usable(q, *rows, params)):
        query, (k, v) = encoding.encode_query(q, forward, store.heads), rows
    else:
        query, k, v = encoding.lane_operands(q, store, forward)
    with suppress(KernelUnusable):
        output = None
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            if apart and triton_decode.usable(query, k, v, store.heads):
                output = triton_decode.decode(query, k, v, positions, store.table(), params)
        elif apart and triton_codes.usable(query, k, v, params):  # type: ignore[arg-type]
            output = triton_codes.decode(query, k, v, positions, params, store.table())  # type: ignore[arg-type]
        if output is not None:
            observer.stats.note_kernel("triton")
            return encoding.decode_output(output, forward, store.heads), None
    observer.stats.note_kernel("lanes")
    output, p = lane_attention(query, k, v, positions < 0, owners, store.heads, params)
    output = encoding.decode_output(output, forward, store.heads)
    if not wants:
        return output, None
    if observer.wants_mass:
        real = None if forward.real is None else forward.on("real", q.device)[owners // store.heads, None]
        observer.add_lane_mass(layer, p if real is None else p * real, forward)
    return output, store.padded(p.transpose(1, 2)).transpose(2, 3)[:, :, :, None]


def _over_selection(
    layer: CompressedLayer, q: Tensor, forward: Forward, params: AttentionParams, observer: AttentionObserver
) -> Tensor:
    """Single queries over the slots that a reader selects.

    Raises:
        ValueError: a selection for another number of heads.
    """
    keys, values = layer.keys_values()
    positions = layer.positions().expand(-1, keys.shape[1], -1)
    chosen = observer.select(layer, q)
    if chosen is None:
        allowed = visible(positions, forward.on("positions", q.device), params.window)
        return softmax_block(q, keys, values, allowed, params)[0]
    if chosen.shape[1] not in (keys.shape[1], q.shape[1]):
        raise ValueError(f"a reader's selection needs {keys.shape[1]} or {q.shape[1]} heads, got {chosen.shape[1]}")
    if chosen.shape[1] != keys.shape[1]:
        group = q.shape[1] // keys.shape[1]
        keys, values, positions = (x.repeat_interleave(group, dim=1) for x in (keys, values, positions))
    slots = chosen.clamp(min=0)
    picked = positions.gather(2, slots).masked_fill(chosen < 0, -1)
    spread = slots[..., None]
    keys = keys.gather(2, spread.expand(-1, -1, -1, keys.shape[-1]))
    values = values.gather(2, spread.expand(-1, -1, -1, values.shape[-1]))
    allowed = visible(picked, forward.on("positions", q.device), params.window)
    return softmax_block(q, keys, values, allowed, params)[0]
