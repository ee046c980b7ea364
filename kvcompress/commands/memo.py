"""Memo of finished commands: the runs that a command line came to, so that its dry run need not compose and build them.

A memo is good for exactly what the runs follow from: the command line, the sources and configuration files, the installed
packages and the accelerators are in its name; files of data are in it by size and time. The records themselves are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcompress.common.atomic_files import replacing
from kvcompress.common.cache_folder import cache_dir
from kvcompress.common.hashing import digest, source_hash
from kvcompress.sweep import record, schema_index
from kvcompress.sweep.config import folder
from kvcompress.sweep.outcome import Outcome

DRY = "dry=true"
ASIDE = ("dry=", "resume=", "logger=", "logger.", "hydra.launcher.", "hydra/launcher=")  # how cells are run, not which
FINISHED = (*record.FINISHED, "done", "same", "dropped")  # nothing is left to do
ELSEWHERE = ("logger", "resume", "dry", "sweep")  # groups of a configuration that name no data
MOST_FILES = 20_000  # in folders of data; more are not looked at, and there is no memo
KEEP = 64  # memos


class Inputs:
    """Files and folders that the settings of cells name, as they were when the cells began."""

    def __init__(self) -> None:
        self.stamps: dict[str, str | None] = {}

    def add(self, configs: Iterable[DictConfig]) -> None:
        """Look at what these cells name: their data folder, and each setting that is a path."""
        for config in configs:
            found: Any = OmegaConf.to_container(config, resolve=True)
            named = {key: value for key, value in found.items() if key not in (*ELSEWHERE, "paths")}
            data = found["paths"]["data"]
            for text in {*_texts(named), *([data] if data else [])} - self.stamps.keys():
                if text == data or os.path.exists(os.path.expanduser(text)):
                    self.stamps[text] = stamp(Path(text).expanduser())


def note(arguments: Sequence[str], outcomes: Sequence[Outcome], inputs: Inputs) -> None:
    """Remember a command of which every cell is finished or dropped. Never raises: without a memo a dry run takes longer."""
    runs = {str(outcome.folder) for outcome in outcomes if outcome.folder is not None}
    known = None not in inputs.stamps.values() and not any("$" in argument for argument in arguments)
    if not runs or not known or not all(outcome.status in FINISHED for outcome in outcomes):
        return
    file = _path(arguments)
    with suppress(OSError, TypeError, ValueError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_text(json.dumps({"runs": sorted(runs), "inputs": inputs.stamps}), encoding="utf-8")
        others = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[KEEP:]:
            old.unlink(missing_ok=True)


def finished_runs(arguments: Sequence[str]) -> int | None:
    """Number of runs of a command where all are finished by the present sources; None where one is not, or who knows."""
    try:
        stored = json.loads(_path(arguments).read_text(encoding="utf-8"))
        runs, inputs = [Path(run) for run in stored["runs"]], dict(stored["inputs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for run in runs:
        folder_of_run = record.RunFolder(run.parent.parent, run.parent.name, run.name)
        found = folder_of_run.record()
        if found is None or folder_of_run.fault(found) is not None:
            return None
        if found["status"] not in record.FINISHED or found.get("versions.source") != source_hash():
            return None
    return len(runs) if all(stamp(Path(name).expanduser()) == before for name, before in inputs.items()) else None


def stamp(path: Path) -> str | None:
    """Hash of names, sizes and times of a file or of all files below a folder; None where these are too many."""
    places = os.walk(path, followlinks=True) if path.is_dir() else iter([(str(path.parent), [], [path.name])])
    found: list[Any] = []
    for place, folders, files in places:
        folders.sort()
        found.append(place)
        for file in (os.path.join(place, name) for name in sorted(files)):
            try:
                facts = os.stat(file)
            except OSError:
                found.append(file)
                continue
            found.append([file, facts.st_size, facts.st_mtime_ns])
        if len(found) > MOST_FILES:
            return None
    return digest(found)


def _path(arguments: Sequence[str]) -> Path:
    """File of a command's memo."""
    asked = [argument for argument in arguments if not argument.lstrip("+").startswith(ASIDE)]
    return (
        cache_dir()
        / "commands"
        / f"{digest([asked, os.getcwd(), schema_index.key(), *_configuration(), _devices()])}.json"
    )


def _configuration() -> list[Any]:
    """The yaml files of the configuration, and the environment that they name."""
    texts = {str(file.relative_to(folder())): file.read_text("utf-8") for file in sorted(folder().rglob("*.yaml"))}
    names = sorted({name for text in texts.values() for name in re.findall(r"\$\{oc\.env:(\w+)", text)})
    return [texts, {name: os.environ.get(name) for name in names}]


def _devices() -> list[str]:
    """Accelerators of this machine, as their files say, and which of them may be seen."""
    files = [str(file) for pattern in ("nvidia[0-9]*", "kfd", "dxg") for file in sorted(Path("/dev").glob(pattern))]
    return [*files, *(f"{name}={os.environ.get(name)}" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))]


def _texts(value: Any) -> Iterator[str]:
    """Strings within nested plain values that may be paths."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str) and value and "\0" not in value and len(value) < 4096:
        yield value
