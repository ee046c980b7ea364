"""Grading of mathematical answers: extract the final answer of a solution and compare it with the expected one.

What is said explicitly counts, in this order: the last `\\boxed{…}` (braces matched), a `#### …` line, "the answer is …"
or "Final answer: …", a line "A: …". Only of an output that came to its end may the last line stand in for these: what
was cut off has numbers, but no answer. Equality is that of texts up to notation, of numbers up to commas, currency and
units, and otherwise math-verify's (latex to sympy, with a time limit).
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import threading
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from kvcompress.data.thinking import answer_part, unfinished

TIMEOUT_S = 5  # of one comparison; math-verify's own default
LONGEST = 1000  # characters of an answer that are compared by more than their text
BOXES = ("\\boxed", "\\fbox")
SAID = re.compile(r"(?:final\s+answer|the\s+answer|answer)\**\s*(?:is|:)\**\s*:?\s*(.+)", re.IGNORECASE)
REASON = re.compile(r",?\s+(?:because|since|as|so|which|where)\b.*", re.IGNORECASE)  # what follows an answer is none
LETTERED = re.compile(r"^\s*A:\s*(.+)", re.MULTILINE)
HASHES = re.compile(r"^\s*####\s*(.+?)\s*$", re.MULTILINE)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textit)\s*\{([^{}]*)\}")
SEVERAL = re.compile(r",\s|;|\b(?:and|or)\b")
BASE = re.compile(r"\d_\{?(\d+)\}?$")
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MATHEMATICAL = frozenset("not pi sqrt sin cos tan cot log ln exp inf infinity infty or and mod frac times".split())


def available() -> bool:
    """True if math-verify is installed: `pip install 'kvcompress[reasoning]'`."""
    return importlib.util.find_spec("math_verify") is not None


@dataclass(frozen=True)
class Grade:
    """`answer` is None where the output gives none: it was cut off, or is empty."""

    right: bool
    answer: str | None


def grade(gold: str, text: str, finished: bool = True, thinking: bool = False) -> Grade:
    """Grade one output.

    Args:
        gold: the expected answer alone, as LaTeX without dollars or as a number.
        text: what was generated.
        finished: it ended by itself; False where it hit the token limit.
        thinking: the prompt ended inside a thinking part, which the output has to close.
    """
    answer = final_answer(text, finished, thinking)
    return Grade(answer is not None and equal(gold, answer), answer)


def final_answer(text: str, finished: bool = True, thinking: bool = False) -> str | None:
    """The final answer that a text gives, or None. What is inside a thinking part is not one."""
    if unfinished(text, thinking):
        return None
    text = answer_part(text, thinking)
    box = last_box(text)
    if box is not None:
        return box or None
    said = text if finished else text.rpartition("\n")[0]  # the last line may have lost its end
    for pattern in (HASHES, SAID, LETTERED):
        found = pattern.findall(said)
        if found:
            answer = found[-1] if pattern is HASHES else REASON.sub("", found[-1])
            return _trimmed(answer) or None
    lines = [line for line in text.splitlines() if line.strip()]
    return (_trimmed(lines[-1]) or None) if finished and lines else None


def last_box(text: str) -> str | None:
    """What the last box holds, "" where it was never closed, None where there is no box."""
    start = max(text.rfind(name) for name in BOXES)
    if start < 0:
        return None
    name = next(name for name in BOXES if text.startswith(name, start))
    rest = text[start + len(name) :]
    if not rest.lstrip().startswith("{"):  # \boxed 5 and \boxed5
        return _trimmed(rest.split("$")[0].split("\n")[0])
    rest, depth = rest.lstrip(), 0
    for at, char in enumerate(rest):
        if rest[at - 1 : at] == "\\":
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:at].strip()
    return ""


def _trimmed(text: str) -> str:
    """Without dollars, emphasis and a full stop around it."""
    text = text.strip().strip("*").strip()
    text = text.removesuffix(".").strip()
    for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inside = text[len(start) : -len(end)]
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end) and start not in inside:
            text = inside.strip()
    return text.removesuffix(".").strip()


def equal(gold: str, answer: str) -> bool:
    """True if an answer equals the expected one: as text, as a number, or as math-verify sees it."""
    wanted, got = plain(gold), plain(answer)
    if not got:
        return False
    if wanted == got or (wanted.isalpha() and len(wanted) > 1 and wanted.casefold() == got.casefold()):
        return True
    if len(answer) > LONGEST:  # minutes of a parser's time, and more digits than Python converts
        return False
    bases = [BASE.findall(side) for side in (wanted, got)]
    if all(bases) and bases[0] != bases[1]:  # which math-verify does not look at
        return False
    number = as_number(gold)
    if number is not None:
        found = as_number(answer)
        if found is None and "=" in answer and not SEVERAL.search(answer):
            found = as_number(answer.rpartition("=")[2])
        if found is not None:
            return number == found
    return _verified(gold, answer)


def plain(text: str) -> str:
    """A text with differences of notation alone taken away."""
    text = _trimmed(text)
    text = WRAPPED.sub(r"\1", text)
    for old, new in (
        *(("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", "")),
        *((space, "") for space in ("\\!", "\\,", "\\;", "\\:", "\\ ", "~")),
        *(("^{\\circ}", ""), ("^\\circ", ""), ("\\%", ""), ("%", ""), ("\\$", ""), ("$", "")),
    ):
        text = text.replace(old, new)
    return "".join(re.sub(r"(?<=\d)\s+(?=\d)", "_ ", text).split())  # 1 2 is not 12


def as_number(text: str) -> Fraction | None:
    """The number a text is, whatever currency, percent sign or unit stands around it; None if it is more than one."""
    text = WRAPPED.sub(r" \1 ", _trimmed(text))
    for old, new in (
        ("\\!", ""),
        ("\\,", ""),
        ("{,}", ","),
        ("\\%", ""),
        ("\\$", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
    ):
        text = text.replace(old, new)
    text = re.sub(r"[$€£%°]", " ", text)
    words = re.findall(r"[A-Za-z]{2,}", text)
    if "\\" in text or any(word.lower() in MATHEMATICAL for word in words):
        return None
    scale = math.prod(SCALES.get(word.lower(), 1) for word in words)
    text = re.sub(r"(?<![A-Za-z])[A-Za-z]{2,}(?:\s*(?:\^\{?\d\}?|/))?", " ", text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".").strip()
    text = re.sub(r"^([-+]) (?=[\d.])", r"\1", text)
    if not text or not NUMBER.fullmatch(text) or not any(char.isdigit() for char in text):
        return None
    return Fraction(text.replace(",", "")) * scale


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Any, ...]:
    from math_verify import parse

    limit = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    found = parse(f"${text}$", parsing_timeout=limit) or parse(text, parsing_timeout=limit)
    return tuple(found)


def _verified(gold: str, answer: str) -> bool:
    from math_verify import verify

    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what cannot be parsed is judged wrong, not shouted about
    limit = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    wanted, got = list(_parsed(gold)), list(_parsed(answer))
    return bool(wanted and got) and bool(verify(wanted, got, timeout_seconds=limit))
