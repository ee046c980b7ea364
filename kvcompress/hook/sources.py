"""Protocols of what a caller may bring to a session: a prefill made before, and a store of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.hook.compression import Compressor
from kvcompress.method.parts import Prefilled

Tensor = torch.Tensor


class PrefillSource(Protocol):
    """A full prefill made before, from which a session's prompt may start (`shared_prefill.SharedPrefill`)."""

    def serves(self, cache: CompressedCache, segments: Sequence[Tensor], mask: Tensor | None) -> bool:
        """True if this is what a prompt of `segments` on `cache` would compute."""
        ...

    def hand_over(self, compressor: Compressor, cache: CompressedCache) -> Prefilled:
        """Fill an empty cache as the prompt's own forward would have filled and compressed it."""
        ...


class ChunkStore(Protocol):
    """Keys and values of chunks of text that a prefill reuses (`kvcompress.reuse.kv_store.KVStore`)."""

    def serves(self, model: Any) -> bool:
        """True if its chunks are those of this model, as it is now."""
        ...

    def check(self, model: Any) -> None:
        """Raises:
        ValueError: it holds chunks of another model.
        """
        ...
