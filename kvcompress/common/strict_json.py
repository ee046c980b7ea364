"""JSON as the standard has it: finite numbers that fit into 64 bits, text that is Unicode, no unbounded depth."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_LONG = re.compile(r"\d{18}|[eE]\+?\d{3}")  # only where such digits stand need numbers be looked at one by one
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MOST = 2**63


def loads(text: str | bytes) -> Any:
    """The value that `text` stands for.

    Raises:
        ValueError: it is no JSON, not UTF-8, nested too deeply, or holds NaN, an infinity, an integer of more than 64
            bits or half a surrogate pair.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # whose error is a ValueError
    hooks: dict[str, Any] = {"parse_float": _float, "parse_int": _int} if _LONG.search(text) else {}
    try:
        value = json.loads(text, parse_constant=_constant, **hooks)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair in a text") from None
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
        raise ValueError(f"{text[:20]}… is an integer of more than 64 bits" if len(text) > 20 else f"{text} is too large")
    return int(text)
