"""Run folder and record: flat, written last, the only thing that reports read.

`results/<sweep>/<run-id>/` holds `config.yaml`, `samples.jsonl` (one line per finished sample, flushed) and, once all
is done, `record.json` (written to a temporary file and renamed, so that it is whole or absent).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

from kvcompress.common import strict_json
from kvcompress.common.atomic_files import append_whole, read_plain, write_whole
from kvcompress.common.hashing import source_hash
from kvcompress.sweep.aggregate import aggregate
from kvcompress.sweep.disk import written
from kvcompress.sweep.record_keys import FINISHED, STATUSES

__all__ = ["FINISHED", "STATUSES", "RunFolder", "read_record", "read_rows"]

logger = logging.getLogger(__name__)
Told = Callable[[str], object]
FROM_SAMPLES = ("kv.", "share_", "score", "n_samples")  # keys that follow from samples and nothing else
STALE_S = 3600.0  # after which what a process was about to write is taken for a killed one's


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """`versions.*` that do not depend on the machine: source hash and the packages that matter."""
    found = {"versions.source": source_hash()}
    for package in ("kvcompress", "tokenizers", "hydra-core"):
        try:
            found[f"versions.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that `path` is whole or as it was, whenever the process dies.

    Raises:
        DiskFull: there is no room for it.
    """
    text = json.dumps(value, indent=1, sort_keys=True, default=str)
    with written(path):
        write_whole(path, text + "\n")


