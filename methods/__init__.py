"""Compression methods, one file each. Each `Method` subclass in this folder is found and exported by its class name."""

from __future__ import annotations

import importlib
import pkgutil

from kvcompress.method import Method


def discover() -> dict[str, type[Method]]:
    """Method classes by class name, in alphabetical order; a leading underscore keeps one out."""
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, value in vars(module).items():
            own = isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
            if own and not name.startswith("_"):
                found[name] = value
    return dict(sorted(found.items()))


METHODS = discover()
globals().update(METHODS)
__all__ = [*METHODS, "METHODS"]
