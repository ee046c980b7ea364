"""ZeroSCROLLS' metrics, and containment: one answer against its references, 0 to 1.

Sources: Shaham et al., Findings of EMNLP 2023, arXiv 2305.14196, and the metric files of `tau/zero_scrolls` and
`tau/scrolls` on the Hub, as copies of them in public repositories have them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from typing import Any

from kvcompress.metrics.scores import normalise
from kvcompress.metrics.words import needs, token_f1

ROUGES = ("rouge1", "rouge2", "rougeL")
LETTER = re.compile(r"\b[A-D]\b")
PERCENTAGE = re.compile(r"\d+\.?\d*%")


def plain_letters(text: str) -> str:
    """SQuAD's normal form in ASCII letters (`unidecode`), as ZeroSCROLLS compares answers."""
    text = normalise(text)
    return text if text.isascii() else needs("unidecode").unidecode(text)


def f1_ascii(prediction: str, reference: str) -> float:
    """Token F1 of normal forms in ASCII letters: Qasper, NarrativeQA and MuSiQue."""
    return token_f1(plain_letters(prediction).split(), plain_letters(reference).split())


@lru_cache(maxsize=1)
def _scorer() -> Any:
    return needs("rouge_score.rouge_scorer").RougeScorer(list(ROUGES), use_stemmer=False)


def rouges(prediction: str, reference: str) -> dict[str, float]:
    """F of `rouge_score`'s ROUGE-1, ROUGE-2 and ROUGE-L without stemming."""
    return {name: float(found.fmeasure) for name, found in _scorer().score(reference, prediction).items()}


def geometric_mean(values: dict[str, float]) -> float:
    """The three ROUGEs as one number. Published values take it of the data set's three means, not of each answer."""
    return float((values["rouge1"] * values["rouge2"] * values["rougeL"]) ** (1 / 3))


def rouge_geometric(prediction: str, reference: str) -> float:
    """Geometric mean of an answer's ROUGE-1, ROUGE-2 and ROUGE-L: the summaries."""
    return geometric_mean(rouges(prediction, reference))


def letter(text: str) -> str | None:
    """The first A, B, C or D that stands alone in a text."""
    found = LETTER.search(text)
    return found[0] if found else None


def letter_accuracy(prediction: str, reference: str) -> float:
    """1 for the right letter: QuALITY.

    Raises:
        ValueError: the reference names none.
    """
    wanted = letter(reference)
    if wanted is None:
        raise ValueError(f"the expected answer {reference!r} names none of A, B, C, D")
    return float(letter(prediction) == wanted)


def percentage(text: str) -> float | None:
    """The first number of a text that a percent sign follows."""
    found = PERCENTAGE.search(text)
    return float(found[0].removesuffix("%")) if found else None


def exp_similarity(prediction: str, reference: str) -> float:
    """Half as much for every ten points that a percentage is off; 0 without one: SpaceDigest.

    Raises:
        ValueError: the reference holds no percentage.
    """
    wanted, got = percentage(reference), percentage(prediction)
    if wanted is None:
        raise ValueError(f"the expected answer {reference!r} holds no percentage")
    return 0.0 if got is None else 0.5 ** (abs(wanted - got) / 10)


def order(text: str) -> list[int]:
    """The whole numbers of a text, letters and marks left out ("3, 1 and 2" is 3, 1, 2)."""
    try:
        return [int(number) for number in re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split()]
    except ValueError:  # of more digits than Python reads
        return []


def concordance(prediction: str, reference: str) -> float:
    """Share of pairs that stand in the right order; 0 where the numbers are not those of the reference: BookSumSort.

    Raises:
        ValueError: the reference is no order of the numbers 1 to n, n at least 2.
    """
    wanted, got = order(reference), order(prediction)
    if len(wanted) < 2 or sorted(wanted) != list(range(1, len(wanted) + 1)):
        raise ValueError(f"the expected answer {reference!r} is no order of the numbers 1 to n")
    if sorted(got) != sorted(wanted):
        return 0.0
    at = {number: place for place, number in enumerate(got)}
    pairs = list(combinations(wanted, 2))
    return sum(at[first] < at[second] for first, second in pairs) / len(pairs)


def contains(prediction: str, reference: str) -> float:
    """1 if the answer's normal form holds the reference's, from word to word."""
    wanted = normalise(reference)
    return float(bool(wanted) and f" {wanted} " in f" {normalise(prediction)} ")


PAIRWISE: dict[str, Callable[[str, str], float]] = {
    "f1_ascii": f1_ascii,
    "rouge_geometric": rouge_geometric,
    "letter_accuracy": letter_accuracy,
    "exp_similarity": exp_similarity,
    "concordance": concordance,
    "contains": contains,
}
MISSES = {
    "f1_ascii": "articles and punctuation do not count",
    "contains": "articles and punctuation do not count",
    "rouge_geometric": "texts of one word have no ROUGE-2",
}
