"""The file `sweep.json` of a sweep: the cells it is made of. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcompress.common import strict_json
from kvcompress.common.atomic_files import read_plain
from kvcompress.sweep import record
from kvcompress.sweep.baseline import fill_deltas
from kvcompress.sweep.disk import written as written_to
from kvcompress.sweep.launcher.lock import clear_locks, locked

LAYOUT = 1  # of a sweep's folder
CELLS_FILE = "sweep.json"


def note_cells(sweep: Path, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Add cells, by run id, to those that are noted already, so that missing ones can be told.

    Raises:
        ValueError: the folder cannot be written to, or holds a sweep of another layout.
    """
    try:
        with written_to(sweep):
            sweep.mkdir(parents=True, exist_ok=True)
        with locked(sweep / ".lock"):
            record.clear_left(sweep)
            clear_locks(sweep)
            fill_deltas(sweep, "")  # which a killed process may have left to do
            known = noted_cells(sweep)
            if not cells.keys() <= known.keys():
                record.write_json(sweep / CELLS_FILE, {"layout": LAYOUT, "cells": known | dict(cells)})
    except OSError as error:
        raise ValueError(f"cannot write to paths.results={sweep.parent}: {error}") from None


def noted_cells(sweep: Path) -> dict[str, dict[str, Any]]:
    """The cells noted in a sweep's folder, by run id.

    Raises:
        ValueError: the folder was made by a version with another layout.
    """
    path = sweep / CELLS_FILE
    try:
        found = strict_json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; take the file away to have it made again") from None
    if not isinstance(found, dict) or found.get("layout") != LAYOUT:
        layout = found.get("layout") if isinstance(found, dict) else None
        raise ValueError(
            f"{path} has layout {layout!r}, this version writes {LAYOUT}: choose another sweep.name or paths.results"
        )
    from kvcompress.sweep.record_schema import check_cells  # pydantic, which only readers of a sweep need

    try:
        check_cells(found.get("cells"))
    except ValueError as error:
        raise ValueError(
            f"{path}: cells is no table of cells ({error}); take the file away to have it made again"
        ) from None
    return dict(found["cells"])
