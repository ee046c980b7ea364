"""The attention function registered with transformers: visibility from positions, observers told of each layer.

A query at position t sees the slots with `0 <= pos <= t`, within the layer's window where it has one. Soft-capping
and attention sinks are applied where the model asks for them. Kernels of several queries: transformers' SDPA for a plain
prompt, SDPA with a mask, and a blockwise float32 softmax where probabilities are wanted (attention mass) or SDPA cannot
do it (soft cap, sinks); its memory grows with L x block, never L x L. On a GPU attention mass is summed beside SDPA by a
kernel of its own. Single queries: `decode_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from kvcompress.cache.forward import KEYWORD, Forward, LayerCall, SplitCall, take
from kvcompress.cache.joint import JointCall
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import Store
from kvcompress.hook.decode_attention import decode_attention
from kvcompress.hook.observer import AttentionObserver
from kvcompress.kernels import triton_mass
from kvcompress.kernels.blockwise import (
    ALL,
    AttentionParams,
    blocks,
    sdpa_block,
    softmax_block,
    softmax_blocks,
    units,
    visible,
)
from kvcompress.kernels.launch import KernelUnusable
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

    Raises:
        ValueError: dropout, a position bias, or a model without a session's hooks.
    """
    if dropout:
        raise ValueError("attention dropout is active: call model.eval() before compressing")
    call = take(kwargs)
    if isinstance(call, SplitCall):
        assert isinstance(call, JointCall)
        return _side_by_side(call, module, query, key, value, scaling, kwargs), None
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    if kwargs.get("position_bias") is not None:
        raise ValueError("attention with a position bias is not supported by kvcompress")
    if call is None:
        if params.window is None and compat.is_full_attention(module):
            raise ValueError(
                "this model attends through kvcompress, but no session's hooks are on it: they were removed inside "
                "compress(), or it was built from the configuration of a model there; leave the hooks, or call "
                "set_attn_implementation('sdpa') on it"
            )
        return _windowed_layer(module, query, key, value, attention_mask, params, kwargs)
    if not isinstance(call, LayerCall):
        return call.attend(query, params).transpose(1, 2).contiguous(), None
    layer: CompressedLayer = call.layer
    observer: AttentionObserver = call.forward.observer
    query = layer.begin_attention(query, call.forward)
    forward, fusion = call.forward, call.forward.fusion
    if fusion is not None:
        query, forward = fusion.asked(query), fusion.narrowed(forward)
    latent = projections.latent_attention(module, query) if layer.context().spec.latents else None
    if latent is None:
        output, probabilities = attend(layer, module, query, forward, params, observer)
    else:
        expanded, query = (query, key, value), latent.absorb(query)
        if is_plain_causal(layer, query.shape[2], forward, params, observer):
            output, probabilities = attend_first(module, *expanded, params, observer), None
        else:
            output, probabilities = attend(layer, module, query, forward, params, observer)
            output = latent.expand(output)
    observer.after_attention(layer, query, probabilities, params, forward)
    layer.end_attention()
    output = output.transpose(1, 2).contiguous()
    return output if fusion is None else fusion.widened(output), None


