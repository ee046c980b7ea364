"""LooGLE's metrics that need no model: BLEU, recall of ROUGE, and matches of filled-in masks.

Source: bigai-nlco/LooGLE 6734382, Evaluation/automatic_metrics.py. Left out, with reasons: METEOR (it aligns Python
sets, whose order changes from process to process, so that its published value is not one number; it also needs
WordNet), BERTScore (a model of its own) and the GPT-4 judge.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvcompress.metrics.words import needs

ABSENT = "None"  # what an empty answer is scored as, as published


def bleu(prediction: str, reference: str) -> dict[str, float]:
    """`bleu1` and `bleu4`: precision of 1-grams and of 4-grams alone, times the brevity penalty; parted at white space.

    As nltk's `sentence_bleu` with weights (1, 0, 0, 0) and (0, 0, 0, 1), whose import takes seconds.
    """
    got, wanted = (text.replace("\n", " ").split() for text in (prediction or ABSENT, reference))
    found = {}
    for n in (1, 4):
        held, known = (Counter(zip(*(words[k:] for k in range(n)), strict=False)) for words in (got, wanted))
        penalty = 1.0 if len(got) > len(wanted) else math.exp(1 - len(wanted) / max(1, len(got)))
        found[f"bleu{n}"] = penalty * (held & known).total() / max(1, held.total())
    return found


def rouge_recalls(prediction: str, reference: str) -> dict[str, float]:
    """Recall of the `rouge` package's ROUGE-1, ROUGE-2 and ROUGE-L; 0 where it cannot score, where others stop."""
    try:
        found = needs("rouge").Rouge().get_scores([prediction or ABSENT], [reference])[0]
    except (ValueError, RecursionError) as error:
        if "needs the package" in str(error):
            raise
        return dict.fromkeys(("rouge1_recall", "rouge2_recall", "rougeL_recall"), 0.0)
    return {f"rouge{n}_recall": float(found[f"rouge-{n.lower()}"]["r"]) for n in ("1", "2", "L")}


def rouge_l_recall(prediction: str, reference: str) -> float:
    """Recall of ROUGE-L."""
    return rouge_recalls(prediction, reference)["rougeL_recall"]


def literal(text: str) -> Any:
    """The Python value that a text writes down, None where it is none. Nothing is run."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def masks_matched(prediction: str, reference: Mapping[str, str]) -> tuple[int, int]:
    """How many masks an answer fills in exactly, and how many share a word with what is right."""
    found = literal(prediction)
    if not isinstance(found, dict):
        return 0, 0
    exact = sum(key in found and found[key] == value for key, value in reference.items())
    try:
        partial = sum(
            bool({*value.split()} & {*found[key].split()}) for key, value in reference.items() if key in found
        )
    except AttributeError:  # a mask filled with no text
        partial = 0
    return exact, partial


def masks_exact(prediction: str, reference: str) -> float:
    """Share of the masks that an answer fills in exactly; both are Python dictionaries written down."""
    wanted = literal(reference)
    if not isinstance(wanted, dict) or not wanted:
        raise ValueError(f"the expected answer {reference!r} is no dictionary of masks")
    return masks_matched(prediction, wanted)[0] / len(wanted)


PAIRWISE: dict[str, Callable[[str, str], float]] = {"rouge_l_recall": rouge_l_recall, "masks_exact": masks_exact}
MISSES = {"rouge_l_recall": "texts without a word, and sentences of a thousand, cannot be scored"}
