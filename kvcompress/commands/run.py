"""Command line of runs: Hydra composes the cells, a scheduler runs them, trackers and the board are told.

Nothing but Hydra is imported until a cell has work to do: help, refusals, `status=` and the plan of a finished sweep answer
at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from kvcompress.commands import memo
from kvcompress.commands.run_help import asks_help, show_help
from kvcompress.common.text import PlainConsole
from kvcompress.sweep import record
from kvcompress.sweep.config import (
    check_folders,
    check_overrides,
    expand_suites,
    folder,
    register,
    results_of,
    with_launcher,
)
from kvcompress.sweep.hydra_errors import HYDRA_ERRORS, one_line
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.plugin import register_launcher
from kvcompress.sweep.launcher.status import show, sweep_folder
from kvcompress.sweep.outcome import Listener, Outcome, nothing_to_do
from kvcompress.tracking import SweepTracker

FULL = "HYDRA_FULL_ERROR"  # 1: whatever Hydra refuses is raised, with its traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that a command line asks for; returns the exit code.

    `status=<sweep>`, its name or its folder, shows what there is of a sweep instead.

    0 all cells finished (now or before), 1 a cell failed or its values are refused, 2 the command line is refused (an
    unknown name or key, text where a number belongs, no cell at all, no such results folder), 130 interrupted.
    """
    arguments = expand_suites(sys.argv[1:] if arguments is None else arguments, folder())
    console = PlainConsole(stderr=True)
    asked = [argument.partition("=")[2] for argument in arguments if argument.startswith("status=")]
    if asked:
        return max(show(sweep_folder(name, results_of(arguments)), console) for name in asked)
    if asks_help(arguments):
        return show_help(arguments)
    if memo.DRY in arguments:
        runs = memo.finished_runs(arguments)
        if runs is not None:
            console.print(nothing_to_do(runs), highlight=False, markup=False)
            return 0
    register()
    register_launcher()
    typed, arguments = arguments, with_launcher(arguments, folder())
    try:
        check_overrides(arguments, folder())
        check_folders(arguments)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    work, interrupted = Work(console), False
    try:
        with traced_by_hydra():
            run_hydra(arguments, work)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what is finished is kept, the same command goes on from here", style="yellow")
    except HYDRA_ERRORS as error:
        if os.environ.get(FULL) == "1":
            raise
        console.print(one_line(error), style="red", highlight=False, markup=False)
        return 2
    if not interrupted and all(outcome.status != "full" for outcome in work.outcomes):
        for place in work.tracker.finish():
            console.print(place, highlight=False, markup=False, soft_wrap=True)
        memo.note(typed, work.outcomes, work.inputs)
    return summary(work.outcomes, console, interrupted)


class Work:
    """What Hydra is given to do: one cell, or all cells of a sweep. The scheduler is made when the first has work to do."""

    def __init__(self, console: Console) -> None:
        self.console, self.tracker, self.inputs = console, SweepTracker(), memo.Inputs()
        self._sweep: Callable[..., list[Outcome]] | None = None
        self.outcomes: list[Outcome] = []

    def sweep(self, configs: Sequence[DictConfig], options: Options | None = None, elsewhere: Any = None) -> None:
        """Run the cells, as `Scheduler.sweep`."""
        if self._sweep is None:
            from transformers.utils import logging as transformers_logging

            from kvcompress.sweep.launcher.scheduler import Scheduler

            transformers_logging.disable_progress_bar()  # ours is the one that shows how far the sweep is
            self._sweep = Scheduler(self.console, [self.outcomes.append, self.tracker]).sweep
        self.tracker.expect(configs)
        self.inputs.add(configs)
        self._sweep(configs, options, elsewhere)


def listeners(configs: Sequence[DictConfig]) -> list[Listener]:
    """Listeners of cells that a process of an engine runs."""
    tracker = SweepTracker()
    tracker.expect(configs)
    return [tracker]


def run_hydra(arguments: Sequence[str], work: Work) -> None:
    """Have Hydra compose the cells of a command line and hand them to `work`."""
    import hydra

    def cell(config: DictConfig) -> None:
        work.sweep([config])

    cell.sweep, cell.listen = work.sweep, listeners  # type: ignore[attr-defined]  # read by the shared launcher
    chosen = any(argument.lstrip("+").startswith("hydra/sweeper=") for argument in arguments)
    before, sys.argv[1:] = sys.argv[1:], [*arguments, *([] if chosen else ["hydra/sweeper=cells"])]
    try:
        hydra.main(version_base="1.3", config_path=str(folder()), config_name="config")(cell)()
    finally:
        sys.argv[1:] = before


@contextmanager
def traced_by_hydra() -> Iterator[None]:
    """Inside, Hydra raises what it refuses instead of printing it and ending the process."""
    before, os.environ[FULL] = os.environ.get(FULL), "1"
    try:
        yield
    finally:
        os.environ.pop(FULL)
        if before is not None:
            os.environ[FULL] = before


def summary(outcomes: Sequence[Outcome], console: Console, interrupted: bool = False) -> int:
    """Print the board of what was run, and every failure in one line; returns the exit code.

    Why cells were not begun was printed before the others were: here they are named once more, if there were others.
    """
    unique = {outcome.run_id: outcome for outcome in outcomes if outcome.record}
    stored = [_latest(outcome) for outcome in unique.values()]
    if stored:
        from kvcompress.report.table import leaderboard, terminal

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
    if outcome.folder is None:
        return outcome.record
    from kvcompress.report.run_index import interval

    try:
        found = record.read_record(outcome.folder / "record.json")
    except ValueError:
        return outcome.record
    return found | interval(found, record.scores_of(record.read_rows(outcome.folder / "samples.jsonl")))
