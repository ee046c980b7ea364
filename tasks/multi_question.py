"""Multi-question contexts: several questions on one context that is compressed before any of them is known.

The protocol of SCBench (Li et al., ICLR 2025, arXiv 2412.10319; microsoft/MInference, scbench), there "multi-request"
(`turns=independent`) and "multi-turn" (`turns=gold`; its scripts put right answers in place of the model's own, unless
told otherwise: `turns=session`). The question is never seen during compression. Contexts are RULER-style needles made
here, the key-value objects of `task=kv_retrieval`, or rows of a file, also SCBench's own. Differences: wording, lengths
and scores are those of our single-question tasks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.common.hashing import content_hash
from kvcompress.common.prose import Encoder
from kvcompress.data import conversation, jsonl, prompts
from kvcompress.data.haystack import ADJECTIVES, NOUNS, build_haystack, follow_up, load_haystack, prompt_template
from kvcompress.data.task import Sample, Task, Turn
from kvcompress.tasks import kv_retrieval, needle

FORMS = {  # metric and tokens of an answer, unless told otherwise
    "needles": ("string_match_all", 32),
    "kv_retrieval": ("string_match_part", 100),
    "rows": ("qa_f1", 64),
}


@dataclass(frozen=True)
class Question:
    """Text of the user's message, start of the answer, and what is expected."""

    text: str
    prefix: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Quiz:
    """Questions on one context: `text` stands before them all, hay of `hay_tokens` with `needles` after it."""

    id: str
    text: str
    questions: tuple[Question, ...]
    length: int | None = None
    needles: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class MultiQuestion(Task):
    """The score of a sample is the mean over its questions; `metrics.score_by_turn` has each place's mean.

    Attributes:
        form: "needles" (a magic number per question in a haystack), "kv_retrieval" (keys of one JSON object) or "rows"
            (JSON Lines: `context`, and `questions` or SCBench's `multi_turns`, each with `question` or `input` and
            `answers` or `answer`).
        turns: "independent", "session" or "gold", see `kvcompress.data.task.TURNS`.
        n_questions: on each context; of rows at most.
        lengths: tokens of the context and one question, at most; n_samples: per length (needles).
        haystack, essays: as in `task=needle`.
        keys: pairs of an object (kv_retrieval).
        source: "auto" (kv_retrieval: `paths.data`), or a file or folder of JSON Lines.
        wording: prompt of a row. What follows `{context}` is asked again in every turn.
        max_length: tokens of a row's context at most, cut in the middle; None: nothing is cut.
        scorer: a metric of `kvcompress.metrics`, or "auto": what the form is usually scored by.
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".
        answer_prefix: start the answer for the model, as RULER does (needles).
        max_new_tokens: of each answer; None: what the form usually takes.
    """

    name: ClassVar[str] = "multi_question"
    version: ClassVar[str] = "1"
    metric_version: ClassVar[str] = "1"

    form: str = "needles"
    turns: str = "independent"
    n_questions: int = 5
    lengths: tuple[int, ...] = (1024,)
    n_samples: int = 5
    haystack: str = "noise"
    essays: str = "auto"
    keys: int = 75
    source: str = "auto"
    wording: str = "{context}\n\nQuestion: {question}\nAnswer:"
    max_length: int | None = None
    scorer: str = "auto"
    template: str = "auto"
    answer_prefix: bool = True
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        valid = {
            "form": tuple(FORMS),
            "turns": conversation.ORDERS,
            "haystack": ("noise", "essay"),
            "essays": ("auto", "builtin", "files"),
            "template": prompts.TEMPLATES,
            "scorer": (
                "auto",
                *(name for name in metrics.VERSIONS if name not in ("classification", *metrics.WITH_LETTER)),
            ),
        }
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        for field, least in (("n_questions", 1), ("n_samples", 1), ("max_new_tokens", 1), ("max_length", 16)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"task.{field}={value}; at least {least}")
        if not self.lengths or len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"task.lengths={list(self.lengths)}: at least one is needed, and none twice")
        before, found, after = self.wording.partition("{context}")
        if not found or "{question}" in before or after.count("{question}") != 1:
            raise ValueError(f"task.wording={self.wording!r}; it needs {{context}}, and {{question}} once after it")
        if self.form == "rows" and self.source == "auto":
            raise ValueError("task.form=rows needs task.source: a JSON Lines file with context and questions")

    @property
    def metric(self) -> str:  # type: ignore[override]
        return FORMS[self.form][0] if self.scorer == "auto" else self.scorer

    def converses(self) -> bool:
        return self.turns == "session"

    def cannot_batch(self) -> str | None:
        return conversation.cannot_batch(self.turns)

    # ------------------------------------------------------------------ contexts and questions

    def _pairs(self) -> kv_retrieval.KVRetrieval:
        return kv_retrieval.KVRetrieval(seed=self.seed, data=self.data, keys=self.keys, source=self.source)

    def _file(self) -> Path:
        path = Path(self.source).expanduser()
        files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
        if len(files) != 1:
            raise ValueError(f"task.source={self.source!r} is no JSON Lines file and no folder with exactly one")
        return files[0]

    def quizzes(self) -> Iterator[Quiz]:
        """Every context with its questions.

        Raises:
            ValueError: no data, or a row without what is needed: named with its line.
        """
        make = {"needles": self._of_needles, "kv_retrieval": self._of_pairs, "rows": self._of_rows}
        return make[self.form]()

    def _of_needles(self) -> Iterator[Quiz]:
        singular = needle.singular
        for length in self.lengths:
            for number in range(self.n_samples):
                rng = random.Random(f"multi_question:{self.seed}:{number}")
                names = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
                words = rng.sample(names, self.n_questions)
                numbers = map(str, rng.sample(range(1_000_000, 10_000_000), self.n_questions))
                found = dict(zip(words, numbers, strict=True))
                prefix = singular(needle.RULER_ANSWER) if self.answer_prefix else ""
                questions = tuple(
                    Question(singular(needle.RULER_QUESTION).format(query=w), prefix.format(query=w), (n,))
                    for w, n in found.items()
                )
                needles = tuple(needle.RULER_NEEDLE.format(key=word, value=n) for word, n in found.items())
                text = needle.RULER_HEAD if len(found) > 1 else singular(needle.RULER_HEAD)
                yield Quiz(f"needles-L{length}-s{self.seed}.{number}", text, questions, length, needles, number)

    def _of_pairs(self) -> Iterator[Quiz]:
        task = self._pairs()
        for number, (row, asked) in enumerate(task.row_prompts()):
            pairs = [tuple(pair) for pair in row["ordered_kv_records"]]
            others = [pair for pair in pairs if pair[0] != row["key"]]
            if self.n_questions > len(others) + 1:
                raise ValueError(f"task.n_questions={self.n_questions}; row {number + 1} has {len(others) + 1} keys")
            rng = random.Random(f"multi_question:{self.seed}:{number}")
            chosen = [(row["key"], row["value"]), *rng.sample(others, self.n_questions - 1)]
            questions = tuple(Question(kv_retrieval.TAIL.format(key=key), "", (str(value),)) for key, value in chosen)
            yield Quiz(str(row.get("_id") or number), asked.text.removesuffix(asked.tail), questions)

    def _of_rows(self) -> Iterator[Quiz]:
        path = self._file()
        before, _, after = self.wording.partition("{context}")
        for number, (line, row) in enumerate(jsonl.numbered(path, ("context",))):
            where = f"{path} line {line}"
            context = jsonl.text(row, "context", where)
            asked = row.get("questions", row.get("multi_turns"))
            if not isinstance(asked, list) or not asked:
                raise ValueError(f"{where}: questions (or multi_turns) must be a list with at least one question")
            questions = tuple(
                _question(one, after, f"{where}, question {at}") for at, one in enumerate(asked[: self.n_questions], 1)
            )
            name = jsonl.identifier(row.get("_id", row.get("id")), number, where)
            yield Quiz(name, before + context, questions)

    def fingerprint(self) -> dict[str, Any]:
        """What the contexts are made of; every row is read, so that bad ones are refused before a model is loaded."""
        rows = sum(1 for _ in self.quizzes())
        if self.form == "needles":
            return {"haystack": load_haystack(self.haystack, self.data, self.essays).source}
        if self.form == "kv_retrieval":
            return self._pairs().fingerprint()
        return {"data": content_hash(self._file()), "records": rows}

    def provenance(self) -> dict[str, Any]:
        if self.form == "kv_retrieval":
            return self._pairs().provenance()
        return {} if self.form == "needles" else {"data": f"file:{content_hash(self._file())}"}

    def settings(self) -> dict[str, Any]:
        # where the data lies is no setting: what it holds is in the fingerprint
        return {name: value for name, value in super().settings().items() if name != "source"}

    def stated_lengths(self) -> tuple[int, ...]:
        return super().stated_lengths() if self.form == "needles" else ()

    # ------------------------------------------------------------------ samples and scores

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        hay = load_haystack(self.haystack, self.data, self.essays) if self.form == "needles" else None
        new = self.max_new_tokens or FORMS[self.form][1]
        for quiz in self.quizzes():
            encode = Encoder(tokenizer)  # it remembers what it encodes: no longer than a context is in use
            frames = [
                prompt_template(tokenizer, encode, quiz.text, q.text, q.prefix, self.template) for q in quiz.questions
            ]
            context, cut = frames[0].head, 0
            meta: dict[str, Any] = {}
            if hay is not None and quiz.length is not None:
                rng = random.Random(f"multi_question hay:{self.seed}:{quiz.number}")
                start = rng.randrange(len(hay.sentences)) if self.haystack == "essay" else 0
                room = quiz.length - len(context) - max(len(one.tail) for one in frames)
                try:
                    filled = build_haystack(
                        encode, hay, quiz.needles, [rng.random() for _ in quiz.needles], room, start
                    )
                except ValueError as error:
                    raise ValueError(f"task.lengths: {quiz.length} tokens are too few ({error})") from None
                context = (*context, *filled.ids)
                meta = {"length": quiz.length, "needle_depths": [round(depth, 6) for depth in filled.depths]}
            elif self.max_length is not None:
                cut = max(0, len(context) - self.max_length)
                context = prompts.cut_ids(context, self.max_length)
            ids = [one.tail for one in frames]
            for at, (before, question) in enumerate(zip(quiz.questions, quiz.questions[1:], strict=False), 1):
                if self.turns != "independent":
                    ids[at] = follow_up(tokenizer, encode, question.text, question.prefix, self.template)
                if self.turns == "gold":
                    ids[at] = (*encode(_written(before, frames[0].template)), *ids[at])
            yield Sample(
                id=quiz.id,
                segments=(context,),
                turns=tuple(
                    Turn(tail, new, references=question.references)
                    for tail, question in zip(ids, quiz.questions, strict=True)
                ),
                protocol={
                    "question": "hidden",
                    "turns": self.turns,
                    "template": frames[0].template,
                    **({"haystack": hay.source} if hay is not None else {}),
                },
                meta={**meta, **prompts.facts(tokenizer, (*context, *ids[0]), cut)},
            )

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Mean over the questions of the metric, and each question's own as `turn_1`, `turn_2`, …"""
        pairs = zip(out["text"], sample.turns, strict=True)
        found = [metrics.score(self.metric, text, turn.references) for text, turn in pairs]
        return conversation.scores(found)

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Mean score of each place in the order of questions, and how many samples have one there."""
        return conversation.by_turn(rows)


def _written(question: Question, template: str) -> str:
    """The right answer as it stands after the start of the answer, or at the start of the assistant's turn."""
    return (" " if question.prefix or template == "none" else "") + question.references[0]


def _question(one: Any, wording: str, where: str) -> Question:
    """A question of a row; ValueError names what is missing or of another type."""
    if not isinstance(one, dict):
        raise ValueError(f"{where}: a JSON object is needed, found {type(one).__name__}")
    text, answers = one.get("question", one.get("input")), one.get("answers", one.get("answer"))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: question (or input) must be text, found {text!r:.60}")
    jsonl.whole(text, "question (or input)", where)
    listed = jsonl.answers(answers if isinstance(answers, list) else [answers], "answers (or answer)", where)
    return Question(wording.replace("{question}", text), "", listed)
