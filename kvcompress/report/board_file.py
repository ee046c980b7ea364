"""Board file: records of a sweep in one file, as a pull request adds it under `results/board/`, and what may be wrong with it.

`NAME.board.json` holds the protocols, each with its settings and the hashes of its prompts, and the runs: record, settings
of the method, score and bytes of every sample. Settings have to hash to the run ids, scores to average to the records, and
runs of one protocol to have the same samples, so that what is edited is named. Nobody's signature is in it: who rewrites
all of it consistently has written another file, which a reviewer repeats by its commands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kvcompress.common import strict_json
from kvcompress.common.atomic_files import read_plain
from kvcompress.common.hashing import canonical, digest
from kvcompress.sweep import record_schema
from kvcompress.sweep.baseline import is_baseline
from kvcompress.sweep.record_keys import FINISHED

SUFFIX = ".board.json"
KIND, FORMAT = "kvcompress board", 1
FOREIGN = ("published", "kvpress", "lm-eval")  # origins of rows that were not measured with this library
OF_A_METHOD = ("method", "parts", "budget")  # the rest of a run's identity is its protocol
COUNTED = ("bytes_held", "bytes_full")  # of `kv`, means over samples
MEASURED_ALONE = ("run_id", "protocol.pair", "kv.bytes_held", "status")  # keys that no number of others has
CLOSE = 1e-9


class Problem(NamedTuple):
    """What is wrong: in which file or run, in which field, and what differs."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class BoardFile:
    """What a file holds.

    Attributes:
        protocols: by `protocol.pair`: `settings` (a run's identity without its method), `samples` (prompt hashes by id) and
            `own_setting`, true where they differ from the board's on purpose.
        runs: `record`, `identity` (the method's part of it), `scores` and `held`, `full` (bytes) in the order of the
            samples, `command`, `files` (hashes of what it was made from), `seal`.
        foreign: rows of others.
    """

    name: str
    protocols: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    foreign: list[dict[str, Any]] = field(default_factory=list)
    by: str = ""

    def text(self) -> str:
        """The file: a line per run, so that a change can be read."""
        head = {"kind": KIND, "format": FORMAT, "name": self.name, "by": self.by}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for key in ("protocols", "runs", "foreign"):
            value = getattr(self, key)
            if isinstance(value, dict):
                rows = ",\n".join(f"  {json.dumps(name)}: {_line(one)}" for name, one in sorted(value.items()))
                lines.append(f' "{key}": {{\n{rows}\n }}' if rows else f' "{key}": {{}}')
            else:
                rows = ",\n".join(f"  {_line(one)}" for one in value)
                lines.append(f' "{key}": [\n{rows}\n ]' if rows else f' "{key}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True)


def read(path: Path) -> BoardFile:
    """The file at `path`.

    Raises:
        ValueError: it cannot be read, or is no such file: names it and what is wrong.
    """
    try:
        found = strict_json.loads(read_plain(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ValueError(f"{path}: kind is not {KIND!r}: kvcompress submit RESULTS writes such files")
    if found.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {found.get('format')!r}, this version reads {FORMAT}")
    for key, kind in (("name", str), ("by", str), ("protocols", dict), ("runs", list), ("foreign", list)):
        if not isinstance(found.get(key), kind):
            raise ValueError(f"{path}: {key} is missing, or no {kind.__name__}")
    unknown = found.keys() - {"kind", "format", "name", "by", "protocols", "runs", "foreign"}
    if unknown:
        raise ValueError(f"{path}: unknown field {sorted(unknown)[0]}")
    return BoardFile(found["name"], found["protocols"], found["runs"], found["foreign"], found["by"])


def identity_of(run: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run, whose hash is its run id."""
    return {**settings, **run["identity"]}


def seal_of(run: Mapping[str, Any]) -> str:
    """Hash of all that a run says."""
    return digest({key: value for key, value in run.items() if key != "seal"})


def problems(board: BoardFile, place: str, versions: Mapping[str, tuple[str, str]] | None = None) -> Iterator[Problem]:
    """Everything that is wrong with a file, in order.

    Args:
        place: how the file is called in what is said.
        versions: of each task the present version and metric (`name/version`), to find runs of another; None: not asked.
    """
    if not board.runs:
        yield Problem(place, "runs is empty: nothing to put on a board")
    for pair, protocol in board.protocols.items():
        where = f"{place}: protocols.{pair}"
        if not isinstance(protocol, dict) or not all(
            isinstance(protocol.get(key), dict) for key in ("settings", "samples")
        ):
            yield Problem(where, "settings or samples is missing")
            return
        if digest(protocol["settings"]) != pair:
            yield Problem(f"{where}.settings", f"they hash to {digest(protocol['settings'])}: a setting was edited")
        task = protocol["settings"].get("task") or {}
        if versions is not None:
            yield from _task_version(task, f"{where}.settings.task", versions)
    seen: dict[str, int] = {}
    for number, run in enumerate(board.runs):
        try:
            yield from _run_problems(run, f"{place}: runs[{number}]", board)
            run_id = str(run["record"]["run_id"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            yield Problem(f"{place}: runs[{number}]", f"a field is missing or of another kind: {error}")
            continue
        if run_id in seen:
            yield Problem(f"{place}: runs[{number}]", f"run_id {run_id} is also runs[{seen[run_id]}]")
        seen.setdefault(run_id, number)
    yield from _baseline_problems(board, place)
    for number, row in enumerate(board.foreign):
        yield from foreign_problems(row, f"{place}: foreign[{number}]")


def _task_version(task: Mapping[str, Any], where: str, versions: Mapping[str, tuple[str, str]]) -> Iterator[Problem]:
    """A task of another version than the present one."""
    known = versions.get(str(task.get("name")))
    if known is None:
        yield Problem(where, f"name is {task.get('name')!r}, which is no task here")
        return
    for key, now in zip(("version", "metric"), known, strict=True):
        asked = str(task.get(key))
        if key == "metric" and asked.partition("/")[0] != now.partition("/")[0]:
            continue  # a task whose metric is a setting
        if asked != now:
            yield Problem(where, f"{key} is {asked!r}, of these sources {now!r}: run the sweep again")


def run_name(record: Mapping[str, Any]) -> str:
    """Method, budget and run id, for messages."""
    return f"{record.get('method')} {record.get('budget')} {str(record.get('run_id'))[:8]}"


def _run_problems(run: Mapping[str, Any], at: str, board: BoardFile) -> Iterator[Problem]:
    record = run["record"]
    where = f"{at} ({run_name(record)})"
    try:
        record_schema.check_record(record)
    except ValueError as error:
        yield Problem(f"{where}.record", str(error))
        return
    if record["status"] not in FINISHED:
        yield Problem(
            f"{where}.record", f"status is {record['status']!r}: a board takes finished runs ({', '.join(FINISHED)})"
        )
    protocol = board.protocols.get(str(record.get("protocol.pair")))
    if protocol is None:
        yield Problem(
            f"{where}.record", f"protocol.pair is {record.get('protocol.pair')!r}, which is not among protocols"
        )
        return
    found = [*_identity_problems(run, where, protocol["settings"]), *_score_problems(run, where, protocol["samples"])]
    yield from found
    if not found and run.get("seal") != seal_of(run):
        yield Problem(
            where, f"seal is {run.get('seal')!r}, its content hashes to {seal_of(run)}: something in it was edited"
        )


def _identity_problems(run: Mapping[str, Any], where: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Where a record says otherwise than the settings that its run id stands for."""
    record, identity = run["record"], identity_of(run, settings)
    if digest(identity) != record["run_id"]:
        yield Problem(
            f"{where}.record", f"run_id is {record['run_id']}, its settings hash to {digest(identity)}: one was edited"
        )
    task = identity.get("task") or {}
    wanted = {
        "budget": identity.get("budget"),
        "seed": identity.get("seed"),
        "dtype": identity.get("dtype"),
        "device": identity.get("device"),
        "model": (identity.get("model") or {}).get("name"),
        "task": task.get("name"),
        "method": (identity.get("method") or {}).get("name"),
        "metric": task.get("metric"),
        "protocol.task_version": task.get("version"),
        **{f"parts.{name}": value for name, value in (identity.get("parts") or {}).items()},
    }
    for key, value in wanted.items():
        said = record.get(key)
        if said != value or type(said) is not type(value):
            yield Problem(f"{where}.record", f"{key} is {said!r}, but {value!r} in its settings")


def _score_problems(run: Mapping[str, Any], where: str, samples: Mapping[str, Any]) -> Iterator[Problem]:
    """Where a record says otherwise than its samples."""
    record, scores = run["record"], run["scores"]
    if len(scores) != len(samples):
        yield Problem(f"{where}.scores", f"{len(scores)} samples, its protocol has {len(samples)}")
        return
    if record["n_samples"] != len(scores):
        yield Problem(f"{where}.record", f"n_samples is {record['n_samples']}, there are {len(scores)} scores")
    for name, score in zip(samples, scores, strict=True):
        if score is not None and not (_number(score) and 0 <= score <= 1):
            yield Problem(f"{where}.scores", f"sample {name}: {score!r} is no score from 0 to 1")
            return
    made: dict[str, float | None] = {"score": None if None in scores else fmean(scores)}
    for key in COUNTED:
        values = run[key.removeprefix("bytes_")]
        if len(values) != len(scores):
            yield Problem(
                f"{where}.{key.removeprefix('bytes_')}", f"{len(values)} samples, its protocol has {len(samples)}"
            )
            return
        made[f"kv.{key}"] = _mean(values)
    ratios = [held / full for held, full in zip(run["held"], run["full"], strict=True) if _number(held) and full]
    made["kv.ratio"] = _mean(ratios)
    for key, value in made.items():
        if not close(record.get(key), value):
            yield Problem(f"{where}.record", f"{key} is {record.get(key)!r}, by its samples {value!r}")


def _baseline_problems(board: BoardFile, place: str) -> Iterator[Problem]:
    """Protocols without the full cache, and differences to it that the scores do not give."""
    runs = [run for run in board.runs if isinstance(run, dict) and isinstance(run.get("record"), dict)]
    for pair in board.protocols:
        members = [run for run in runs if run["record"].get("protocol.pair") == pair]
        bases = [run for run in members if is_baseline(run["record"])]
        if not bases:
            task = (board.protocols[pair].get("settings") or {}).get("task") or {}
            yield Problem(
                f"{place}: protocols.{pair}", f"no run of the full cache ({task.get('name')}): add method=full"
            )
            continue
        base = bases[0]["scores"]
        for run in members:
            record, scores = run["record"], run.get("scores") or ()
            if None in (*base, *scores) or len(base) != len(scores) or record.get("delta_full") is None:
                continue
            delta = fmean(ours - full for ours, full in zip(scores, base, strict=True))
            if not close(record["delta_full"], delta):
                where = f"{place}: runs ({run_name(record)}).record"
                yield Problem(where, f"delta_full is {record['delta_full']!r}, by the scores {delta!r}")


def foreign_problems(row: Any, where: str) -> Iterator[Problem]:
    """What keeps a row of others from being shown as such."""
    if not isinstance(row, dict):
        yield Problem(where, "no row")
        return
    if row.get("origin") not in FOREIGN:
        yield Problem(where, f"origin is {row.get('origin')!r}; a row of others is {', '.join(FOREIGN)}")
    if not str(row.get("source") or "").strip():
        yield Problem(where, "source is missing: where the number was taken from")
    for key in MEASURED_ALONE:
        if row.get(key) is not None and not (key == "status" and row[key] == "ok"):
            yield Problem(where, f"{key} is {row[key]!r}: only what was measured here has one")


def protocol_problems(board: BoardFile, place: str, others: Mapping[str, BoardFile]) -> Iterator[Problem]:
    """Protocols that are not those of the board's other files though they ask the same task of the same model; run ids twice.

    One that says `own_setting` is meant to be apart, and is never put into one table with the board's.
    """
    known: dict[str, Mapping[str, Any]] = {}
    taken: dict[str, str] = {}
    for name, other in others.items():
        known |= {pair: one["settings"] for pair, one in other.protocols.items()}
        taken |= {run["record"]["run_id"]: name for run in other.runs}
    for run in board.runs:
        if (run_id := run["record"].get("run_id")) in taken:
            yield Problem(f"{place}: {run_name(run['record'])}", f"run_id {run_id} is in {taken[run_id]} already")
    for pair, protocol in board.protocols.items():
        mine = protocol["settings"]
        rivals = [one for one in known.values() if _subject(one) == _subject(mine)]
        if pair in known or protocol.get("own_setting") is True or not rivals:
            continue
        nearest = min((differing(mine, one) for one in rivals), key=len)
        task, model = _subject(mine)
        yield Problem(
            f"{place}: protocols.{pair} ({task} on {model})",
            f"another protocol than the board's: {'; '.join(nearest)} (--own-setting, if it is meant to stand apart)",
        )


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settings in which two protocols differ, one text each."""
    left, right = dict(_leaves(mine)), dict(_leaves(theirs))
    absent = object()
    return [
        f"{key} is {left.get(key, 'not set')!r}, on the board {right.get(key, 'not set')!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, absent) != right.get(key, absent)
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _subject(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    return (settings.get("task") or {}).get("name"), (settings.get("model") or {}).get("name")


def settings_of(identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An identity as plain values, in two: its protocol, and what is the method's."""
    plain = canonical(identity)
    mine = {key: plain[key] for key in OF_A_METHOD}
    return {key: value for key, value in plain.items() if key not in OF_A_METHOD}, mine


def files(folder: Path) -> list[Path]:
    """Board files under a folder, or the file itself."""
    return [folder] if folder.name.endswith(SUFFIX) else sorted(folder.rglob(f"*{SUFFIX}"))


def close(one: Any, other: Any) -> bool:
    """Equal, numbers but for rounding."""
    if _number(one) and _number(other):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    return bool(one == other)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mean(values: Iterable[Any] | Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
