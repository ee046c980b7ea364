"""Attention mass: what each slot got of the queries' attention so far, a channel `mass` of a store."""

from __future__ import annotations

import torch

from kvcompress.cache.layouts import DenseStore, RaggedStore, Store
from kvcompress.common.transfer import upload

Tensor = torch.Tensor


def add_mass(store: Store, mass: Tensor, fade: Tensor | None) -> None:
    """Add attention mass `[B, H_kv, G, P]` to the slots' sums, held as `[B, H_kv, P, G]` float32.

    Args:
        fade: float32 `[B]`, what the sums so far are multiplied by first; None for 1.
    """
    mass = mass.transpose(2, 3)
    if "mass" not in store.channels:
        store.put("mass", mass.contiguous())
        return
    before = store.get("mass")
    if fade is not None:
        before = before.mul_(upload(fade, mass.device)[:, None, None, None])
    if isinstance(store, DenseStore):
        before.add_(mass)
    else:
        store.put("mass", before + mass)


def add_lane_mass(store: RaggedStore, mass: Tensor, fade: Tensor | None) -> None:
    """`add_mass` from `[lanes, G, slots]`, as attention over lanes gives it."""
    if "mass" not in store.channels:
        store.put("mass", store.padded(mass.transpose(1, 2)))
        return
    before = store.in_lanes("mass")
    if fade is not None:
        before.mul_(upload(fade, mass.device)[store.owners() // store.heads, None, None])
    before.add_(mass.transpose(1, 2))
