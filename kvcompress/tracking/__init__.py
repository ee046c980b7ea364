"""Finished runs as rows of a tracker (Weights & Biases, trackio): views of records that can be built again at any time.

Nothing here ends a run: trouble is a warning, and `scripts/sync.py` sends the same later, from the records alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcompress.sweep.record import read_record
from kvcompress.tracking.content import Unreachable, read

logger = logging.getLogger(__name__)
LOGGERS = ("none", "wandb", "trackio")
MODES = ("offline", "online", "disabled")
_given_up: set[str] = set()  # trackers that could not be had: each further try would cost its timeout again


@dataclass
class LoggerConfig:
    """`name` is none, wandb or trackio. `mode` (offline, online, disabled) and `entity` are wandb's; offline needs no
    network. `dir`: where it writes, null = its own default. `timeout`: seconds that its start and end may take each.
    """

    name: str = "none"
    project: str = "kvcompress"
    entity: str | None = None
    mode: str = "offline"
    dir: str | None = None
    timeout: float = 60.0


def check(settings: Any) -> None:
    """Refuse settings that no tracker has, before anything is run.

    Raises:
        ValueError: names the setting and what is valid.
    """
    if settings.name not in LOGGERS:
        raise ValueError(f"logger.name={settings.name!r}; valid: {', '.join(LOGGERS)}")
    if settings.mode not in MODES:
        raise ValueError(f"logger.mode={settings.mode!r}; valid: {', '.join(MODES)}")
    if not settings.timeout > 0:
        raise ValueError(f"logger.timeout={settings.timeout}; seconds above 0")


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
        check(settings)
        send(import_module(f"kvcompress.tracking.to_{settings.name}"))
        return True
    except Unreachable as error:
        _given_up.add(settings.name)
        text = "nothing is logged to %s: %s (records are complete; scripts/sync.py sends them later)"
        logger.warning(text, settings.name, error)
    except (Exception, SystemExit) as error:
        text = "%s is not logged to %s: %s: %s (the record is complete; scripts/sync.py sends it later)"
        logger.warning(text, what, settings.name, type(error).__name__, error)
    return False
