"""Questions of one's own: contexts, questions and answers of a JSON Lines or csv file, without any code.

What a row may hold: `kvcompress.data.question_rows`. A prompt is the context, a blank line, the question, as a user's
message; the question is hidden from the compression unless told otherwise, so that several questions on one context
share its compressed cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.common.hashing import content_hash
from kvcompress.common.prose import Encoder
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import conversation, grading, prompts, question_rows
from kvcompress.data.haystack import follow_up, prompt_template
from kvcompress.data.question_rows import Asked, ContextRow
from kvcompress.data.task import Sample, Task, Turn

MATH = "math"  # equality as of the reasoning tasks
METRICS = (*(name for name in metrics.VERSIONS if name != "classification"), MATH)
ORDERS = ("independent", "session", "gold")


@dataclass(frozen=True, kw_only=True)
class JsonLines(Task):
    """The score of a context is the mean over its questions.

    Attributes:
        file: JSON Lines, or csv with a header.
        metric: of `kvcompress.metrics`, or "math": the last box or final answer, compared by math-verify.
        question: "hidden" during compression; or "seen", where each question is a prompt of its own.
        turns: of several hidden questions: "independent", "session" or "gold", see `kvcompress.data.task.TURNS`.
        wording: of a prompt. What follows `{context}` is asked again with every question.
        prefix: start of each answer, which the model continues.
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".
        max_length: tokens of a context at most, cut in the middle; None: nothing is cut.
        max_new_tokens: of each answer.
    """

    name: ClassVar[str] = "jsonl"
    version: ClassVar[str] = "1"
    metric_version: ClassVar[str] = "1"

    file: str = ""
    metric: str = "string_match_part"  # type: ignore[misc]  # a setting here, of the class elsewhere
    question: str = "hidden"
    turns: str = "independent"
    wording: str = "{context}\n\n{question}"
    prefix: str = ""
    template: str = "auto"
    max_length: int | None = None
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        valid = {
            "metric": METRICS,
            "question": ("hidden", "seen"),
            "turns": ORDERS,
            "template": prompts.TEMPLATES,
        }
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        for field, least in (("max_new_tokens", 1), ("max_length", 16)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"task.{field}={value}; at least {least}")
        before, found, after = self.wording.partition("{context}")
        if not found or "{question}" in before or after.count("{question}") != 1 or "{context}" in after:
            raise ValueError(
                f"task.wording={self.wording!r}; it needs {{context}} once, and {{question}} once after it"
            )
        if self.metric == MATH and not grading.available():
            raise ValueError("task.metric=math judges with math-verify: pip install 'kvcompress[reasoning]'")

    @property
    def path(self) -> Path:
        """The file.

        Raises:
            ValueError: none is named, or there is none.
        """
        path = Path(self.file).expanduser()
        if not self.file or not path.is_file():
            raise ValueError(
                f"task.file={self.file!r} is no file; it needs one of JSON Lines or csv with context, question and answer"
            )
        return path

    def rows(self) -> tuple[ContextRow, ...]:
        """Contexts with their questions; where a question is seen, each by itself.

        Raises:
            ValueError: a bad row, named with file, line and field.
        """
        about = self.path.stat()
        found = _read(self.path, about.st_mtime_ns, about.st_size)
        if self.question == "hidden":
            return found
        apart = tuple(
            ContextRow(row.id if len(row.asked) == 1 else f"{row.id}.{at}", row.context, (one,), one.where)
            for row in found
            for at, one in enumerate(row.asked, 1)
        )
        names = dict.fromkeys(row.id for row in apart)
        if len(names) < len(apart):
            twice = next(row for row in apart if names.pop(row.id, row) is not None)
            raise ValueError(
                f"{twice.where}: question {twice.id!r} has the name of another row: rename that row's id, as each question is a "
                "sample of its own where task.question=seen"
            )
        return apart

    def fingerprint(self) -> dict[str, Any]:
        """Which data; every row is read, so that bad ones are refused before a model is loaded."""
        return {"data": content_hash(self.path), "records": len(self.rows())}

    def provenance(self) -> dict[str, Any]:
        return {"data": f"file:{content_hash(self.path)}"}

    def settings(self) -> dict[str, Any]:
        # where the data lies is no setting, what it holds is in the fingerprint; the metric is named with its version
        return {name: value for name, value in super().settings().items() if name not in ("file", "metric")}

    def converses(self) -> bool:
        return self.question == "hidden" and self.turns == "session"

    def cannot_batch(self) -> str | None:
        several = self.question == "hidden" and any(len(row.asked) > 1 for row in self.rows())
        return conversation.cannot_batch(self.turns) if several else None

    # ------------------------------------------------------------------ samples and scores

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        before, _, after = self.wording.partition("{context}")
        for row in self.rows():
            encode = Encoder(tokenizer)  # it remembers what it encodes: no longer than a context is in use
            texts = [after.replace("{question}", one.question) for one in row.asked]
            frames = [
                prompt_template(tokenizer, encode, before + row.context, text, self.prefix, self.template)
                for text in texts
            ]
            template, context, cut = frames[0].template, frames[0].head, 0
            if self.max_length is not None:
                cut = max(0, len(context) - self.max_length)
                context = prompts.cut_ids(context, self.max_length)
            ids = [frame.tail for frame in frames]
            for at in range(1, len(ids)):
                if self.turns != "independent":
                    ids[at] = follow_up(tokenizer, encode, texts[at], self.prefix, self.template)
                if self.turns == "gold":
                    blank = " " if self.prefix or template == "none" else ""
                    ids[at] = (*encode(blank + row.asked[at - 1].answers[0]), *ids[at])
            for one in row.asked:
                self._check_room(tokenizer, one)
            hidden = self.question == "hidden"
            yield Sample(
                id=row.id,
                segments=(context,) if hidden else ((*context, *ids[0]),),
                turns=tuple(
                    Turn(tail if hidden else (), self.max_new_tokens, references=one.answers)
                    for tail, one in zip(ids, row.asked, strict=True)
                ),
                protocol={
                    "question": self.question,
                    "template": template,
                    "max_length": self.max_length,
                    **({"turns": self.turns} if len(ids) > 1 else {}),
                },
                meta=prompts.facts(tokenizer, (*context, *ids[0]), cut),
                where=row.where if len(ids) == 1 else f"{row.where}, context and {len(ids)} questions",
            )

    def _check_room(self, tokenizer: Any, one: Asked) -> None:
        """Refuse a question to which no answer can be given in full.

        Raises:
            ValueError: names row and field, the length and the limit.
        """
        shortest = min(len(plain_ids(tokenizer, answer)) for answer in one.answers)
        if shortest > self.max_new_tokens:
            raise ValueError(
                f"{one.where}: answer has {shortest} tokens, but task.max_new_tokens={self.max_new_tokens}: nobody could give "
                "it; raise the limit, or shorten the answer"
            )

    def gold(self, sample: Sample) -> list[str] | None:
        if self.metric == MATH:
            return [f"\\boxed{{{turn.references[0]}}}" for turn in sample.turns]
        return super().gold(sample)

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Mean over the questions of the metric, and each one's own as `turn_1`, `turn_2`, … where there are several."""
        found = [
            self._scored(text, end, turn.references)
            for text, end, turn in zip(out["text"], out["finished"], sample.turns, strict=True)
        ]
        return conversation.scores(found) if len(found) > 1 else {"score": found[0]}

    def _scored(self, text: str, end: str, references: Sequence[str]) -> float:
        if self.metric == MATH:
            return float(any(grading.grade(gold, text, end == "stop").right for gold in references))
        return metrics.score(self.metric, text, references)

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Mean score of each place in the order of questions, and how many contexts have one there."""
        return conversation.by_turn(rows) if any("turn_1" in row["scores"] for row in rows) else {}


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> tuple[ContextRow, ...]:
    return tuple(question_rows.read(path))
