"""Traces of real servers as requests, read line by line, with errors that name file and line.

    mooncake_conversation, mooncake_synthetic    JSON Lines of Mooncake (FAST'25), blocks of 512 tokens
    azure_code, azure_conversation               csv of Azure (2023): arrivals and lengths, no contents
    agent_coding                                 JSON Lines of coding sessions with sub-agents, blocks of 64 tokens

Any file of one of these forms is read by its path; so are JSON Lines with `chat_id` (Qwen-Bailian: times in seconds,
blocks of 16) and csv with the columns of BurstGPT or `at,input,output`. A file may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kvcompress.measure.serving.requests import MAIN, Request

FILES = {
    "mooncake_conversation": "mooncake_fast25_conversation_trace.jsonl.gz",
    "mooncake_synthetic": "mooncake_fast25_synthetic_trace.jsonl.gz",
    "azure_code": "azure_llm_2023_code.csv.gz",
    "azure_conversation": "azure_llm_2023_conv.csv.gz",
    "agent_coding": "agent_coding_traces.jsonl.gz",
}
FOLDER = "traces"  # within paths.data
MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
# csv: columns of (time, input, output)
COLUMNS: dict[str, tuple[str, str, str]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burst": ("Timestamp", "Request tokens", "Response tokens"),
    "plain": ("at", "input", "output"),
}
FORMS = (
    "JSON Lines with timestamp (ms), input_length, output_length, hash_ids; "
    "JSON Lines of sessions with id, block_size, requests; csv with "
    + " or ".join(",".join(c) for c in COLUMNS.values())
)


def find(name: str, data: str | Path | None = None) -> Path:
    """The file of a trace, by its name within the folder of data sets, or by its path.

    Raises:
        ValueError: there is none.
    """
    folders = [] if data is None else [Path(data) / FOLDER, Path(data)]
    for folder in folders:
        for path in (folder / FILES.get(name, name), folder / name):
            if path.is_file():
                return path
    if Path(name).is_file():
        return Path(name)
    where = " and ".join(map(str, folders)) or "no folder of data sets (paths.data)"
    raise ValueError(f"trace {name!r}: no such file, nor in {where}; known names: {', '.join(FILES)}")


def read(path: Path) -> Iterator[Request]:
    """Requests of a file in order of arrival, times from 0.

    Lazily, but for sessions of agents, which run side by side and are merged.

    Raises:
        ValueError: while reading; the file and line, and what is allowed there.
    """
    lines = _lines(path)
    head = next(lines, None)
    if head is None:
        raise ValueError(f"{path} holds no request; read are {FORMS}")
    lines = _again(head, lines)
    if not head[1].lstrip().startswith("{"):
        return _from_start(_ordered(path, _csv(path, lines)))
    if "requests" in _json(path, *head):
        sessions = _Sessions(path)
        for number, line in lines:
            sessions.session(number, _json(path, number, line))
        return iter(sessions.ordered())
    return _from_start(_ordered(path, _consistent(path, _json_lines(path, lines))))


def _again(head: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield head
    yield from rest


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} line {number + 1}: cannot be read: {error}") from error


def _json(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {number}: no JSON ({error}); read are {FORMS}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} line {number}: a JSON object is needed, found {type(row).__name__}")
    return row


def _field(path: Path, number: int, row: Mapping[str, Any], name: str, least: float = 0, whole: bool = True) -> Any:
    """A number of a row."""
    where = f"{path} line {number}"
    if name not in row:
        raise ValueError(f"{where}: {name!r} is missing; found {', '.join(map(str, row))}")
    value = row[name]
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least or value == float("inf"):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{where}: {name}={value!r}; {kind} of at least {least:g} is needed")
    return value


def _ids(path: Path, number: int, row: Mapping[str, Any], tokens: int, size: int) -> tuple[int, ...]:
    ids = row.get("hash_ids", ())
    if not isinstance(ids, (list, tuple)) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ValueError(f"{path} line {number}: hash_ids must be a list of whole numbers")
    if len(ids) > -(-tokens // size):
        raise ValueError(
            f"{path} line {number}: {len(ids)} hash_ids for {tokens} tokens; blocks of {size} tokens allow "
            f"{-(-tokens // size)}"
        )
    return tuple(ids)


def _json_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
    turns: dict[Any, int] = {}
    for index, (number, line) in enumerate(lines):
        row = _json(path, number, line)
        chat = row.get("chat_id")
        size = row.get("block_size", MOONCAKE_BLOCK if chat is None else BAILIAN_BLOCK)
        size = _field(path, number, {"block_size": size}, "block_size", 1)
        tokens = _field(path, number, row, "input_length", 1)
        time = _field(path, number, row, "timestamp", 0, whole=False)
        parent = row.get("parent_chat_id")
        yield Request(
            at=time / 1000 if chat is None else float(time),
            input=tokens,
            output=_field(path, number, row, "output_length", 1),
            blocks=_ids(path, number, row, tokens, size),
            block_size=size,
            line=number,
            parent=turns.get(parent),
            agent=MAIN if chat is None else str(chat),
        )
        if chat is not None:
            turns[chat] = index


def _csv(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Request]:
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            numbers[:] = [number]
            yield line

    rows = csv.DictReader(texts())
    columns = next((c for c in COLUMNS.values() if set(c) <= set(rows.fieldnames or ())), None)
    if columns is None:
        raise ValueError(f"{path} line 1: columns {', '.join(rows.fieldnames or ())}; read are {FORMS}")
    burst = columns == COLUMNS["burst"]
    for row in rows:
        number, (time, tokens, answer) = numbers[0], (row.get(name) for name in columns)
        try:
            counts = {"input": int(tokens or ""), "output": int(answer or "")}
            at = _seconds(time or "")
        except ValueError as error:
            raise ValueError(
                f"{path} line {number}: {', '.join(columns)} = {time}, {tokens}, {answer}: {error}"
            ) from error
        if burst and counts["output"] == 0:
            continue  # BurstGPT lists requests that failed
        _field(path, number, counts, "input", 1)
        _field(path, number, counts, "output", 1)
        yield Request(at, counts["input"], counts["output"], line=number)


def _seconds(text: str) -> float:
    """A time in seconds, or a date with seconds in up to 7 digits."""
    try:
        return float(text)
    except ValueError:
        day, dot, rest = text.partition(".")
        moment = datetime.fromisoformat(day)  # 100 ns digits are more than datetime takes
        return (moment - datetime(1970, 1, 1)).total_seconds() + float(f"0{dot}{rest or 0}")


def _ordered(path: Path, requests: Iterable[Request]) -> Iterator[Request]:
    before: Request | None = None
    for request in requests:
        if before is not None and request.at < before.at:
            raise ValueError(
                f"{path} line {request.line}: arrives at {request.at:g} s, before line {before.line} at {before.at:g} s; "
                "times may be equal but must not fall: sort the file"
            )
        before = request
        yield request


def _from_start(requests: Iterable[Request]) -> Iterator[Request]:
    start: float | None = None
    for request in requests:
        start = request.at if start is None else start
        yield replace(request, at=request.at - start)


def _consistent(path: Path, requests: Iterable[Request]) -> Iterator[Request]:
    """Each id always behind the same one: it stands for all that is before it."""
    parents: dict[int, int | None] = {}
    sizes: set[int] = set()
    for request in requests:
        sizes.add(request.block_size)
        if len(sizes) > 1:
            raise ValueError(
                f"{path} line {request.line}: block_size {request.block_size}, before it another: one per file"
            )
        lead: int | None = None
        for block in request.blocks:
            known = parents.setdefault(block, lead)
            if known != lead:
                raise ValueError(
                    f"{path} line {request.line}: block {block} follows {_named(lead)}, but followed {_named(known)} before; an "
                    "id stands for its block and everything before it: hash each block with its prefix"
                )
            lead = block
        if len(set(request.blocks)) < len(request.blocks):
            raise ValueError(f"{path} line {request.line}: a block is twice in one request; ids are of whole prefixes")
        yield request


def _named(block: int | None) -> str:
    return "the start of a prompt" if block is None else f"block {block}"


class _Sessions:
    """Requests of agent sessions that all begin at 0.

    In a closed loop a request follows the one before it in its session; a sub-agent starts from the request of the main
    agent before it, and runs beside the next. Ids are local to a session, and are numbered on from one to the next.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[tuple[float, int, Request]] = []  # with parents by place in this list
        self.offset = self.top = 0

    def ordered(self) -> list[Request]:
        """In order of arrival as their own times say."""
        order = sorted(self.found, key=lambda entry: entry[:2])
        place = {number: index for index, (_, number, _) in enumerate(order)}
        return [replace(one, parent=None if one.parent is None else place[one.parent]) for _, _, one in order]

    def session(self, number: int, row: Mapping[str, Any]) -> None:
        """Add the session of a line."""
        requests, self.offset = row.get("requests"), self.top
        if not isinstance(requests, list) or not all(isinstance(one, dict) for one in requests):
            raise ValueError(f"{self.path} line {number}: 'requests' must be a list of JSON objects")
        size, name = _field(self.path, number, row, "block_size", 1), str(row.get("id", number))
        end, last, before = 0.0, None, 0.0
        for one in requests:
            if one.get("type") == "subagent":
                # its own time is when it was done
                wait = max(0.0, self._time(number, one, "t") - self._time(number, one, "duration_ms") / 1000 - before)
                agent, parent, ended = f"{name}/{one.get('agent_id', len(self.found))}", last, end
                for index, inner in enumerate(one.get("requests", ())):
                    gap = self._time(number, inner, "think_time") if index else wait
                    ended = self._add(number, inner, size, ended + gap, parent, gap, agent, self._fixed(number, one))
                    parent = len(self.found) - 1
                continue
            gap = self._time(number, one, "think_time") if last is not None else 0.0
            end = self._add(number, one, size, end + gap, last, gap, f"{name}/{MAIN}", self._fixed(number, row))
            last, before = len(self.found) - 1, self._time(number, one, "t") + self._time(number, one, "api_time")

    def _add(
        self,
        number: int,
        one: Mapping[str, Any],
        size: int,
        at: float,
        parent: int | None,
        gap: float,
        agent: str,
        fixed: int,
    ) -> float:
        """Add a request; returns when it ends."""
        tokens = _field(self.path, number, one, "in", 1)
        blocks = tuple(self.offset + block for block in _ids(self.path, number, one, tokens, size))
        self.top = max([self.top, *(block + 1 for block in blocks)])
        output = max(1, _field(self.path, number, one, "out"))
        request = Request(at, tokens, output, blocks, size, number, parent, gap, agent, fixed)
        self.found.append((at, len(self.found), request))
        return at + self._time(number, one, "api_time")

    def _time(self, number: int, row: Mapping[str, Any], name: str) -> float:
        return float(_field(self.path, number, {name: 0.0, **row}, name, whole=False))

    def _fixed(self, number: int, row: Mapping[str, Any]) -> int:
        names = ("tool_tokens", "system_tokens")
        return sum(_field(self.path, number, {name: 0, **row}, name) for name in names)
