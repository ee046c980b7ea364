"""Needle in a haystack: find a fact hidden at a known depth of a long context.

Two forms. `ruler`: magic numbers behind adjective-noun keys, wording and scoring of NVIDIA/RULER's niah tasks (c3f5e3b,
scripts/data/synthetic). `classic`: one sentence, length x depth grid, the prompt of the KV-cache papers. The haystack
is built in; essays are read from `paths.data` where present. What differs from RULER: depths are a grid and exact, a
noise line may be parted at a sentence boundary (the needle still stands on its own line), and the length limit covers
the prompt alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.common.prose import Encoder
from kvcompress.data import prompts
from kvcompress.data.haystack import (
    ADJECTIVES,
    NOUNS,
    Haystack,
    build_haystack,
    essays_folder,
    load_haystack,
    prompt_template,
)
from kvcompress.data.task import Sample, Task, Turn

RULER_NEEDLE = "One of the special magic numbers for {key} is: {value}."
RULER_HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n"
)
RULER_QUESTION = "\nWhat are all the special magic numbers for {query} mentioned in the provided text?"
RULER_ANSWER = " The special magic numbers for {query} mentioned in the provided text are"

CLASSIC_NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
CLASSIC_SPANS = ("eat a sandwich", "Dolores Park")
CLASSIC_HEAD = "This is a very long story book: <book> "
CLASSIC_QUESTION = (
    " </book>.\nBased on the content of the book, Question: What is the best thing to do in San Francisco?"
)
CLASSIC_ANSWER = "\nAnswer: The best thing to do in San Francisco is"


def singular(text: str) -> str:
    """RULER's wording for one answer: "A special magic number is hidden", "What is the special magic number"."""
    for plural, single in (
        ("Some special", "A special"),
        ("numbers are hidden", "number is hidden"),
        ("the numbers", "the number"),
        ("are all the special magic numbers", "is the special magic number"),
        ("The special magic numbers", "The special magic number"),
    ):
        text = text.replace(plural, single)
    return text[: -len("are")] + "is" if text.endswith("text are") else text


