"""Status of a sweep (`status=results/<sweep>`): which cells are done, running, failed or missing. Imports no torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcompress.common import hashing, text
from kvcompress.common.text import PlainConsole
from kvcompress.sweep import record
from kvcompress.sweep.launcher.lock import holder
from kvcompress.sweep.launcher.sweep_file import noted_cells
from kvcompress.sweep.outcome import last_line

ORDER = ("running", "failed", "oom", "partial", "missing", "stale", "inactive", "unscored", "ok")
STYLE = {"failed": "red", "oom": "red", "running": "cyan", "ok": "green"}


def sweep_folder(name: str, results: str = "results") -> Path:
    """The folder of a sweep given as a path, or as the name it has under `results` (`paths.results`)."""
    given = Path(name)
    beside = Path(results) / name
    try:
        return beside if not given.is_dir() and beside.is_dir() else given
    except (OSError, ValueError):  # a name that no folder can have; who reads it says so
        return given


def sweeps_of(results: str) -> list[str]:
    """Names of the sweeps under a folder of results."""
    place = Path(results)
    found = {path.parent.relative_to(place) for path in place.rglob("sweep.json")}
    found |= {path.parent.parent.relative_to(place) for path in place.rglob("*/*/record.json")}
    return sorted(str(path) for path in found)


def cells_of(sweep: Path) -> list[dict[str, Any]]:
    """One entry per cell: `run_id status samples score note` and what the sweep noted of it.

    Raises:
        ValueError: there is no such sweep, or it was made by a version with another layout.
    """
    try:
        there = sweep.is_dir()
    except (OSError, ValueError) as error:  # a name that the file system cannot hold
        raise ValueError(f"status={str(sweep)[:60]}…: {getattr(error, 'strerror', None) or error}") from None
    if not there:
        raise ValueError(
            f"status={sweep}: no such folder; give a sweep's name under paths.results, or its folder, such as results/default"
        )
    noted = noted_cells(sweep)
    found = {path.parent.name for pattern in ("*/record.json", "*/config.yaml") for path in sweep.glob(pattern)}
    if not noted and not found:
        raise ValueError(f"status={sweep}: no sweep lies here; give the folder of one, such as results/default")
    return [_entry(sweep, run_id, noted.get(run_id, {})) for run_id in [*noted, *sorted(found - noted.keys())]]


def _entry(sweep: Path, run_id: str, noted: dict[str, Any]) -> dict[str, Any]:
    folder = record.RunFolder(sweep.parent, sweep.name, run_id)
    written, damage = _record(folder)
    entry = {"run_id": run_id, "samples": len(folder.rows()), "note": "", **noted}
    if written is not None:
        entry |= {key: written.get(key) for key in ("method", "budget", "task", "model", "seed", "score")}
    held = holder(folder.path / "lock")
    if held is not None:
        entry |= {
            "status": "running",
            "note": f"process {held.get('pid')} on {held.get('host')} since {held.get('since')}",
        }
    elif written is None or damage:
        begun = "begun, not finished" if entry["samples"] else ""
        entry |= {"status": "missing", "note": f"damaged: {damage}" if damage else begun, "score": None}
    else:
        status = "stale" if _stale(written) else written["status"]
        entry |= {"status": status, "note": last_line(written.get("error"))}
    return entry


def _stale(written: dict[str, Any]) -> bool:
    """True for a finished record of other sources."""
    return written["status"] in record.FINISHED and written.get("versions.source") != hashing.source_hash()


def _record(folder: record.RunFolder) -> tuple[dict[str, Any] | None, str]:
    """The record of a run, None where it cannot be read, and what is wrong with it, so that it is made again."""
    path = folder.path / "record.json"
    if not path.exists():
        return None, ""
    try:
        found = record.read_record(path)
    except ValueError as error:
        return None, str(error).removeprefix(f"{path}: ")
    wrong = None if _stale(found) else folder.fault(found)
    return found, "" if wrong is None else wrong.text


def place(cell: dict[str, Any]) -> tuple[Any, ...]:
    """Where a cell stands in the table: what needs attention first, then by method and from large budgets to small."""
    budget = cell.get("budget")
    known = isinstance(budget, (int, float))
    order = (0, 0.0) if not known else (1 + isinstance(budget, int), -float(budget))  # type: ignore[arg-type]
    names = [str(cell.get(key, "")) for key in ("task", "model", "seed")]
    return (ORDER.index(cell["status"]), str(cell.get("method", "")), *order, *names)


def shown(value: Any) -> str:
    """A value of the table; what is not known is a dash."""
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def show(sweep: Path, console: Console) -> int:
    """Print the table of a sweep; 0 if every cell is finished, 1 if not, 2 if there is no sweep."""
    try:
        cells = cells_of(sweep)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 2
    out = PlainConsole(width=None if Console().is_terminal else 140)
    same = [key for key in ("model", "seed") if len({str(cell.get(key)) for cell in cells}) == 1]  # said once, above
    if same:
        out.print(", ".join(f"{key} {cells[0].get(key)}" for key in same), highlight=False, markup=False)
    keys = [key for key in ("method", "budget", "task", "model", "seed", "score", "samples") if key not in same]
    table = Table("status", *keys, "run", "note", box=None)
    for cell in sorted(cells, key=place):
        values = [shown(cell.get(key)) for key in keys]
        texts = map(text.cell, (cell["status"], *values, cell["run_id"], cell["note"]))
        table.add_row(*texts, style=STYLE.get(cell["status"], ""))
    out.print(table)
    counts = Counter(cell["status"] for cell in cells)
    out.print(", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status]), highlight=False)
    return 0 if all(cell["status"] in ("ok", "inactive", "unscored", "stale") for cell in cells) else 1
