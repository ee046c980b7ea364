"""Run ids, the folder of a run, and the record: flat, written last, the only thing that reports read.

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
from statistics import fmean, median, quantiles, stdev
from types import ModuleType
from typing import Any, NamedTuple

from kvcompress.common import strict_json
from kvcompress.common.atomic_files import append_whole, read_plain, write_whole
from kvcompress.common.hashing import source_hash
from kvcompress.sweep.disk import written
from kvcompress.sweep.record_keys import FINISHED, STATUSES, TIMES

__all__ = ["FINISHED", "STATUSES", "RunFolder", "aggregate", "read_record", "read_rows"]

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


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Record keys that follow from the samples: score, shares, `kv.*`, `memory.*`, `time.*`, `protocol.*`.

    Samples for which memory ran out (they have no report of their end) count in number and score alone.
    """
    if not rows:
        return {"n_samples": 0}
    scores = [float(row["score"]) for row in rows]
    found: dict[str, Any] = {
        "n_samples": len(rows),
        "score": fmean(scores),
        "score_stderr": stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
    }
    rows = [row for row in rows if row["out"].get("end") is not None]
    if not rows:
        return found
    outs = [row["out"] for row in rows]
    found |= {
        "share_inactive": fmean(not out["end"]["active"] for out in outs),
        "share_clamped": fmean(bool(out["end"]["clamped"]) for out in outs),
        "notes": sorted({note for out in outs for note in out["end"].get("notes", ())}),
    }
    moments, standing = zip(*map(held_at, outs), strict=True)
    found["kv.moment"] = ",".join(sorted(set(moments)))
    after, end = [out["compressed"]["kv"] for out in outs], [out["end"]["kv"] for out in outs]
    for key in (
        "bytes_held",
        "bytes_allocated",
        "bytes_full",
        "ratio",
        "bytes_host",
        "bytes_summaries",
        "bytes_tables",
        "bytes_scores",
        "kept_tokens_mean",
    ):
        found[f"kv.{key}"] = _mean(kv.get(key) for kv in standing)
    # along the decode: sampled by the task, or what its two ends say
    held = [
        out.get("held") or [a.get("bytes_held"), b.get("bytes_held")]
        for out, a, b in zip(outs, after, end, strict=True)
    ]
    known = [values for values in held if None not in values]
    found["kv.bytes_peak"] = _mean(max(values) for values in known)
    # what goes into pages leaves the form the prompt had with the first step
    found["kv.bytes_mean"] = _mean(
        fmean(values[1:] or values if moment == "decode" else values)
        for values, moment in zip(held, moments, strict=True)
        if None not in values
    )
    for key in ("read_bytes_per_token", "moved_bytes_per_token"):
        found[f"kv.{key}"] = _mean(kv.get(key) for kv in end)
    found["kv.kept_tokens_max"] = max((kv["kept_tokens_max"] for kv in end if kv.get("kept_tokens_max")), default=None)
    found["kv.storage"] = _all_of(kv.get("storage") for kv in end)
    for key in ("prefill_peak", "decode_peak"):
        found[f"memory.{key}"] = max((out[key] for out in outs if out.get(key) is not None), default=None)
    for key in TIMES:
        values: list[float] = []
        for out in outs:
            value = out.get(key.removeprefix("time."))
            values += value if isinstance(value, list) else [] if value is None else [value]
        found |= _quartiles(key, values)
    protocols = [row.get("protocol", {}) for row in rows]
    for key in sorted({key for protocol in protocols for key in protocol}):
        kinds = sorted({str(protocol[key]) for protocol in protocols if key in protocol})
        found[f"protocol.{key}"] = kinds[0] if len(kinds) == 1 else ",".join(kinds)
    found["protocol.kernel"] = _all_of(out["end"].get("kernel") for out in outs)
    steps = [out["end"].get("step") or {} for out in outs]
    found["protocol.step"] = "+".join(sorted({step["how"] for step in steps if "how" in step})) or None
    found["protocol.step_why"] = _all_of((step.get("why") for step in steps), "; ")
    found["time.step_ready_s"] = max((step["ready_s"] for step in steps if "ready_s" in step), default=None)
    found["protocol.truncated_share"] = fmean((row.get("meta") or {}).get("truncated_tokens", 0) > 0 for row in rows)
    found["protocol.unfinished_share"] = fmean(row.get("unfinished", 0.0) for row in rows)
    if any("forced" in row for row in rows):
        found["protocol.think_forced_share"] = fmean(row.get("forced", 0.0) for row in rows)
    found["protocol.hit_max_share"] = fmean("length" in out.get("finished", ()) for out in outs)
    return found


def held_at(out: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """When a sample's bytes held say what its method holds, and the `kv` of its report then.

    "prompt": when the compression has ended, before the question. "decode": at the end, where what is held lies in
    pages by then, which begin with the first step of decode; what grows or moves later is always of the end.
    """
    compressed, end = ((out.get(report) or {}).get("kv") or {} for report in ("compressed", "end"))
    return ("decode", end) if end.get("bytes_summaries") else ("prompt", compressed)


def _all_of(values: Iterable[str | None], mark: str = ",") -> str | None:
    """What samples say, each thing once: those of before a resume may have run otherwise. None where none says anything."""
    return mark.join(sorted({value for value in values if value})) or None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _quartiles(key: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {key: None, f"{key}.q1": None, f"{key}.q3": None}
    first, _, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {key: median(values), f"{key}.q1": first, f"{key}.q3": third}


def is_baseline(record: Mapping[str, Any]) -> bool:
    """True for a finished run in which nothing was compressed by any part: what the others are measured against."""
    untouched = {"scorer": "none", "codec": "plain", "reader": "all"}
    return (
        record.get("status") == "ok"
        and all(record.get(f"parts.{part}") == value for part, value in untouched.items())
        and record.get("parts.prefill") in ("oneshot", "chunked")
    )


def paired_delta(
    rows: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]
) -> tuple[float, float | None] | None:
    """Mean difference in score on the samples both have, and its standard error; None without a common sample."""
    common = sorted(rows.keys() & base.keys())
    if not common:
        return None
    deltas = [float(rows[key]["score"]) - float(base[key]["score"]) for key in common]
    return fmean(deltas), stdev(deltas) / math.sqrt(len(deltas)) if len(deltas) > 1 else None


def fill_deltas(sweep: Path, changed: str | None = None) -> None:
    """Fill `delta_full` and `baseline` of every record in a sweep whose baseline is in it.

    Args:
        changed: run id of the only record that is new, so that the samples of others are not read again; None: any.
    """
    found: list[tuple[RunFolder, dict[str, Any]]] = []
    for path in sorted(sweep.glob("*/record.json")):
        if path.parent.is_symlink():
            continue  # nothing is written there
        folder = RunFolder(sweep.parent, sweep.name, path.parent.name)
        record = folder.record()
        if record is not None:
            found.append((folder, record))
    bases = {record.get("protocol.pair"): folder for folder, record in found if is_baseline(record)}
    for folder, record in found:
        base = bases.get(record.get("protocol.pair"))
        if base is None or record["status"] not in FINISHED:
            continue
        if changed not in (None, folder.run_id, base.run_id) and record.get("baseline") == base.run_id:
            continue
        delta = paired_delta(folder.rows(), base.rows())
        if delta is not None and (record.get("baseline"), record.get("delta_full")) != (base.run_id, delta[0]):
            folder.finish(record | {"delta_full": delta[0], "baseline": base.run_id})
