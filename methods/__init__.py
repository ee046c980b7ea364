"""Compression methods, one file each. Each `Method` subclass in this folder is found and exported by its class name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

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


def method_of(method: Method | str | None, budget: float | int | None, settings: dict[str, Any]) -> Method:
    """A method as it is, or made of its name in lower case, its budget and its settings; None compresses nothing.

    Raises:
        ValueError: an unknown name or setting, or settings beside a method that is made already.
    """
    names = {name.lower(): cls for name, cls in METHODS.items()}
    if isinstance(method, Method):
        if budget is not None or settings:
            given = ", ".join((["budget"] if budget is not None else []) + list(settings))
            raise ValueError(f"{given}: settings of the method, which is given as {method}")
        return method
    if method is None and settings:
        raise ValueError(f"{', '.join(settings)}: no argument here; settings of a method need method=NAME")
    if method is not None and method not in names:
        raise ValueError(f"method={method!r} is unknown; valid: {', '.join(sorted(names))}")
    cls = Method if method is None else names[method]
    settings = settings if budget is None else {"budget": budget, **settings}
    try:
        return cls(**settings)
    except TypeError as error:
        raise ValueError(f"method={method}: {error}") from None


METHODS = discover()
globals().update(METHODS)
__all__ = [*METHODS, "METHODS"]
