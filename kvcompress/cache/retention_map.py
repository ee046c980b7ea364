"""Retention map: share of each stretch of the prompt that a cache kept, small enough for a record; tokens per layer and head."""

from __future__ import annotations

from typing import Any

import torch

from kvcompress.cache.cache import CompressedCache

BINS = 128  # stretches of the prompt, at most one per token


def retention_map(cache: CompressedCache, row: int = 0) -> dict[str, Any]:
    """Where the tokens lie that a row of a cache holds.

    Returns:
        `kept_map`: for each of at most `BINS` even stretches of what the row has seen, the share of its tokens that is
        held, mean over full-attention layers and heads, in percent (whole numbers). `kept_per_head`: tokens held, a list
        per layer; left out where all heads of each layer hold equally many. Nothing at all where nothing was evicted.
    """
    layers = cache.full_layers
    if not layers or cache.real is None or all(layer.evicted == 0 for layer in layers):
        return {}
    seen = int(cache.real[row])
    bins = min(BINS, seen)
    counts = torch.zeros(bins, dtype=torch.long)
    heads = 0
    for layer in layers:
        positions = cache.positions(layer.index)[row]  # [H_kv, P]
        held = positions[positions >= 0].clamp(max=seen - 1)
        counts += torch.bincount(held * bins // seen, minlength=bins).cpu()
        heads += positions.shape[0]
    # tokens of each stretch: as many positions as fall into it
    sizes = torch.bincount(torch.arange(seen) * bins // seen, minlength=bins) * heads
    found: dict[str, Any] = {"kept_map": (100.0 * counts / sizes).round().int().tolist()}
    per_head = cache.kept_tokens()[:, row]
    if (per_head != per_head[:, :1]).any():
        found["kept_per_head"] = per_head.tolist()
    return found
