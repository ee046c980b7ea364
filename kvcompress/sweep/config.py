"""Typed configuration: every Hydra group has a schema that is derived from the dataclass it configures.

`register` puts the schemas into Hydra's ConfigStore as `base_<name>`; the yaml files in `conf/` start from them. A
schema leaves out what other groups and top-level keys set (budget, parts; seed, data folder), so each thing has one
place. Nothing here names a method or a task: they are found.
"""

from __future__ import annotations

import difflib
import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf

from kvcompress.data.task import Task
from kvcompress.method import Allocator, Codec, Method, Prefill, Reader, Schedule
from kvcompress.methods import METHODS
from kvcompress.models import loading
from kvcompress.reuse.prefix import PrefixReuse  # noqa: F401  (a part that no method brings)
from kvcompress.sweep.launcher.compose import compose_once_per_choice
from kvcompress.sweep.launcher.plugin import store_launcher
from kvcompress.tasks import TASKS
from kvcompress.tracking import LoggerConfig

PARTS: dict[str, type] = {"allocator": Allocator, "codec": Codec, "reader": Reader, "prefill": Prefill}
SHORT = {"tasks": "task.tasks"}  # lists that may be written shorter on the command line
GROUPS = ("model", "task", "method", *PARTS, "schedule", "sweep", "logger", "experiment", "debug")
RESUME = ("auto", "refresh", "any")
AGENTS = {"sweep": {"wandb"}}  # files beside the options that are read by `wandb sweep`, not by Hydra


@dataclass
class ModelConfig:
    """`name` and what `load` takes beside it; `options` are for random models only."""

    name: str = MISSING
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    device_map: Any = None  # a name, as auto, or a table from module to device
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SweepConfig:
    """`name` of the folder under `paths.results` that a run's record goes to."""

    name: str = "default"


@dataclass
class PathsConfig:
    """`data`: data sets, used where present; `results`: records. Neither is part of the run id."""

    data: str | None = None
    results: str = "results"


