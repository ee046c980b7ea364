"""Sweep benchmark: the same cells one by one, with shared prefills, and decoded together, in one process."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from kvcompress.measure.measuring import without_peaks
from kvcompress.sweep.config import composing
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.scheduler import Scheduler

METHODS = ("snapkv", "pyramidkv", "adakv", "knorm", "cake:decode=false", "random")
BUDGETS = (0.5, 0.25, 0.1, 0.05)
MODES: Mapping[str, Options] = {
    "one by one": Options(share=False),
    "shared prefill": Options(together=False),
    "decoded together": Options(),
}


@dataclass(frozen=True)
class Total:
    """What all cells took in one mode.

    Attributes:
        seconds, cpu: by the clock, and of processor time, which hardly depends on what else a machine does.
        ratio, cpu_ratio: to the first mode.
        full, cpu_full: to a single cell of the full cache.
    """

    mode: str
    cells: int
    samples: int
    seconds: float
    cpu: float
    ratio: float
    cpu_ratio: float
    full: float
    cpu_full: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class SweepBench:
    """Needle samples of one length, methods × budgets, in each mode.

    Memory peaks are not measured in any mode, so that what collecting garbage for them takes alone is not counted.

    Args:
        folder: for the records; empty.
        model: a choice of the group `model`.
        methods: names, with `:key=value` for settings of their own.
        length: tokens of the prompt; `new`: generated at most; `samples`: of each cell.
    """

    def __init__(
        self,
        folder: Path,
        model: str = "smollm2",
        methods: Sequence[str] = METHODS,
        budgets: Sequence[float | int] = BUDGETS,
        length: int = 2000,
        new: int = 16,
        samples: int = 1,
    ) -> None:
        self.folder, self.model, self.methods, self.budgets = folder, model, methods, budgets
        self.length, self.new, self.samples = length, new, samples
        self.console = Console(file=io.StringIO())

    def run(self, modes: Sequence[str] = tuple(MODES)) -> Iterator[Total]:
        """One total per mode, one by one first.

        Raises:
            ValueError: a cell failed.
        """
        scheduler = Scheduler(self.console)
        cells = [(method, budget) for method in self.methods for budget in self.budgets]
        with without_peaks():
            # the model is loaded, and everything has run once
            self._sweep(scheduler, "warm", [("full", 1.0), *cells[:: len(self.budgets)]], Options(), length=600, new=2)
            full = self._sweep(scheduler, "full", [("full", 1.0)], Options())
            first = None
            for mode in modes:
                took = self._sweep(scheduler, mode, cells, MODES[mode])
                first = took if first is None else first
                ratios = [took[i] / base[i] for base in (first, full) for i in (0, 1)]
                yield Total(mode, len(cells), self.samples, *took, *ratios)

    def _sweep(
        self,
        scheduler: Scheduler,
        name: str,
        cells: Sequence[tuple[str, float | int]],
        options: Options,
        length: int | None = None,
        new: int | None = None,
    ) -> tuple[float, float]:
        """Seconds by the clock and of processor time."""
        configs = list(self._configs(name.replace(" ", "-"), cells, length or self.length, new or self.new))
        start, start_cpu = time.perf_counter(), time.process_time()
        outcomes = scheduler.sweep(configs, options)
        took = time.perf_counter() - start, time.process_time() - start_cpu
        bad = [f"{outcome.method} {outcome.budget}: {outcome.note}" for outcome in outcomes if outcome.status != "ok"]
        if bad:
            raise ValueError(f"{name}: {'; '.join(bad)}")
        return took

    def _configs(
        self, name: str, cells: Sequence[tuple[str, float | int]], length: int, new: int
    ) -> Iterator[DictConfig]:
        depths = [round((i + 0.5) / self.samples, 4) for i in range(self.samples)]
        settings = [f"model={self.model}", f"task.lengths=[{length}]", f"task.depths={depths}".replace(" ", "")]
        settings += [f"task.max_new_tokens={new}", f"paths.results={self.folder}", f"sweep.name={name}"]
        with composing() as config:
            for method, budget in cells:
                name, *options = method.split(":")
                chosen = [f"method={name}", f"budget={json.dumps(budget)}", *(f"method.{option}" for option in options)]
                yield config([*settings, "device=cpu", *chosen])
