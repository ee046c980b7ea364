"""Answer rules of InfiniteBench and SCBench: one answer against its references, 0 to 1.

Sources: OpenBMB/InfiniteBench 88b3daa, src/compute_scores.py, with the rules for `model_name="yarn-mistral"`, and
microsoft/MInference fb56c91, scbench/compute_scores.py. Where a published rule is odd, it is kept: published numbers
depend on it. References are texts, numbers among them as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from kvcompress.metrics.words import BOTH, needs, token_f1

LETTERS = "ABCD"
QUOTES = ("\n", ":", '"', "'", ".", ",", "?", "!", "{", "}")
SAID = ("answer is:", "answer:", "answer is", "option is")
SAID_OF_CODE = ("answer is:", "is:", "answer:", "correct option is:")


def _spaced(text: str, marks: Sequence[str]) -> str:
    for mark in marks:
        text = text.replace(mark, " ")
    return text


def _single_spaced(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def first_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the first run of digits is the first reference."""
    found = re.search("[0-9]+", prediction)
    return float(references[0] == (found[0] if found else ""))


def whole_word(prediction: str, references: Sequence[str]) -> float:
    """1 if the first reference is a word of the answer, quotes, braces and punctuation as spaces."""
    return float(references[0] in _spaced(prediction, QUOTES).split())


def speaker(prediction: str, references: Sequence[str]) -> float:
    """1 if the first reference is a word of the answer in capitals; a name of two words or in small letters never is."""
    words = _spaced(prediction.strip(), QUOTES).split()
    return float(references[0] in [word.upper() for word in words])


def last_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the last word is the whole number of the first reference."""
    words = _spaced(prediction.strip(), ("\n", ".", "`", "'", '"', ":")).split()
    try:
        return float(bool(words) and int(words[-1]) == int(references[0]))
    except ValueError:
        return 0.0


def choice_of_code(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer begins with the letter, or letter or name follow "answer is:" and the like.

    Args:
        references: name and letter of the right option.
    """
    name, letter = references
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = _single_spaced(_spaced(text, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    return float(_after(text, SAID_OF_CODE, (letter, name)))


def choice(prediction: str, references: Sequence[str]) -> float:
    """1 if the first letter is the right one, or the answer is the right option, or either follows "answer is" and the like.

    Args:
        references: text and letter of the right option.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in LETTERS:
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = _single_spaced(_spaced(text, ("\n", '"', "'", ".", ",", "?", "!", "{", "}")))
    if any(said in text for said in SAID):
        return float(_after(text, SAID, references))
    letter = next((word for word in text.split() if word in LETTERS), "")  # "BC" is part of the alphabet too
    return float(bool(letter) and letter in references)


def _after(text: str, phrases: Sequence[str], wanted: Sequence[str]) -> bool:
    """True if one of `wanted` stands one character behind the first of `phrases` that is in the text."""
    for phrase in phrases:
        at = text.find(phrase)
        if at >= 0:
            rest = at + len(phrase) + 1
            return len(text) >= rest and text.startswith(tuple(wanted), rest)
    return False


def list_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the first number, with or without decimals, is the reference (InfiniteBench)."""
    found, wanted = re.search(r"\d+\.\d+|\d+", prediction), references[0]
    if found is None:
        return 0.0
    if re.fullmatch(r"-?\d+", wanted):  # the published rule stops with an error at decimals here: no answer is right
        return float("." not in found[0] and int(found[0]) == int(wanted))
    return float(float(found[0]) == float(wanted))


def list_number_whole(prediction: str, references: Sequence[str]) -> float:
    """The same, decimals of the answer cut off where the reference is a whole number (SCBench)."""
    found, wanted = re.search(r"\d+\.\d+|\d+", prediction), references[0]
    if found is None:
        return 0.0
    if re.fullmatch(r"-?\d+", wanted):
        return float(int(float(found[0])) == int(wanted))
    return float(float(found[0]) == float(wanted))


def leading_numbers(prediction: str, references: Sequence[str]) -> float:
    """Share of the references, one number each, that the answer gives before the first wrong one; signs are not read."""
    right = 0
    for number, reference in zip(re.findall("[0-9]+", prediction), references, strict=False):
        if number.lstrip("0") != reference.lstrip("0"):  # as numbers; int() refuses thousands of digits
            break
        right += 1
    return right / len(references)


def substring(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer contains the first reference, letter for letter."""
    return float(references[0] in prediction)


def any_substring(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer contains any reference, in capitals."""
    text = prediction.strip().upper()
    return float(any(reference.upper() in text for reference in references))


def share_contained(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that the answer contains, in small letters, to two decimals."""
    text = prediction.lower()
    return round(sum(reference.lower() in text for reference in references) / len(references), 2)


def characters_f1(prediction: str, references: Sequence[str]) -> float:
    """Best F1 of characters, small letters, without white space and punctuation of either script."""

    def characters(text: str) -> str:
        return "".join(text.lower().translate(BOTH).split())

    return max(token_f1(characters(prediction), characters(reference)) for reference in references)


@lru_cache(maxsize=1)
def _rouge_lsum() -> Any:

    return needs("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"], use_stemmer=False)


def rouge_lsum(prediction: str, references: Sequence[str]) -> float:
    """Best F of `rouge_score`'s ROUGE-Lsum, as `evaluate`'s rouge gives it: lines are sentences, no stemming."""
    return max(float(_rouge_lsum().score(one, prediction)["rougeLsum"].fmeasure) for one in references)


RULES: dict[str, Callable[[str, Sequence[str]], float]] = {
    rule.__name__: rule
    for rule in (
        *(first_number, whole_word, speaker, last_number, choice_of_code, choice, list_number, list_number_whole),
        *(leading_numbers, substring, any_substring, share_contained, characters_f1, rouge_lsum),
    )
}
# What else than the first reference is a right answer.
GOLD: dict[str, Callable[[Sequence[str]], str]] = {
    "choice_of_code": lambda references: f"{references[1]}.",
    "choice": lambda references: references[1],
    "leading_numbers": ", ".join,
    "share_contained": ", ".join,
}
# Rules whose references are text and letter of the right option.
WITH_LETTER = ("choice", "choice_of_code")
# Rules that find an answer only where all of the first reference is written out.
EXACT = frozenset(
    ("first_number", "whole_word", "speaker", "last_number", "list_number", "list_number_whole", "substring")
)


def gold(metric: str, references: Sequence[str]) -> str:
    """A right answer by one of these rules."""
    return GOLD[metric](references) if metric in GOLD else references[0]