@dataclass
class RunConfig:
    """One cell. The groups are `Any` here because each option brings its own schema, which must survive."""

    model: Any = MISSING
    task: Any = MISSING
    method: Any = MISSING
    allocator: Any = None
    codec: Any = None
    reader: Any = None
    prefill: Any = None
    schedule: Any = None
    budget: float | int = 1.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    limit: int | None = None
    batch: int = 1
    batch_memory: int | None = None
    kernel: str = "auto"
    decode: str = "eager"
    resume: str = "auto"
    dry: bool = False
    sweep: Any = field(default_factory=SweepConfig)
    logger: Any = field(default_factory=LoggerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


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


def schema(cls: type, name: str, leave_out: Sequence[str] = ()) -> type:
    """A plain dataclass with the fields of `cls` in types that OmegaConf knows, and `name`.

    Fields declared with `repr=False` hold data of a model, not settings, and are left out.
    Literals become strings and tuples lists; `cls` itself checks their values when it is built.
    """
    hints = get_type_hints(cls)
    specs: list[Any] = [("name", str, field(default=name))]
    for item in fields(cls):
        if item.name in leave_out or not item.repr:
            continue
        kind = _plain(hints[item.name])
        if item.default_factory is not NO_DEFAULT:
            value: Any = item.default_factory()
        else:
            value = item.default
        if isinstance(value, tuple):
            values = list(value)
            specs.append((item.name, kind, field(default_factory=functools.partial(list, values))))
        else:
            specs.append((item.name, kind, field(default=MISSING if value is NO_DEFAULT else value)))
    return make_dataclass(f"{cls.__name__}Config", specs)


def _plain(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return type(arguments[0])
    if origin is tuple:
        return list[_plain(arguments[0])]  # type: ignore[misc]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, (_plain(argument) for argument in arguments))
    return kind


METHOD_ELSEWHERE = tuple(item.name for item in fields(Method) if item.name != "preset")
SCHEDULE_ELSEWHERE = ("newline_ids", "until_ids")  # the tokenizer's business
TASK_ELSEWHERE = tuple(item.name for item in fields(Task))


def register() -> None:
    """Put every schema into the ConfigStore; may be called more than once, and makes them anew where a class is new."""
    parts = {group: tuple(part_classes(base).items()) for group, base in PARTS.items()}
    _register(tuple(method_classes().items()), tuple(TASKS.items()), tuple(parts.items()))


@functools.lru_cache(maxsize=1)  # making them takes longer than composing a cell
def _register(
    methods: tuple[tuple[str, type], ...], tasks: tuple[tuple[str, type], ...], parts: tuple[tuple[str, Any], ...]
) -> None:
    store = ConfigStore.instance()
    store.store(name="base_config", node=RunConfig)
    store.store(group="model", name="base_model", node=ModelConfig)
    store.store(group="sweep", name="base_sweep", node=SweepConfig)
    store.store(group="logger", name="base_logger", node=LoggerConfig)
    for name, method in methods:
        store.store(group="method", name=f"base_{name}", node=schema(method, name, METHOD_ELSEWHERE))
    for name, task in tasks:
        flat = name.replace("/", "_")  # a name may have a folder: reasoning/gsm8k
        store.store(group="task", name=f"base_{flat}", node=schema(task, name, TASK_ELSEWHERE))
    for group, found in parts:
        for name, part in found:
            store.store(group=group, name=f"base_{name}", node=schema(part, name))
    store.store(group="schedule", name="base_schedule", node=schema(Schedule, "schedule", SCHEDULE_ELSEWHERE))
    for name in loading.names():
        if "/" in name:
            register_model(name)
    store_launcher()


def folder() -> Path:
    """Where the yaml files lie."""
    import kvcompress.conf

    return Path(str(kvcompress.conf.__file__)).resolve().parent


@contextmanager
def composing() -> Iterator[Callable[[Sequence[str]], DictConfig]]:
    """A function that composes a cell from command-line overrides, without a command line."""
    register()
    with initialize_config_dir(str(folder()), version_base="1.3"):
        compose_once_per_choice(GlobalHydra.instance().config_loader())
        yield lambda overrides: compose("config", list(overrides))


def register_model(name: str) -> None:
    """Make `model=<folder>/<name>` a valid choice: random models, and Hub ids given on the command line."""
    folder, _, last = name.rpartition("/")
    ConfigStore.instance().store(group=f"model/{folder}", name=last, node=ModelConfig(name=name))


def options(group: str, folder: Path) -> list[str]:
    """What may be chosen of a group: its yaml files, and for models the random ones."""
    found = {str(path.relative_to(folder / group).with_suffix("")) for path in (folder / group).rglob("*.yaml")}
    found -= AGENTS.get(group, set())
    if group == "model":
        found |= set(loading.names())
    return sorted(found)


def expand_suites(overrides: Sequence[str], folder: Path) -> list[str]:
    """`task=<suite>` for a folder of tasks → all of them, as a sweep: one cell and one record per data set.

    Lists that have a shorter form are written out too; names without brackets are a list each, to be swept.
    """
    expanded, several = [], False
    for override in overrides:
        key, equals, values = override.partition("=")
        if equals and key in SHORT:
            values = values if values.startswith("[") else ",".join(f"[{value}]" for value in values.split(","))
            override = f"{SHORT[key]}={values}"
        if key == "task":
            names: list[str] = []
            for value in values.split(","):
                found = sorted((folder / "task" / value).glob("*.yaml")) if value and value[0] not in "./~" else []
                names += [f"{value}/{path.stem}" for path in found] or [value]
            several |= ",".join(names) != values
            override = f"task={','.join(names)}"
        expanded.append(override)
    flags = {"-m", "--multirun"}
    sweep = bool(flags & set(expanded))
    if several or sweep:  # first, as argparse takes no flag among the overrides
        expanded = ["-m", *(override for override in expanded if override not in flags)]
    return _per_cell(expanded) if several or sweep else expanded


def with_launcher(overrides: Sequence[str], folder: Path) -> list[str]:
    """The same with `hydra/launcher=shared`, the default of sweeps, unless another is named here or by an experiment.

    In config.yaml it would win over what an experiment says: in Hydra the outer defaults list has the last word. A dry
    run of another launcher is planned by the shared one without sharing: one plan for all cells, one calibration.
    """
    chosen = any(override.lstrip("+").startswith("hydra/launcher") for override in overrides)
    for override in overrides:
        group, _, names = override.partition("=")
        if group.lstrip("+") in ("experiment", "debug"):
            files = [folder / group.lstrip("+") / f"{name}.yaml" for name in names.split(",")]
            chosen |= any("/hydra/launcher" in file.read_text(encoding="utf-8") for file in files if file.is_file())
    if not chosen:
        return [*overrides, "hydra/launcher=shared"]
    if "dry=true" in overrides and "hydra/launcher=shared" not in overrides:
        kept = [override for override in overrides if not override.lstrip("+").startswith("hydra/launcher")]
        return [*kept, "hydra/launcher=shared", "hydra.launcher.share=false"]
    return list(overrides)


def _per_cell(overrides: list[str]) -> list[str]:
    """Settings of a group that is swept, as settings of each cell.

    Hydra first composes what all cells have in common, with the group's default: `task=a,b task.x=1` would fail there
    if the default task has no x.
    """
    parser = OverridesParser.create()
    swept: set[str] = set()
    plain: set[str] = set()
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
        except HydraException:  # flags, and what Hydra itself will refuse
            continue
        (swept if parsed.is_sweep_override() else plain).add(override)
    groups = tuple(f"{override.partition('=')[0]}." for override in swept if override.partition("=")[0] in GROUPS)
    if not groups:
        return overrides
    return [
        f"{key}=choice({value})" if text in plain and text.startswith(groups) else text
        for text, key, value in ((override, *override.partition("=")[::2]) for override in overrides)
    ]


def check_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Refuse unknown names of a group with the valid ones, before Hydra's less friendly message.

    A model `owner/name` that is not known is taken for a Hub id and registered.

    Raises:
        ValueError: names the group, the value, the nearest valid one and all of them.
    """
    for override in overrides:
        group, equals, values = override.partition("=")
        group = group.lstrip("+").partition("@")[0]
        if not equals or group not in GROUPS or any(mark in values for mark in "({$"):
            continue
        if "[" in values:
            raise ValueError(f"{override}: one {group} is wanted, no list; to sweep: -m {group}={values.strip('[]')}")
        valid = options(group, folder)
        for value in values.split(","):
            value = value.strip().strip("'\"")
            if value == "null":
                fix = f"leave {group} out" + (f", or write {group}=own for the method's own" if "own" in valid else "")
                raise ValueError(f"{group}=null: Hydra cannot choose nothing; {fix}")
            if value in valid or not value:
                continue
            if group == "model" and value.count("/") == 1 and value[0] not in "./~" and not value.startswith("random/"):
                register_model(value)
                continue
            near = difflib.get_close_matches(value, valid, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "."
            other = " (a path: model.name=PATH; a Hub id: model=owner/name)" if group == "model" else ""
            raise ValueError(f"{group}={value!r} is unknown{hint} Valid: {', '.join(valid)}{other}")


def check_keys(config: DictConfig) -> None:
    """Refuse keys that no schema has: Hydra's `+key=value` adds them even to a typed group.

    Raises:
        ValueError: names the key and those that are valid.
    """
    for group, node in (("", config), *((str(key), config[key]) for key in config)):
        kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if kind is None or not is_dataclass(kind):
            continue
        valid = [item.name for item in fields(kind)]
        for key in node:
            if key not in valid:
                near = difflib.get_close_matches(str(key), valid, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                name = f"{group}.{key!s}" if group else str(key)
                raise ValueError(f"{name} is no setting{hint} Valid: {', '.join(valid)}")


def _values(node: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(vars(node))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}  # type: ignore


def _named(group: str, node: Any, classes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
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
    cls, values = _named("method", config.method, dict(method_classes()))
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
    cls, values = _named("task", config.task, dict(TASKS))
    return cls(seed=config.seed, data=config.paths.data, **values)
