"""Command line of trackers: sends runs and leaderboards from records, such as those of runs without a network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvcompress import tracking
from kvcompress.commands.program import program
from kvcompress.common.text import PlainConsole
from kvcompress.report.run_index import gather
from kvcompress.sweep.config import LOGGERS, MODES, LoggerConfig, check_logger


def main(arguments: Sequence[str] | None = None) -> int:
    """Send every run under the given paths, and a leaderboard per sweep. A run sent before is replaced, by its run id.

    Returns:
        0, or 1 where something was not sent or no record was found.
    """
    parser = argparse.ArgumentParser(prog=program("sync"), description="Tracker runs from records, once or again.")
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("results")], help="folders with records")
    parser.add_argument("--logger", choices=LOGGERS[1:], default="wandb")
    parser.add_argument("--mode", choices=MODES[:2], default="offline", help="of wandb")
    parser.add_argument("--project", default="kvcompress")
    parser.add_argument("--entity", help="wandb's user or team")
    parser.add_argument("--dir", help="where it writes")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to start or end a run")
    parser.add_argument("--no-board", action="store_true", help="send runs, not the leaderboards")
    options = parser.parse_args(arguments)

    notes = PlainConsole(stderr=True)
    settings = LoggerConfig(options.logger, options.project, options.entity, options.mode, options.dir, options.timeout)
    try:
        check_logger(settings)
    except ValueError as error:
        parser.error(str(error))
    found = gather(options.paths)
    for damaged in found.damaged:
        notes.print(f"skipped {damaged}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if not found.entries:
        places = ", ".join(map(str, options.paths))
        notes.print(f"no records under {places}: make some with kvcompress run", style="red", markup=False)
        return 1
    sent = boards = 0
    sweeps = list(dict.fromkeys(entry.folder for entry in found.entries))
    for entry in found.entries:
        sent += tracking.log(settings, entry.path.parent)
    for sweep in [] if options.no_board else sweeps:
        boards += tracking.log_board(settings, sweep)
    place = f" in {options.mode} mode" if options.logger == "wandb" else ""
    text = f"{options.logger}{place}: {sent} of {len(found.entries)} runs"
    notes.print(text if options.no_board else f"{text}, {boards} of {len(sweeps)} leaderboards", highlight=False)
    if sent and (kept := tracking.place(settings)):
        notes.print(kept, highlight=False, markup=False, soft_wrap=True)
    complete = sent == len(found.entries) and (options.no_board or boards == len(sweeps))
    return 0 if complete else 1
