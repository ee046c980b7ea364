"""Outcome of a cell, and who is told of it: data that every module of a sweep may hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What became of one cell.

    Attributes:
        status: a record's status, or `done` (finished before), `same` (equals an earlier cell of this sweep), `stale`
            (finished with other sources; not run), `running` (another process has it), `dry` (only planned), `dropped`
            (legal settings that do not go together, as a sweep over all combinations has them) or `refused` (an illegal
            configuration, or a folder that cannot be written to). Nothing was run or written of those two. `full` stands
            for all cells that are left when the disk takes no more.
        record: as written to disk, empty where there is none.
        note: why, in one line.
        folder: of the run, None where the configuration was not understood.
        fresh: this process has just written the record.
    """

    method: str
    budget: float | int
    status: str
    run_id: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    folder: Path | None = None
    fresh: bool = False

    @property
    def name(self) -> str:
        """Method, settings that differ from its own where they are known, and budget."""
        return " ".join(filter(None, (self.method, self.record.get("variant"), f"budget {self.budget}")))

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "oom", "refused", "partial", "full")


Listener = Callable[[Outcome], object]  # told of each outcome as soon as it is known; must not raise


def nothing_to_do(cells: int) -> str:
    """What a dry run says of a sweep in which every cell is finished."""
    return f"nothing to do: {'the cell is' if cells == 1 else f'all {cells} cells are'} finished"


def last_line(text: str | None) -> str:
    """Last line of a traceback: what went wrong."""
    return ((text or "").strip().splitlines() or [""])[-1]
