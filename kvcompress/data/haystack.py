"""Haystacks for needle tests, and prompts assembled from token ids.

Everything is joined as token ids: pieces are encoded once, without special tokens, and never decoded and encoded again,
so an inserted needle stays verbatim, its offset is exact, and no beginning-of-sequence token slips in between.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.common.prose import Encoder, built_in_prose, split_list
from kvcompress.common.tokenization import begun
from kvcompress.data.prompts import resolve_template
from kvcompress.data.thinking import start_answer

ESSAYS = Path("niah") / "PaulGrahamEssays"

# RULER's repeated line (Apache-2.0, NVIDIA/RULER scripts/data/synthetic/niah.py).
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


ADJECTIVES = split_list(
    "able ancient ample aquatic bitter blissful brave brisk bronze calm careful cheerful clever coastal copper "
    "crisp curious dapper deep distant dusty eager early earnest elegant faint famous fearless fierce firm flat "
    "fluffy fond fragile frosty gentle gilded glossy golden graceful grand hasty hidden hollow honest humble icy "
    "jolly keen kind lively lonely lucky mellow mighty modest muddy narrow neat nimble noble odd orderly pale "
    "patient plain playful polite proud quaint quick quiet rapid rare ripe robust rough royal rustic sharp shiny "
    "silent silky simple sleepy slender smooth solemn spicy steady stout subtle sunny swift tidy timid tough "
    "tranquil upbeat vivid wandering warm wise witty wooden young zealous"
)

NOUNS = split_list(
    "acorn almanac anchor apron arch atlas bakery balcony banner barn basket beacon bellows bench blanket bonnet "
    "bottle bridge bucket cabin candle canoe canvas canyon carpet castle cellar chapel cherry chimney compass "
    "cottage cradle cricket crown cushion daisy desk dolphin dragon drawer drum eagle easel elbow ember engine "
    "falcon feather fence fiddle flask forest fountain garden glacier goblet granite hammer harbor harp hatch "
    "hermit island ivory jacket journal kettle kitchen ladder lagoon lantern ledger lemon library lobster magnet "
    "maple marble meadow mirror mitten monastery mountain napkin needlework oboe orchard otter oven paddle palace "
    "parcel pebble pepper pillow planet pocket quarry quilt rabbit raft ribbon river rocket saddle sailor sandal "
    "shovel sparrow spoon statue stove tavern temple thimble thunder tractor trumpet tunnel umbrella valley "
    "vessel village violin wagon walnut whistle willow window zipper"
)

# Slots of the built-in prose: written for this project, so that a haystack of ordinary English works offline and is
# free to ship. The frames and slots below give over a million different sentences; none holds a digit.


@dataclass(frozen=True)
class Haystack:
    """Sentences in order, and what stands between them.

    Attributes:
        source: what they are, for records.
        sentences: each ends in its own punctuation; used from a start onwards and around again.
        separators: text between sentence i and the next one.
        needle_separator: text on both sides of a needle.
    """

    source: str
    sentences: Sequence[str]
    separators: Sequence[str]
    needle_separator: str


def split_sentences(text: str) -> list[str]:
    """Sentences of `text`, white space normalised; fragments without a letter join what went before."""
    pieces = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text).strip())
    sentences: list[str] = []
    for piece in pieces:
        if sentences and not re.search(r"[A-Za-z]", piece):
            sentences[-1] += " " + piece
        elif piece:
            sentences.append(piece)
    return sentences


def essays_folder(data: str | None) -> Path | None:
    """The essays under the data folder, or None where there are none."""
    folder = Path(data) / ESSAYS if data else None
    return folder if folder is not None and any(folder.glob("*.txt")) else None


def _essay(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def load_haystack(kind: str, data: str | None = None, essays: str = "auto") -> Haystack:
    """The haystack `noise` or `essay`.

    Args:
        kind: "noise" is RULER's repeated line; "essay" is running prose.
        data: data folder that may hold the essays.
        essays: "auto" takes the essays of the data folder where present, "builtin" never, "files" always.

    Raises:
        ValueError: an unknown kind, or essays asked for that are not there.
    """
    if kind == "noise":
        separators = [" "] * (len(NOISE) - 1) + ["\n"]
        return Haystack("noise", NOISE, separators, "\n")
    if kind != "essay":
        raise ValueError(f"haystack={kind!r}; valid: noise, essay")
    folder = None if essays == "builtin" else essays_folder(data)
    if folder is not None:
        # sorted: the order of a directory listing differs between file systems
        text = " ".join(map(_essay, sorted(folder.glob("*.txt"))))
        sentences = split_sentences(text)
        return Haystack("essay:PaulGraham", sentences, [" "] * len(sentences), " ")
    if essays == "files":
        raise ValueError(f"essays=files, but no *.txt under {ESSAYS} of paths.data={data!r}; set it, or essays=auto")
    prose = built_in_prose()
    sentences = [next(prose) for _ in range(4000)]
    return Haystack("essay:builtin", sentences, [" "] * len(sentences), " ")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt around a context, as token ids: `head` before it, `tail` after it (the question and what follows)."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    template: str  # "chat" or "none", as resolved


def prompt_template(
    tokenizer: Any, encode: Encoder, head: str, question: str, answer: str, template: str
) -> PromptTemplate:
    """Wrap a context in a prompt, with the beginning-of-sequence tokens the tokenizer's convention intends.

    With a chat template the template alone decides about special tokens, as transformers' own `apply_chat_template`
    does; without one the tokenizer's own rule does (none where it adds none). They are never added twice.

    Args:
        head: text before the context; question: text after it; answer: start of the answer that the model continues.
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".

    Raises:
        ValueError: template="chat" and the tokenizer has none, or an unknown value.
    """
    if resolve_template(tokenizer, template) == "none":
        return PromptTemplate(tuple(begun(tokenizer, encode(head))), encode(question + answer), "none")
    mark = "\x1econtext\x1e"
    chat = [{"role": "user", "content": f"{head}{mark}{question}"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    before, found, after = text.partition(mark)
    if not found:
        raise ValueError("the chat template drops the user's message; use template=none")
    return PromptTemplate(encode(before), encode(start_answer(tokenizer, after, answer.lstrip())), "chat")


def follow_up(tokenizer: Any, encode: Encoder, question: str, answer: str, template: str) -> tuple[int, ...]:
    """Token ids from the end of an answer to the start of the next: what closes the turn, and another question.

    Args:
        question: text of the user's message; answer: start of the answer that the model continues.
        template: as `prompt_template` takes it. Without a chat template nothing closes an answer but what the question begins with.

    Raises:
        ValueError: as `prompt_template`, or the chat template drops an answer of the assistant.
    """
    if resolve_template(tokenizer, template) == "none":
        return encode(question + answer)
    mark = "\x1eanswer\x1e"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    text = tokenizer.apply_chat_template(
        [*chat, {"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    _, found, after = text.partition(mark)
    if not found:
        raise ValueError("the chat template drops the assistant's answer; use template=none")
    return encode(start_answer(tokenizer, after, answer.lstrip()))


@dataclass(frozen=True)
class NeedlePrompt:
    """A context with needles in it.

    Attributes:
        ids: token ids of the context.
        offsets: per needle (in the order given) where its text starts in the context, in tokens.
        depths: the same as a share of the hay before and after it, 0 to 1.
        hay: tokens of hay.
    """

    ids: list[int]
    offsets: list[int]
    depths: list[float]
    hay: int


def build_haystack(
    encode: Encoder,
    haystack: Haystack,
    needles: Sequence[str],
    depths: Sequence[float],
    max_tokens: int,
    start: int = 0,
) -> NeedlePrompt:
    """A context of at most `max_tokens` tokens with each needle at the sentence boundary nearest to its depth.

    Hay is laid sentence by sentence from sentence `start` on. Whole sentences are used; only where they would leave
    more than 2% of them empty is the last one cut, in token space. Between a needle and its neighbours stands
    the haystack's needle separator.

    Raises:
        ValueError: the needles do not fit.
    """

    def joined(separator: str, text: str) -> tuple[int, ...]:
        # a space belongs to the word after it in most vocabularies, a newline is a token of its own
        return encode(separator + text) if separator in ("", " ") else encode(separator) + encode(text)

    around = haystack.needle_separator
    slack = len(encode(around)) + 1  # the hay after a needle may take one token more than after its usual separator
    cost = sum(len(joined(around, needle)) + slack for needle in needles)
    hay_room = max_tokens - cost
    if hay_room < 1:
        raise ValueError(f"no room: {max_tokens} tokens are left for the context and the needles alone need {cost}")
    count = len(haystack.sentences)
    hay: list[tuple[str, str]] = []  # separator before, sentence
    ends = [0]
    while ends[-1] < hay_room:
        index = (start + len(hay)) % count
        separator = haystack.separators[index - 1] if hay else ""  # sentence 0 follows the last: it goes around
        length = len(joined(separator, haystack.sentences[index]))
        free = hay_room - ends[-1]
        if length > free and hay and free <= 0.02 * max_tokens:
            break
        hay.append((separator, haystack.sentences[index]))
        ends.append(ends[-1] + min(length, free))
    last_length = ends[-1] - ends[-2]

    boundaries = ends
    places = []
    for depth in depths:
        after = bisect_left(boundaries, depth * ends[-1])
        near = [at for at in (after - 1, after) if 0 <= at < len(boundaries)]
        places.append(min(near, key=lambda at: abs(boundaries[at] - depth * ends[-1])))

    ids: list[int] = []
    offsets = [0] * len(needles)
    before_is_needle = False
    for at in range(len(hay) + 1):
        for i in (i for i in range(len(needles)) if places[i] == at):
            piece = joined(around if ids else "", needles[i])
            offsets[i] = len(ids) + (len(encode(around)) if ids and around != " " else 0)
            ids += piece
            before_is_needle = True
        if at < len(hay):
            separator, sentence = hay[at]
            piece = joined(around if before_is_needle else separator, sentence)
            ids += piece if at < len(hay) - 1 else piece[:last_length]
            before_is_needle = False
    return NeedlePrompt(ids, offsets, [boundaries[at] / ends[-1] for at in places], ends[-1])
