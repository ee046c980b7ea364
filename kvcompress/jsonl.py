"""Samples of published data sets from JSON Lines, with errors that name file and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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


@lru_cache(maxsize=32)
def content_hash(path: Path) -> str:
    """16 hex digits that change with the content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
