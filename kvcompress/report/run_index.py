"""Records from disk. Reports read records and samples, and nothing else of the library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvcompress.common.hashing import source_hash
from kvcompress.report import board_file, stats
from kvcompress.sweep.baseline import is_baseline
from kvcompress.sweep.record import FINISHED, contradiction, read_record, read_rows, scores_of

NONE = "–"


@dataclass
class Entry:
    """One record and where it lies."""

    record: dict[str, Any]
    path: Path
    label: str = ""  # of the sweep, where another folder has the same name
    damaged: list[str] = field(default_factory=list)  # rows of its samples that were left out, one text each

    @property
    def folder(self) -> Path:
        """The sweep's."""
        return self.path.parent.parent

    @property
    def sweep(self) -> str:
        return self.label or self.folder.name

    @property
    def table(self) -> tuple[str, Any]:
        """What runs are compared within: sweep and `protocol.pair`."""
        return self.sweep, self.record.get("protocol.pair")

    def rows(self) -> dict[str, dict[str, Any]]:
        """Finished samples by id, read again each time: many runs would not fit into memory."""
        return {row["id"]: row for row in read_rows(self.samples)}

    @property
    def samples(self) -> Path:
        return self.path.parent / "samples.jsonl"

    @cached_property
    def scores(self) -> dict[str, float]:
        """Scores of the finished samples by id; what was damaged is in `damaged` from here on."""
        return scores_of(read_rows(self.samples, self.damaged.append))


@dataclass
class Loaded:
    """What was found under the given paths; `damaged` says what was skipped and why."""

    entries: list[Entry] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    foreign: list[dict[str, Any]] = field(default_factory=list)  # rows of others, from board files

    def groups(self) -> list[list[dict[str, Any]]]:
        """Records that may be compared, the uncompressed baseline first, then by method and falling budget."""
        found: dict[tuple[str, Any], list[dict[str, Any]]] = {}
        for entry in self.entries:
            found.setdefault(entry.table, []).append(entry.record)
        return [ordered(group) for _, group in sorted(found.items(), key=lambda item: str(item[0]))]


def named(record: Mapping[str, Any]) -> str:
    """The method, and what differs from its own settings."""
    return f"{record['method']} {record.get('variant') or ''}".strip()


def label(record: Mapping[str, Any]) -> str:
    """Method, settings and budget, as a figure says them; no budget where none was asked for."""
    budget = budget_of(record)
    return named(record) if budget == NONE else f"{named(record)} · {budget}"


def budget_of(record: Mapping[str, Any]) -> str:
    """The budget as tables say it: a share, or "64 tok"; `NONE` of the full cache and of a form that has none."""
    budget, evicts = record["budget"], record.get("parts.scorer") not in (None, "none")
    if isinstance(budget, float):
        return f"{budget:g}" if evicts or budget < 1.0 else NONE
    return f"{budget} tok"