def _side_by_side(
    call: JointCall,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Output `[B, n, H, D_v]` of the rows of several caches, each cache's as in a forward of its own.

    What one raises is noted with it, and its rows are zeros from then on.
    """
    outputs = []
    for part in call.parts:
        member, rows, output = part.member, part.member.rows, None
        keys, values = (key[rows], value[rows]) if part.held is None else part.held
        if member.error is None:
            own = kwargs if part.call is None else {**kwargs, KEYWORD: part.call}
            try:
                output, _ = kv_attention(module, query[rows].clone(), keys, values, part.mask, scaling=scaling, **own)
            except Exception as error:
                member.error = error
        if output is None:
            output = query.new_zeros(len(keys), query.shape[2], query.shape[1], value.shape[-1])
        outputs.append(output)
    return torch.cat(outputs)


def is_plain_causal(
    layer: CompressedLayer, n: int, forward: Forward, params: AttentionParams, observer: AttentionObserver
) -> bool:
    """True if these `n` queries are a sequence's first tokens, and only their output is wanted."""
    plain = forward.real is None and params.window is None and not needs_probabilities(params, observer)
    return is_first_forward(layer.held(), n) and plain


def is_first_forward(store: Store, n: int) -> bool:
    """True if `n` queries are of a sequence's first tokens."""
    return store.length == n and store.kind == "dense"


def needs_probabilities(params: AttentionParams, observer: AttentionObserver) -> bool:
    """True if probabilities are wanted of several queries, or SDPA cannot do what the model asks for."""
    return observer.wants_mass or observer.blockwise or not params.plain


def attend_first(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, observer: AttentionObserver
) -> Tensor:
    """Output `[B, H, n, D_v]` of a sequence's first tokens."""
    observer.stats.note_kernel("sdpa")
    output, _ = compat.foreign_attention(module, q, k, v, None, scaling=params.scaling)
    return output.transpose(1, 2)


def _windowed_layer(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    params: AttentionParams,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """A layer that keeps transformers' own cache (sliding window), with the mask transformers made for it."""
    if params.plain:
        output, _ = compat.foreign_attention(module, q, k, v, mask, scaling=params.scaling, **kwargs)
        return output, None
    batch, _, n, _ = q.shape
    if mask is None:  # the stock mask is left out where it is plainly causal
        total = k.shape[2]
        allowed = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)[None, None]
    else:
        allowed = mask | ~mask.any(-1, keepdim=True)  # a padding query sees nothing: keep its row finite
    output = torch.empty_like(q)
    for rows in blocks(n, q, k):
        output[:, :, rows], _ = softmax_block(q[:, :, rows], k, v, allowed[:, :, rows], params)
    return output.transpose(1, 2).contiguous(), None


def attend(
    layer: CompressedLayer,
    module: torch.nn.Module,
    q: Tensor,
    forward: Forward,
    params: AttentionParams,
    observer: AttentionObserver,
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, n, D]`, and probabilities `[B, H_kv, G, 1, P]` of a single query where the method wants them."""
    n, store, encoding = q.shape[2], layer.held(), layer.encoding
    if n == 1 and not is_first_forward(store, n):
        return decode_attention(layer, q, forward, params, observer)
    if is_plain_causal(layer, n, forward, params, observer):
        return attend_first(module, q, *layer.keys_values(), params, observer), None
    if not encoding.absorbs_projection:
        return _attend_masked(layer, module, q, *layer.keys_values(), forward, params, observer), None
    output = _attend_masked(layer, module, *encoding.decode_operands(q, store, forward), forward, params, observer)
    return encoding.decode_output(output, forward, store.heads), None


def _attend_masked(
    layer: CompressedLayer,
    module: torch.nn.Module,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    forward: Forward,
    params: AttentionParams,
    observer: AttentionObserver,
) -> Tensor:
    """Output `[B, H, n, D_v]` of several queries, a block after the other; attention mass is summed where it is wanted."""
    n, store = q.shape[2], layer.held()
    observe_mass, math = observer.wants_mass, needs_probabilities(params, observer)
    if observe_mass and not observer.blockwise and triton_mass.usable(q, params):
        with suppress(KernelUnusable):
            return _attend_and_sum(layer, module, q, keys, values, forward, params, observer)
    positions, queries = layer.positions(), forward.on("positions", q.device)
    observer.stats.note_kernel("blockwise" if math else "sdpa")
    ordered = store.kind == "dense"  # new columns lie last, in order: later ones are invisible to earlier queries
    unit = units(q, keys)[0] if math else ALL
    cut = blocks(n, q[unit[0], unit[2]], keys, logits=math)
    ends = [visible_prefix(store, forward, rows.stop, n) if ordered else store.length for rows in cut]
    if not math:
        return _by_sdpa(q, keys, values, positions, queries, params, cut, ends)
    mass = weights = None
    if observe_mass:
        weights = forward.weights(observer.mass_decay, q.device)
        mass = torch.zeros(q.shape[0], keys.shape[1], q.shape[1] // keys.shape[1], keys.shape[2], device=q.device)
    starts = [unmasked_prefix(store, forward, params, rows, n) for rows in cut]
    spans = list(zip(cut, starts, ends, strict=True))
    output = softmax_blocks(q, keys, values, positions, queries, params, spans, mass, weights)
    if mass is not None:
        observer.add_mass(layer, mass, forward)
    return output


def _by_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    queries: Tensor,
    params: AttentionParams,
    cut: Sequence[slice],
    ends: Sequence[int],
) -> Tensor:
    """Output `[B, H, n, D_v]`, a block of queries of `cut` after the other, each over the first columns up to its end."""
    output = q.new_empty(*q.shape[:3], v.shape[-1])
    for rows, last in zip(cut, ends, strict=True):
        allowed = visible(positions[..., :last], queries[:, rows], params.window)
        output[:, :, rows] = sdpa_block(q[:, :, rows], k[:, :, :last], v[:, :, :last], allowed, params.scaling)
    return output


def _attend_and_sum(
    layer: CompressedLayer,
    module: torch.nn.Module,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    forward: Forward,
    params: AttentionParams,
    observer: AttentionObserver,
) -> Tensor:
    """Output `[B, H, n, D]` by flash or SDPA and the attention mass beside it by a kernel of its own, on a GPU.

    Raises:
        KernelUnusable: Triton cannot run that kernel here; nothing was added.
    """
    n, store, lse = q.shape[2], layer.held(), None
    positions, at = layer.positions(), forward.on("positions", q.device)
    weights = forward.weights(observer.mass_decay, q.device)
    plain = is_first_forward(store, n) and forward.real is None and params.window is None and forward.fusion is None
    both = triton_mass.flash(q, keys, values, params.scaling) if plain else None
    if both is not None:
        output, lse = both
    elif plain:
        output = attend_first(module, q, keys, values, params, observer)
    else:
        cut = blocks(n, q, keys, logits=False)
        output = _by_sdpa(q, keys, values, positions, at, params, cut, [keys.shape[2]] * len(cut))
    ordered = store.kind == "dense" and forward.fusion is None
    mass = triton_mass.mass(q, keys, at, positions, params, ordered, plain, weights, lse)
    observer.stats.note_kernel("sdpa" if both is None else "flash", "triton")
    observer.add_mass(layer, mass, forward)
    return output


def unmasked_prefix(store: Store, forward: Forward, params: AttentionParams, rows: slice, n: int) -> int:
    """Length of the prefix of keys that all queries of the block may attend to; it needs no mask."""
    if store.kind != "dense" or not store.full or forward.real is not None or params.window is not None:
        return 0
    return visible_prefix(store, forward, rows.start + 1, n) - 1


def visible_prefix(store: Store, forward: Forward, number: int, n: int) -> int:
    """Length of the prefix of a dense store's keys that the first `number` of n queries may attend to at most.

    New columns lie last, one per query; in a fused prompt every column is new, and queries are there for some.
    """
    return store.length - n + number if forward.fusion is None else int(forward.positions[0, number - 1]) + 1


compat.register(kv_attention)
