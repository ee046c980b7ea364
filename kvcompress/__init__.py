"""kvcompress: KV-cache compression for HuggingFace models, really measured."""

from __future__ import annotations

from typing import Any

__all__ = ["CompressedCache", "Session", "compress", "load"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: a command line that only prints help should not wait for them
    if name in ("Session", "compress"):
        from kvcompress.hook import session

        return getattr(session, name)
    if name == "CompressedCache":
        from kvcompress.cache.cache import CompressedCache

        return CompressedCache
    if name == "load":
        from kvcompress.models.loading import load

        return load
    raise AttributeError(f"module 'kvcompress' has no attribute {name!r}")
