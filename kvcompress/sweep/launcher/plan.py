"""Which cells start from one prefill, which run alone and why; and the list of cells that a sweep is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcompress.common import strict_json
from kvcompress.common.atomic_files import read_plain
from kvcompress.hook.shared_prefill import cannot_share, needs_of
from kvcompress.method import Needs
from kvcompress.sweep import record
from kvcompress.sweep.disk import written
from kvcompress.sweep.launcher.cell import Cell, model_key, pair_id
from kvcompress.sweep.launcher.lock import clear_locks, locked
from kvcompress.sweep.record_schema import check_cells

LAYOUT = 1  # of a sweep's folder
CELLS_FILE = "sweep.json"


@dataclass
class Group:
    """Cells that are worked on together.

    Attributes:
        cells: in the order they were asked for.
        reason: why a cell runs alone, empty where several share a prefill.
    """

    cells: list[Cell] = field(default_factory=list)
    reason: str = ""

    @property
    def shared(self) -> bool:
        return not self.reason

    @property
    def needs(self) -> Needs:
        """What the shared prefill has to observe for those cells that are not finished."""
        needs = Needs()
        for cell in self.cells:
            if cell.open:
                needs |= needs_of(cell.method)
        return needs


def alone_because(cell: Cell) -> str:
    """Why a cell cannot share its prefill; empty if it can."""
    if cell.config.batch > 1:
        return f"batch={cell.config.batch} puts samples together, not cells"
    if cell.config.decode != "eager":
        return f"decode={cell.config.decode} has each cell take its own steps"
    if not cell.task.shares_prefill:
        return f"task={cell.task.name} measures the prefill itself"
    try:
        return cannot_share(cell.method) or ""
    except ValueError as error:  # it will say so again when it runs
        return str(error)


def group_cells(cells: Iterable[Cell], share: bool = True) -> list[Group]:
    """Groups in order of their first cell, those of one model next to each other.

    Cells share if they agree on model, task, seed, dtype, kernel, and on whether attention mass
    is summed up and how: that takes another attention kernel, whose output differs in the last digits. A cell that is finished
    counts as a member, so that how the others are run does not depend on when a sweep was interrupted.
    """
    groups: dict[Any, Group] = {}
    for number, cell in enumerate(cells):
        reason = alone_because(cell) if share else "sharing is switched off"
        key: Any = number
        if not reason:
            needs, blockwise = needs_of(cell.method), cell.config.kernel == "blockwise"
            mass = (needs.mass or blockwise, needs.decay if needs.mass else None if not blockwise else 1.0)
            where = str(cell.folder.path.parent), model_key(cell.config)
            key = (pair_id(cell.identity), *where, mass)
        groups.setdefault(key, Group(reason=reason)).cells.append(cell)
    for group in groups.values():
        if group.shared and len(group.cells) == 1:
            group.reason = "no other cell has the same prefill"
        for cell in group.cells:
            cell.shared = group.shared
    order: dict[str, int] = {}
    for group in groups.values():
        order.setdefault(model_key(group.cells[0].config), len(order))
    return sorted(groups.values(), key=lambda group: order[model_key(group.cells[0].config)])


def listed(cells: Sequence[Cell]) -> str:
    """Cells as `method budget, budget; method …`, those that differ in other settings counted."""
    budgets: dict[str, list[str]] = {}
    for cell in cells:
        found = budgets.setdefault(str(cell.config.method.name), [])
        if cell.method.budget_kind != "none":
            found.append(str(cell.method.budget))
    texts = []
    for name, found in budgets.items():
        several = f" ({len(found) // len(set(found))} each)" if len(found) > len(set(found)) else ""
        texts.append(f"{name} {', '.join(dict.fromkeys(found))}".strip() + several)
    return "; ".join(texts)


def note_cells(cells: Sequence[Cell]) -> None:
    """Write down which cells a sweep has, beside those that are noted already, so that missing ones can be told.

    Raises:
        ValueError: the folder cannot be written to, or holds a sweep of another layout.
    """
    for sweep in sorted({cell.folder.path.parent for cell in cells}):
        mine = {cell.run_id: _entry(cell) for cell in cells if cell.folder.path.parent == sweep}
        try:
            with written(sweep):
                sweep.mkdir(parents=True, exist_ok=True)
            with locked(sweep / ".lock"):
                record.clear_left(sweep)
                clear_locks(sweep)
                record.fill_deltas(sweep, "")  # which a killed process may have left to do
                known = noted_cells(sweep)
                if not mine.keys() <= known.keys():
                    record.write_json(sweep / CELLS_FILE, {"layout": LAYOUT, "cells": known | mine})
        except OSError as error:
            raise ValueError(f"cannot write to paths.results={sweep.parent}: {error}") from None


def _entry(cell: Cell) -> dict[str, Any]:
    return {
        "method": str(cell.config.method.name),
        "budget": cell.identity["budget"],
        "task": cell.task.name,
        "model": str(cell.config.model.name),
        "seed": cell.config.seed,
    }


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
    try:
        check_cells(found.get("cells"))
    except ValueError as error:
        raise ValueError(f"{path}: cells is no table of cells ({error}); take it away to have it made again") from None
    return found["cells"]
