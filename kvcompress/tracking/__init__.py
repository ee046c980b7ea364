"""Finished runs as rows of a tracker (Weights & Biases, trackio): views of records that can be built again at any time.

Nothing here ends a run: trouble is a warning, and `scripts/sync.py` sends the same later, from the records alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcompress.sweep.config import LOGGERS, MODES, LoggerConfig, check_logger
from kvcompress.sweep.outcome import Outcome
from kvcompress.sweep.record import read_record
from kvcompress.tracking.content import Unreachable, read

__all__ = [
    "LOGGERS",
    "MODES",
    "LoggerConfig",
    "SweepTracker",
    "by_agent",
    "finish",
    "log",
    "log_board",
    "place",
    "wanted",
]

logger = logging.getLogger(__name__)
_given_up: set[str] = set()  # trackers that could not be had: each further try would cost its timeout again


class SweepTracker:
    """Listener of a scheduler: sends each run when its record is written, and leaderboards after the sweeps."""

    def __init__(self) -> None:
        self._settings: dict[Path, Any] = {}  # by folder of the sweep
        self._outcomes: list[Outcome] = []

    def expect(self, configs: Iterable[Any]) -> None:
        """Take note of the group `logger` of cells that will be run."""
        for config in configs:
            self._settings[Path(config.paths.results) / config.sweep.name] = config.logger

    def __call__(self, outcome: Outcome) -> None:
        """Send the run whose record this process has just written. Never raises: trouble is a warning."""
        if not outcome.record or outcome.folder is None:
            return
        self._outcomes.append(outcome)
        if outcome.fresh:
            log(self._settings[outcome.folder.parent], outcome.folder)

    def finish(self) -> list[str]:
        """Bring the trackers up to date with what the sweeps left → a line for each that keeps files on this disk."""
        places = []
        for sweep, settings in self._settings.items():
            mine = [(o.folder, o) for o in self._outcomes if o.folder is not None and o.folder.parent == sweep]
            done = [folder for folder, outcome in mine if outcome.status == "done"]
            finish(settings, sweep, [(folder, outcome.record) for folder, outcome in mine], done)
            kept = place(settings) if mine else None
            places += [kept] if kept else []
        return places


def wanted(settings: Any) -> bool:
    return settings.name != "none" and settings.mode != "disabled" and settings.name not in _given_up


def place(settings: Any) -> str | None:
    """Where offline files of wandb lie and how they are sent; None where nothing waits on disk."""
    mode = os.environ.get("WANDB_MODE", settings.mode)
    if settings.name != "wandb" or mode != "offline" or not wanted(settings) or by_agent():
        return None
    folder = Path(settings.dir or os.environ.get("WANDB_DIR") or ".").resolve() / "wandb"
    return f"wandb's offline runs are in {folder}; wandb sync '{folder}'/offline-run-* uploads them"


def by_agent() -> bool:
    """True in a process that a wandb sweep agent started: the run is the agent's, with its id."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def log(settings: Any, folder: Path) -> bool:
    """Send the run in `folder` as one row named by its run id; a run sent before is replaced.

    Args:
        settings: the group `logger` of a configuration.
        folder: of a run, with `record.json`, `samples.jsonl` and `config.yaml`.

    Returns:
        True if it was sent. Never raises: trouble is a warning.
    """
    return wanted(settings) and _try(settings, lambda sink: sink.log(settings, read(folder)), str(folder))


def log_board(settings: Any, sweep: Path) -> bool:
    """Send a sweep's leaderboard as a run of its own: table, Pareto plots, curves and heat maps. Never raises."""

    def send(sink: Any) -> None:
        from kvcompress.tracking.board import board  # figures need matplotlib

        with board(sweep) as made:
            sink.log_board(settings, made)

    return wanted(settings) and _try(settings, send, f"the leaderboard of {sweep}")


def finish(settings: Any, sweep: Path, sent: Iterable[tuple[Path, Mapping[str, Any]]], done: Iterable[Path]) -> None:
    """After a sweep: send again what a later baseline has filled in, then the leaderboard. Never raises.

    Args:
        sent: folder of each run and its record as it was sent.
        done: folders of runs that had nothing to do. Under an agent they are sent: it waits for the run it asked for.
    """
    if not wanted(settings):
        return
    if by_agent():
        for folder in done:
            log(settings, folder)
        return
    for folder, before in sent:
        try:
            now = read_record(folder / "record.json")
        except ValueError:
            continue
        if (now.get("baseline"), now.get("delta_full")) != (before.get("baseline"), before.get("delta_full")):
            log(settings, folder)
    if len(list(sweep.glob("*/record.json"))) > 1:
        log_board(settings, sweep)


def _try(settings: Any, send: Any, what: str) -> bool:
    try:
        check_logger(settings)
        send(import_module(f"kvcompress.tracking.to_{settings.name}"))
        return True
    except Unreachable as error:
        _given_up.add(settings.name)
        text = "nothing is logged to %s: %s (records are complete; kvcompress sync sends them later)"
        logger.warning(text, settings.name, error)
    except (Exception, SystemExit) as error:
        text = "%s is not logged to %s: %s: %s (the record is complete; kvcompress sync sends it later)"
        logger.warning(text, what, settings.name, type(error).__name__, error)
    return False
