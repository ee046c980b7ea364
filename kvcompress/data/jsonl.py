"""Samples of published data sets from JSON Lines, with errors that name file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


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
        ValueError: it is something else.
    """
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} must be text, found {_shown(value)}")
    return value


def answer(value: Any, field: str, where: str) -> str:
    """An expected answer, text or a number, as text.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{where}: {field} must be text or a number, found {_shown(value)}")
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


@lru_cache(maxsize=32)
def numbered(path: Path, fields: tuple[str, ...] = ()) -> tuple[tuple[int, dict[str, Any]], ...]:
    """The same with the number of each row's line."""
    rows = []
    try:
        found = lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    for number, line in found:
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: no JSON ({error})") from error
        rows.append((number, check(row, fields, where)))
    if not rows:
        raise ValueError(f"{path} holds no record")
    return tuple(rows)
