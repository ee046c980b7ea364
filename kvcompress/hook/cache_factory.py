"""Cache factory: empty caches of one model and method; a caller's cache is checked before a forward goes into it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.sequence import CacheSpec
from kvcompress.hook.compression import Compressor
from kvcompress.hook.model_facts import ModelFacts
from kvcompress.method.parts import Plain
from kvcompress.models import compat

Tensor = torch.Tensor


class CacheFactory:
    """Caches for the forwards of one session.

    Attributes:
        reuse_rotations: RoPE per layer, if the method's prefill reuses chunks.
    """

    def __init__(self, model: PreTrainedModel, compressor: Compressor, facts: ModelFacts) -> None:
        self.model, self.compressor, self.facts = model, compressor, facts
        self.reuse_rotations: list[compat.Rotation] = []
        self._codec_rope: list[compat.Rotation] | None = None  # by which the codec or reader turns keys back

    def find_rotations(self) -> None:
        """Find out how the model rotates its keys, where the method depends on it; runs the model, unhooked.

        Raises:
            ValueError: a rotation that is not known, or a model whose chunks cannot be reused.
        """
        parts = self.compressor.parts
        self.facts.measure()
        if parts.prefill.needs_segments:
            compat.check_reusable(self.model)
            self.reuse_rotations = self.facts.rope or compat.rotations(self.model)
        if (parts.codec.needs_rotation or parts.reader.rank) and self._codec_rope is None:
            self._codec_rope = compat.rotations(self.model)

    def new(self, headroom: bool = True, exact: bool = False, into: Any = None) -> CompressedCache:
        """An empty cache.

        Args:
            headroom: buffers have room for tokens to come.
            exact: holds keys and values as the model makes them, all of them, whatever the method.
            into: an empty cache of transformers', which becomes this one, so that its owner sees what it is filled with.
        """
        spec = CacheSpec(
            codec=self.compressor.parts.codec,
            limited=self.compressor.limited or not headroom,
            compact_rope=self.facts.compact_rope,
            codec_rope=self._codec_rope,
            latents=compat.holds_latents(self.model),
            method=self.compressor.method,
            model=weakref.ref(self.model),
        )
        if exact:
            spec = replace(spec, codec=Plain(), limited=False, compact_rope=None, codec_rope=None)
        if into is None:
            into = CompressedCache.__new__(CompressedCache)
        else:
            vars(into).clear()
            into.__class__ = CompressedCache
        into.__init__(spec, lambda cache: compat.new_layers(self.model, lambda index: CompressedLayer(cache, index)))
        return into

    def adopt(self, cache: Any) -> CompressedCache:
        """The cache that a forward goes into: the caller's if it is ours, or empty, which makes it ours; a new one for none.

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
            if cache.spec.model is None or cache.spec.model() is not self.model:
                raise ValueError("this cache was filled by another model: prefill it again in this session")
            method = self.compressor.method
            if cache.spec.method is not method and cache.spec.method != method:
                raise ValueError("this cache was made by another method: prefill it again in this session")
            return cache
        if compat.is_empty_dynamic(cache):
            return self.new(into=cache)
        raise ValueError(
            f"a {type(cache).__name__} cannot be compressed: pass no cache, an empty DynamicCache, or one made by this "
            "session"
        )
