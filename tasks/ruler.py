"""RULER: 13 synthetic tasks at any length (Hsieh et al., COLM 2024, arXiv 2404.06654; NVIDIA/RULER c3f5e3b).

Prompts, starts of answers, answer lengths and scoring are the published ones (tasks/data/ruler.yaml); a length covers
prompt and answer, as there. `task=ruler` stands for all 13. Differences: samples are our own draw, since theirs depends
on the tokenizer and on Python's generator anyway; each sample is filled by itself, to the unit; keys and values of one
prompt never repeat; sentences end where a full stop says so; essays are read from `paths.data`, else written here;
words are the package wonderwords' where it is installed; the worked example of cwe stands in the user's message.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvcompress import metrics
from kvcompress.common.hashing import content_hash
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import prompts, ruler
from kvcompress.data.haystack import load_haystack
from kvcompress.data.questions import read_questions
from kvcompress.data.task import Sample, Task, Turn, of_suite


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each task, with those of its kind."""
    path = Path(__file__).parent / "data" / "ruler.yaml"
    made = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: made["kinds"][about["kind"]] | about for name, about in made["tasks"].items()}


@lru_cache(maxsize=4)
def _essay(data: str | None, essays: str) -> tuple[str, tuple[str, ...]]:
    """Name of the prose, and its words in order."""
    hay = load_haystack("essay", data, essays)
    return hay.source, tuple(word for sentence in hay.sentences for word in sentence.split(" "))


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """One task of RULER. `task` is the class's.

    Attributes:
        lengths: tokens of prompt and answer together, at most.
        n_samples: per length; RULER takes 500.
        question: "seen" during compression, or "hidden": what follows the context is appended after it.
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".
        answer_prefix: start the answer for the model, as published.
        max_new_tokens: None for the published length.
        essays: "auto" (the data folder's where present), "builtin" or "files".
        words: "auto" (the package wonderwords where installed), "builtin" or "wonderwords".
        source: JSON file with the questions of qa_1 (SQuAD 2.0) or qa_2 (HotpotQA, distractor); "auto": `paths.data`.
    """

    task: ClassVar[str]
    version: ClassVar[str] = "1"
    metric_version: ClassVar[str] = "1"

    lengths: tuple[int, ...] = (4096,)
    n_samples: int = 500
    question: str = "seen"
    template: str = "auto"
    answer_prefix: bool = True
    max_new_tokens: int | None = None
    essays: str = "auto"
    words: str = "auto"
    source: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        valid = {
            "question": ("seen", "hidden"),
            "template": prompts.TEMPLATES,
            "essays": ("auto", "builtin", "files"),
            "words": ("auto", "builtin", "wonderwords"),
        }
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        if self.n_samples < 1 or (self.max_new_tokens is not None and self.max_new_tokens < 1):
            raise ValueError(
                f"task.n_samples={self.n_samples}, task.max_new_tokens={self.max_new_tokens}; at least 1 is needed"
            )
        if not self.lengths or len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"task.lengths={list(self.lengths)}: at least one is needed, and none twice")
        if self.source != "auto" and self.about["kind"] != "qa":
            raise ValueError(
                f"task.source={self.source!r}: {self.name} is generated; only ruler/qa_1 and qa_2 read a file"
            )

    @property
    def about(self) -> dict[str, Any]:
        return settings()[self.task]

    @property
    def answer_tokens(self) -> int:
        return self.max_new_tokens or int(self.about["max_new_tokens"])

    def file(self) -> Path:
        """Where the questions of qa_1 and qa_2 are.

        Raises:
            ValueError: nowhere; says where it looked.
        """
        if self.source != "auto":
            places = [Path(self.source).expanduser()]
        elif self.data:
            places = [Path(self.data) / "ruler" / file for file in self.about["files"]]
        else:
            places = []
        for place in places:
            if place.is_file():
                return place
        looked = ", ".join(map(str, places)) or f"paths.data (not set), for ruler/{self.about['files'][0]}"
        raise ValueError(f"no questions for {self.name}: looked for {looked}. Set task.source or paths.data")

    def fingerprint(self) -> dict[str, Any]:
        about, facts = self.about, {}
        if about["kind"] == "qa":
            path = self.file()
            read_questions(path, about["reader"])  # refused here if broken, before a model is loaded
            facts["data"] = content_hash(path)
        if about.get("haystack") == "essay":
            facts["haystack"] = _essay(self.data, self.essays)[0]
        if about.get("keys") == "words" or self.task == "cwe":
            facts["words"] = ruler.word_lists(self.words)[0]
        return facts

    def provenance(self) -> dict[str, Any]:
        return {"data": f"file:{content_hash(self.file())}"} if self.about["kind"] == "qa" else {}

    def settings(self) -> dict[str, Any]:
        # where the questions lie is no setting: what they are is in the fingerprint
        return {name: value for name, value in super().settings().items() if name != "source"}

    def _writer(self, tokenizer: Any, length: int) -> ruler.Writer:
        about = self.about
        if about["kind"] == "niah":
            _, adjectives, nouns, _ = ruler.word_lists(self.words)
            essay = _essay(self.data, self.essays)[1] if about["haystack"] == "essay" else ()
            return ruler.Niah(about, adjectives, nouns, essay)
        if about["kind"] == "variable_tracking":
            lines = 5
            while len(plain_ids(tokenizer, ruler.Tracking(about).example_of(lines + 1))) <= 500:
                lines += 1
            return ruler.Tracking(about, lines)
        if about["kind"] == "common_words_extraction":
            return ruler.CommonWords(about, ruler.word_lists(self.words)[3], length < ruler.SHORT)
        if about["kind"] == "freq_words_extraction":
            return ruler.FrequentWords(about, (length - self.answer_tokens) // 50)
        return ruler.Quiz(about, *read_questions(self.file(), about["reader"]))

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Lengths, then samples. The needles, chains and words of a sample are the same at every length."""
        for length in self.lengths:
            writer, guess = self._writer(tokenizer, length), 0
            for number in range(self.n_samples):
                sample, guess = self._sample(tokenizer, writer, length, number, guess)
                yield sample

    def _sample(self, tokenizer: Any, writer: ruler.Writer, length: int, number: int, guess: int) -> tuple[Sample, int]:
        """Sample `number`, and the units of hay it took: a guess for the next."""

        def write(units: int) -> ruler.Text:
            return writer.write(number, random.Random(f"ruler:{self.task}:{self.seed}:{number}"), units)

        def build(text: ruler.Text, hide: bool) -> prompts.Prompt:
            answer = text.prefix if self.answer_prefix else ""
            return prompts.build(tokenizer, text.text, text.tail, self.template, None, "tokens", hide, answer)

        new = self.answer_tokens
        try:
            units = ruler.largest(lambda n: len(build(write(n), False).ids) + new, length, writer.least, guess)
        except ValueError as error:
            raise ValueError(
                f"{self.name}: task.lengths {length} does not work with this tokenizer: {error}"
            ) from error
        text = write(units)
        prompt = build(text, self.question == "hidden")
        sample = Sample(
            id=f"L{length}-s{self.seed}.{number}",
            segments=(prompt.context,),
            turns=(Turn(prompt.question, new, references=text.references),),
            protocol={"question": self.question, "template": prompt.template, "answer_prefix": self.answer_prefix},
            meta={"length": length, "units": units, **prompts.describe(tokenizer, prompt)},
        )
        return sample, units

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Share of the references that the answer contains; for qa_1 and qa_2, 1 if it contains any."""
        return {"score": metrics.score(self.metric, out["text"][0], sample.turns[0].references)}


def _task(name: str, about: dict[str, Any]) -> type[Task]:
    text = f"RULER's {name} ({about['kind'].replace('_', ' ')}, metric {about['metric']})."
    return of_suite(Ruler, "ruler", name, text, about["metric"], task=name)


globals().update({cls.__name__: cls for cls in (_task(name, about) for name, about in settings().items())})
