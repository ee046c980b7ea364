"""Configuration of a run: its groups, their schemas, and the checks of a command line before Hydra composes it.

`register` puts the schemas into Hydra's ConfigStore as `base_<name>`; the yaml files in `conf/` start from them. Imports no
torch: methods, tasks and parts are known by their schemas (`schema_index`).
"""

from __future__ import annotations

import difflib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf

from kvcompress.common.budget_text import RATIO, kept_of
from kvcompress.sweep import schema_index
from kvcompress.sweep.compose import compose_once_per_choice, share_config_store
from kvcompress.sweep.schemas import Table

PARTS = ("allocator", "codec", "reader", "prefill")
# flags of Hydra that are followed by a value, which is no override
WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
)
ONE_CELL = {"--cfg", "-c", "--info", "--shell-completion", "-sc"}  # what these show is of one cell, not of a sweep
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # what may follow --info
SHORT = {"tasks": "task.tasks"}  # lists that may be written shorter on the command line
GROUPS = ("model", "task", "method", *PARTS, "schedule", "sweep", "logger", "experiment", "debug")
RESUME = ("auto", "refresh", "any")
LOGGERS = ("none", "wandb", "trackio")
MODES = ("offline", "online", "disabled")  # of wandb
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
class LoggerConfig:
    """`name` is none, wandb or trackio. `mode` (offline, online, disabled) and `entity` are wandb's; offline needs no
    network. `dir`: where it writes, null = its own default. `timeout`: seconds that its start and end may take each.
    """

    name: str = "none"
    project: str = "kvcompress"
    entity: str | None = None
    mode: str = "offline"
    dir: str | None = None
    timeout: float = 60.0


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
    think: str = "keep"
    think_tokens: int | None = None
    resume: str = "auto"
    dry: bool = False
    sweep: Any = field(default_factory=SweepConfig)
    logger: Any = field(default_factory=LoggerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


def register() -> None:
    """Put every schema into the ConfigStore; may be called more than once, and makes them anew where a class is new."""
    _register(schema_index.load())


@functools.lru_cache(maxsize=1)  # making them takes longer than composing a cell
def _register(table: Table) -> None:
    store = ConfigStore.instance()
    share_config_store()
    store.store(name="base_config", node=RunConfig)
    for group, node in (("model", ModelConfig), ("sweep", SweepConfig), ("logger", LoggerConfig)):
        store.store(group=group, name=f"base_{group}", node=node)
    for group, schemas in table.groups.items():
        for name, schema in schemas.items():
            flat = name.replace("/", "_")  # a name may have a folder: reasoning/gsm8k
            store.store(group=group, name=f"base_{flat}", node=schema.dataclass())
    for name in table.models:
        if "/" in name:
            register_model(name)


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
        found |= set(schema_index.load().models)
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
    flags, expanded = _apart(expanded)
    sweep = several or "-m" in flags
    flags = [flag for flag in flags if flag != "-m"]
    if not sweep or ONE_CELL & {flag.partition("=")[0] for flag in flags}:
        return [*flags, *expanded]
    return ["-m", *flags, *_per_cell(expanded)]


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and overrides: argparse takes no flag among the overrides, so that flags come first."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            overrides.append(word)
        elif word in WITH_VALUE:
            flags += [word, *rest[:1]]
            del rest[:1]
        elif word in ("--info", "-i"):  # its value may be left out, and an override would be taken for it
            flags.append(f"--info={rest.pop(0) if rest and rest[0] in INFO else 'all'}")
        else:
            flags.append("-m" if word == "--multirun" else word)
    return flags, overrides


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
                if key == RATIO:
                    raise ValueError(kept_of(node[key]))
                near = difflib.get_close_matches(str(key), valid, n=1)
                hint = f"; did you mean {near[0]}?" if near else "."
                name = f"{group}.{key!s}" if group else str(key)
                raise ValueError(f"{name} is no setting{hint} Valid: {', '.join(valid)}")


def check_logger(settings: Any) -> None:
    """Refuse settings that no tracker has.

    Raises:
        ValueError: names the setting and what is valid.
    """
    if settings.name not in LOGGERS:
        raise ValueError(f"logger.name={settings.name!r}; valid: {', '.join(LOGGERS)}")
    if settings.mode not in MODES:
        raise ValueError(f"logger.mode={settings.mode!r}; valid: {', '.join(MODES)}")
    if not settings.timeout > 0:
        raise ValueError(f"logger.timeout={settings.timeout}; seconds above 0")


def check_sweep_name(name: str, results: str) -> None:
    """Refuse a `sweep.name` that is no folder inside `paths.results`, or that the file system cannot hold.

    Raises:
        ValueError: names it, and what is allowed.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not name or "\0" in name:
        raise ValueError(f"sweep.name={name!r}; a name inside paths.results={results}")
    longest = max(len(os.fsencode(part)) for part in path.parts) if path.parts else 0
    limit = _name_limit(Path(results))
    if longest > limit:
        short = name if len(name) <= 40 else f"{name[:39]}…"
        raise ValueError(
            f"sweep.name={short!r} has {longest} bytes; a folder's name may have {limit}: choose a shorter one"
        )


def _name_limit(folder: Path) -> int:
    """Bytes that a name may have in `folder`, or in the nearest folder above it that exists."""
    for place in (folder.absolute(), *folder.absolute().parents):
        with suppress(OSError, ValueError, AttributeError):  # not there yet; Windows has no pathconf
            return os.pathconf(place, "PC_NAME_MAX")
    return 255


def check_folders(arguments: Sequence[str]) -> None:
    """Refuse `paths.results` and `sweep.name` that cannot be folders or cannot be written to, as command-line overrides.

    Hydra makes the folder before any cell is looked at, and would say so with a traceback.

    Raises:
        ValueError: names the folder and what is in the way.
    """
    results = _given(arguments, "paths.results") or ["results"]
    for name in results:
        place = Path(name).absolute()
        try:
            while not place.exists():
                place = place.parent
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to paths.results={name}: {error}") from None
    for name in _given(arguments, "sweep.name"):
        check_sweep_name(name, results[0])


def results_of(arguments: Sequence[str]) -> str:
    """`paths.results` of a command line."""
    return (_given(arguments, "paths.results") or ["results"])[-1]


def _given(arguments: Sequence[str], key: str) -> list[str]:
    """Plain values of a key among overrides: no lists, quotes or interpolations."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    return [value for value in values if value and not set(value) & set("$,'\"")]
