"""A finished record as a Weights & Biases run. A view that can be rebuilt: it never fails the run it reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvcompress.record import canonical

logger = logging.getLogger(__name__)
LOGGERS = ("none", "wandb")


def log(
    settings: Any, record: Mapping[str, Any], cell: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], sweep: str
) -> None:
    """Send one record, if `settings.name` asks for it. Trouble is a warning, never an exception."""
    if settings.name == "none":
        return
    try:
        if settings.name not in LOGGERS:
            raise ValueError(f"logger={settings.name!r}; valid: {', '.join(LOGGERS)}")
        import wandb

        run = wandb.init(
            project=settings.project,
            mode=settings.mode,
            dir=settings.dir,
            group=sweep,
            job_type="eval",
            name=f"{record['method']}-{record['budget']}-{record['task']}",
            tags=[str(record[key])[-64:] for key in ("model", "method", "task")],
            id=str(record["run_id"]),
            resume="allow",
            config=canonical(cell),
            reinit="create_new",  # without it a second run of the same process would land in the first
        )
        failed = record["status"] not in ("ok", "inactive")
        try:
            run.summary.update({key: value for key, value in record.items() if value is not None})
            table = wandb.Table(columns=["id", "score", "text"])
            for row in rows:
                table.add_data(row["id"], row["score"], " ".join(row["out"].get("text", [])))
            run.log({"samples": table})
        finally:
            run.finish(exit_code=1 if failed else 0)
    except Exception as error:
        logger.warning("not logged to %s: %s (the record is complete without it)", settings.name, error)
