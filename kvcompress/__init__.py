"""kvcompress: KV-cache compression for HuggingFace models, really measured."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcompress.common.after_import import after_import

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


def _register_pipeline() -> None:
    # by its name: what imports the package does not import this, which stands above most of it
    import_module("kvcompress.pipeline").register()


after_import("transformers.pipelines", _register_pipeline)  # which may have been imported, or may never be
