"""Scheduler: configurations → cells → groups → outcomes. Decides the order and who runs what; tells listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvcompress.common.text import PlainConsole
from kvcompress.hook.session import keeps_all
from kvcompress.method.budget import NotTogether
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.disk import DiskFull
from kvcompress.sweep.launcher.cell_run import CellRun
from kvcompress.sweep.launcher.dry import estimate
from kvcompress.sweep.launcher.executor import GroupExecutor
from kvcompress.sweep.launcher.grouping import CellGroup, group_cells, listed, note_cells
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.outcome import Listener, Outcome

# groups as lists of indices → of each that has ended its number, and its outcomes or what became of the process
Elsewhere = Callable[[list[list[int]]], Iterator[tuple[int, list[Outcome] | BaseException]]]


class Scheduler:
    """Runs cells; the loaded model is kept for the next ones that want the same.

    Args:
        console: for notes and outcomes; standard error by default.
        listeners: told of each outcome as soon as it is known, in this order.

    Attributes:
        outcomes: of all cells so far, in the order in which they were settled.
    """

    def __init__(self, console: Console | None = None, listeners: Sequence[Listener] = ()) -> None:
        self.console = console or PlainConsole(stderr=True)
        self.listeners = tuple(listeners)
        self.outcomes: list[Outcome] = []
        self.models = ModelPool()
        self._seen: set[tuple[str, str]] = set()

    def __call__(self, config: DictConfig) -> Outcome:
        """Run the cell `config` describes, or find that it is done. A fault is recorded, not raised."""
        return self.sweep([config])[-1]

    def sweep(
        self, configs: Sequence[DictConfig], options: Options | None = None, elsewhere: Elsewhere | None = None
    ) -> list[Outcome]:
        """Run many cells, those that can share a prefill together. Faults are recorded, not raised.

        Args:
            elsewhere: runs groups, each a list of indices into `configs`, in other processes.

        Returns:
            one outcome per configuration, in the order in which they were settled.

        Raises:
            KeyboardInterrupt: what is finished is on disk, and what was begun goes on where it stopped.
        """
        first = len(self.outcomes)
        try:
            self._sweep(configs, options or Options(), elsewhere)
        except DiskFull as error:
            note = f"{error}: {error.advice}"
            self._settle(Outcome("", configs[0].budget, "full", note=note))
        return self.outcomes[first:]

    def _sweep(self, configs: Sequence[DictConfig], options: Options, elsewhere: Elsewhere | None) -> None:
        made = [self._cell(config) for config in configs]
        cells = [cell for cell in made if cell is not None]
        groups = group_cells(cells, options.share)
        dry = any(config.get("dry") for config in configs)
        if len(cells) > 1:
            self._explain([group for group in groups if not (dry and group.shared)])
        if dry:
            self._plan(groups)
            return
        try:
            note_cells(cell.spec for cell in cells)
        except ValueError as error:
            for cell in cells:
                self._settle(cell.set_outcome("refused", note=str(error)))
            return
        if elsewhere is not None:
            number = {id(cell): index for index, cell in enumerate(made) if cell is not None}
            due = [group for group in groups if not self._settle_finished(group)]
            self._collect(due, elsewhere([[number[id(cell)] for cell in group.cells] for group in due]))
            return
        try:
            busy = [group for group in groups if self._run(group, options)]
            for group in busy:  # in the meantime the other process may have ended, or died
                self._run(group, options, again=True)
        finally:
            for cell in cells:
                cell.release()

    def _cell(self, config: DictConfig) -> CellRun | None:
        """The cell of a configuration, or None where it is refused or the same as an earlier one."""
        try:
            spec = CellSpec.from_config(config)
        except Exception as error:  # whatever a task's data or a setting does, the other cells are not to blame
            status = "dropped" if isinstance(error, NotTogether) else "refused"
            note = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
            self._settle(Outcome(str(OmegaConf.select(config, "method.name")), config.budget, status, note=note))
            return None
        cell, key = CellRun(spec), (str(spec.sweep), spec.run_id)
        if key in self._seen:
            none = spec.method.budget_kind == "none"
            note = "this method has no budget: one cell for all" if none else "the same cell again"
            self._settle(cell.set_outcome("same", cell.folder.record(), note))
            return None
        self._seen.add(key)
        return cell

    def _plan(self, groups: Sequence[CellGroup]) -> None:
        """Print what would be done; a cell that could not begin has failed."""
        faults = estimate(groups, self.models, self.console)
        for cell in (cell for group in groups for cell in group.cells):
            fault = faults.get(cell.spec.run_id)
            self._settle(cell.set_outcome("dry") if fault is None else cell.set_outcome("failed", note=fault))

    def _settle_finished(self, group: CellGroup) -> bool:
        """True if no cell of a group has anything to do; then their outcomes are settled."""
        found = [cell.check_finished() for cell in group.cells]
        if None in found:
            return False
        for outcome in filter(None, found):
            self._settle(outcome)
        return True

    def _collect(self, groups: Sequence[CellGroup], ended: Iterator[tuple[int, list[Outcome] | BaseException]]) -> None:
        """Outcomes of groups that other processes run; a process that died leaves its unfinished cells failed."""
        for number, result in ended:
            if isinstance(result, BaseException):
                for cell in groups[number].cells:
                    text = f"its process ended: {(str(result).strip().splitlines() or [type(result).__name__])[-1]}"
                    note = f"{text}; the same command goes on"
                    self._settle(cell.check_finished() or cell.set_outcome("failed", note=note))
            else:
                for outcome in result:
                    self._settle(replace(outcome, fresh=False))

    def _explain(self, groups: Sequence[CellGroup]) -> None:
        """Print which cells share, and which run alone and why."""
        alone: dict[str, list[CellSpec]] = {}
        for group in groups:
            if group.reason is None:
                text = f"{len(group.cells)} cells share each prefill: {group.first.config.model.name} {group.first.task.name}"
                self.console.print(text, style="dim", highlight=False, markup=False)
            else:
                alone.setdefault(group.reason, []).append(group.first)
        for reason, specs in alone.items():
            tasks = ", ".join(dict.fromkeys(spec.task.name for spec in specs))
            text = f"{reason}: {listed(specs)} · {tasks} {'runs' if len(specs) == 1 else 'run'} alone"
            self.console.print(text, style="dim", highlight=False, markup=False)

    def _run(self, group: CellGroup, options: Options, again: bool = False) -> bool:
        """Run what there is to run of a group; True if another process has some of its cells."""
        busy = False
        for cell in group.cells:
            if again:
                cell.reopen()
            if not cell.open:
                continue
            outcome = cell.acquire()
            if outcome is None:
                self._warn(cell.spec)
            elif outcome.status == "running" and not again:
                busy = True
            else:
                self._settle(outcome)
        if group.open_cells():
            GroupExecutor(group, self.models, self.console, self._settle, options).run()
        return busy

    def _warn(self, spec: CellSpec) -> None:
        """Print a note where a budget is probably not meant as it is."""
        method, text = spec.method, ""
        if method.limited and isinstance(method.budget, int) and method.budget == 1:
            text = "budget=1 is one token per head; no limit is budget=1.0"
        if keeps_all(method):
            text = "budget=1.0 evicts nothing; a share such as budget=0.25 does"
        if text:
            self.console.print(text, style="yellow", markup=False)

    def _settle(self, outcome: Outcome) -> None:
        """Keep an outcome, print it and tell the listeners."""
        self.outcomes.append(outcome)
        score = outcome.record.get("score")
        shown = "" if score is None else f" score {score:.3f}"
        if outcome.status not in ("dry", "full"):  # which are said once, at the end
            self.console.print(
                f"{outcome.name}: {outcome.status}{shown}" + (f" · {outcome.note}" if outcome.note else ""),
                highlight=False,
                markup=False,
            )
        for listener in self.listeners:
            listener(outcome)
