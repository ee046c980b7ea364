"""The one attention function registered with transformers: visibility from positions, observers on the way.

A query at position t sees the slots with `0 <= pos <= t`, within the layer's window where it has one. Soft-capping
and attention sinks are applied where the model asks for them. Kernels: transformers' SDPA for a plain prompt, SDPA with grouped queries
for decode, a batched softmax over lanes for decode of ragged layers (in Triton on a GPU, as over pages), and a blockwise
float32 softmax where probabilities are wanted (attention mass) or SDPA cannot do it (soft cap, sinks); its memory grows
with L x block, never L x L. On a GPU attention mass is summed beside SDPA by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import Blocks, RaggedStore, Store
from kvcompress.cache.pages import PagedReader, read_pages
from kvcompress.cache.pages import kernel as page_kernel
from kvcompress.hook.compression import Compressor
from kvcompress.hook.static_decode import FixedLayer
from kvcompress.kernels import triton_decode, triton_groups, triton_mass
from kvcompress.kernels.blockwise import (
    ALL,
    Features,
    blocks,
    sdpa_block,
    softmax_block,
    softmax_blocks,
    units,
    visible,
)
from kvcompress.kernels.online_softmax import piecewise_attention
from kvcompress.kernels.varlen_decode import lane_attention
from kvcompress.models import compat, projections

Tensor = torch.Tensor


def kv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of new queries over what the layer holds (transformers' attention signature).

    Args:
        query: `[B, H, n, D]`; `key` and `value` are ignored for layers of ours, which know what they hold, unless they
            hold latents: then these are the new tokens' own.

    Returns:
        output `[B, n, H, D]` and no weights.
    """
    if dropout:
        raise ValueError("attention dropout is active: call model.eval() before compressing")
    layer: CompressedLayer | FixedLayer | None = kwargs.pop("kv_layer", None)
    features = Features(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    if kwargs.get("position_bias") is not None:
        raise ValueError("attention with a position bias is not supported by kvcompress")
    if isinstance(layer, FixedLayer):
        return layer.attend(query, features).transpose(1, 2).contiguous(), None
    if layer is None:
        return _windowed_layer(module, query, key, value, attention_mask, features, kwargs)
    cache = layer.holder()
    assert cache.forward is not None
    layer.group = query.shape[1] // layer.held().heads
    rotation = cache.rotation(layer.index)
    if rotation is not None:
        query = layer.compact_queries(query, rotation)
    compressor: Compressor = cache.owner
    whole, fusion = cache.forward, cache.forward.fusion
    if fusion is not None:
        query, cache.forward = fusion.asked(query), fusion.narrowed(whole)
    latent = projections.latent_attention(module, query) if cache.latents else None
    if latent is None:
        output, probabilities = attend(layer, module, query, cache.forward, features, compressor)
    else:
        expanded, query = (query, key, value), latent.absorb(query)
        if unmasked(layer, query.shape[2], cache.forward, features, compressor):
            output, probabilities = attend_first(module, *expanded, features, compressor), None
        else:
            output, probabilities = attend(layer, module, query, cache.forward, features, compressor)
            output = latent.expand(output)
    compressor.after_attention(layer, query, probabilities, features)
    cache.forward, layer.fresh = whole, None
    output = output.transpose(1, 2).contiguous()
    return output if fusion is None else fusion.widened(output), None


def unmasked(layer: CompressedLayer, n: int, forward: Forward, features: Features, compressor: Compressor) -> bool:
    """True if these `n` queries are a sequence's first tokens, and nothing but what they are is to be looked at."""
    plain = forward.real is None and features.window is None and not wants_math(features, compressor)
    return first_tokens(layer.held(), n) and plain


def first_tokens(store: Store, n: int) -> bool:
    """True if `n` queries are of a sequence's first tokens."""
    return store.length == n and store.kind == "dense"


def wants_math(features: Features, compressor: Compressor) -> bool:
    """True if probabilities are wanted of several queries, or SDPA cannot do what the model asks for."""
    return compressor.wants_mass or compressor.blockwise or not features.plain


def attend_first(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, features: Features, compressor: Compressor
) -> Tensor:
    """Output `[B, H, n, D_v]` of a sequence's first tokens."""
    compressor.kernel("sdpa")
    output, _ = compat.foreign_attention(module, q, k, v, None, scaling=features.scaling)
    return output.transpose(1, 2)


def _windowed_layer(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    features: Features,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """A layer that keeps transformers' own cache (sliding window), with the mask transformers made for it."""
    if features.plain:
        output, _ = compat.foreign_attention(module, q, k, v, mask, scaling=features.scaling, **kwargs)
        return output, None
    batch, _, n, _ = q.shape
    if mask is None:  # the stock mask is left out where it is plainly causal
        total = k.shape[2]
        allowed = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)[None, None]
    else:
        allowed = mask | ~mask.any(-1, keepdim=True)  # a padding query sees nothing: keep its row finite
    output = torch.empty_like(q)
    for rows in blocks(n, q, k):
        output[:, :, rows], _ = softmax_block(q[:, :, rows], k, v, allowed[:, :, rows], features)
    return output.transpose(1, 2).contiguous(), None


def attend(
    layer: CompressedLayer,
    module: torch.nn.Module,
    q: Tensor,
    forward: Forward,
    features: Features,
    compressor: Compressor,
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, n, D]`, and probabilities `[B, H_kv, G, 1, P]` of a single query where the method wants them."""
    n, store = q.shape[2], layer.held()
    observe_mass, math = compressor.wants_mass, wants_math(features, compressor)
    if n == 1 and not first_tokens(store, n):
        return _decode(layer, q, forward, features, compressor)
    if unmasked(layer, n, forward, features, compressor):
        return attend_first(module, q, *layer.keys_values(), features, compressor), None
    q, keys, values = layer.read(q) if layer.absorbed else (q, *layer.keys_values())
    if observe_mass and not compressor.blockwise and triton_mass.usable(q, features):
        output = _attend_and_sum(layer, q, keys, values, forward, features, compressor)
        return layer.expand(output) if layer.absorbed else output, None
    positions, queries = layer.positions(), forward.on("positions", q.device)
    compressor.kernel("blockwise" if math else "sdpa")
    ordered = store.kind == "dense"  # new columns lie last, in order: later ones are invisible to earlier queries
    unit = units(q, keys)[0] if math else ALL
    cut = blocks(n, q[unit[0], unit[2]], keys, logits=math)
    ends = [seen_at_most(store, forward, rows.stop, n) if ordered else store.length for rows in cut]
    if not math:
        output = _by_sdpa(q, keys, values, positions, queries, features, cut, ends)
        return layer.expand(output) if layer.absorbed else output, None
    mass = weights = None
    if observe_mass:
        weights = forward.weights(compressor.needs.decay, q.device)
        mass = torch.zeros(q.shape[0], keys.shape[1], q.shape[1] // keys.shape[1], keys.shape[2], device=q.device)
    starts = [seen_by_all(store, forward, features, rows, n) for rows in cut]
    spans = list(zip(cut, starts, ends, strict=True))
    output = softmax_blocks(q, keys, values, positions, queries, features, spans, mass, weights)
    if mass is not None:
        compressor.add_mass(layer, mass, forward)
    return layer.expand(output) if layer.absorbed else output, None


def _by_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    queries: Tensor,
    features: Features,
    cut: Sequence[slice],
    ends: Sequence[int],
) -> Tensor:
    """Output `[B, H, n, D_v]`, a block of queries of `cut` after the other, each over the first columns up to its end."""
    output = q.new_empty(*q.shape[:3], v.shape[-1])
    for rows, last in zip(cut, ends, strict=True):
        allowed = visible(positions[..., :last], queries[:, rows], features.window)
        output[:, :, rows] = sdpa_block(q[:, :, rows], k[:, :, :last], v[:, :, :last], allowed, features.scaling)
    return output


def _attend_and_sum(
    layer: CompressedLayer,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    forward: Forward,
    features: Features,
    compressor: Compressor,
) -> Tensor:
    """Output `[B, H, n, D]` by SDPA and the attention mass beside it by a kernel of its own, on a GPU."""
    n, store, lse = q.shape[2], layer.held(), None
    positions, asked = layer.positions(), forward.on("positions", q.device)
    weights = forward.weights(compressor.needs.decay, q.device)
    compressor.kernel("sdpa")
    compressor.kernel("triton")
    plain = first_tokens(store, n) and forward.real is None and features.window is None and forward.fusion is None
    both = triton_mass.flash(q, keys, values, features.scaling) if plain else None
    if both is not None:
        output, lse = both
    else:
        cut = blocks(n, q, keys, logits=False)
        output = _by_sdpa(q, keys, values, positions, asked, features, cut, [keys.shape[2]] * len(cut))
    ordered = store.kind == "dense" and forward.fusion is None
    mass = triton_mass.mass(q, keys, asked, positions, features, ordered, plain, weights, lse)
    compressor.add_mass(layer, mass, forward)
    return output


def seen_by_all(store: Store, forward: Forward, features: Features, rows: slice, n: int) -> int:
    """How many of the first columns every query of a block sees, so that they need no mask."""
    if store.kind != "dense" or not store.full or forward.real is not None or features.window is not None:
        return 0
    return seen_at_most(store, forward, rows.start + 1, n) - 1


def seen_at_most(store: Store, forward: Forward, number: int, n: int) -> int:
    """How many of a dense store's first columns the first `number` of n queries see: none sees a later one.

    New columns lie last, one per query; in a fused prompt every column is new, and queries are there for some.
    """
    return store.length - n + number if forward.fusion is None else int(forward.positions[0, number - 1]) + 1


def _decode(
    layer: CompressedLayer, q: Tensor, forward: Forward, features: Features, compressor: Compressor
) -> tuple[Tensor, Tensor | None]:
    """One query per row over all that is held, or what the reader selects."""
    store = layer.held()
    reader = compressor.reader
    if isinstance(reader, PagedReader):
        if forward.phase != "prompt" and reader.reads_layer(layer.index):
            math = compressor.blockwise or not features.plain
            compressor.kernel(page_kernel(layer, reader, q, math))
            return read_pages(layer, reader, q, forward, features, math), None
    elif not compressor.reads_all:
        return _read_selected(layer, q, forward, features, compressor), None
    wants = compressor.wants_probabilities or not features.plain
    if layer.blocks is not None and features.window is None:
        return _decode_groups(layer, layer.blocks, q, forward, features, compressor)
    in_lanes = layer.holder().rotations is None and (layer.holder().codec.in_lanes or not layer.sealed)
    if isinstance(store, RaggedStore) and features.window is None and in_lanes:
        return _decode_lanes(store, layer, q, forward, features, compressor)
    compressor.kernel("blockwise" if wants else "sdpa")
    asked, keys, values = layer.read(q)
    allowed = None
    if features.window is not None or forward.real is not None:
        allowed = visible(layer.positions(), forward.on("positions", q.device), features.window)
    elif not store.full:  # nothing that is held lies ahead of the newest token
        allowed = layer.positions()[:, :, None] >= 0
    if allowed is not None and allowed.shape[1] > keys.shape[1]:  # held once for heads that see different slots
        keys, values = (x.expand(-1, allowed.shape[1], -1, -1) for x in (keys, values))
    if not wants:
        return layer.expand(sdpa_block(asked, keys, values, allowed, features.scaling)), None
    output, p = softmax_block(asked, keys, values, allowed, features)
    output, p = layer.expand(output), p.view(p.shape[0], store.heads, -1, *p.shape[3:])
    if compressor.wants_mass:
        real = p if forward.real is None else p * forward.on("real", q.device)[:, None, None, :, None]
        compressor.add_mass(layer, real.squeeze(3), forward)
    return output, p


def _decode_groups(
    layer: CompressedLayer, blocks: Blocks, q: Tensor, forward: Forward, features: Features, compressor: Compressor
) -> tuple[Tensor, Tensor | None]:
    """Single queries over coded groups and what is held exactly, decoded a piece at a time."""
    packed = blocks.packed and not compressor.wants_probabilities and features.sinks is None and triton_decode.usable(q)
    compressor.kernel("triton" if packed else "blockwise" if compressor.wants_probabilities else "groups")
    output, group = torch.empty_like(q), q.shape[1] // blocks.heads
    positions, p = layer.positions(), None
    if compressor.wants_probabilities:
        p = q.new_zeros(q.shape[0], blocks.heads, group, layer.length, dtype=torch.float32)
    for rows, heads, unit in blocks.each():
        of = slice(heads.start * group, heads.stop * group) if heads.start is not None else heads
        if packed:
            output[rows, of] = triton_groups.decode(q[rows, of], unit, features)
            continue
        sinks = None if features.sinks is None else features.sinks[of]
        mine = replace(features, sinks=sinks)
        output[rows, of], found = piecewise_attention(q[rows, of], unit.pieces("keys"), unit.pieces("values"), mine)
        if p is not None:
            held = (positions[rows, heads if positions.shape[1] > 1 else slice(None)] >= 0)[:, :, None]
            place = p[rows, heads]
            place.masked_scatter_(held.expand_as(place), found)
    if p is None:
        return output, None
    if compressor.wants_mass:
        real = p if forward.real is None else p * forward.on("real", q.device)[:, None, None, :]
        compressor.add_mass(layer, real, forward)
    return output, p[:, :, :, None]


def _decode_lanes(
    store: RaggedStore, layer: CompressedLayer, q: Tensor, forward: Forward, features: Features, compressor: Compressor
) -> tuple[Tensor, Tensor | None]:
    """Single queries over segments of different lengths, read where they lie."""
    owners = store.owners()
    asked, k, v = layer.read_lanes(q)
    positions = store.in_lanes("positions")
    if not compressor.wants_probabilities and features.sinks is None and triton_decode.usable(q):
        compressor.kernel("triton")
        return layer.expand(triton_decode.decode(asked, k, v, positions, store.table(), features)), None
    compressor.kernel("lanes")
    output, p = lane_attention(asked, k, v, positions < 0, owners, store.heads, features)
    output = layer.expand(output)
    if not compressor.wants_probabilities:
        return output, None
    if compressor.wants_mass:
        real = None if forward.real is None else forward.on("real", q.device)[owners // store.heads, None]
        compressor.add_lane_mass(layer, p if real is None else p * real, forward)
    return output, store.padded(p.transpose(1, 2)).transpose(2, 3)[:, :, :, None]


def _read_selected(
    layer: CompressedLayer, q: Tensor, forward: Forward, features: Features, compressor: Compressor
) -> Tensor:
    keys, values = layer.keys_values()
    positions = layer.positions().expand(-1, keys.shape[1], -1)
    chosen = compressor.select(layer, q)
    if chosen is None:
        allowed = visible(positions, forward.on("positions", q.device), features.window)
        return softmax_block(q, keys, values, allowed, features)[0]
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
    allowed = visible(picked, forward.on("positions", q.device), features.window)
    return softmax_block(q, keys, values, allowed, features)[0]


compat.register(kv_attention)
