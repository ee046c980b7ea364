"""Strict JSON: finite numbers that fit into 64 bits, no unbounded depth."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_LONG = re.compile(r"\d{18}|[eE]\+?\d{3}")  # only where such digits stand need numbers be looked at one by one
MOST = 2**63


def loads(text: str | bytes) -> Any:
    """The value that `text` stands for; a text in it may hold half a surrogate pair (`encodable`).

    Raises:
        ValueError: it is no JSON, not UTF-8, nested too deeply, or holds NaN, an infinity or an integer of more than 64
            bits.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # whose error is a ValueError
    hooks: dict[str, Any] = {"parse_float": _float, "parse_int": _int} if _LONG.search(text) else {}
    try:
        return json.loads(text, parse_constant=_constant, **hooks)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def encodable(value: Any) -> Any:
    """`value` with a question mark for each half of a surrogate pair, which no file or terminal takes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.30} is no finite number")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or not -MOST <= int(text) < MOST:
        raise ValueError(
            f"{text[:20]}… is an integer of more than 64 bits" if len(text) > 20 else f"{text} is too large"
        )
    return int(text)
