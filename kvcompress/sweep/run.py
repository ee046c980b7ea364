"""The runner: configs → cells → groups → records. The model is kept between the groups that use it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvcompress import tracking
from kvcompress.common.memory import is_oom, release
from kvcompress.method.budget import NotTogether
from kvcompress.models import loading
from kvcompress.sweep import record
from kvcompress.sweep.config import check_overrides, expand_suites, folder, register, with_launcher
from kvcompress.sweep.disk import DiskFull
from kvcompress.sweep.hydra_errors import Refused, explain
from kvcompress.sweep.launcher.cell import Cell, Outcome, identity, model_key, pair_id
from kvcompress.sweep.launcher.dry import estimate
from kvcompress.sweep.launcher.plan import Group, group_cells, listed, note_cells
from kvcompress.sweep.launcher.work import Options, Worker

__all__ = ["Options", "Outcome", "Runner", "identity", "is_oom", "main", "pair_id", "release"]

FULL = "HYDRA_FULL_ERROR"  # 1: whatever Hydra refuses is raised, with its traceback


class Runner:
    """Runs cells and keeps the loaded model for the next ones that want the same."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.outcomes: list[Outcome] = []
        self._seen: set[tuple[str, str]] = set()
        self._loggers: dict[Path, Any] = {}  # of each sweep's folder
        self._model_key: Any = None
        self._model: tuple[Any, Any] | None = None

    def __call__(self, config: DictConfig) -> Outcome:
        """Run the cell `config` describes, or find that it is done. A fault is recorded, not raised."""
        return self.sweep([config])[-1]

    def sweep(
        self,
        configs: Sequence[DictConfig],
        options: Options | None = None,
        elsewhere: Callable[[list[list[int]]], Iterator[tuple[int, list[Outcome] | BaseException]]] | None = None,
    ) -> list[Outcome]:
        """Run many cells, those that can share a prefill together. Faults are recorded, not raised.

        Args:
            elsewhere: runs groups, each a list of indices into `configs`, in other processes, and yields for each as it
                ends its number and its outcomes or what became of the process.

        Returns:
            one outcome per configuration; in the order in which they were settled.

        Raises:
            KeyboardInterrupt: what is finished is on disk, and what was begun goes on where it stopped.
        """
        first = len(self.outcomes)
        try:
            self._sweep(configs, options or Options(), elsewhere)
        except DiskFull as error:
            note = f"{error}: what is finished is kept, the same command goes on when there is room"
            self.outcomes.append(Outcome("", configs[0].budget, "full", note=note))
        return self.outcomes[first:]

    def _sweep(
        self,
        configs: Sequence[DictConfig],
        options: Options,
        elsewhere: Callable[[list[list[int]]], Iterator[tuple[int, list[Outcome] | BaseException]]] | None,
    ) -> None:
        made = [self._cell(config) for config in configs]
        cells = [cell for cell in made if cell is not None]
        groups = group_cells(cells, options.share)
        dry = any(config.get("dry") for config in configs)
        if len(cells) > 1:
            self._explain([group for group in groups if not (dry and group.shared)])
        if dry:
            faults = estimate(groups, self._load, self._tokenizer, self.console)
            for cell in cells:
                fault = faults.get(cell.run_id)
                self._settled(cell.settle("dry") if fault is None else cell.settle("failed", note=fault))
            return
        try:
            note_cells(cells)
        except ValueError as error:
            for cell in cells:
                self._settled(cell.settle("refused", note=str(error)))
            return
        if elsewhere is not None:
            number = {id(cell): index for index, cell in enumerate(made) if cell is not None}
            due = [group for group in groups if not self._finished(group)]
            self._collect(due, elsewhere([[number[id(cell)] for cell in group.cells] for group in due]))
            return
        try:
            busy = [group for group in groups if self._group(group, options)]
            for group in busy:  # in the meantime the other process may have ended, or died
                self._group(group, options, again=True)
        finally:
            for cell in cells:
                cell.release()

    def _finished(self, group: Group) -> bool:
        """True if no cell of a group has anything to do; then what became of them is said here."""
        found = [cell.look() for cell in group.cells]
        if not all(found):
            return False
        for outcome in found:
            assert outcome is not None
            self._settled(outcome)
        return True

    def _collect(self, groups: Sequence[Group], ended: Iterator[tuple[int, list[Outcome] | BaseException]]) -> None:
        """Outcomes of groups that other processes run; a process that died leaves its unfinished cells failed."""
        for number, result in ended:
            if isinstance(result, BaseException):
                for cell in groups[number].cells:
                    text = f"its process ended: {(str(result).strip().splitlines() or [type(result).__name__])[-1]}"
                    self._settled(cell.look() or cell.settle("failed", note=f"{text}; the same command goes on"))
            else:
                for outcome in result:
                    (self.outcomes.append if outcome.status == "full" else self._settled)(outcome)

    def _cell(self, config: DictConfig) -> Cell | None:
        """The cell of a configuration, or None where it is refused or the same as an earlier one."""
        try:
            cell = Cell(config)
        except Exception as error:  # whatever a task's data or a setting does, the other cells are not to blame
            status = "dropped" if isinstance(error, NotTogether) else "refused"
            note = str(error) if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
            self._settled(Outcome(str(OmegaConf.select(config, "method.name")), config.budget, status, note=note))
            return None
        self._loggers[cell.folder.path.parent] = config.logger
        key = (str(cell.folder.path.parent), cell.run_id)
        if key in self._seen:
            none = cell.method.budget_kind == "none"
            note = "this method has no budget: one cell for all" if none else "the same cell again"
            self._settled(cell.settle("same", cell.folder.record(), note))
            return None
        self._seen.add(key)
        return cell

    def track(self) -> None:
        """Bring the tracker up to date with what the sweeps left, and give it their leaderboards."""
        for sweep, settings in self._loggers.items():
            mine = [o for o in self.outcomes if o.record and o.folder is not None and o.folder.parent == sweep]
            before = [(o.folder, o.record) for o in mine if o.folder is not None]
            done = [o.folder for o in mine if o.folder is not None and o.status == "done"]
            tracking.finish(settings, sweep, before, done)
            if mine and (kept := tracking.place(settings)):
                self.console.print(kept, highlight=False, markup=False, soft_wrap=True)

    def _explain(self, groups: Sequence[Group]) -> None:
        """Say which cells share, and which run alone and why."""
        alone: dict[str, list[Cell]] = {}
        for group in groups:
            first = group.cells[0]
            if group.shared:
                text = f"{len(group.cells)} cells share each prefill: {first.config.model.name} {first.task.name}"
                self.console.print(text, style="dim", highlight=False, markup=False)
            else:
                alone.setdefault(group.reason, []).append(first)
        for reason, cells in alone.items():
            tasks = ", ".join(dict.fromkeys(cell.task.name for cell in cells))
            text = f"{reason}: {listed(cells)} · {tasks} {'runs' if len(cells) == 1 else 'run'} alone"
            self.console.print(text, style="dim", highlight=False, markup=False)

    def _group(self, group: Group, options: Options, again: bool = False) -> bool:
        """Run what there is to run of a group; True if another process has some of its cells."""
        busy = False
        for cell in group.cells:
            if again and cell.outcome is not None and cell.outcome.status == "running":
                cell.outcome = None
            if cell.outcome is not None:
                continue
            outcome = cell.claim()
            if outcome is None:
                self._warn(cell)
            elif outcome.status == "running" and not again:
                busy = True
            else:
                self._settled(outcome)
        if any(cell.open for cell in group.cells):
            Worker(self._load, self._tokenizer, self.console, self._settled, options).run(group)
        return busy

    def _warn(self, cell: Cell) -> None:
        method = cell.method
        if method.limited and isinstance(method.budget, int) and method.budget == 1:
            self.console.print("budget=1 is one token per head; no limit is budget=1.0", style="yellow", markup=False)
        if method.budget_kind == "held_tokens" and not method.limited and method.parts().scorer is not None:
            self.console.print(
                "budget=1.0 evicts nothing; a share such as budget=0.25 does", style="yellow", markup=False
            )

    def _settled(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        score = outcome.record.get("score")
        shown = "" if score is None else f" score {score:.3f}"
        if outcome.status != "dry":
            self.console.print(
                f"{outcome.name}: {outcome.status}{shown}" + (f" · {outcome.note}" if outcome.note else ""),
                highlight=False,
                markup=False,
            )
        return outcome

    def _tokenizer(self, config: DictConfig) -> Any:
        """The tokenizer of a configuration: the loaded model's, or on its own where that is another."""
        if self._model is not None and model_key(config) == self._model_key:
            return self._model[1]
        wanted: Any = OmegaConf.to_container(config.model, resolve=True)
        settings = {key: wanted[key] for key in ("trust_remote_code", "revision")}
        return loading.load_tokenizer(wanted["name"], **settings, **wanted["options"])

    def _load(self, config: DictConfig) -> tuple[Any, Any]:
        key = model_key(config)
        if key != self._model_key:
            settings: Any = OmegaConf.to_container(config.model, resolve=True)
            extra = settings.pop("options")
            name = settings.pop("name")
            self._model = self._model_key = None
            release()
            self._model = loading.load(name, config.dtype, config.device, seed=config.seed, **settings, **extra)
            self._model_key = key
        assert self._model is not None
        return self._model


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: Hydra composes the cells, a runner runs them; returns the exit code.

    `status=results/<sweep>` shows what there is of a sweep instead.

    0 all cells finished (now or before), 1 a cell failed or its values are refused, 2 the command line is refused (an
    unknown name or key, text where a number belongs, no cell at all, no such results folder), 130 interrupted.
    """
    import hydra
    from transformers.utils import logging as transformers_logging

    from kvcompress.sweep.launcher.plugin import register_launcher
    from kvcompress.sweep.launcher.status import show

    arguments = expand_suites(sys.argv[1:] if arguments is None else arguments, folder())
    console = Console(stderr=True)
    asked = [argument.partition("=")[2] for argument in arguments if argument.startswith("status=")]
    if asked:
        return max(show(Path(sweep), console) for sweep in asked)
    register()
    register_launcher()
    arguments = with_launcher(arguments, folder())
    try:
        check_overrides(arguments, folder())
        check_results(arguments)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    transformers_logging.disable_progress_bar()  # ours is the one that says how far the sweep is
    runner = Runner(console)

    def cell(config: DictConfig) -> None:
        runner(config)

    cell.sweep = runner.sweep  # type: ignore[attr-defined]  # what the shared launcher calls with all cells at once
    interrupted = False
    before, sys.argv[1:] = sys.argv[1:], arguments
    traceback, os.environ[FULL] = os.environ.get(FULL), "1"  # Hydra shall raise what it refuses, not print it
    try:
        hydra.main(version_base="1.3", config_path=str(folder()), config_name="config")(cell)()
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what is finished is kept, the same command goes on from here", style="yellow")
    except Refused as error:
        if traceback == "1":
            raise
        console.print(explain(error), style="red", highlight=False, markup=False)
        return 2
    finally:
        sys.argv[1:] = before
        os.environ.pop(FULL)
        if traceback is not None:
            os.environ[FULL] = traceback
    if not interrupted and all(outcome.status != "full" for outcome in runner.outcomes):
        runner.track()
    return summary(runner.outcomes, console, interrupted)


def check_results(arguments: Sequence[str]) -> None:
    """Refuse a `paths.results` that cannot be a folder or cannot be written to, which Hydra would say with a traceback.

    Raises:
        ValueError: names the folder and what is in the way.
    """
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("paths.results=")]
    for name in named or ["results"]:
        if not name or set(name) & set("$,'\""):
            continue
        place = Path(name).absolute()
        try:
            while not place.exists():
                place = place.parent
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to paths.results={name}: {error}") from None


def summary(outcomes: Sequence[Outcome], console: Console, interrupted: bool = False) -> int:
    """The board of what was run, every failure in one line, and the exit code.

    Why cells were not begun was printed before the others were: here they are named once more, if there were others.
    """
    from kvcompress.report.table import leaderboard, terminal

    unique = {outcome.run_id: outcome for outcome in outcomes if outcome.record}
    stored = [_latest(outcome) for outcome in unique.values()]
    if stored:
        leaderboard([dict(found) for found in stored], terminal())
    unbegun = [outcome for outcome in outcomes if outcome.status in ("refused", "dropped")]
    for status in ("refused", "dropped") if len(unbegun) < len(outcomes) else ():
        names = [outcome.name for outcome in unbegun if outcome.status == status]
        if names:
            text = f"{status}: {', '.join(names)} (said above why)"
            console.print(text, style="red" if status == "refused" else "yellow", highlight=False, markup=False)
    full = [outcome for outcome in outcomes if outcome.status == "full"]
    if full:  # of every process the same
        console.print(full[0].note, style="red", highlight=False, markup=False, soft_wrap=True)
    for outcome in outcomes:
        if outcome not in [*unbegun, *full] and (outcome.failed or outcome.status in ("stale", "running")):
            text = f"{outcome.status}: {outcome.name} {outcome.run_id} {outcome.note}"
            console.print(text, style="red" if outcome.failed else "yellow", highlight=False, markup=False)
    if interrupted:
        return 130
    dropped = bool(outcomes) and all(outcome.status == "dropped" for outcome in outcomes)
    return 1 if dropped or any(outcome.failed for outcome in outcomes) else 0


def _latest(outcome: Outcome) -> Mapping[str, Any]:
    """The record as it is now: a baseline that ran later has filled in its delta."""
    path = outcome.folder / "record.json" if outcome.folder else None
    try:
        return record.read_record(path) if path else outcome.record
    except ValueError:
        return outcome.record
