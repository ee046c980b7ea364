"""Hashes: of plain values, of files, and of the sources of this library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLOAT_DIGITS = 6


def canonical(value: Any) -> Any:
    """`value` as plain JSON types: keys sorted, floats rounded to 6 digits, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, float):
        return round(value, FLOAT_DIGITS)
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for `value`; the int 1 and the float 1.0 differ."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Hash of the sources of the library, its methods (with their data) and its tasks: what a stale record had not."""
    found = hashlib.sha256()
    for package in ("kvcompress", "kvcompress.methods", "kvcompress.tasks"):
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted([*root.rglob("*.py"), *root.rglob("data/**/*.json")]):
            found.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            found.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return found.hexdigest()[:16]


@lru_cache(maxsize=32)
def content_hash(path: Path) -> str:
    """16 hex digits that change with the content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
