"""Built-in prose, as text and as token ids: for prompts where no data set is at hand; equal seeds give equal texts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from kvcompress.common.tokenization import plain_ids


def split_list(text: str, mark: str | None = None) -> list[str]:
    return text.split(mark)


_SLOTS = {
    "who": split_list(
        "a patient teacher|the old carpenter|every good gardener|a young engineer|the village baker|my "
        "grandfather|an honest critic|the new librarian|a careful editor|the ferry captain|a tired nurse|one of "
        "the builders|a retired judge|the piano tuner|a curious child|the night watchman|an ambitious painter|the "
        "shopkeeper",
        "|",
    ),
    "does": split_list(
        "learns to wait|keeps a short list|asks the plain question first|repairs what is broken|writes things "
        "down|walks the long way home|starts over without complaint|listens before speaking|throws away the first "
        "draft|measures twice|forgets the small insults|leaves room for mistakes|opens the windows early|borrows "
        "tools and returns them|works in the quiet hours|trusts the slow method",
        "|",
    ),
    "why": split_list(
        "because haste is expensive|since nobody else will|although the reward is uncertain|because memory is a "
        "poor ledger|even when the weather turns|since habits outlast plans|because small errors grow|though few "
        "people notice|because the work itself is a kind of rest|since the details decide the outcome|as long as "
        "the light holds|because silence teaches more than noise",
        "|",
    ),
    "what": split_list(
        "a well-made chair|the shape of a sentence|an empty notebook|the sound of rain on a tin roof|a long "
        "letter from a friend|the first hour of the day|a map with its corners torn|the smell of fresh bread|a "
        "crowded station|an unfinished bridge|the habit of reading aloud|a garden in late autumn|the price of "
        "convenience|a borrowed book|the weight of a promise|a slow river",
        "|",
    ),
    "is": split_list(
        "is worth more than it seems|tells you something about its maker|changes with the season|cannot be "
        "hurried|is easily mistaken for luck|rewards attention|is harder to describe than to enjoy|outlives its "
        "purpose|looks different from close by|asks for very little|settles an argument better than words|is "
        "rarely what was planned",
        "|",
    ),
    "where": split_list(
        "in the mountains|near the harbor|at the edge of town|in a narrow kitchen|behind the school|on the upper "
        "floor|in most small companies|along the canal|in the back of the workshop|under the old bridge|on a "
        "quiet street|at the end of the line",
        "|",
    ),
    "when": split_list(
        "in the spring|after the harvest|on long evenings|before the first frost|during the quiet weeks|at the "
        "end of a busy year|when the guests have left|early in a project|toward the end of a career|on the first "
        "warm day|in difficult times|late at night",
        "|",
    ),
    "idea": split_list(
        "that good work hides its effort|that most advice is autobiography|that simple tools last longest|that "
        "people argue about what they cannot measure|that a promise is a kind of debt|that curiosity can be "
        "practised|that every shortcut has a toll|that the best conversations have pauses|that taste is mostly "
        "attention|that nobody regrets a walk|that clear writing is clear thinking|that failure is often only bad "
        "timing",
        "|",
    ),
}


_FRAMES = split_list(
    "{When}, {who} {does}.|{Who} {does} {why}.|{What} {is}.|{Where}, {what} {is}.|I used to believe {idea}, but "
    "{who} showed me otherwise.|{Who} once told me {idea}.|It is easy to forget {idea} {when}.|{When}, {what} "
    "{is}, and {who} knows it.|People {where} like to say {idea}.|There is nothing strange about {what} "
    "{where}.|If {who} {does}, it is usually {why}.|{What} {is} {when}.|Nobody {where} expects {what}.|The story "
    "goes {idea}, and {who} {does}.|{Who} and {who} rarely agree about {what}.|What matters {when} is not {what} "
    "but {what}.|{Where}, {who} {does} {when}.|Perhaps it is true {idea}.|{What} reminded me of {what}.|Suppose "
    "{who} {does} {when}; then {what} {is}.",
    "|",
)


def built_in_prose(seed: int = 0) -> Iterator[str]:
    """Endless essay-like sentences, the same for the same seed, without digits."""
    rng = random.Random(f"prose:{seed}")

    def fill_slot(match: re.Match[str]) -> str:
        slot = match[1]
        text = rng.choice(_SLOTS[slot.lower()])
        return text[0].upper() + text[1:] if slot[0].isupper() else text

    while True:
        yield re.sub(r"\{(\w+)\}", fill_slot, rng.choice(_FRAMES))


class Encoder:
    """Pieces of text as token ids that may be concatenated: no special tokens added, no invented leading space."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}
        self._anchor: list[int] = []
        anchor = self._encode("\n")
        joined = self._encode("\na")
        if joined[: len(anchor)] == anchor and joined[len(anchor) :] != self._encode("a"):
            self._anchor = anchor  # this tokenizer (SentencePiece style) puts a space before each piece it is given

    def _encode(self, text: str) -> list[int]:
        return plain_ids(self._tokenizer, text)

    def __call__(self, text: str) -> tuple[int, ...]:
        if text not in self._known:
            ids = self._encode(text)
            if self._anchor and text:
                anchored = self._encode("\n" + text)
                if anchored[: len(self._anchor)] == self._anchor:
                    ids = anchored[len(self._anchor) :]
            self._known[text] = tuple(ids)
        return self._known[text]


def prose_ids(encode: Encoder, least: int, seed: int = 0) -> list[int]:
    """Token ids of built-in prose, whole sentences, at least `least` of them."""
    prose, ids = built_in_prose(seed), list[int]()
    while len(ids) < least:
        ids += encode((" " if ids else "") + next(prose))
    return ids