@lru_cache(maxsize=8)
def _haystack(kind: str, data: str | None, essays: str) -> Haystack:
    return load_haystack(kind, data, essays)


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Needle in a haystack.

    Attributes:
        form: "ruler" or "classic".
        haystack: "noise" or "essay"; `essays`: "auto" (the data folder's where present), "builtin" or "files".
        lengths: tokens of the whole prompt, at most; a prompt holds at least 95% of it.
        depths: where the (first asked-for) needle lies, 0 = start, 1 = end of the context; the others lie at random.
        n_seeds: samples per length and depth.
        n_keys, n_values, n_queries: keys hidden, numbers per key, keys asked for (ruler only).
        question: "seen" during compression, or "hidden" and appended after it. The token ids are the same.
        template: "auto" (the tokenizer's chat template if it has one), "chat" or "none".
        answer_prefix: start the answer for the model, as RULER does.
        max_new_tokens: answer length; RULER allows 128.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "string_match_all"
    metric_version: ClassVar[str] = "1"

    form: str = "ruler"
    haystack: str = "noise"
    essays: str = "auto"
    lengths: tuple[int, ...] = (1024,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    n_seeds: int = 1
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1
    question: str = "seen"
    template: str = "auto"
    answer_prefix: bool = True
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "depths", tuple(float(depth) for depth in self.depths))
        valid = {
            "form": ("ruler", "classic"),
            "haystack": ("noise", "essay"),
            "essays": ("auto", "builtin", "files"),
            "question": ("seen", "hidden"),
            "template": ("auto", "chat", "none"),
        }
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        for field in ("n_seeds", "n_keys", "n_values", "n_queries", "max_new_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)}; at least 1 is needed")
        if not self.lengths or not self.depths:
            raise ValueError("task.lengths and task.depths need at least one value each")
        if any(not 0.0 <= depth <= 1.0 for depth in self.depths):
            raise ValueError(f"task.depths={list(self.depths)}; a depth is a share of the context, from 0.0 to 1.0")
        for field in ("lengths", "depths"):
            if len(set(getattr(self, field))) != len(getattr(self, field)):
                raise ValueError(
                    f"task.{field}={list(getattr(self, field))} holds a value twice; use n_seeds for repeats"
                )
        if self.form == "classic" and (self.n_keys, self.n_values, self.n_queries) != (1, 1, 1):
            raise ValueError("form=classic hides one sentence; n_keys, n_values and n_queries belong to form=ruler")

    def fingerprint(self) -> dict[str, Any]:
        found = essays_folder(self.data) is not None and self.essays != "builtin"
        source = "noise" if self.haystack == "noise" else "essay:PaulGraham" if found else "essay:builtin"
        return {"haystack": source}

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Lengths, then depths, then seeds; the needle of a seed and depth is the same at every length."""
        encode = Encoder(tokenizer)
        for length in self.lengths:
            for depth in self.depths:
                for number in range(self.n_seeds):
                    yield self._sample(tokenizer, encode, length, depth, number)

    def _sample(self, tokenizer: Any, encode: Encoder, length: int, depth: float, number: int) -> Sample:
        rng = random.Random(f"needle:{self.seed}:{number}:{depth:.6f}")
        needles, head, question, answer, references = self._texts(rng)
        hay = _haystack(self.haystack, self.data, self.essays)
        wrap = prompt_template(tokenizer, encode, head, question, answer if self.answer_prefix else "", self.template)
        room = length - len(wrap.head) - len(wrap.tail)
        depths = [depth] + [rng.random() for _ in needles[1:]]
        # noise repeats, so where it starts says nothing; prose starts at another sentence for each seed
        start = rng.randrange(len(hay.sentences)) if self.haystack == "essay" else 0
        try:
            filled = build_haystack(encode, hay, needles, depths, room, start)
        except ValueError as error:
            raise ValueError(f"task.lengths: {length} tokens are too few for this prompt ({error})") from None
        context = (*wrap.head, *filled.ids)
        prompt = context + wrap.tail
        seen = self.question == "seen"
        return Sample(
            id=f"{self.form}-L{length}-d{depth:g}-s{self.seed}.{number}",
            segments=((*context, *wrap.tail) if seen else context,),
            turns=(Turn(() if seen else wrap.tail, self.max_new_tokens, references=references),),
            protocol={"question": self.question, "template": wrap.template, "haystack": hay.source},
            meta={
                "length": length,
                "depth": depth,
                "hay_tokens": filled.hay,
                "needle_depths": [round(d, 6) for d in filled.depths],
                "needle_offsets": [len(wrap.head) + offset for offset in filled.offsets],
                **prompts.facts(tokenizer, prompt),
            },
        )

    def _texts(self, rng: random.Random) -> tuple[list[str], str, str, str, tuple[str, ...]]:
        """Needles (an asked-for one first), text before the context, question, answer prefix, references."""
        if self.form == "classic":
            answer = CLASSIC_ANSWER
            return [CLASSIC_NEEDLE], CLASSIC_HEAD, CLASSIC_QUESTION, answer, CLASSIC_SPANS
        n_keys = max(self.n_keys, self.n_queries)  # as RULER does
        words = rng.sample([f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS], n_keys)
        numbers = [str(number) for number in rng.sample(range(1_000_000, 10_000_000), n_keys * self.n_values)]
        values = {word: numbers[i * self.n_values : (i + 1) * self.n_values] for i, word in enumerate(words)}
        asked = words[: self.n_queries]
        needles = [RULER_NEEDLE.format(key=key, value=value) for key in words for value in values[key]]
        query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        texts = [RULER_HEAD, RULER_QUESTION, RULER_ANSWER]
        if self.n_queries * self.n_values == 1:
            texts = [singular(text) for text in texts]
        head, question, answer = (text.format(query=query) for text in texts)
        return needles, head, question, answer, tuple(value for key in asked for value in values[key])

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """RULER's string_match_all: the share of references contained in the answer, case ignored."""
        return {"score": metrics.score(self.metric, out["text"][0], sample.turns[0].references)}
