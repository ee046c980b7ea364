"""JSON Lines: rows and their fields, checked when they are read. Errors name file, line and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcompress.common.tokenization import surrogate


def check(row: Any, fields: Sequence[str], where: str) -> dict[str, Any]:
    """A row that has the named fields; ValueError names the first that is missing."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is needed, found {type(row).__name__}")
    for field in fields:
        if field not in row:
            raise ValueError(f"{where}: field {field!r} is missing; found: {', '.join(map(str, row)) or 'none'}")
    return row


def text(row: Mapping[str, Any], field: str, where: str) -> str:
    """A field that must be text.

    Raises:
        ValueError: it is something else, or no Unicode.
    """
    return whole(row[field], field, where)


def whole(value: Any, field: str, where: str) -> str:
    """A value that must be text.

    Raises:
        ValueError: it is something else, or holds half of a surrogate pair, as a cut `\\ud83d\\ude00` leaves it.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} must be text, found {_shown(value)}")
    at = surrogate(value)
    if at is not None:
        raise ValueError(
            f"{where}: {field} holds half of a surrogate pair (\\u{ord(value[at]):04x} at character {at + 1}), which is no "
            "text: write the whole character, or leave it out"
        )
    return value


def identifier(value: Any, number: int, where: str) -> str:
    """A row's name in the data, or its number where it has none.

    Raises:
        ValueError: it is neither text nor a whole number.
    """
    if value is None or value == "":
        return str(number)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return whole(value, "id", where)


def answer(value: Any, field: str, where: str) -> str:
    """An expected answer, text or a number, as text.

    Raises:
        ValueError: it is something else, no Unicode, or a number that is none (JSON's NaN and Infinity).
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{where}: {field} must be text or a number, found {_shown(value)}")
    if isinstance(value, str):
        return whole(value, field, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {field} is {value}, which is no number; give the answer, or leave the row out")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def answers(value: Any, field: str, where: str) -> tuple[str, ...]:
    """A list of expected answers, at least one.

    Raises:
        ValueError: no list, an empty one, or one of something else than text and numbers.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where}: {field} must be a list of at least one answer, found {_shown(value)}")
    return tuple(answer(one, field, where) for one in value)


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:59] + '…'}"


def loads(text: str, where: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, is nested too deep, or holds a number of more digits than Python reads.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON ({error})") from error


def lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of every line that is not blank. Parted at line feeds alone: JSON strings may hold U+2028.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    found = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    return [(number, line) for number, line in found if line.strip()]


def read(path: Path, fields: tuple[str, ...] = ()) -> tuple[dict[str, Any], ...]:
    """All rows of a JSON Lines file.

    Raises:
        ValueError: the file cannot be read, a line is no JSON, or a field is missing: named with its line.
    """
    return tuple(row for _, row in numbered(path, fields))


def numbered(path: Path, fields: tuple[str, ...] = ()) -> tuple[tuple[int, dict[str, Any]], ...]:
    """The same with the number of each row's line; a file that did not change is read once."""
    try:
        about = path.stat()
        return _numbered(path, fields, about.st_mtime_ns, about.st_size)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


@lru_cache(maxsize=32)
def _numbered(path: Path, fields: tuple[str, ...], changed: int, size: int) -> tuple[tuple[int, dict[str, Any]], ...]:
    rows = []
    found = lines(path)
    for number, line in found:
        where = f"{path} line {number}"
        rows.append((number, check(loads(line, where), fields, where)))
    if not rows:
        raise ValueError(f"{path} holds no record")
    return tuple(rows)


def parsed(text: str, where: str, fields: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a text that is JSON Lines or one JSON list, each with where it stands, for errors.

    Raises:
        ValueError: there is no row, something is no JSON, or a field is missing.
    """
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        found = [(f"{where} record {number}", row) for number, row in enumerate(loads(text, where), 1)]
    else:
        numbered_lines = enumerate(text.split("\n"), 1)
        found = [
            (f"{where} line {number}", loads(line, f"{where} line {number}"))
            for number, line in numbered_lines
            if line.strip()
        ]
    if not found:
        raise ValueError(f"{where} holds no record")
    return [(place, check(row, fields, place)) for place, row in found]


@lru_cache(maxsize=2)
def _list(path: Path, fields: tuple[str, ...], changed: int, size: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    return tuple(parsed(path.read_text(encoding="utf-8"), str(path), fields))


def listed(path: Path, fields: tuple[str, ...] = ()) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Rows of a file that is JSON Lines or one JSON list, each with where it stands; read once while it does not change.

    Raises:
        ValueError: as `parsed`, or the file cannot be read.
    """
    try:
        about = path.stat()
        return _list(path, fields, about.st_mtime_ns, about.st_size)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
