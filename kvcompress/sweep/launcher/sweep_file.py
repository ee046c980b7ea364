"""The file `sweep.json` of a sweep: its cells, and which command-line settings came to which run. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcompress.common import hashing
from kvcompress.sweep import record
from kvcompress.sweep.launcher.lock import locked
from kvcompress.sweep.schema_index import installed_packages

LAYOUT = 1  # of a sweep's folder
CELLS_FILE = "sweep.json"
ELSEWHERE = ("logger", "paths", "resume", "dry", "sweep")  # where a cell runs and what is done with it, not what it is
MOST_FILES = 20_000  # of a folder of data that is looked at


def note_cells(sweep: Path, cells: Mapping[str, Mapping[str, Any]], requests: Mapping[str, str] | None = None) -> None:
    """Add cells to those that are noted already, so that missing ones can be told.

    Args:
        cells: what is shown of each, by run id.
        requests: run ids by `RequestKeys`.

    Raises:
        ValueError: the folder cannot be written to, or holds a sweep of another layout.
    """
    try:
        sweep.mkdir(parents=True, exist_ok=True)
        with locked(sweep / ".lock"):
            record.clear_left(sweep)
            known, asked = noted_cells(sweep), noted_requests(sweep)
            wanted = dict(requests or {})
            if not cells.keys() <= known.keys() or not wanted.items() <= asked.items():
                found = {"layout": LAYOUT, "cells": known | dict(cells), "requests": asked | wanted}
                record.write_json(sweep / CELLS_FILE, found)
    except OSError as error:
        raise ValueError(f"cannot write to paths.results={sweep.parent}: {error}") from None


def noted_cells(sweep: Path) -> dict[str, dict[str, Any]]:
    """The cells noted in a sweep's folder, by run id.

    Raises:
        ValueError: the folder was made by a version with another layout.
    """
    path = sweep / CELLS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; take the file away to have it made again") from None
    if not isinstance(found, dict) or found.get("layout") != LAYOUT:
        layout = found.get("layout") if isinstance(found, dict) else None
        raise ValueError(
            f"{path} has layout {layout!r}, this version writes {LAYOUT}: choose another sweep.name or paths.results"
        )
    cells = found.get("cells")
    if not isinstance(cells, dict) or not all(isinstance(cell, dict) for cell in cells.values()):
        raise ValueError(f"{path}: cells is no table of cells; take the file away to have it made again")
    return cells


def noted_requests(sweep: Path) -> dict[str, str]:
    """Run ids by `RequestKeys`; empty where the file is damaged or was written without."""
    try:
        found = json.loads((sweep / CELLS_FILE).read_text(encoding="utf-8"))
        requests = found["requests"]
        return {str(key): str(run_id) for key, run_id in requests.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


class RequestKeys:
    """Hash of a cell's settings and of all else that its run id follows from. Files are looked at once per object.

    Two equal keys under the same sources mean the same run id. Counted are the resolved configuration, files in the
    data folder and those that a setting names (by size and time), installed packages, and the accelerators there are.
    """

    def __init__(self) -> None:
        self._machine = [installed_packages(), _accelerators()]
        self._stamps: dict[str, str | None] = {}

    def __call__(self, config: DictConfig) -> str | None:
        """The key of a composed configuration; None where it cannot be told."""
        found: Any = OmegaConf.to_container(config, resolve=True)
        asked = {key: value for key, value in found.items() if key not in ELSEWHERE} | {"data": found["paths"]["data"]}
        stamps = {text: self._stamp(text) for text in sorted(set(_texts(asked))) if os.path.exists(text)}
        return None if None in stamps.values() else hashing.digest([asked, stamps, *self._machine])

    def _stamp(self, path: str) -> str | None:
        if path not in self._stamps:
            self._stamps[path] = _stamp(Path(path))
        return self._stamps[path]


def finished_runs(configs: Sequence[DictConfig]) -> list[dict[str, Any]] | None:
    """Records of these cells where every one is finished by the present sources; None where one is not, or who knows."""
    requests: dict[Path, dict[str, str]] = {}
    key, found = RequestKeys(), []
    for config in configs:
        sweep = Path(config.paths.results) / config.sweep.name
        if sweep not in requests:
            requests[sweep] = noted_requests(sweep)
        if not requests[sweep]:
            return None
        run_id = requests[sweep].get(key(config) or "")
        written = record.RunFolder(sweep.parent, sweep.name, run_id).record() if run_id else None
        fresh = written is not None and written.get("versions.source") == hashing.source_hash()
        if written is None or not fresh or written["status"] not in record.FINISHED:
            return None
        found.append(written)
    return found


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


def _stamp(path: Path) -> str | None:
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
    return hashing.digest(found)


def _accelerators() -> list[str]:
    """Devices of this machine, as their files say, and which of them may be seen."""
    files = [str(file) for pattern in ("nvidia[0-9]*", "kfd", "dxg") for file in sorted(Path("/dev").glob(pattern))]
    return [*files, *(f"{name}={os.environ.get(name)}" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))]
