"""Rows of a user's file: contexts with one or several questions and their answers, from JSON Lines or csv.

A row of JSON Lines has `context`, and one of

    question, answer              text, and text or a number
    question, answers             the same with a list of accepted answers
    questions, answers            lists of one length: texts, and for each an answer or a list of accepted ones
    questions                     a list of objects with `question` and `answer` or `answers`

and may have `id`. A csv file has a header with `context`, `question` and `answer` (or `answers`, a JSON list) and may have
`id`. Rows that follow one another with the same context, and no `id` of their own, are questions on one context.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvcompress.data import jsonl

ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv")
LONGEST_CELL = 2**31 - 1  # characters of a csv cell; Python's own limit of 131,072 is less than a context


@dataclass(frozen=True)
class Asked:
    """A question, its accepted answers, and where it stands, for errors."""

    question: str
    answers: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class ContextRow:
    """A context and the questions on it; `where` it stands, for errors."""

    id: str
    context: str
    asked: tuple[Asked, ...]
    where: str


def read(path: Path) -> list[ContextRow]:
    """All contexts of a file, in its order.

    Raises:
        ValueError: names the file, its line, the field, and what is allowed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: a file of JSON Lines or csv is needed; its name may end in {', '.join(ENDINGS)}")
    table = path.suffix.lower() in (".csv", ".tsv")
    rows = _csv(path) if table else [(f"{path} line {number}", row) for number, row in jsonl.numbered(path)]
    found = [_row(row, where, number) for number, (where, row) in enumerate(rows)]
    joined: list[ContextRow] = []
    for _, members in groupby(found, key=lambda pair: (pair[0], pair[1].context)):
        parts = [row for _, row in members]
        joined.append(
            ContextRow(parts[0].id, parts[0].context, tuple(one for row in parts for one in row.asked), parts[0].where)
        )
    names: dict[str, str] = {}
    for one in joined:
        if one.id in names:
            raise ValueError(f"{one.where}: id {one.id!r} is that of {names[one.id]} too; each needs one of its own")
        names[one.id] = one.where
    return joined


def _row(row: Mapping[str, Any], where: str, number: int) -> tuple[Any, ContextRow]:
    """A row, behind what it is joined with others by: the number of one that has an id, else nothing."""
    row = jsonl.check(row, ("context",), where)
    context = jsonl.text(row, "context", where)
    if not context.strip():
        raise ValueError(f"{where}: context is empty")
    named = row.get("id", row.get("_id")) not in (None, "")
    name = jsonl.identifier(row.get("id", row.get("_id")), number, where)
    return number if named else None, ContextRow(name, context, _questions(row, where), where)


def _questions(row: Mapping[str, Any], where: str) -> tuple[Asked, ...]:
    if "questions" not in row:
        jsonl.check(dict(row), ("question",), where)
        return (_asked(row, where),)
    listed = row["questions"]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{where}: questions must be a list with at least one question, found {listed!r:.60}")
    if all(isinstance(one, Mapping) for one in listed):
        return tuple(_asked(one, f"{where}, question {at}") for at, one in enumerate(listed, 1))
    answers = row.get("answers")
    if not isinstance(answers, list) or len(answers) != len(listed):
        count = len(answers) if isinstance(answers, list) else "none"
        raise ValueError(f"{where}: answers must be a list as long as questions ({len(listed)}), found {count}")
    found = []
    for at, (question, answer) in enumerate(zip(listed, answers, strict=True), 1):
        accepted = {"answers": answer} if isinstance(answer, list) else {"answer": answer}
        found.append(_asked({"question": question, **accepted}, f"{where}, question {at}"))
    return tuple(found)


def _asked(one: Mapping[str, Any], where: str) -> Asked:
    jsonl.check(dict(one), ("question",), where)
    question = jsonl.text(one, "question", where)
    if not question.strip():
        raise ValueError(f"{where}: question is empty")
    if "answers" in one:
        answers = jsonl.answers(one["answers"], "answers", where)
    else:
        jsonl.check(dict(one), ("answer",), where)
        if isinstance(one["answer"], list):
            raise ValueError(f"{where}: answer is a list; several accepted answers go by the name of answers")
        answers = (jsonl.answer(one["answer"], "answer", where),)
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{where}: an answer is empty; give one, or leave the row out")
    return Asked(question, tuple(answer.strip() for answer in answers), where)  # outputs are judged without such space


def _csv(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a csv file by its header, each with the line that it ends at."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark of byte order before it
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    found: list[tuple[str, dict[str, Any]]] = []
    with _long_cells():
        kind = "excel-tab" if path.suffix.lower() == ".tsv" else "excel"
        reader = csv.reader(io.StringIO(text, newline=""), kind, strict=True)  # else an open quote swallows rows
        try:
            header = [name.strip() for name in next(reader, [])]
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise ValueError(
                    f"{path} line 1: column {', '.join(twice)} is there twice; each needs a name of its own"
                )
            for fields in ("context", "question"), ("answer", "answers"):
                lacking = [name for name in fields if name not in header]
                if lacking and (fields[0] == "context" or len(lacking) == len(fields)):
                    raise ValueError(
                        f"{path} line 1: column {' or '.join(lacking)} is missing; found: {', '.join(header) or 'none'}"
                    )
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    where = f"{path} line {reader.line_num}"
                    found.append((where, _cells(header, cells, where)))
        except csv.Error as error:
            raise ValueError(f"{path} line {reader.line_num}: no csv ({error})") from error
    if not found:
        raise ValueError(f"{path} holds no record")
    return found


def _cells(header: Sequence[str], cells: Sequence[str], where: str) -> dict[str, Any]:
    if len(cells) != len(header):
        raise ValueError(f"{where}: {len(cells)} cells under {len(header)} columns ({', '.join(header)})")
    row: dict[str, Any] = dict(zip(header, cells, strict=True))
    row.pop("questions", None)
    given: dict[str, str] = {name: row.pop(name) for name in ("answer", "answers") if name in row}
    told = {name: cell for name, cell in given.items() if cell.strip().lower() not in ("", "nan")}
    if not told:
        name, cell = next(iter(given.items()))
        raise ValueError(f"{where}: {name} is {cell.strip() or 'empty'}; give an answer, or leave the row out")
    row.update(told)
    if "answers" in row:
        row["answers"] = jsonl.loads(row["answers"], f"{where}: answers must be a JSON list")
    return row


@contextmanager
def _long_cells() -> Iterator[None]:
    """Inside, cells of any length are read; the limit is one for the whole process."""
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)
