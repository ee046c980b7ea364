"""Multi-document questions: passages read from published files, fitted into a prompt and shuffled, as token ids.

A record is a JSON object with one of three sets of fields:

    passages, question, answers   passages: texts, or objects with `text` and, if there is one, `title`
    ctxs, question, answers       CacheBlend's files: the same objects
    context, input, answers       LongBench's multi-document sets: one text, parted at its "Passage 1:" lines

`answers` is a list of texts; `id` or `_id` names the record. A file is JSON Lines, or one JSON array.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcompress.common.prose import Encoder
from kvcompress.data import jsonl

KINDS = {
    "passages": ("passages", "question", "answers"),
    "ctxs": ("ctxs", "question", "answers"),
    "context": ("context", "input", "answers"),
}
FITS = ("drop", "cut")
LEAST = 16  # tokens of passages that a prompt must have room for
END = "\n\n"
_NUMBERED = re.compile(r"^Passage \d+:[ \t]*\n?", re.MULTILINE)


@dataclass(frozen=True)
class MultiDocQuestion:
    """A question, the passages it is asked of (as they stand in a prompt) and its answers."""

    id: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


@lru_cache(maxsize=8)
def read(path: Path) -> tuple[MultiDocQuestion, ...]:
    """All records of a file.

    Raises:
        ValueError: names the file, and line or record, and what is wrong with it.
    """
    rows = _array(path) if path.suffix == ".json" else None
    if rows is None:
        rows = [(f"{path} line {number}", row) for number, row in jsonl.numbered(path)]
    return tuple(_question(row, where, number) for number, (where, row) in enumerate(rows))


def _array(path: Path) -> list[tuple[str, Any]] | None:
    """The records of a JSON array; None where the file is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not text.lstrip().startswith("["):
        return None
    found = jsonl.loads(text, str(path))
    if not found:
        raise ValueError(f"{path} holds no record")
    return [(f"{path} record {number}", row) for number, row in enumerate(found, 1)]


def _question(row: Any, where: str, number: int) -> MultiDocQuestion:
    kind = next((kind for kind in KINDS if isinstance(row, Mapping) and kind in row), None)
    if kind is None:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: a record needs one of {', '.join(KINDS)}; found: {has or 'nothing'}")
    row = jsonl.check(dict(row), KINDS[kind], where)
    question = jsonl.text(row, KINDS[kind][1], where)
    if not question.strip():
        raise ValueError(f"{where}: {KINDS[kind][1]} is empty")
    passages = parted(jsonl.text(row, "context", where)) if kind == "context" else _texts(row[kind], kind, where)
    if not passages:
        raise ValueError(f"{where}: {kind} holds no passage")
    name = jsonl.identifier(row.get("id") or row.get("_id"), number, where)
    return MultiDocQuestion(name, passages, question, jsonl.answers(row["answers"], "answers", where))


def parted(context: str) -> tuple[str, ...]:
    """LongBench's passages, without their numbers: the first line of each is its title."""
    found = []
    for part in _NUMBERED.split(context):
        if part.strip():
            title, _, text = part.strip().partition("\n")
            found.append(f"{title}{END}{text}{END}" if text else f"{END}{title}{END}")
    return tuple(found)


def _texts(value: Any, field: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {field} must be a list of passages, found {type(value).__name__}")
    found = []
    for number, one in enumerate(value, 1):
        about = {"text": one} if isinstance(one, str) else one
        if not isinstance(about, Mapping) or not isinstance(about.get("text"), str):
            raise ValueError(f"{where}: passage {number} must be a text, or an object with text and title")
        if not about["text"].strip():
            raise ValueError(f"{where}: passage {number} is empty: leave it out")
        title = jsonl.whole(about.get("title") or "", f"{field} {number} title", where)
        jsonl.whole(about["text"], f"{field} {number}", where)
        found.append(f"{title}{END}{about['text']}{END}")  # as the released code writes them, with or without a title
    return tuple(found)


@dataclass(frozen=True)
class Fitted:
    """Passages as token ids that fit into a prompt.

    Attributes:
        chunks: token ids of each, in the order of the prompt.
        order: which passage of the record each is.
        dropped: passages that were left out; cut: tokens that were cut off the others.
    """

    chunks: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    dropped: int
    cut: int


def fit(
    asked: MultiDocQuestion, encode: Encoder, room: int | None, how: str, most: int | None, shuffle: str | None
) -> Fitted:
    """Choose, cut and order the passages of a record.

    Args:
        room: tokens of all passages together at most, None: all of them whole.
        how: "drop" leaves out whole passages until the rest fits; those that hold an answer are chosen first, then those
            that come first, and the very first is cut if it alone is too long. "cut" cuts the longest at their ends, all to one length.
        most: passages at most, chosen in the same way.
        shuffle: what the order is drawn by; None: as in the record.

    Raises:
        ValueError: room for less than a few tokens.
    """
    count = len(asked.passages) if most is None else min(most, len(asked.passages))
    least = max(LEAST, count if how == "cut" else 0)  # a token of each at least
    if room is not None and room < least:
        raise ValueError(
            f"record {asked.id}: its question and the instructions leave {room} tokens for passages, at least {least} are "
            "needed; raise task.max_tokens"
        )
    chunks = [encode(passage) for passage in asked.passages]
    wanted = [i for i, text in enumerate(asked.passages) if any(a.lower() in text.lower() for a in asked.answers)]
    ranked = [*wanted, *(i for i in range(len(chunks)) if i not in wanted)]
    kept = ranked[: len(ranked) if most is None else most]
    if room is not None and how == "drop":
        kept = _within(kept, [len(chunk) for chunk in chunks], room)
    lengths = {i: len(chunks[i]) for i in kept}
    if room is not None:
        lengths = shared_out(lengths, room)
    order = sorted(kept)
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    end = encode(END)
    cut = tuple(_shortened(chunks[i], lengths[i], end) for i in order)
    lost = sum(len(chunks[i]) for i in kept) - sum(map(len, cut))
    return Fitted(cut, tuple(order), len(chunks) - len(kept), lost)


def _within(ranked: Sequence[int], lengths: Sequence[int], room: int) -> list[int]:
    """The first one, and of the others as many as fit beside those before them."""
    kept = list(ranked[:1])
    for i in ranked[1:]:
        if sum(lengths[j] for j in kept) + lengths[i] <= room:
            kept.append(i)
    return kept


def shared_out(lengths: Mapping[int, int], room: int) -> dict[int, int]:
    """Lengths that add up to `room` at most: the longest are brought down to one level, to within a token."""
    left, found = room, {}
    for number, (i, length) in enumerate(sorted(lengths.items(), key=lambda item: item[1])):
        found[i] = min(length, left // (len(lengths) - number))
        left -= found[i]
    return found


def _shortened(ids: tuple[int, ...], length: int, end: tuple[int, ...]) -> tuple[int, ...]:
    """The first ids, with the blank line that ends a passage."""
    if len(ids) <= length:
        return ids
    return ids[: length - len(end)] + end if length > len(end) else ids[: max(length, 1)]
