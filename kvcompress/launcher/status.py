"""`status=results/<sweep>`: which cells of a sweep are done, running, failed or missing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcompress import record
from kvcompress.launcher.cell import last_line
from kvcompress.launcher.lock import holder
from kvcompress.launcher.plan import noted_cells

ORDER = ("running", "failed", "oom", "partial", "missing", "stale", "inactive", "ok")
STYLE = {"failed": "red", "oom": "red", "running": "cyan", "ok": "green"}


def cells_of(sweep: Path) -> list[dict[str, Any]]:
    """One entry per cell: `run_id status samples note` and what the sweep noted of it.

    Raises:
        ValueError: there is no such sweep, or it was made by a version with another layout.
    """
    if not sweep.is_dir():
        raise ValueError(f"status={sweep}: no such folder; give the folder of a sweep, such as results/default")
    noted = noted_cells(sweep)
    found = {path.parent.name for pattern in ("*/record.json", "*/config.yaml") for path in sweep.glob(pattern)}
    if not noted and not found:
        raise ValueError(f"status={sweep}: no sweep lies here; give the folder of one, such as results/default")
    return [_entry(sweep, run_id, noted.get(run_id, {})) for run_id in [*noted, *sorted(found - noted.keys())]]


def _entry(sweep: Path, run_id: str, noted: dict[str, Any]) -> dict[str, Any]:
    folder = record.RunFolder(sweep.parent, sweep.name, run_id)
    written = folder.record()
    entry = {"run_id": run_id, "samples": len(folder.rows()), "note": "", **noted}
    if written is not None:
        entry |= {key: written.get(key) for key in ("method", "budget", "task", "model", "seed")}
    held = holder(folder.path / "lock")
    if held is not None:
        entry |= {
            "status": "running",
            "note": f"process {held.get('pid')} on {held.get('host')} since {held.get('since')}",
        }
    elif written is None:
        entry |= {"status": "missing", "note": "begun, not finished" if entry["samples"] else ""}
    else:
        finished = written["status"] in record.FINISHED
        stale = finished and written.get("versions.source") != record.source_hash()
        entry |= {"status": "stale" if stale else written["status"], "note": last_line(written.get("error"))}
    return entry


def show(sweep: Path, console: Console) -> int:
    """Print the table of a sweep; 0 if every cell is finished, 1 if not, 2 if there is no sweep."""
    try:
        cells = cells_of(sweep)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    out = Console(width=None if Console().is_terminal else 140)
    table = Table("status", "run", "model", "task", "method", "budget", "seed", "samples", "note", box=None)
    for cell in sorted(cells, key=lambda cell: ORDER.index(cell["status"])):
        values = [str(cell.get(key, "")) for key in ("run_id", "model", "task", "method", "budget", "seed", "samples")]
        table.add_row(cell["status"], *values, cell["note"], style=STYLE.get(cell["status"], ""))
    out.print(table)
    counts = Counter(cell["status"] for cell in cells)
    out.print(", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status]), highlight=False)
    return 0 if all(cell["status"] in ("ok", "inactive", "stale") for cell in cells) else 1