def ordered(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        budget = record.get("budget")
        share = isinstance(budget, float)
        return (not is_baseline(record), named(record), not share, -(budget or 0), record["run_id"])

    return sorted(records, key=key)


def gather(paths: Iterable[Path]) -> Loaded:
    """Every record under `paths` (folders, record or board files); the difference to the baseline is computed again.

    A damaged record, one that cannot be read and one that says otherwise than its samples are left out and listed;
    damaged rows are listed and do not count.
    """
    found = Loaded()
    files: set[Path] = set()
    for path in paths:
        if not path.exists():
            found.damaged.append(f"{path}: not there")
        boards = board_file.files(path)
        for board in boards:
            _add_board(found, board)
        if not path.is_file():
            files |= set(path.rglob("record.json"))
        elif not boards:
            files.add(path)
    for file in sorted(files):
        try:
            entry = Entry(read_record(file), file)
        except ValueError as error:
            found.damaged.append(str(error))
            continue
        wrong = contradiction(entry.record, entry.scores)
        found.damaged += entry.damaged + ([] if wrong is None else [f"{file}: {wrong}"])
        if wrong is None:
            found.entries.append(entry)
    tell_apart(found.entries)
    bases = baselines(found.entries)
    compared: dict[tuple[str, Any], list[tuple[Entry, Any]]] = {}
    for entry in found.entries:
        base = bases.get(entry.table)
        entry.record |= interval(entry.record, entry.scores)
        if base is None or entry.record["status"] not in FINISHED:
            continue
        deltas = stats.paired(entry.scores, base.scores)
        if len(deltas):
            entry.record["delta_full"] = float(deltas.mean())
            entry.record["delta_stderr"] = stats.standard_error(deltas.tolist())
            entry.record["baseline"] = base.record["run_id"]
            if entry is not base and entry.record["status"] == "ok":
                compared.setdefault(entry.table, []).append((entry, deltas))
    for members in compared.values():
        for entry, deltas in members:
            entry.record["delta_needed"] = stats.samples_needed(deltas, len(members))
    return found


def _add_board(found: Loaded, path: Path) -> None:
    """Add what a board file holds; of a file with a fault nothing is taken. Samples but for their scores are not in it."""
    try:
        board = board_file.read(path)
    except ValueError as error:
        found.damaged.append(str(error))
        return
    wrong = [str(one) for one in board_file.problems(board, str(path))]
    found.damaged += wrong
    if wrong:
        return
    found.foreign += board.foreign
    for run in board.runs:
        record = run["record"]
        entry = Entry(dict(record), path.parent / board.name / str(record["run_id"]) / "record.json")
        names = board.protocols[str(record["protocol.pair"])]["samples"]
        scored = {name: float(score) for name, score in zip(names, run["scores"], strict=True) if score is not None}
        vars(entry)["scores"] = scored  # in place of what would be read from its samples
        found.entries.append(entry)


def interval(record: Mapping[str, Any], scores: Mapping[str, float]) -> dict[str, float | None]:
    """Ends of the interval of a run's score, as keys of its record; nothing of one that does not count."""
    if record["status"] != "ok" or not scores:
        return {}
    found = stats.score_interval(list(scores.values()))
    return {"score_low": found.low, "score_high": found.high}


def tell_apart(entries: Iterable[Entry]) -> None:
    """Sweeps in different folders that have the same name get as much of their path as tells them apart."""
    named: dict[str, dict[Path, list[Entry]]] = {}
    for entry in entries:
        folder = entry.folder.resolve()
        named.setdefault(folder.name, {}).setdefault(folder, []).append(entry)
    for folders in named.values():
        parts = 1
        while len({folder.parts[-parts:] for folder in folders}) < len(folders):
            parts += 1
        for folder, members in folders.items() if parts > 1 else ():
            for entry in members:
                entry.label = "/".join(folder.parts[-parts:])


def by_model(entries: Iterable[Entry]) -> Iterator[tuple[str, str, list[list[dict[str, Any]]]]]:
    """(sweep, model, records by setting) of every sweep and model, in order: what a figure may compare."""
    models: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for entry in entries:
        groups = models.setdefault((entry.sweep, str(entry.record["model"])), {})
        groups.setdefault(str(entry.record.get("protocol.pair")), []).append(entry.record)
    for (sweep, model), groups in sorted(models.items()):
        yield sweep, model, list(groups.values())


def baselines(entries: Iterable[Entry]) -> dict[tuple[str, Any], Entry]:
    """The uncompressed run of each table."""
    return {e.table: e for e in entries if is_baseline(e.record)}


def flags(record: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting a row."""
    found = [] if record["status"] == "ok" else [record["status"]]
    if record.get("versions.source") != source_hash():
        found.append("stale")
    if "simulated" in (record.get("kv.storage") or ""):
        found.append("simulated")
    if record["status"] == "ok" and 0 < (record.get("share_inactive") or 0) < 1:
        found.append(f"inactive on {record['share_inactive']:.0%}")
    if record.get("share_clamped"):
        found.append(f"clamped on {record['share_clamped']:.0%}")
    if record.get("protocol.truncated_share"):
        found.append(f"truncated {record['protocol.truncated_share']:.0%}")
    if record.get("protocol.unfinished_share"):
        found.append(f"thinking unfinished {record['protocol.unfinished_share']:.0%}")
    if record.get("protocol.think_forced_share"):
        found.append(f"thinking ended by force {record['protocol.think_forced_share']:.0%}")
    if record.get("protocol.hit_max_share"):
        found.append(f"hit-max {record['protocol.hit_max_share']:.0%}")
    read, full = record.get("kv.read_bytes_per_token"), record.get("kv.bytes_full")
    if record.get("parts.reader") not in (None, "all") and read and full:
        found.append(f"reads {read / full:.0%}")
    if record.get("kv.bytes_host"):
        found.append(f"{record['kv.bytes_host'] / 2**20:.1f} MiB on the host")
    return found


def several(record: dict[str, Any]) -> str | None:
    """How several questions on one context were asked, where there were several."""
    count, turns = record.get("protocol.questions"), record.get("protocol.turns")
    return None if turns in (None, "single") else f"{count} questions, {turns}"
