"""Bytes that one layer holds, by kind: keys and values, positions, scores, tables, host memory."""

from __future__ import annotations

import torch

from kvcompress.cache.encoding import BESIDE
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import PagedStore, RaggedStore

Tensor = torch.Tensor

KINDS = "keys_values codes scales residual positions summaries tables scores index host allocated full".split()


def layer_bytes(layer: CompressedLayer, real: Tensor | None) -> dict[str, int]:
    """Bytes of one layer by kind, from the storages its tensors live in."""
    store = layer.held()
    counts, heads = store.counts, store.counts.shape[1]
    found = dict.fromkeys(KINDS, 0)
    if layer.encoding.groups is not None:
        for _, _, unit in layer.encoding.groups.each():
            for kind, value, held in unit.tensors():
                found[kind] += held
                found["keys_values"] += held
                found["allocated"] += storage_bytes(value)
    for name, value in store.channels.items():
        allocated = storage_bytes(value)
        if name in BESIDE and name != "positions":
            found["scores"] += allocated
            continue
        found["allocated"] += allocated
        if isinstance(store, PagedStore):
            shared = name == "positions" and value.shape[1] == 1
            on_device = counts[:, 0] if shared else counts if name == "positions" else store.resident()
            slots, width = int(on_device.sum()), 1 if name == "positions" else value[0, 0].numel()
        elif isinstance(store, RaggedStore):
            slots, width = int(counts.sum()), value[:1].numel() if value.dim() > 1 else 1
        elif value.shape[1] == heads:
            slots, width = int(counts.sum()), value[0, 0, :1].numel()
        else:  # shared by all heads
            slots, width = int(counts[:, 0].sum()), value[0, 0, :1].numel()
        held = slots * width * value.element_size()
        found["positions" if name == "positions" else "keys_values"] += held
        if layer.encoding.is_encoded and name != "positions":
            found["scales" if name in layer.encoding.codec.scales else "codes"] += held
    beside_scores = [*layer.state.values(), *(() if layer.queries is None else layer.queries.tensors)]
    beside_scores += [tensor for name, tensor in layer.reader_state.items() if name != "summaries"]
    found["scores"] += sum(storage_bytes(tensor) for tensor in beside_scores)
    beside = sum(storage_bytes(tensor) for tensor in layer.encoding.state.values())
    found["keys_values"] += beside
    found["codes"] += beside
    found["allocated"] += beside
    if isinstance(store, PagedStore):
        # the table is kept on the CPU and copied to the device whenever it changes: that copy is counted
        pages, index = int(store.pages().sum()), storage_bytes(store.bounds) + storage_bytes(store.table)
        found["summaries"] += pages * store.bounds.shape[-1] * store.bounds.element_size()
        found["tables"] += pages * store.table.element_size()
        found["index"] += index
        found["allocated"] += index
        own, rebuilt = layer.reader_state.get("summaries"), None if store.host is None else store.host.rebuilt
        if rebuilt is not None and own is not None:
            found["summaries"] += int(rebuilt.full.sum()) * heads * own.shape[-1] * own.element_size()
            found["keys_values"] += rebuilt.nbytes
            found["allocated"] += storage_bytes(own) + rebuilt.allocated
        if store.host is not None:
            found["host"] += sum(storage_bytes(value) for value in store.host.channels.values())
    if layer.evictor is not None:
        found["index"] += storage_bytes(layer.evictor.blocked)
    found["index"] += sum(storage_bytes(tensor) for tensor in layer.beside_steps())
    if real is not None:
        found["full"] = int(real.sum()) * layer.full_width
    return found


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the storage a tensor lives in, whether it fills it or not."""
    return tensor.untyped_storage().nbytes()
