"""LongMemEval: questions on months of chats (Wu et al., ICLR 2025, arXiv 2410.10813; xiaowu0162/LongMemEval 9e0b455).

Prompts, history and cut are the published ones of reading the whole history (src/generation/run_generation.py). The
published score is a judgement by GPT-4o; it is not offered. What is: `contains`, 1 where the expected answer stands in the
given one word for word, which denies right answers in other words their point. Two kinds of questions have no answer that
could be found so, only a rubric or an explanation (preferences and abstention): `questions=all` asks them too and leaves
all unscored, and `scripts/report.py --submission FOLDER` writes the file that the published judge takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.common.tokenization import plain_ids, prompt_ids
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample

INTRODUCTION = (
    "I will give you several history chats between you and a user. Please answer the question based on the relevant chat "
    "history."
)
STEPS = (
    " Answer the question step by step: first extract all the relevant information, and then reason over the information "
    "to get the answer."
)
FILES = {"s": "longmemeval_s_cleaned", "m": "longmemeval_m_cleaned", "oracle": "longmemeval_oracle"}
KINDS = (
    "single-session-user", "single-session-assistant", "single-session-preference", "multi-session",
    "temporal-reasoning", "knowledge-update",
)  # fmt: skip
TOKENS = {"con": 800, "direct": 500}  # of an answer, by how it is read
SPARE = 1000  # tokens beside history and answer, as published


def judged(row: Mapping[str, Any]) -> bool:
    """True where the expected answer can stand in a given one: it is neither a rubric nor an explanation."""
    return row["question_type"] != "single-session-preference" and "_abs" not in str(row["question_id"])


@dataclass(frozen=True, kw_only=True)
class LongMemEval(RowTask):
    """Containment of the expected answer; by kind of question in the record. Not the published judge.

    Attributes:
        subset: "s", some 40 sessions and 115,000 tokens; "m", some 500 sessions; "oracle", sessions with evidence alone.
        reading: "con", information is extracted first (as published by default), or "direct".
        history: sessions written as "json" (as published by default) or "nl".
        questions: "contained", those whose answer can be found in another text, or "all", unscored.
        max_length: tokens of the history at most, the earliest; None: what the tokenizer says the model takes, less the
            answer and 1,000, as published.
        revision: commit of the data set on the Hub, or its branch.
        source, question, template: see `RowTask`. Files are `longmemeval/longmemeval_s_cleaned.json` and so on.
    """

    name: ClassVar[str] = "longmemeval"
    metric: ClassVar[str] = "contains"
    folder: ClassVar[str] = "longmemeval"
    ending: ClassVar[str] = ".json"
    whole_answers: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = (
        "question_id", "question_type", "question", "answer", "question_date", "haystack_dates", "haystack_sessions",
    )  # fmt: skip

    subset: str = "s"
    reading: str = "con"
    history: str = "json"
    questions: str = "contained"
    revision: str = "98d7416c24c778c2fee6e6f3006e7a073259d48f"

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = {
            "subset": tuple(FILES),
            "reading": tuple(TOKENS),
            "history": ("json", "nl"),
            "questions": ("contained", "all"),
        }
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")

    def names(self) -> Sequence[str]:
        return [FILES[self.subset]]

    def hub(self) -> hub.Source | hub.File | None:
        return hub.File("xiaowu0162/longmemeval-cleaned", f"{FILES[self.subset]}.json", "", self.revision)

    def read(self, path: Path) -> Sequence[tuple[str, dict[str, Any]]]:
        return jsonl.listed(path, self.fields)

    def located(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """All questions that are asked, with `_id`."""
        found: list[tuple[str, dict[str, Any]]] = []
        names: set[str] = set()
        for where, row in super().located():
            name = jsonl.text(row, "question_id", where)
            if name in names:
                raise ValueError(f"{where}: question_id {name!r} is another record's too")
            if row["question_type"] not in KINDS:
                raise ValueError(f"{where}: question_type={row['question_type']!r}; valid: {', '.join(KINDS)}")
            names.add(name)
            if self.questions == "all" or judged(row):
                found.append((where, row | {"_id": name}))
        if not found:
            raise ValueError(f"{self.name}: no question has an answer that can be found in another text: questions=all")
        return found

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return TOKENS[self.reading]

    def limit(self, tokenizer: Any) -> int | None:
        return self.max_length or prompts.room(tokenizer, self.new_tokens({}), SPARE)

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": row["question_type"], "sessions": len(row["haystack_sessions"])}

    # ------------------------------------------------------------------ prompts

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        date, question = (jsonl.text(row, field, where) for field in ("question_date", "question"))
        answer = jsonl.answer(row["answer"], "answer", where)
        con = self.reading == "con"
        head = f"{INTRODUCTION}{STEPS if con else ''}\n\n\nHistory Chats:\n\n"
        tail = f"\n\nCurrent Date: {date}\nQuestion: {question}\nAnswer{' (step by step)' if con else ''}:"
        references = (answer,) if self.questions == "contained" else ()
        return RowPrompt(head + self._sessions(row, where) + tail, tail, references)

    def _sessions(self, row: Mapping[str, Any], where: str) -> str:
        """The history: sessions in the order of their dates."""
        dates, sessions = row["haystack_dates"], row["haystack_sessions"]
        if not isinstance(dates, list) or not isinstance(sessions, list) or len(dates) != len(sessions) or not dates:
            raise ValueError(f"{where}: haystack_dates and haystack_sessions must be lists of one length, at least 1")
        dated = []
        for number, (date, session) in enumerate(zip(dates, sessions, strict=True), 1):
            here = f"{where}, haystack_sessions {number}"
            if not isinstance(session, list):
                raise ValueError(f"{here}: must be a list of messages, found {type(session).__name__}")
            for message in session:
                jsonl.check(message, ("role", "content"), here)
                for field in ("role", "content"):
                    jsonl.text(message, field, here)
            dated.append((jsonl.whole(date, f"haystack_dates {number}", where), session))
        dated.sort(key=lambda one: one[0])
        return "".join(
            f"\n### Session {number}:\nSession Date: {date}\nSession Content:\n{self._session(session)}\n"
            for number, (date, session) in enumerate(dated, 1)
        )

    def _session(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self.history == "json":  # where the evidence is, is not told
            return "\n" + json.dumps([{k: v for k, v in one.items() if k != "has_answer"} for one in messages])
        return "".join(f"\n\n{one['role']}: {one['content'].strip()}" for one in messages)

    def build(self, tokenizer: Any, row: Mapping[str, Any], asked: RowPrompt, where: str) -> prompts.Prompt:
        """The published cut: of a long history its first tokens stay."""
        limit = self.limit(tokenizer)
        at = asked.text.index("History Chats:\n\n") + len("History Chats:\n\n")
        history, cut = asked.text[at : len(asked.text) - len(asked.tail)], 0
        ids = prompt_ids(tokenizer, history)
        if limit is not None and len(ids) > limit:
            history, cut = tokenizer.decode(ids[:limit], skip_special_tokens=True), len(ids) - limit
        beside = len(plain_ids(tokenizer, asked.text[:at] + asked.tail))
        if beside > SPARE:
            raise ValueError(
                f"{where}: question and instruction take {beside} tokens, and {SPARE} are left for them beside the history: "
                "mend question, or leave the row out"
            )
        text = asked.text[:at] + history + asked.tail
        hide = self.question == "hidden"
        return replace(prompts.build(tokenizer, text, asked.tail, self.template, None, "text", hide), truncated=cut)

    # ------------------------------------------------------------------ scores

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, Any]:
        """1 where the expected answer stands in the given one; None where all questions are asked."""
        references = sample.turns[0].references
        return {"score": metrics.score(self.metric, out["text"][0], references) if references else None}

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Containment by kind of question, with how many there are of each."""
        if any(row["scores"]["score"] is None for row in rows):
            return {}
        found: dict[str, Any] = {}
        for kind in sorted({row["meta"]["kind"] for row in rows}):
            scores = [row["scores"]["score"] for row in rows if row["meta"]["kind"] == kind]
            found |= {f"contains_{kind}": fmean(scores), f"n_{kind}": len(scores)}
        return found
