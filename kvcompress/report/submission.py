"""Submission files: what runs answered, in the formats that published judges take, from records alone.

ZeroSCROLLS' leaderboard takes a CSV file with the columns Task, ID and Prediction, one for all ten sets
(tau-nlp/zero_scrolls c994676, submission/); LongMemEval's judge JSON Lines with `question_id` and `hypothesis`
(xiaowu0162/LongMemEval 9e0b455, src/evaluation/evaluate_qa.py). A thinking part is no part of an answer.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvcompress.common.atomic_files import write_whole
from kvcompress.common.hashing import digest
from kvcompress.common.text import for_filename
from kvcompress.data import thinking
from kvcompress.report.run_index import Entry

SCROLLS, MEMORY = "zero_scrolls", "longmemeval"
SETS = (  # of ZeroSCROLLS, all of which its leaderboard wants
    "gov_report", "summ_screen_fd", "qmsum", "narrative_qa", "qasper", "quality", "squality", "musique", "space_digest",
    "book_sum_sort",
)  # fmt: skip
# what runs of one submission have in common
COMMON = ("model", "method", "variant", "budget", "seed", "dtype", "protocol.question", "protocol.template")
Rows = Mapping[str, Mapping[str, Any]]


class Submission(NamedTuple):
    """A file that was written, and what a reader must know of it."""

    path: Path
    note: str


def predictions(rows: Rows) -> dict[str, str]:
    """Answers by sample, without thinking parts."""
    found = {}
    for name, row in rows.items():
        prompt = str((row.get("meta") or {}).get("prompt_last") or "")
        text = str(((row.get("out") or {}).get("text") or [""])[0])
        found[name] = thinking.answer_part(text, thinking.ends_open(prompt))
    return found


def scrolls_csv(answers: Mapping[str, Mapping[str, str]]) -> str:
    """The leaderboard's file from the answers of each data set."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("Task", "ID", "Prediction"))
    for name, found in answers.items():
        writer.writerows((name, sample, answer) for sample, answer in found.items())
    return text.getvalue()


def memory_lines(answers: Mapping[str, str]) -> str:
    """The judge's file."""
    rows = ({"question_id": name, "hypothesis": answer.strip()} for name, answer in answers.items())
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(entries: Iterable[Entry], folder: Path) -> list[Submission]:
    """Write a file for every model, method and budget that answered one of these benchmarks."""
    groups: dict[tuple[Any, ...], dict[str, Entry]] = {}
    for entry in entries:
        record = entry.record
        suite, _, name = str(record["task"]).partition("/")
        if suite in (SCROLLS, MEMORY) and record["status"] in ("ok", "unscored", "inactive"):
            key = (suite, entry.sweep, "" if suite == SCROLLS else record.get("protocol.pair"))
            groups.setdefault((*key, *(record.get(one) for one in COMMON)), {})[name] = entry
    written = []
    for key, members in groups.items():
        suite, first = key[0], next(iter(members.values())).record
        parts = (suite, first["model"], first["method"], first["budget"], digest(list(map(str, key)))[:6])
        stem = "-".join(for_filename(str(part).replace("/", "_")) for part in parts)
        folder.mkdir(parents=True, exist_ok=True)
        if suite == SCROLLS:
            path = folder / f"{stem}.csv"
            text = scrolls_csv({name: predictions(entry.rows()) for name, entry in sorted(members.items())})
            missing = [name for name in SETS if name not in members]
            note = f"the leaderboard wants all ten sets; missing: {', '.join(missing)}" if missing else "all ten sets"
        else:
            path = folder / f"{stem}.jsonl"
            rows = next(iter(members.values())).rows()
            text, note = memory_lines(predictions(rows)), f"{len(rows)} of the 500 questions"
        write_whole(path, text)
        written.append(Submission(path, note))
    return written
