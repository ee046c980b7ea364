"""Runs and leaderboards in trackio, a tracker without an account: a database on this machine, and a local board."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcompress.tracking.board import Board
from kvcompress.tracking.content import Content, Unreachable, identifier


def log(settings: Any, content: Content) -> None:
    """Send one run: config, record, and table of samples. Its name ends in the run id.

    Raises:
        Unreachable: trackio is not installed, or does not start.
    """
    config = {**content.config, "run_id": content.run_id, "tags": content.tags, "failed": content.failed}
    name = f"{content.name} · {content.run_id}"
    with started(settings, name, content.sweep, config) as (trackio, run):
        # one step for all: a run is over when it is sent
        known = {key: value for key, value in content.summary.items() if value is not None}
        run.log(known | {"samples": trackio.Table(columns=content.columns, data=content.rows)})


def log_board(settings: Any, board: Board) -> None:
    """Send a leaderboard: its table and its figures.

    Raises:
        Unreachable: trackio is not installed, or does not start.
    """
    name = identifier(f"leaderboard-{board.sweep}")
    with started(settings, name, board.sweep, {"sweep": board.sweep}) as (trackio, run):
        figures = {f"{kind}/{path.stem}": trackio.Image(str(path)) for kind, path in board.figures}
        table = trackio.Table(columns=board.columns, data=board.rows)
        run.log({"runs": len(board.rows), "leaderboard": table, **figures})


@contextmanager
def started(settings: Any, name: str, group: str, config: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """trackio and a new run of it, in the place of an earlier one of the same name.

    Raises:
        Unreachable: trackio is not installed, or does not start.
    """
    if settings.dir is not None:
        os.environ.setdefault("TRACKIO_DIR", settings.dir)  # read when it is imported
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of every run
        try:
            import trackio

            with contextlib.suppress(ValueError):  # a project without runs
                for old in trackio.Api().runs(settings.project):
                    if old.name == name:
                        old.delete()
            run = trackio.init(
                project=settings.project,
                name=name,
                group=group,
                config=config,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except ImportError as error:
            raise Unreachable(f"{error}: pip install 'kvcompress[trackio]'") from None
        except Exception as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        try:
            yield trackio, run
        finally:
            run.finish()
