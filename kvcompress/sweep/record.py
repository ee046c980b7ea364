"""Run ids, the folder of a run, and the record: flat, written last, the only thing that reports read.

`results/<sweep>/<run-id>/` holds `config.yaml`, `samples.jsonl` (one line per finished sample, flushed) and, once all
is done, `record.json` (written to a temporary file and renamed, so that it is whole or absent).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any

from kvcompress.common.atomic_files import replacing
from kvcompress.common.hashing import source_hash

FINISHED = ("ok", "inactive")
STATUSES = ("ok", "failed", "oom", "inactive", "partial")
TIMES = ("time.ttft_s", "time.tpot_s", "time.prefill_s", "time.compress_s")
KEYS = (
    *("run_id", "status", "model", "task", "method", "budget", "seed", "dtype", "device", "n_samples"),
    *("score", "score_stderr", "metric", "delta_full", "baseline", "share_inactive", "share_clamped"),
    *("parts.scorer", "parts.allocator", "parts.codec", "parts.prefill", "parts.reader", "parts.schedule"),
    *("parts.preset", "variant", "kv.bytes_held", "kv.bytes_allocated", "kv.bytes_full", "kv.ratio", "kv.bytes_host"),
    *(
        "kv.bytes_summaries",
        "kv.bytes_tables",
        "kv.moment",
        "kv.bytes_scores",
        "kv.bytes_peak",
        "kv.bytes_mean",
        "kv.kept_tokens_mean",
        "kv.kept_tokens_max",
        "kv.read_bytes_per_token",
        "kv.moved_bytes_per_token",
    ),
    *("kv.storage", "memory.prefill_peak", "memory.decode_peak"),
    *(key + end for key in TIMES for end in ("", ".q1", ".q3")),
    *("protocol.question", "protocol.chunking", "protocol.kernel", "protocol.template", "protocol.truncated_share"),
    *(
        "protocol.hit_max_share",
        "protocol.unfinished_share",
        "protocol.turns",
        "protocol.questions",
        "protocol.batch",
        "protocol.lengths",
        "protocol.data",
        "protocol.revision",
        "protocol.shared",
        "protocol.decoding",
        "protocol.decoding_why",
        "protocol.step",
        "protocol.step_why",
        "time.step_ready_s",
        "protocol.pair",
        "sanity.gold",
        "sanity.empty",
        "versions.source",
        "notes",
        "error",
    ),
)


KINDS: dict[str, Any] = {
    **dict.fromkeys(("run_id", "status", "model", "task", "method"), str),
    "budget": (int, float),
    "n_samples": int,
}
# what boards reckon with, by the start of its name: a number or null; parts and protocols are names
NUMBERS = ("kv.", "time.", "memory.", "share_", "delta_", "score_", "protocol.truncated_", "protocol.hit_max_")
NAMES = ("protocol.pair", "kv.storage", "kv.moment", "metric", "dtype", "device")


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
    """Write `value` so that `path` is whole or as it was, whenever the process dies."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True, default=str)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`.

    Raises:
        ValueError: it cannot be read, is no JSON object, lacks `run_id` or a known `status`, or holds a value of the
            wrong kind where boards count on it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(record, dict) or not record.get("run_id") or record.get("status") not in STATUSES:
        raise ValueError(f"{path}: not a record (no run_id, or status not one of {', '.join(STATUSES)})")
    for key, kinds in KINDS.items():
        value = record.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"{path}: not a record ({key} is {value!r})")
    for key, value in record.items():
        kinds = str if key in NAMES or key.startswith("parts.") else (int, float) if key.startswith(NUMBERS) else object
        if value is not None and not isinstance(value, kinds):
            raise ValueError(f"{path}: not a record ({key} is {value!r})")
    score = record.get("score")
    if record["status"] in FINISHED and not (isinstance(score, (int, float)) and math.isfinite(score)):
        raise ValueError(f"{path}: not a record (finished, but its score is {score!r})")
    return record


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
        """Make the folder, with the resolved configuration in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(config, encoding="utf-8")

    def rows(self, source: str | None = None) -> dict[str, dict[str, Any]]:
        """Finished samples by id; damaged lines are ignored. Only those made with `source`, if given."""
        rows = (row for row in read_rows(self.path / "samples.jsonl") if isinstance(row.get("out"), dict))
        return {row["id"]: row for row in rows if source in (None, row.get("source"))}

    def start(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Keep exactly `rows`, and take away the record: what is written from here on belongs to a new attempt.

        What a killed process was about to write is taken away as well.
        """
        for left in self.path.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        (self.path / "record.json").unlink(missing_ok=True)
        self._write(rows)

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with replacing(self.path / "samples.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")

    def arrange(self, order: Sequence[str]) -> None:
        """Put the finished samples into this order of ids, those it does not name last."""
        rows = self.rows()
        place = {name: number for number, name in enumerate(order)}
        wanted = sorted(rows, key=lambda name: place.get(name, len(place)))
        if order and wanted != list(rows):
            self._write([rows[name] for name in wanted])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one finished sample and flush it to disk."""
        with (self.path / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, record: Mapping[str, Any]) -> None:
        write_json(self.path / "record.json", record)


def clear_left(sweep: Path) -> None:
    """Take away what killed processes were about to write. Records and the list of cells are written under the sweep's
    lock, which the caller holds, so that nobody is about to write now."""
    for left in (*sweep.glob(".sweep.json.*.tmp"), *sweep.glob("*/.record.json.*.tmp")):
        left.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a `samples.jsonl` with id and finite score; damaged ones are left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            continue
        out, score = row.get("out"), row.get("score")
        moments = [out.get(moment) for moment in ("compressed", "end")] if isinstance(out, dict) else []
        whole = out is None or (isinstance(out, dict) and all(one is None or isinstance(one, dict) for one in moments))
        if whole and isinstance(score, (int, float)) and math.isfinite(score):
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
        fmean(values[1:] if moment == "decode" else values)
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
    found["protocol.truncated_share"] = fmean(row.get("meta", {}).get("truncated_tokens", 0) > 0 for row in rows)
    found["protocol.unfinished_share"] = fmean(row.get("unfinished", 0.0) for row in rows)
    found["protocol.hit_max_share"] = fmean("length" in out["finished"] for out in outs)
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
