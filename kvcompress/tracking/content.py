"""What a tracker is told of a run: read from its folder alone, the same now and a year later."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvcompress.common.hashing import canonical
from kvcompress.common.text import for_tracker, printable
from kvcompress.sweep import stored_config
from kvcompress.sweep.aggregate import held_at
from kvcompress.sweep.record import FINISHED, RunFolder, read_record

TAG = 64  # characters that wandb takes
TEXT = 10_000  # characters of an answer in the table; samples.jsonl has the rest
ERROR = 4_000  # of a traceback, its end
LEAVE_OUT = ("logger", "paths", "resume", "dry")  # how it was run, not what
FILES = ("record.json", "samples.jsonl", "config.yaml")


class Unreachable(RuntimeError):
    """A tracker that is not installed or does not start: no run of this process can be sent."""


@dataclass(frozen=True)
class Content:
    """A run as trackers take it.

    Attributes:
        config: the resolved configuration, nested as the groups are, and the parts that it came to.
        summary: every key of the record, flat, None where it has no value.
        columns, rows: one line per sample.
        failed: the run did not finish.
    """

    run_id: str
    sweep: str
    name: str
    tags: list[str]
    config: dict[str, Any]
    summary: dict[str, Any]
    columns: list[str]
    rows: list[list[Any]]
    files: list[Path]
    failed: bool


def read(folder: Path) -> Content:
    """The content of a run's folder.

    Raises:
        ValueError: its record cannot be read.
    """
    record = read_record(folder / "record.json")
    samples = list(RunFolder(folder.parent.parent, folder.parent.name, folder.name).rows().values())
    columns, rows = table(samples)
    parts = {key.removeprefix("parts."): record[key] for key in sorted(record) if key.startswith("parts.")}
    label = f"{record['method']} {record.get('variant') or ''}".strip()
    return Content(
        run_id=str(record["run_id"]),
        sweep=folder.parent.name,
        name=printable(f"{label} · {record['budget']} · {record['task']}"),
        tags=tags(record),
        config=configuration(folder / "config.yaml") | {"budget": record["budget"], "parts": parts},
        summary=summary(record),
        columns=columns,
        rows=rows,
        files=[folder / name for name in FILES if (folder / name).is_file()],
        failed=record["status"] not in FINISHED,
    )


def tags(record: Mapping[str, Any]) -> list[str]:
    """Model, method, task and what became of it, each once and no longer than a tracker takes."""
    found = [printable(record[key])[-TAG:] for key in ("model", "method", "task", "status")]
    if record.get("protocol.shared"):
        found.append("shared")
    return list(dict.fromkeys(tag for tag in found if tag))


def configuration(path: Path) -> dict[str, Any]:
    """The configuration of a run as nested plain values, as it is written; empty where the file is damaged."""
    found = stored_config.read(path) or {}
    return {key: value for key, value in canonical(found).items() if key not in LEAVE_OUT}


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record, flat; an absent value stays in as None, so that a run sent again loses what it no longer has."""
    found = {printable(key): for_tracker(value) for key, value in record.items()}
    if found.get("error"):
        found["error"] = str(found["error"])[-ERROR:]
    return found


def table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """One line per sample: score and parts of it, answer, what was held, times, and what the task says of it."""
    lines = [_line(row) for row in samples]
    columns = list(dict.fromkeys(key for line in lines for key in line))
    fixed = [key for key in columns if "." not in key or key.startswith("kv.")]
    columns = fixed + sorted(set(columns) - set(fixed))
    return columns, [[line.get(key) for key in columns] for line in lines]


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    out = row["out"]
    end = _mapping(out.get("end"))
    held = _mapping(held_at(out)[1])
    line: dict[str, Any] = {
        "id": row["id"],
        "score": float(row["score"]),
        "text": "\n".join(map(str, out.get("text") or []))[:TEXT],
        "references": "\n".join(" | ".join(map(str, some)) for some in row.get("references") or [])[:TEXT],
        "tokens": sum(len(tokens) for tokens in out.get("tokens") or []),
        "finished": ", ".join(map(str, out.get("finished") or [])),
        "active": end.get("active"),
        "kv.ratio": held.get("ratio"),
        "kv.bytes_held": held.get("bytes_held"),
        "kv.kept_tokens_mean": held.get("kept_tokens_mean"),
        "ttft_s": _middle(out.get("ttft_s")),
        "tpot_s": _middle(out.get("tpot_s")),
    }
    for kind in ("scores", "meta"):
        for key, value in _mapping(row.get(kind)).items():
            if isinstance(value, (str, int, float)) and (kind, key) != ("scores", "score"):
                line[f"{kind}.{key}"] = value[:TEXT] if isinstance(value, str) else value
    return {printable(key): for_tracker(value) for key, value in line.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _middle(value: Any) -> float | None:
    if isinstance(value, list):
        return median(value) if value else None
    return value if isinstance(value, (int, float)) else None


def identifier(text: str) -> str:
    """`text` as an id that trackers take."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)
