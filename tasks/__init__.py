"""Tasks, one file each. Every `Task` subclass with a `name` is found and exported by its class name."""

from __future__ import annotations

import importlib
import pkgutil

from kvcompress.data.task import Task


def discover() -> dict[str, type[Task]]:
    """Task classes by their `name`, in alphabetical order."""
    found: dict[str, type[Task]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            here = isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
            if here and "name" in vars(value):
                found[value.name] = value
    return dict(sorted(found.items()))


TASKS = discover()
globals().update({task.__name__: task for task in TASKS.values()})
__all__ = [*(task.__name__ for task in TASKS.values()), "TASKS"]
