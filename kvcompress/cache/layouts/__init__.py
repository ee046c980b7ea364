"""Layouts of kept tokens in memory. The layout follows from the decision; no method chooses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompress.cache.layouts.dense import DenseStore, gather_slots
from kvcompress.cache.layouts.low_rank_pages import LowRankKeyPages
from kvcompress.cache.layouts.paged import PagedStore
from kvcompress.cache.layouts.quantized_groups import QuantizedGroups
from kvcompress.cache.layouts.ragged import RaggedStore
from kvcompress.cache.layouts.score_sorted import ScoreSortedStore

Store = DenseStore | RaggedStore

# A dense buffer may waste this share on empty slots; with a growing buffer's headroom of 1/8 what is allocated stays
# under 1.25 times what is valid.
DENSE_WASTE = 1.1

__all__ = [
    "QuantizedGroups",
    "DenseStore",
    "PagedStore",
    "RaggedStore",
    "ScoreSortedStore",
    "LowRankKeyPages",
    "Store",
    "joined",
    "keep_slots",
    "one_row",
]


def joined(stores: Sequence[Store], leave_out: Sequence[str] = ()) -> RaggedStore:
    """Copies of all that several stores hold, their rows one after the other."""
    packed = []
    for store in stores:
        mask = store.get("positions") >= 0
        packed.append(store.packed(mask.expand(-1, store.heads, -1)))
    names = [name for name in packed[0] if name not in leave_out]
    channels = {name: torch.cat([held[name] for held in packed]) for name in names}
    return RaggedStore(channels, torch.cat([store.counts for store in stores]))


def one_row(store: Store | PagedStore, number: int, grow: bool) -> Store | PagedStore:
    """A store of one row's slots, copied; empty ones are left out but for pages, which stay as they are."""
    one = torch.tensor([number])
    if isinstance(store, PagedStore):
        paged = store.fork()
        paged.select_rows(one)
        return paged
    if isinstance(store, DenseStore):
        held: Store = DenseStore({n: store.get(n)[number : number + 1] for n in store.channels}, store.counts[one])
    else:
        wanted = store.get("positions") >= 0
        wanted[torch.arange(len(wanted)) != number] = False
        held = RaggedStore(store.packed(wanted), store.counts[one])
    return keep_slots(held, (held.get("positions") >= 0).expand(-1, held.heads, -1), grow)


def keep_slots(store: Store, mask: torch.Tensor, grow: bool = False) -> Store:
    """A store that holds copies of the marked slots only, in their order.

    Args:
        store: what is held now.
        mask: bool `[B, H, P]` over the held slots; unmarked and empty slots are dropped.
        grow: give the new buffer headroom at once (in decode, where the next token comes right away).
    """
    mask = mask & (store.get("positions") >= 0)
    counts = mask.sum(-1).cpu()
    longest = int(counts.max())
    if counts.numel() * longest <= DENSE_WASTE * int(counts.sum()):
        return _to_dense(store, mask, counts, longest, grow)
    if not isinstance(store, DenseStore):
        return RaggedStore(store.packed(mask), counts)
    flat_index = mask.flatten().nonzero().squeeze(1)
    channels = {}
    for name in store.channels:
        value = store.get(name)
        value = value.expand(*mask.shape, *value.shape[3:])
        channels[name] = value.reshape(-1, *value.shape[3:]).index_select(0, flat_index)
    return RaggedStore(channels, counts)


def _to_dense(store: Store, mask: torch.Tensor, counts: torch.Tensor, longest: int, grow: bool) -> DenseStore:
    batch, heads, slots = mask.shape
    even = bool((counts == longest).all())
    if even:
        index = mask.nonzero()[:, 2].view(batch, heads, longest)
    else:
        # unmarked slots sort to the front: empty slots end up at the left
        index = torch.sort(mask.to(torch.uint8), dim=-1, stable=True).indices[..., slots - longest :]
    shared = heads > 1 and even and bool((index == index[:, :1]).all())
    channels = {}
    for name in store.channels:
        value = store.get(name)
        one_head = value.shape[1] == 1 and (shared or heads == 1)
        channels[name] = gather_slots(value, index[:, :1] if one_head else index)
    if not even:
        channels["positions"] = channels["positions"].masked_fill(~mask.gather(2, index), -1)
    elif channels["positions"].shape[1] != 1 and bool((channels["positions"] == channels["positions"][:, :1]).all()):
        channels["positions"] = channels["positions"][:, :1].clone()
    return DenseStore(channels, counts, grow=grow)
