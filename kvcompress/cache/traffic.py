"""Bytes read by decode steps and moved between tiers, summed from the accounts of the layers."""

from __future__ import annotations

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import PagedStore
from kvcompress.cache.nbytes import layer_bytes


def traffic(layer: CompressedLayer) -> dict[str, float]:
    """Of one layer, sums over rows: bytes `read`, decode `steps`, pages `skipped`, and bytes moved between tiers by kind."""
    found = {name: float(value.sum()) for name, value in layer.account.totals.items()}
    store = layer.store
    if isinstance(store, PagedStore) and store.host is not None:
        for name, value in store.host.moved.items():
            found[name] = found.get(name, 0.0) + float(value.sum())
    return found


def skipped(layer: CompressedLayer) -> bool:
    """True if some step did not read all that the layer held."""
    return "skipped" in layer.account.totals and bool((layer.account.totals["skipped"] > 0).any())


def per_token(cache: CompressedCache, rows: int) -> dict[str, int]:
    """Bytes read and moved between tiers per decoded token, the mean over steps and rows, as in a record's `kv.*`.

    A layer without pages is read whole, at its present size. The prompt's pages, which are written to the host once,
    are not part of what is moved.
    """
    read = float(cache.nbytes()["other_layers"]) / rows
    moved = 0.0
    for layer in cache.full_layers:
        if layer.store is None:
            continue
        found = traffic(layer)
        steps = found.get("steps", 0.0)
        if steps:
            read += (found["read"] + found.get("rebuilt", 0.0)) / steps
            moved += sum(found.get(name, 0.0) for name in ("written", "promoted", "fetched")) / steps
        else:
            read += layer_bytes(layer, None)["keys_values"] / rows
    return {"read_bytes_per_token": int(read), "moved_bytes_per_token": int(moved)}
