"""Components of a cell: the classes that a configuration may name, and the method and task that it builds.

Nothing here names a method or a task: they are found. Imports all of them, and torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcompress.data.task import Task
from kvcompress.method import Allocator, Codec, Method, Prefill, Reader, Schedule
from kvcompress.methods import METHODS
from kvcompress.models import loading
from kvcompress.reuse.prefix import PrefixReuse  # noqa: F401  (a part that no method brings)
from kvcompress.sweep.schemas import Schema, Table, derive
from kvcompress.tasks import TASKS

PARTS: dict[str, type] = {"allocator": Allocator, "codec": Codec, "reader": Reader, "prefill": Prefill}
# what other groups and top-level keys set
METHOD_ELSEWHERE = tuple(item.name for item in fields(Method) if item.name != "preset")
SCHEDULE_ELSEWHERE = ("newline_ids", "until_ids")  # the tokenizer's business
TASK_ELSEWHERE = tuple(item.name for item in fields(Task))


def part_classes(base: type, within: str = "") -> dict[str, type]:
    """Concrete dataclasses under `base` by the name they have in records, of modules whose names begin with `within`."""
    found: dict[str, type] = {}
    subclasses: list[Any] = base.__subclasses__()
    for cls in subclasses:
        concrete = not getattr(cls, "__abstractmethods__", None)
        if concrete and is_dataclass(cls) and cls.__module__.startswith(within):
            found[getattr(cls, "name", str(getattr(cls, "__name__", "")).lower())] = cls  # type: ignore[assignment]
        found |= part_classes(cls, within)
    return dict(sorted(found.items()))


def method_classes() -> dict[str, type[Method]]:
    """Method classes by the name they have on the command line: the class name in lower case."""
    return {name.lower(): cls for name, cls in METHODS.items()}


def table(within: str = "") -> Table:
    """Schemas of all methods, tasks and schedules, and of the parts of modules whose names begin with `within`."""
    parts = tuple((group, tuple(part_classes(base, within).items())) for group, base in PARTS.items())
    return _table(tuple(method_classes().items()), tuple(TASKS.items()), parts)


@functools.lru_cache(maxsize=2)
def _table(methods: tuple[Any, ...], tasks: tuple[Any, ...], parts: tuple[Any, ...]) -> Table:
    groups: dict[str, Mapping[str, Schema]] = {
        "method": {name: derive(cls, name, METHOD_ELSEWHERE) for name, cls in methods},
        "task": {name: derive(cls, name, TASK_ELSEWHERE) for name, cls in tasks},
        "schedule": {"schedule": derive(Schedule, "schedule", SCHEDULE_ELSEWHERE)},
    }
    groups |= {group: {name: derive(cls, name) for name, cls in found} for group, found in parts}
    return Table(groups, tuple(loading.names()))


def _values(node: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(vars(node))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}  # type: ignore


def _named(group: str, node: Any, classes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    values = _values(node)
    name = values.pop("name", None)
    if name not in classes:
        raise ValueError(f"{group}.name={name!r} is unknown; valid: {', '.join(classes)}")
    return classes[name], values


def build_method(config: Any) -> Method:
    """The method of a cell with its budget and replaced parts; `config` is a `RunConfig` or its DictConfig.

    Raises:
        ValueError: an illegal budget, hyper-parameter or combination of parts.
    """
    cls, values = _named("method", config.method, method_classes())
    for group, base in PARTS.items():
        node = getattr(config, group)
        if node is not None:
            part, settings = _named(group, node, part_classes(base))
            values[group] = part(**settings)
    method = cls(budget=config.budget, **values)
    if config.schedule is None or method.make_scorer() is None:  # nothing to schedule: one cell for all
        return method
    settings = _values(config.schedule)
    if settings.pop("name", None) is None:
        raise ValueError(f"no schedule is chosen that has settings, but {', '.join(settings)} is set: schedule=NAME")
    return method.replace(schedule=Schedule(**settings))


def build_task(config: Any) -> Task:
    """The task of a cell with its seed and data folder.

    Raises:
        ValueError: an illegal setting.
    """
    cls, values = _named("task", config.task, TASKS)
    return cls(seed=config.seed, data=config.paths.data, **values)
