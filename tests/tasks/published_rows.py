"""Rows of LooGLE, ZeroSCROLLS, LongMemEval and AIME 2025 in their published formats, made here: always the same ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

N = 28
PEOPLE = ("Anna", "Bob", "Clara", "David", "Emma", "Felix")
SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
KINDS = (
    "single-session-user", "single-session-assistant", "single-session-preference", "multi-session",
    "temporal-reasoning", "knowledge-update",
)  # fmt: skip


def story(rng: random.Random, sentences: int = 12) -> str:
    return " ".join(
        f"{rng.choice(PEOPLE)} wrote {rng.randint(2, 99)} letters to {rng.choice(PEOPLE)}." for _ in range(sentences)
    )


def loogle(name: str) -> list[dict[str, Any]]:
    """Documents; those that are no summaries have one question or two, written down as Python does."""
    rng = random.Random(name)
    rows = []
    for number in range(N):
        text = story(rng)
        who = rng.sample(PEOPLE, 2)
        if name == "longdep_summarization":
            rows.append(
                {"input": text, "title": f"2201.{number:05}", "qa_pairs": "none", "output": f"Letters by {who[0]}."}
            )
            continue
        pairs = [
            {
                "Q": f"<mask-0> wrote to <mask-1>, letter {k}.",
                "A": {f"<mask-{i}>": one for i, one in enumerate(who)},
                "S": text,
            }
            if name == "shortdep_cloze"
            else {
                "Q": f"Who wrote letter {k}?",
                "A": f"{who[k]} wrote it, don't ask.",
                "S": [text],
                "type": "computation",
            }
            for k in range(2 - (number % 7 > 1))
        ]
        rows.append({"input": text, "title": f"Story {number}", "qa_pairs": str(pairs), "output": "none"})
    return rows


def zero_scrolls(name: str, hidden: bool = False) -> list[dict[str, Any]]:
    """Instruction, document, query and start of the answer in one `input`, with the places where they meet."""
    rng = random.Random(name)
    rows = []
    for number in range(N):
        instruction = f"You are given a text about letters. Read it ({name}).\n\n"
        document = f"Text:\n{story(rng)}"
        query = (
            ""
            if name in ("gov_report", "summ_screen_fd", "space_digest", "book_sum_sort")
            else "\n\nQuestion:\nWho wrote?"
        )
        end = {
            "space_digest": "\n\nPercentage of Positive Reviews:",
            "book_sum_sort": "\n\nSummary IDs in Correct Order:",
        }
        start = "\n\nSummary:" if name in SUMMARIES else end.get(name, "\n\nAnswer:")
        text = instruction + document + query + start
        order = list(range(1, 6))
        rng.shuffle(order)
        answer = {
            "quality": rng.choice("ABCD"),
            "space_digest": f"{rng.randint(0, 100)}%",
            "book_sum_sort": ", ".join(map(str, order)),
        }.get(name, f"{rng.choice(PEOPLE)} wrote letters to {rng.choice(PEOPLE)} and others.")
        at = len(instruction + document)
        rows.append({
            "id": f"{name}_{number}", "pid": f"{name}_{number}_0", "input": text, "output": None if hidden else answer,
            "document_start_index": len(instruction), "document_end_index": at, "query_start_index": at,
            "query_end_index": at + len(query), "truncation_seperator": "\n\n... [The rest of the text is omitted]",
        })  # fmt: skip
    return rows


def longmemeval() -> list[dict[str, Any]]:
    """Questions on three dated sessions, not in the order of their dates; every sixth is a rubric, some abstain."""
    rng = random.Random("longmemeval")
    rows = []
    for number in range(N):
        days = rng.sample(range(1, 29), 3)
        sessions = [
            [
                {"role": "user", "content": story(rng, 3) + " “Ça va?” "},
                {"role": "assistant", "content": story(rng, 2), **({"has_answer": True} if k == 1 else {})},
            ]
            for k in range(3)
        ]
        rows.append({
            "question_id": f"q{number:03}" + ("_abs" if number % 8 == 7 else ""), "question_type": KINDS[number % 6],
            "question": f"How many letters did {rng.choice(PEOPLE)} write?",
            "answer": rng.randint(2, 99) if number % 2 else f"{rng.choice(PEOPLE)}'s letters, the last",
            "question_date": "2023/05/30 (Tue) 23:40", "haystack_session_ids": [f"s{number}_{k}" for k in range(3)],
            "haystack_dates": [f"2023/05/{day:02} (Sat) 02:21" for day in days], "haystack_sessions": sessions,
            "answer_session_ids": [f"s{number}_1"],
        })  # fmt: skip
    return rows


def aime25() -> list[dict[str, Any]]:
    rng = random.Random("aime25")
    return [
        {"problem": f"Find ${k} \\cdot {k}$ modulo 1000.", "answer": str(rng.randint(0, 999)), "id": str(k)}
        for k in range(N)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file in the published form: one JSON list for LongMemEval, else JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(lines, encoding="utf-8")
    return path
