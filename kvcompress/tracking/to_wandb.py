"""Runs and leaderboards as Weights & Biases runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcompress.tracking import by_agent
from kvcompress.tracking.board import Board
from kvcompress.tracking.content import Content, Unreachable, identifier


def log(settings: Any, content: Content) -> None:
    """Send one run: config, summary, table of samples, and its files as an artifact.

    Raises:
        Unreachable: wandb is not installed, or does not start.
    """
    about: dict[str, Any] = {
        "group": content.sweep,
        "job_type": "eval",
        "name": content.name,
        "tags": content.tags,
        "config": content.config,
    }
    if not by_agent():  # else the id is the agent's, and wandb says so for every other
        about |= {"id": content.run_id, "resume": "allow"}
    with started(settings, content.failed, about) as (wandb, run):
        run.config.update({"run_id": content.run_id}, allow_val_change=True)
        run.summary.update(content.summary)
        # samples of one task may have a number where others have text
        table = wandb.Table(columns=content.columns, data=content.rows, allow_mixed_types=True)
        run.log({"samples": table})
        artifact = wandb.Artifact(f"record-{content.run_id}", type="record", metadata={"sweep": content.sweep})
        for file in content.files:
            artifact.add_file(str(file), name=file.name)
        run.log_artifact(artifact)


def log_board(settings: Any, board: Board) -> None:
    """Send a leaderboard: its table and its figures.

    Raises:
        Unreachable: wandb is not installed, or does not start.
    """
    about = {
        "group": board.sweep,
        "job_type": "leaderboard",
        "name": f"leaderboard {board.sweep}",
        "tags": ["leaderboard"],
        "config": {"sweep": board.sweep},
        "id": identifier(f"board-{board.sweep}"),
        "resume": "allow",
    }
    with started(settings, False, about) as (wandb, run):
        run.summary.update({"runs": len(board.rows)} | {f"runs.{k}": n for k, n in board.counts.items()})
        run.log({"leaderboard": wandb.Table(columns=board.columns, data=board.rows, allow_mixed_types=True)})
        run.log({f"{kind}/{path.stem}": wandb.Image(str(path)) for kind, path in board.figures})


@contextmanager
def started(settings: Any, failed: bool, about: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """wandb and a run of it that is finished on the way out; an offline run takes the place of its earlier ones.

    Raises:
        Unreachable: wandb is not installed, or does not start.
    """
    try:
        import wandb
    except ImportError as error:
        raise Unreachable(f"{error}: pip install 'kvcompress[wandb]'") from None
    wished = {
        "console": "off",  # what this process prints belongs to many runs
        "silent": True,
        "x_disable_stats": True,  # the run is over: the machine's load now says nothing of it
        "x_disable_meta": True,  # host, user's folders, command line and packages of whoever sends the record
        "disable_git": True,
        "disable_code": True,
        "init_timeout": settings.timeout,
        "login_timeout": settings.timeout,
        "finish_timeout": settings.timeout,
        "finish_timeout_raises": True,
    }
    known = {key: value for key, value in wished.items() if key in wandb.Settings.model_fields}
    if settings.dir is not None:
        Path(settings.dir).mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            dir=settings.dir,
            reinit="create_new",  # without it a second run of the same process would land in the first
            settings=wandb.Settings(**known),
            **about,
        )
    except Exception as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from None
    sent = False
    try:
        yield wandb, run
        sent = True
    finally:
        run.finish(exit_code=0 if sent and not failed else 1)
    if settings.mode == "offline":
        replace(Path(run.settings.sync_dir), str(run.id))


def replace(folder: Path, run_id: str) -> None:
    """Remove what was written offline for the same run before: one folder per run, the newest."""
    for old in folder.parent.glob("offline-run-*"):
        if old != folder and (old / f"run-{run_id}.wandb").is_file():
            shutil.rmtree(old, ignore_errors=True)