def _schema() -> ModuleType:
    """The schema: pydantic takes longer to import than all else that a refused command line needs."""
    from kvcompress.sweep import record_schema

    return record_schema


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        ValueError: it cannot be read, or is no record: names the file and what is wrong (`record_schema.Record`).
    """
    try:
        record = strict_json.encodable(strict_json.loads(read_plain(path)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        _schema().check_record(record)
    except ValueError as error:
        raise ValueError(f"{path}: not a record ({error})") from None
    return record


def contradiction(record: Mapping[str, Any], scores: Mapping[str, float]) -> str | None:
    """What a finished record says otherwise than the scores of its samples, None where they agree or too few are left."""
    if record["status"] not in FINISHED or len(scores) < record["n_samples"] or not scores:
        return None
    if len(scores) > record["n_samples"]:
        return f"n_samples is {record['n_samples']}, but samples.jsonl has {len(scores)}"
    score = fmean(scores.values())
    if not math.isclose(record["score"], score, rel_tol=1e-9, abs_tol=1e-9):
        return f"score is {record['score']!r}, but that of its samples {score!r}"
    return None


def _sources(record: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [record.get("versions.source"), *(row.get("source") for row in rows)]


class Fault(NamedTuple):
    """What is wrong with a finished record, and whether its samples may be kept."""

    text: str
    rows_hold: bool


class RunFolder:
    """The folder of one run."""

    def __init__(self, results: Path, sweep: str, run_id: str) -> None:
        self.path = Path(results) / sweep / run_id
        self.run_id = run_id

    def record(self) -> dict[str, Any] | None:
        """The record, or None where there is none or it is damaged (then the cell is run again)."""
        try:
            return read_record(self.path / "record.json")
        except ValueError:
            return None

    def stamp(self) -> int | None:
        """When the record was written, in nanoseconds, or None where there is none."""
        try:
            return (self.path / "record.json").stat().st_mtime_ns
        except OSError:
            return None

    def open(self, config: str) -> None:
        """Make the folder, with the configuration in it.

        Raises:
            OSError: it cannot be written to, or is a link to another folder.
        """
        with written(self.path):
            if self.path.is_symlink():
                raise OSError(f"{self.path} is a link, which is not followed")
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "config.yaml", config)

    def rows(self, source: str | None = None, told: Told | None = None) -> dict[str, dict[str, Any]]:
        """Finished samples by id; what is damaged is left out and told. Only those made with `source`, if given."""
        path, told = self.path / "samples.jsonl", told or warn_once
        found = {}
        for row in read_rows(path, told):
            out = row.get("out") or {}
            if out.get("end") is None and not out.get("oom"):
                told(f"{path}: sample {row['id']!r:.60} has no out.end, and memory did not run out; left out")
            elif source in (None, row.get("source")):
                found[row["id"]] = row
        return found

    def fault(self, record: Mapping[str, Any]) -> Fault | None:
        """Why a finished record is to be made again: samples are missing, or it says otherwise than they do."""
        if record["status"] not in FINISHED or not (self.path / "samples.jsonl").exists():
            return None
        rows = self.rows()
        if len(rows) < record["n_samples"]:
            return Fault(f"n_samples is {record['n_samples']}, but {len(rows)} samples are sound", True)
        wrong = contradiction(record, {key: float(row["score"]) for key, row in rows.items()})
        source = source_hash()
        if wrong is None and all(one == source for one in _sources(record, rows.values())):
            made = aggregate(list(rows.values()))
            differ = [key for key in made if key.startswith(FROM_SAMPLES) and record.get(key) != made[key]]
            wrong = f"{differ[0]} is {record.get(differ[0])!r}, by its samples {made[differ[0]]!r}" if differ else None
        return None if wrong is None else Fault(wrong, False)

    def start(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Keep exactly `rows`, and take away the record: what is written from here on belongs to a new attempt.

        What a killed process was about to write is taken away as well.
        """
        for left in self.path.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        (self.path / "record.json").unlink(missing_ok=True)
        self.keep(rows)

    def keep(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put exactly these rows into `samples.jsonl`."""
        path = self.path / "samples.jsonl"
        with written(path):
            write_whole(path, "".join(map(_line, rows)))

    def arrange(self, order: Sequence[str]) -> None:
        """Put the finished samples into this order of ids; those it does not name are of no sample and go."""
        if not order:
            return
        rows = self.rows()
        wanted = [name for name in dict.fromkeys(order) if name in rows]
        if wanted != list(rows):
            self.keep([rows[name] for name in wanted])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one finished sample and flush it to disk.

        Raises:
            DiskFull: there is no room for it; nothing of it is left.
        """
        path = self.path / "samples.jsonl"
        with written(path):
            append_whole(path, _line(row).encode())

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the record.

        Raises:
            DiskFull: there is no room for it.
        """
        write_json(self.path / "record.json", record)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=str) + "\n"


def readable_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """`row`, if what is written of it can be read back.

    Raises:
        ValueError: names the sample and the field, as one that is NaN.
    """
    try:
        _schema().check_row(strict_json.loads(_line(row)))
    except ValueError as error:
        raise ValueError(f"sample {row.get('id')}: {error}") from None
    return row


def readable_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` as it can be read back: numbers that are not finite are None.

    Raises:
        ValueError: names a key whose value is of another kind than records hold.
    """
    made = {key: _finite(value) for key, value in record.items()}
    _schema().check_record(strict_json.loads(json.dumps(made, default=str)))
    return made


def _finite(value: Any) -> Any:
    """`value`, None where a number or one of a list is not finite: there is no such number to report."""
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def clear_left(sweep: Path) -> None:
    """Take away what killed processes were about to write. Records, locks and the list of cells are written under the
    sweep's lock, which the caller holds, so that nobody is about to write now."""
    for left in (
        *sweep.glob(".sweep.json.*.tmp"),
        *sweep.glob("*/.record.json.*.tmp"),
        *sweep.glob("*/.lock.*.tmp"),
    ):
        left.unlink(missing_ok=True)
    for left in sweep.glob(".references/.*.tmp"):  # which are written without the lock
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > STALE_S:
                left.unlink(missing_ok=True)


@lru_cache(maxsize=4096)
def warn_once(text: str) -> None:
    """Say it on the terminal, once in a process: files are read again and again."""
    logger.warning("%s", text)


def read_rows(path: Path, told: Told | None = None) -> Iterator[dict[str, Any]]:
    """Finished samples of a `samples.jsonl` (`record_schema.SampleRow`); damaged lines are left out.

    Args:
        told: is given one text per damaged line: file, line and field. What a process was about to write when it died,
            or writes at this moment, is no damage: a last line without its end.
    """
    try:
        content = read_plain(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if told is not None:
            told(f"{path}: {error}")
        return
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = strict_json.loads(line)
            _schema().check_row(row)
        except ValueError as error:
            if told is not None and number < len(lines):
                told(f"{path} line {number}: {error}; left out, the command of its sweep computes it again")
            continue
        yield row
