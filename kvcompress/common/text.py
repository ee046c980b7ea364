"""Strings that a user or a data set may bring, on their way out: each exit takes them as text and nothing else.

A model's name, a method's setting or a sample's answer may hold what an exit reads as an order: markup and escape codes in a
terminal, HTML and table borders in markdown, formulas in a spreadsheet, mathematics in a figure, folders in a file's
name. Each exit has a function here.
"""

from __future__ import annotations

import os
import re
import unicodedata
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from kvcompress.common.hashing import digest

LONGEST_LABEL = 300  # characters of a figure's text; more would leave no room for what is drawn
LONGEST_NAME = 72  # bytes of a part of a file's name: three of them are a name that file systems take
REPLACEMENT = "\ufffd"
# what turns the direction of writing, and lets text look like other text
_TURNING = frozenset(map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r")
_MARKDOWN = re.compile(r"[\\`*|$<>~]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|\](?=[(\[:])")


def printable(text: Any, keep: str = "") -> str:
    """A text without characters that act rather than show: control codes, marks of direction, lone surrogates.

    Line breaks, tabs and what else is blank become a space, the others U+FFFD; those in `keep` stay.
    """

    def shown(char: str) -> str:
        if char in keep or char == " ":
            return char
        kind = unicodedata.category(char)
        if char in "\t\n\r\x0b\x0c\x85" or kind in ("Zl", "Zp"):
            return " "
        return REPLACEMENT if kind in ("Cc", "Cs") or char in _TURNING or char in "\ufffe\uffff" else char

    text = str(text)
    return text if text.isascii() and text.isprintable() else "".join(map(shown, text))


def for_terminal(text: Any) -> str:
    """For a console that does not read markup, or inside `rich.text.Text`. Line breaks stay."""
    return printable(text, keep="\n")


def cell(text: Any, style: str = "") -> Text:
    """One line of a terminal's table, as it is."""
    return Text(printable(text), style=style)


class PlainConsole(Console):
    """A console that takes every string as text: no markup, no emoji codes, no escape codes, no colours of its own."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(stderr=stderr, file=file, width=width, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; where no terminal shows them and no COLUMNS is set, lines are not wrapped: a log keeps paths whole."""
        if not self.is_terminal and "COLUMNS" not in os.environ and all(isinstance(one, str) for one in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(for_terminal(text), **options)


def for_markdown(text: Any) -> str:
    """For one line or cell of a markdown table: no HTML, no link, no emphasis, no mathematics, no border."""

    def escaped(match: re.Match[str]) -> str:
        mark = match[0]
        return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(mark, f"\\{mark}")

    return _MARKDOWN.sub(escaped, " ".join(printable(text).split()))


def for_csv(value: Any) -> Any:
    """For a cell of a csv file: text that a spreadsheet would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return for_csv(str(value)) if isinstance(value, (list, tuple, dict)) else value
    text = printable(value, keep="\t\n\r")
    return f"'{text}" if text.lstrip(" \n").startswith(_FORMULA) else text


def for_figure(text: Any) -> str:
    """For matplotlib: no mathematics, and no underscore in front, which leaves a line out of its legend."""
    shown = printable(text, keep="\n")
    shown = shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"
    return (" " if shown.startswith("_") else "") + shown.replace("$", "\\$")


def for_filename(text: Any) -> str:
    """For a part of a file's name: letters and digits of any script and `. _ + = , -`; everything else is a hyphen.

    A name that is changed or cut ends in digits that tell it from others that would look alike.
    """
    wanted = str(text)
    name = re.sub(r"[^\w.+=,-]+", "-", wanted).lstrip(".")
    if name == wanted and len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name.encode()[: LONGEST_NAME - 9].decode(errors='ignore')}-{digest(wanted)[:8]}"


def for_tracker(value: Any) -> Any:
    """For a value that a tracker keeps and shows as text: as it is, without lone surrogates, which no database takes."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
