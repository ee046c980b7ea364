"""Answer metrics of published benchmarks: one answer against its references, 0 to 1.

Sources: LongBench (THUDM/LongBench 2e00731, LongBench/metrics.py and eval.py) and RULER (NVIDIA/RULER c3f5e3b,
scripts/eval/synthetic/constants.py). Checked against scores that were published with their predictions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvcompress.metrics import long_context
from kvcompress.metrics.words import ASCII, BOTH, needs, token_f1


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(ASCII)).split())


def qa_f1(prediction: str, reference: str) -> float:
    """Token F1 of SQuAD's normal forms."""
    return token_f1(normalise(prediction).split(), normalise(reference).split())


def cut(text: str) -> list[str]:
    """Chinese text in words, as jieba parts it."""
    jieba = needs("jieba")
    jieba.setLogLevel("ERROR")
    return list(jieba.cut(text, cut_all=False))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Token F1 of words, lower case, without punctuation of either script."""

    def words(text: str) -> list[str]:
        return [word for word in ("".join(w.lower().translate(BOTH).split()) for w in cut(text)) if word]

    return token_f1(words(prediction), words(reference))


def rouge_l(prediction: str, reference: str) -> float:
    """F of the `rouge` package's ROUGE-L (1.0.1): union of the sentences' longest common subsequences, unique words.

    Not the ROUGE-L of `rouge_score`. What that package cannot score (an empty text, or sentences of a thousand words)
    counts 0, as published.
    """
    rouge = needs("rouge").Rouge()
    try:
        return float(rouge.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_l_zh(prediction: str, reference: str) -> float:
    """ROUGE-L over words as jieba parts them."""
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n if the gold class is one of the n class names that the answer contains.

    As published, a found name that is part of the gold one is taken out of the list while the list is walked, so that
    the name after it is passed over.
    """
    found = [name for name in classes if name in prediction]
    for name in found:  # the published loop changes the list it walks; its scores depend on it
        if name in reference and name != reference:
            found.remove(name)
    return 1.0 / len(found) if reference in found else 0.0


def _share_of_numbers(prediction: str, number: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(n == number for n in numbers) / len(numbers) if numbers else 0.0


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the right one."""
    return _share_of_numbers(prediction, str(reference))


def retrieval(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the right paragraph's ("Paragraph 5")."""
    return _share_of_numbers(prediction, re.findall(r"Paragraph (\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str) -> float:
    """The same for "段落5"."""
    return _share_of_numbers(prediction, re.findall(r"段落(\d+)", reference)[0])


def code_sim(prediction: str, reference: str) -> float:
    """Similarity of the first line of code with the reference, in whole percents.

    `fuzz.ratio` on difflib, which published scores were made with; on Levenshtein the same package gives 1 to 2
    points more.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def exact_match(prediction: str, reference: str) -> float:
    """1 if the normal forms are equal."""
    return float(normalise(prediction) == normalise(reference))


@lru_cache(maxsize=1)
def _rouge1() -> Any:
    return needs("rouge_score.rouge_scorer").RougeScorer(["rouge1"], use_stemmer=True)


def rouge1(prediction: str, reference: str) -> float:
    """F of `rouge_score`'s ROUGE-1 with stemming, as papers report classic needles."""
    return float(_rouge1().score(reference, prediction)["rouge1"].fmeasure)


def _clean(text: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip().lower()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """RULER: share of the references that the answer contains."""
    text = _clean(prediction)
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """RULER's question answering: 1 if the answer contains any reference."""
    text = _clean(prediction)
    return float(any(reference.lower() in text for reference in references))


PAIRWISE: dict[str, Callable[[str, str], float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "code_sim": code_sim,
    "exact_match": exact_match,
    "rouge1": rouge1,
}
JOINT: dict[str, Callable[[str, Sequence[str]], float]] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    **long_context.RULES,
}
# Why a published metric may deny a right answer its full score, or give an empty one some.
MISSES: dict[str, str] = {
    **dict.fromkeys(("qa_f1", "qa_f1_tokens", "qa_f1_zh", "exact_match"), "articles and punctuation do not count"),
    **dict.fromkeys(("rouge_l", "rouge_l_zh"), "texts without a word, and sentences of a thousand, cannot be scored"),
    **dict.fromkeys(("rouge1", "rouge_lsum"), "texts without a word cannot be scored"),
    "code_sim": "lines with a comment or code mark are passed over",
    "classification": "class names within one another share the point",
    "speaker": "names of several words and in small letters are not found",
    "characters_f1": "texts of punctuation alone have no characters",
    "function_found": "functions of a few words are not similar enough to themselves, and of equal ones the first wins",
}
VERSIONS: dict[str, str] = dict.fromkeys([*PAIRWISE, "classification", *JOINT], "1")


def add(pairwise: Mapping[str, Callable[[str, str], float]], misses: Mapping[str, str]) -> None:
    """Take in the metrics of a module of their own, all of version 1."""
    PAIRWISE.update(pairwise)
    MISSES.update(misses)
    VERSIONS.update(dict.fromkeys(pairwise, "1"))


def score(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """One answer against its references: the best of them, or all together where the metric says so; 0 to 1.

    Args:
        classes: names of all classes, for "classification".
    """
    if not references:
        raise ValueError(f"metric {metric!r} needs at least one reference answer")
    if metric in JOINT:
        return JOINT[metric](prediction, references)
    if metric == "classification":
        return max(classification(prediction, reference, classes) for reference in references)
    if metric not in PAIRWISE:
        raise ValueError(f"metric {metric!r} is unknown; valid: {', '.join(VERSIONS)}")
    return max(PAIRWISE[metric](prediction, reference) for reference in references)
