"""RULER's text generators (Hsieh et al., COLM 2024, arXiv 2404.06654; rules of NVIDIA/RULER c3f5e3b, written anew).

A writer makes one prompt from a random generator and a number of units of hay (lines, words, documents); the same
generator state and number give the same text, and one more unit makes it longer. `largest` finds how many fit.
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, cycle, islice, product
from typing import Any, Protocol

import torch

from kvcompress.data.haystack import ADJECTIVES, NOISE, NOUNS, split_sentences
from kvcompress.data.questions import Question

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE_LINE = " ".join(NOISE)
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # per cent, in sentences
SHORT = 4096  # below it RULER repeats fewer common words


@dataclass(frozen=True)
class Text:
    """A prompt in words.

    Attributes:
        text: all of it, without the start of the answer; it ends with `tail`.
        tail: the question and what follows.
        prefix: start of the answer, which the model continues.
        references: what the answer should hold.
    """

    text: str
    tail: str
    prefix: str
    references: tuple[str, ...]


class Writer(Protocol):
    """`least` units of hay are needed; `write` makes the text of sample `number` with `units` of them."""

    @property
    def least(self) -> int: ...

    def write(self, number: int, rng: random.Random, units: int) -> Text: ...


def _text(about: dict[str, Any], context: str, references: Sequence[str], before: str = "", **slots: Any) -> Text:
    head, tail = about["template"].split("{context}")
    tail = tail.format(**slots)
    prefix = about["answer_prefix"].format(**slots)
    return Text(before + head.format(**slots) + context + tail, tail, prefix, tuple(references))


def largest(size: Callable[[int], int], limit: int, least: int, guess: int) -> int:
    """The largest number of units, at least `least`, whose size is at most `limit`; sizes grow with the number.

    Raises:
        ValueError: `least` is too large already.
    """
    low, low_size = least, size(least)
    if low_size > limit:
        raise ValueError(f"the shortest prompt and its answer take {low_size}")
    base, high, high_size, at = low_size, 0, 0, max(guess, least + 1)
    for tries in count(1):
        now = size(at)
        if now <= limit:
            low, low_size = at, now
        else:
            high, high_size = at, now
        if high and high - low <= 1:
            break
        if not high:
            slope = max((low_size - base) / (low - least), 1e-3)
            at = low + 1 + min(int((limit - low_size) / slope), 15 * low)
        elif tries % 4:  # between the two, by the slope: texts are nearly linear
            at = low + round((limit - low_size) * (high - low) / (high_size - low_size))
            at = min(max(at, low + 1), high - 1)
        else:
            at = (low + high) // 2
    return low


# ---------------------------------------------------------------------- words


@lru_cache(maxsize=4)
def word_lists(source: str) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Name of the source as found, adjectives, nouns, and all words without repeats.

    Args:
        source: "wonderwords" (RULER's own, the package of that name), "builtin", or "auto": the first where installed.

    Raises:
        ValueError: "wonderwords" is not installed.
    """
    try:
        if source == "builtin":
            raise ImportError
        import importlib.metadata
        import importlib.resources

        name = f"wonderwords-{importlib.metadata.version('wonderwords')}"
        assets = importlib.resources.files("wonderwords") / "assets"
        adjectives, nouns, verbs = (
            tuple((assets / f"{kind}list.txt").read_text(encoding="utf-8").split("\n"))
            for kind in ("adjective", "noun", "verb")
        )
    except ImportError as error:
        if source == "wonderwords":
            raise ValueError(
                "task.words=wonderwords, but it is not installed: pip install 'kvcompress[ruler]'"
            ) from error
        name, adjectives, nouns, verbs = "builtin", tuple(ADJECTIVES), tuple(NOUNS), ()
    adjectives, nouns, verbs = (
        tuple(word.strip() for word in words if word.strip()) for words in (adjectives, nouns, verbs)
    )
    return name, adjectives, nouns, tuple(sorted({*adjectives, *nouns, *verbs}))


@lru_cache(maxsize=1)
def invented_words() -> tuple[str, ...]:
    """22,500 pronounceable words of five letters in a fixed order: for where the lists end."""
    words = ["".join(letters) for letters in product("bdfgklmnprstvwz", "aeiou", "bdfglmnrtvz", "aeiou", "klmnr")]
    random.Random("invented words").shuffle(words)
    return tuple(words)


