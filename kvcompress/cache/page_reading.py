"""Decode attention over the pages that a reader chooses: a layer into pages, the choice, the read, the account of it."""

from __future__ import annotations

from contextlib import suppress

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import LowRankKeyPages, PagedStore
from kvcompress.cache.pages import PagedReader, PageIndex
from kvcompress.common.transfer import upload
from kvcompress.kernels import triton_pages
from kvcompress.kernels.blockwise import AttentionParams, sdpa_block, softmax_block
from kvcompress.kernels.launch import KernelUnusable

Tensor = torch.Tensor


def read_pages(
    layer: CompressedLayer,
    reader: PagedReader,
    q: Tensor,
    forward: Forward,
    params: AttentionParams,
    math: bool = False,
) -> tuple[Tensor, str]:
    """Output `[B, H, 1, D]` of single queries over the pages that the reader selects, and the kernel that gave it.

    The kernel is "triton", in place; else pages are gathered first: "pages", or "blockwise", without SDPA, if `math`.
    """
    store = to_pages(layer, reader, forward)
    sequence = layer.context().sequence
    real = sequence.real if sequence.prompted is None else sequence.prompted
    assert real is not None
    index = PageIndex(
        layer.index,
        store.size,
        upload(store.pages(), q.device),
        store.shown_bounds(),
        real,
        layer.account.count_step(forward),
        params.scaling,
        lambda: _keys(layer, store),
    )
    chosen = reader.select(q, index, layer.reader_state)
    if chosen is None:
        ids = torch.arange(store.most, device=q.device).expand(*index.pages.shape, -1)
        chosen = ids.masked_fill(ids >= index.pages[..., None], -1)
    if chosen.shape[1] not in (store.heads, q.shape[1]):
        raise ValueError(f"a reader's selection needs {store.heads} or {q.shape[1]} heads, got {chosen.shape[1]}")
    store.bring(chosen)
    output, kernel = None if math else _in_place(layer, store, chosen, q, forward, params), "triton"
    if output is None:
        output, kernel = (
            attend_gathered(layer, store, chosen, q, forward, params, math),
            "blockwise" if math else "pages",
        )
    _count_step(layer, store, chosen, index, forward)
    held = reader.hold(index, layer.reader_state)
    if held is not None:
        store.hold(held)
    return output, kernel


def _in_place(
    layer: CompressedLayer, store: PagedStore, chosen: Tensor, q: Tensor, forward: Forward, params: AttentionParams
) -> Tensor | None:
    """Output `[B, H, 1, D]` over pages read where they lie; None where no kernel can."""
    if not layer.encoding.is_plain:
        return None
    keys, values, positions, table = store.block_table()
    if not triton_pages.usable(q, keys, values, chosen.shape[1]):
        return None
    at = forward.on("positions", q.device)
    with suppress(KernelUnusable):
        return triton_pages.decode(q, keys, values, positions, table, chosen, at, params)
    return None


