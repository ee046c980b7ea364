"""Records from disk. Reports read records and samples, and nothing else of the library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcompress.record import FINISHED, is_baseline, paired_delta, read_record, read_rows, source_hash


@dataclass
class Entry:
    """One record and where it lies."""

    record: dict[str, Any]
    path: Path

    @property
    def sweep(self) -> str:
        return self.path.parent.parent.name

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in read_rows(self.path.parent / "samples.jsonl")}


@dataclass
class Loaded:
    """What was found under the given paths; `damaged` says what was skipped and why."""

    entries: list[Entry] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def groups(self) -> list[list[dict[str, Any]]]:
        """Records that may be compared, the uncompressed baseline first, then by method and falling budget."""
        found: dict[tuple[str, Any], list[dict[str, Any]]] = {}
        for entry in self.entries:
            found.setdefault((entry.sweep, entry.record.get("protocol.pair")), []).append(entry.record)
        return [ordered(group) for _, group in sorted(found.items(), key=lambda item: str(item[0]))]


def ordered(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        budget = record.get("budget")
        share = isinstance(budget, float)
        return (not is_baseline(record), str(record.get("method")), not share, -(budget or 0), record["run_id"])

    return sorted(records, key=key)


def load(paths: Iterable[Path]) -> Loaded:
    """Every record under `paths` (folders, or record files); the difference to the baseline is computed again.

    A damaged record or one that cannot be read is left out and listed.
    """
    found = Loaded()
    files: set[Path] = set()
    for path in paths:
        if not path.exists():
            found.damaged.append(f"{path}: not there")
        files |= {path} if path.is_file() else set(path.rglob("record.json"))
    for file in sorted(files):
        try:
            found.entries.append(Entry(read_record(file), file))
        except ValueError as error:
            found.damaged.append(str(error))
    pairs: dict[tuple[str, Any], Entry] = {}
    for entry in found.entries:
        if is_baseline(entry.record):
            pairs[entry.sweep, entry.record.get("protocol.pair")] = entry
    for entry in found.entries:
        base = pairs.get((entry.sweep, entry.record.get("protocol.pair")))
        if base is None or entry.record["status"] not in FINISHED:
            continue
        delta = paired_delta(entry.rows(), base.rows())
        if delta is not None:
            entry.record["delta_full"], entry.record["delta_stderr"] = delta
            entry.record["baseline"] = base.record["run_id"]
    return found


def flags(record: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting a row."""
    found = [] if record["status"] == "ok" else [record["status"]]
    if record.get("versions.source") != source_hash():
        found.append("stale")
    if record.get("kv.storage") == "simulated":
        found.append("simulated")
    if record["status"] == "ok" and 0 < (record.get("share_inactive") or 0) < 1:
        found.append(f"inactive on {record['share_inactive']:.0%}")
    if record.get("share_clamped"):
        found.append(f"clamped on {record['share_clamped']:.0%}")
    if record.get("protocol.truncated_share"):
        found.append(f"truncated {record['protocol.truncated_share']:.0%}")
    if record.get("protocol.unfinished_share"):
        found.append(f"thinking unfinished {record['protocol.unfinished_share']:.0%}")
    return found


def several(record: dict[str, Any]) -> str | None:
    """How several questions on one context were asked, where there were several."""
    count, turns = record.get("protocol.questions"), record.get("protocol.turns")
    return None if turns in (None, "single") else f"{count} questions, {turns}"
