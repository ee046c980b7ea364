"""Small sweeps for the launcher's tests: configurations, runs in this process and in forked ones, and what they left."""

from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

from composed import composed
from rich.console import Console

from kvcompress.measure.measuring import without_peaks
from kvcompress.sweep import record
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.launcher.cell_run import CellRun
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.scheduler import Scheduler

SHORT = (
    "model=random",
    "task.lengths=[450]",
    "task.depths=[0.0,1.0]",
    "task.n_seeds=1",
    "task.max_new_tokens=4",
    "device=cpu",
    "paths.data=null",
    "sweep.name=test",
)
ALONE, SHARED, TOGETHER = Options(share=False), Options(together=False), Options()


def cell(folder: Path, *overrides: str) -> Any:
    """A resolved configuration whose records go to `folder`."""
    return composed(*SHORT, f"paths.results={folder}", *overrides)


def cells(folder: Path, methods: str, budgets: str, *overrides: str) -> list[Any]:
    """Configurations of every method with every budget, both given as comma lists."""
    made = []
    for method in methods.split(","):
        base = cell(folder, f"method={method}", *overrides)
        for budget in budgets.split(","):
            made.append(base.copy())
            made[-1].budget = json.loads(budget)
    return made


def cell_run(config: Any) -> CellRun:
    """The cell of a configuration, which nobody works on yet."""
    return CellRun(CellSpec.from_config(config))


def sweep(configs: list[Any], options: Options = SHARED) -> tuple[list[Any], str]:
    """Run the cells in this process: their outcomes, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    with without_peaks():
        outcomes = Scheduler(console).sweep(configs, options)
    return outcomes, console.file.getvalue()  # type: ignore[attr-defined]


def forked(target: Any, *arguments: Any) -> Any:
    """Start `target` in a copy of this process, which has all modules loaded."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def left(folder: Path) -> dict[str, Any]:
    """What a sweep left behind, by run id: status, and of each sample what must not depend on how it was run."""
    found = {}
    for path in sorted((folder / "test").glob("*/record.json")):
        written = record.read_record(path)
        kept = {key: value for key, value in written.items() if key.startswith(("kv.", "share_", "score"))}
        lines = (path.parent / "samples.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found[written["run_id"]] = (written["status"], written["n_samples"], kept, [essence(row) for row in rows])
    return found


def essence(row: dict[str, Any]) -> dict[str, Any]:
    """A sample's line without times, peaks, and the kernel that decoded it."""
    out = {key: value for key, value in row["out"].items() if not key.endswith(("_s", "_peak"))}
    for moment in ("compressed", "end"):
        out[moment] = {key: value for key, value in out[moment].items() if key not in ("time", "kernel")}
    return {"id": row["id"], "score": row["score"], "out": out}
