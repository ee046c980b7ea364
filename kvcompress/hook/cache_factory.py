"""Makes the empty caches of one model and method, and checks a caller's cache before a forward goes into it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.compression import Compressor
from kvcompress.method.parts import Plain
from kvcompress.models import compat

Tensor = torch.Tensor


class CacheFactory:
    """Caches for the forwards of one session.

    Attributes:
        rotations: RoPE per layer, if positions are compact.
        reuse_rotations: RoPE per layer, if the method's prefill reuses chunks.
    """

    def __init__(self, model: PreTrainedModel, compressor: Compressor) -> None:
        self.model, self.compressor = model, compressor
        self.rotations: list[compat.Rotation] | None = None
        self.reuse_rotations: list[compat.Rotation] = []
        self._codec_rotations: list[compat.Rotation] | None = None  # by which the codec turns keys back

    def find_rotations(self) -> None:
        """Find out how the model rotates its keys, where the method depends on it; runs the model, unhooked.

        Raises:
            ValueError: a rotation that is not known, or a model whose chunks cannot be reused.
        """
        compressor, model = self.compressor, self.model
        compact = compressor.method.compact_positions and compressor.limited
        self.rotations = compat.rotations(model) if compact else None
        if compressor.needs.prerope:
            compressor.rotations = self.rotations or compat.rotations(model)
        if compressor.parts.prefill.needs_segments:
            compat.check_reusable(model)
            self.reuse_rotations = compressor.rotations or compat.rotations(model)
        if (compressor.parts.codec.needs_rotation or compressor.reader.rank) and self._codec_rotations is None:
            self._codec_rotations = compat.rotations(model)

    def new(self, headroom: bool = True, exact: bool = False) -> CompressedCache:
        """An empty cache.

        Args:
            headroom: buffers have room for tokens to come.
            exact: holds keys and values as the model makes them, all of them, whatever the method.
        """
        codec = Plain() if exact else self.compressor.parts.codec
        limited = not exact and (self.compressor.limited or not headroom)
        cache = CompressedCache([], codec, limited, None if exact else self.rotations)
        cache.layers[:] = compat.new_layers(self.model, lambda i: CompressedLayer(cache, i))
        cache.owner, cache.model, cache.turns = self.compressor, weakref.ref(self.model), self._codec_rotations
        cache.latents = compat.holds_latents(self.model)
        return cache

    def adopt(self, cache: Any) -> CompressedCache:
        """The cache that a forward goes into: the caller's if it is ours, a new one in place of none or an empty one.

        Raises:
            ValueError: a cache that is half written, of another model or method, or of another class with content.
        """
        if cache is None:
            return self.new()
        if isinstance(cache, CompressedCache):
            if cache.broken:
                raise ValueError(
                    "a failed forward left this cache half written: start again, or go on from a fork() made before"
                )
            if cache.model is None or cache.model() is not self.model:
                raise ValueError("this cache was filled by another model: prefill it again in this session")
            if cache.owner is not self.compressor:
                if not isinstance(cache.owner, Compressor) or cache.owner.method != self.compressor.method:
                    raise ValueError("this cache was made by another method: prefill it again in this session")
                cache.owner = self.compressor
            return cache
        if compat.is_empty_dynamic(cache):
            if not hasattr(cache, "_kvcompress"):
                cache._kvcompress = self.new()
            return cache._kvcompress
        raise ValueError(
            f"a {type(cache).__name__} cannot be compressed: pass no cache, an empty DynamicCache, or one made by this "
            "session"
        )