# ---------------------------------------------------------------------- writers


@dataclass(frozen=True)
class Niah:
    """Needles in noise lines, in prose (units are its words) or among other needles.

    Differs from RULER in that keys and values of one prompt never repeat.
    """

    about: dict[str, Any]
    adjectives: Sequence[str]
    nouns: Sequence[str]
    essay: Sequence[str]  # words of the prose, used around again

    @property
    def n_needles(self) -> int:
        return self.about.get("n_keys", 1) * self.about.get("n_values", 1)

    @property
    def least(self) -> int:
        return 1 if self.about["haystack"] == "essay" else self.n_needles

    def _draw(self, rng: random.Random, kind: str, taken: set[str]) -> str:
        while True:
            if kind == "words":
                made = f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"
            elif kind == "numbers":
                made = str(rng.randint(1_000_000, 9_999_999))
            else:
                made = str(uuid.UUID(int=rng.getrandbits(128), version=4))
            if made not in taken:
                taken.add(made)
                return made

    def write(self, number: int, rng: random.Random, units: int) -> Text:
        about, taken = self.about, set[str]()
        keys_kind, kind, n_queries = about["keys"], about["values"], about.get("n_queries", 1)
        values = {
            self._draw(rng, keys_kind, taken): [self._draw(rng, kind, taken) for _ in range(about.get("n_values", 1))]
            for _ in range(about.get("n_keys", 1))
        }
        needles = [NEEDLE.format(kind=kind, key=key, value=value) for key in values for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(list(values), n_queries)
        context = self._context(rng, units, needles, taken)
        references = [value for key in asked for value in values[key]]
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        if len(references) == 1:
            about = about | {part: _singular(about[part]) for part in ("template", "answer_prefix")}
            kind = kind[:-1]
        return _text(about, context, references, kind=kind, query=query)

    def _context(self, rng: random.Random, units: int, needles: list[str], taken: set[str]) -> str:
        about = self.about
        if about["haystack"] == "essay":
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            sentences = split_sentences(" ".join(islice(cycle(self.essay), units)))
            places = [0, *(int(len(sentences) * depth / 100) for depth in depths), len(sentences)]
            parts = [" ".join(sentences[a:b]) for a, b in zip(places, places[1:], strict=False)]
            return " ".join(part for pair in zip(parts, [*needles, ""], strict=True) for part in pair if part)
        # places are drawn from a generator of their own: lines of hay differ from number to number of units only in count
        places_rng = random.Random(rng.getrandbits(64))
        if about["haystack"] == "noise":
            lines = [NOISE_LINE] * units
        else:
            lines = [
                NEEDLE.format(
                    kind=about["values"],
                    key=self._draw(rng, about["keys"], taken),
                    value=self._draw(rng, about["values"], taken),
                )
                for _ in range(units)
            ]
        places = sorted(places_rng.sample(range(units), len(needles)), reverse=True)
        for at, needle in zip(places, needles, strict=True):
            lines.insert(at, needle)
        return "\n".join(lines)


def _singular(template: str) -> str:
    for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(plural, single)
    return template


@dataclass(frozen=True)
class Tracking:
    """Chains of variable assignments among noise lines, after a worked example of `example` lines."""

    about: dict[str, Any]
    example: int = 5

    @property
    def least(self) -> int:
        return self.about["hops"] + 1

    def write(self, number: int, rng: random.Random, units: int) -> Text:
        example = self._one(rng, self.example, 3)
        worked = f"{example.text}{example.prefix} {' '.join(example.references)}\n\n"
        return self._one(rng, units, 5, worked)

    def example_of(self, lines: int) -> str:
        """An example of that many lines, to measure; its letters do not matter."""
        text = self._one(random.Random("example"), lines, 3)
        return text.text + text.prefix

    def _one(self, rng: random.Random, units: int, letters: int, before: str = "") -> Text:
        chains, length = self.about["chains"], self.about["hops"] + 1
        names: list[str] = []
        while len(names) < chains * length:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if name not in names:
                names.append(name)
        lines, values = [NOISE_LINE] * units, []
        for first in range(0, len(names), length):
            here = names[first : first + length]
            values.append(str(rng.randint(10_000, 99_998)))
            statements = [f"VAR {here[0]} = {values[-1]}"]
            # the space at the end of a line is the published one
            statements += [f"VAR {new} = VAR {old} " for old, new in zip(here, here[1:], strict=False)]
            places = sorted(rng.sample(range(len(lines)), length))
            for already, (at, statement) in enumerate(zip(places, statements, strict=True)):
                lines.insert(at + already, statement)
        context = "\n".join(lines)
        return _text(self.about, context, names[:length], before, query=values[0], count=length)


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which ten words are common; units are different words. After a worked example."""

    about: dict[str, Any]
    words: Sequence[str]
    short: bool

    least = 11

    def write(self, number: int, rng: random.Random, units: int) -> Text:
        words = rng.sample(self.words, len(self.words))
        if units > len(words):
            known = set(words)
            words += [word for word in invented_words() if word not in known]
        if units > len(words):
            raise ValueError(f"only {len(words)} different words are at hand")
        example_of, example_common, example_rare, common, rare = (20, 3, 1, 6, 1) if self.short else (40, 10, 3, 30, 3)
        context, answer = self._list(rng, rng.sample(self.words, example_of), example_common, example_rare)
        shown = _text(self.about, context, answer)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(answer, 1))
        context, answer = self._list(rng, words[:units], common, rare)
        return _text(self.about, context, answer, before=f"{shown.text}{shown.prefix} {numbered}\n")

    @staticmethod
    def _list(rng: random.Random, words: Sequence[str], common: int, rare: int) -> tuple[str, Sequence[str]]:
        entries = list(words[:10]) * common + list(words[10:]) * rare
        rng.shuffle(entries)
        return " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1)), words[:10]


@dataclass(frozen=True)
class FrequentWords:
    """Coded words whose frequencies fall as k^-alpha; the most frequent is dots. Units are words before rounding."""

    about: dict[str, Any]
    vocabulary: int

    @property
    def least(self) -> int:
        # from here on the third word (k = 4) comes more often than the fourth (k = 5), whatever the rounding
        alpha = float(self.about["alpha"])
        return math.ceil(self._zeta() / (4**-alpha - 5**-alpha))

    def _zeta(self) -> float:
        alpha = torch.tensor(float(self.about["alpha"]), dtype=torch.float64)
        return float(torch.special.zeta(alpha, torch.ones_like(alpha)))

    def _counts(self, units: int, words: int) -> list[int]:
        alpha, zeta = float(self.about["alpha"]), self._zeta()
        return [int(units * k**-alpha / zeta) for k in range(1, words + 1)]

    def write(self, number: int, rng: random.Random, units: int) -> Text:
        words: list[str] = []
        while len(words) < max(self.vocabulary, 5):
            word = "".join(rng.choices(string.ascii_lowercase, k=6))
            if word not in words:
                words.append(word)
        words[0] = "..."
        text = list(chain.from_iterable([w] * n for w, n in zip(words, self._counts(units, len(words)), strict=True)))
        rng.shuffle(text)
        return _text(self.about, " ".join(text), words[1:4])


@dataclass(frozen=True)
class Quiz:
    """Questions about one of many documents; units are documents. Sample i asks question i."""

    about: dict[str, Any]
    questions: Sequence[Question]
    documents: Sequence[str]

    @property
    def least(self) -> int:
        return max(1, *(len(question.documents) for question in self.questions[:500]))

    def write(self, number: int, rng: random.Random, units: int) -> Text:
        question = self.questions[number % len(self.questions)]
        own, more = list(question.documents), list(question.more)
        near = {*own, *more}
        if units >= len(self.documents):
            chosen = list(islice(cycle(range(len(self.documents))), units))
        elif units - len(own) > len(more):
            others = [at for at in range(len(self.documents)) if at not in near]
            chosen = own + more + rng.sample(others, len(others))[: units - len(own) - len(more)]
        else:
            chosen = own + rng.sample(more, len(more))[: max(0, units - len(own))]
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{self.documents[at]}" for i, at in enumerate(chosen, 1))
        return _text(self.about, context, question.answers, query=question.query)