def attend_gathered(
    layer: CompressedLayer,
    store: PagedStore,
    chosen: Tensor,
    q: Tensor,
    forward: Forward,
    params: AttentionParams,
    math: bool,
) -> Tensor:
    """Output `[B, H, 1, D]` over pages `chosen [B, H_kv or H, n]` of a store (-1 = none), gathered first."""
    batch, heads, n = chosen.shape
    size = store.size
    slots = chosen[..., None] * size + torch.arange(size, device=q.device)
    counts = upload(store.counts, q.device)
    if heads != store.heads:
        counts = counts.repeat_interleave(heads // store.heads, dim=1)
    allowed = (slots < counts[:, :, None, None]) & (chosen >= 0)[..., None]
    if params.window is not None:
        positions = store.positions.expand(batch, store.heads, -1)
        positions = positions.repeat_interleave(heads // store.heads, dim=1)
        seen = positions.gather(2, slots.clamp(min=0).flatten(2)).view_as(slots)
        at = forward.on("positions", q.device)[:, :1, None, None]
        allowed &= (seen > at - params.window) | (at < 0)
    allowed = allowed.flatten(2)[:, :, None]
    query, keys, values = _gathered(layer, store, chosen, q, forward)
    if params.plain and not math:
        output = sdpa_block(query, keys, values, allowed, params.scaling)
    else:
        output = softmax_block(query, keys, values, allowed, params)[0]
    in_groups = layer.encoding.groups is not None  # whose pages hold decoded keys and values
    return output if in_groups else layer.encoding.decode_output(output, forward, store.heads)


def _gathered(
    layer: CompressedLayer, store: PagedStore, chosen: Tensor, q: Tensor, forward: Forward
) -> tuple[Tensor, Tensor, Tensor]:
    """The query, and the keys and values `[B, h, n * size, ...]` of the chosen pages, in the codec's own terms."""
    encoding = layer.encoding
    exact = not encoding.is_encoded or encoding.groups is not None
    names = ["keys", "values"] if exact else encoding.channels(store)
    channels = {name: store.read(name, chosen) for name in names}
    shape = (*chosen.shape[:2], -1)
    if exact:
        keys, values = (channels[name].view(*shape, channels[name].shape[-1]) for name in ("keys", "values"))
        return q, *encoding.attention_kv(keys, values)
    batch, heads, n = chosen.shape
    positions = store.positions.expand(batch, store.heads, -1).unflatten(2, (-1, store.size))
    segments = torch.arange(batch * heads, device=q.device)
    owners = segments // heads * store.heads + segments % heads * store.heads // heads
    pages = chosen.clamp(min=0).flatten(0, 1)
    at = positions.flatten(0, 1)[owners[:, None], pages].flatten(0, 1)[None]
    slots = encoding.slot_info(at, store.heads, owners=owners.repeat_interleave(n))
    keys, values = encoding.codec.read({name: value[None] for name, value in channels.items()}, slots)
    keys, values = (x[0].reshape(*shape, x.shape[-1]) for x in (keys, values))
    return encoding.encode_query(q, forward, store.heads), *encoding.attention_kv(keys, values)


def _keys(layer: CompressedLayer, store: PagedStore) -> Tensor:
    """Keys `[B, H_kv, slots, D]` of all pages as attention sees them."""
    encoding = layer.encoding
    in_place = encoding.is_plain or encoding.groups is not None
    return store.get("keys") if in_place else encoding.keys_values(store)[0]


# ---------------------------------------------------------------------- into pages


def to_pages(layer: CompressedLayer, reader: PagedReader, forward: Forward) -> PagedStore:
    """The layer's slots in pages: put there if they are not yet, at the first step `forward` after a prompt.

    What a grouped codec holds is decoded into pages anew at every step, and so is read whole.
    """
    store = layer.held()
    if isinstance(store, PagedStore):
        return store
    keys, values = layer.keys_values()
    positions = store.get("positions")
    mask = (positions >= 0).expand(-1, store.heads, -1)
    shared = positions.shape[1] == 1
    keys, packed = keys[mask], store.packed(mask)
    bounded = keys if reader.bounded else keys[:, :0]
    if layer.encoding.groups is not None:  # groups of codes stay as they are: the pages are this step's own
        packed |= {"keys": keys, "values": values[mask]}
        return PagedStore(packed, store.counts.clone(), bounded, reader.page_size, shared, ())
    before = store.counts - forward.added[:, None]  # the step's own token is no part of what is summed up
    low_rank = None if reader.rank is None else low_rank_keys(layer, before[:, 0], reader.page_size, reader.rank)
    host = reader.offloaded(layer.index)
    found = PagedStore(packed, store.counts.clone(), bounded, reader.page_size, shared, host, low_rank)
    layer.go_into_pages(found)
    if not reader.bounded:
        first = reader.begin(layer.keys_values()[0], before, layer.reader_state)
        if first is not None:
            found.hold(first)
    return found


def low_rank_keys(layer: CompressedLayer, counts: Tensor, size: int, rank: int) -> LowRankKeyPages:
    """Keys of a layer's first `counts [B]` tokens in `rank` numbers per token, all heads together."""
    store, rope = layer.held(), layer.encoding.codec_rope
    assert rope is not None
    positions = store.get("positions")
    held = (positions >= 0)[:, 0].to(torch.uint8)
    order = torch.sort(held, dim=1, descending=True, stable=True).indices  # held slots to the left
    at = layer.encoding.slot_info(positions, store.heads).rotated[:, 0].gather(1, order)
    keys = layer.keys_values()[0]
    keys = keys.gather(2, order[:, None, :, None].expand(-1, store.heads, -1, keys.shape[-1]))
    return LowRankKeyPages.of(rope.unrotate(keys, at[:, None]), at, counts, size, rank, rope.rotate)


# ---------------------------------------------------------------------- what was read


def _count_step(layer: CompressedLayer, store: PagedStore, chosen: Tensor, index: PageIndex, forward: Forward) -> None:
    """Count this step's bytes by row: whole pages, and the bounds, summaries or keys that they were ranked by."""
    read, pages = (chosen >= 0).sum((1, 2)), index.pages.sum(1)
    bounds = index.bounds.shape[-1] * index.bounds.element_size()
    ranked = torch.div(pages * min(index.scored, store.heads), store.heads, rounding_mode="floor") * bounds
    summaries, page_bytes = layer.reader_state.get("summaries"), store.slot_bytes
    if summaries is not None:
        low_rank = None if store.host is None else store.host.rebuilt
        number = pages if low_rank is None else upload(low_rank.full, pages.device) * store.heads
        ranked = ranked + number * summaries.shape[-1] * summaries.element_size()
    if index.ranked:  # every key was read, the chosen pages' among them
        ranked = ranked + upload(store.counts.sum(1), read.device) * store.key_bytes
        page_bytes -= store.key_bytes
    stepped = upload(forward.added > 0, read.device)
    skipped = (pages * (chosen.shape[1] // store.heads) - read).clamp(min=0)
    whole = read * store.size * page_bytes + ranked
    if layer.encoding.groups is not None:
        held = sum(size for _, _, unit in layer.encoding.groups.each() for _, _, size in unit.tensors())
        whole = torch.full_like(read, held // len(read))
    values = {"read": whole, "skipped": skipped, "steps": torch.ones_like(read)}
    layer.account.add({name: value * stepped for name, value in values.items()})
