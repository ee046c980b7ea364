"""AIME 2025: 30 competition problems, both papers (math-ai/aime25 on the Hub).

One of them is 3.3 points: give many samples, and never compare them with one. The data has no prompt and no scorer of its
own: prompt and judge are those of `Reasoning`, and beside pass@1 stands the share by kvpress's rule
(NVIDIA/kvpress 8bb29b9, evaluation/benchmarks/aime25).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from kvcompress.data import grading
from kvcompress.data.reasoning import Reasoning
from kvcompress.data.task import Sample


def boxed(text: str, gold: str) -> bool:
    """kvpress's rule: what stands between the last "boxed{" and the next "}", all of it where there is none, is equal."""
    return text.split("boxed{")[-1].split("}")[0] == gold


@dataclass(frozen=True, kw_only=True)
class AIME25(Reasoning):
    """The expected answer is a whole number from 0 to 999.

    Attributes:
        path, k, temperature, top_p, batch, template, revision: see `Reasoning`.
        max_new_tokens: 32,768, as R-KV's readme has it for AIME24.
    """

    name: ClassVar[str] = "reasoning/aime25"
    file: ClassVar[str] = "aime25.jsonl"
    hub: ClassVar[tuple[str, str | None, str]] = ("math-ai/aime25", None, "test")

    max_new_tokens: int = 32768
    revision: str = "563bb8404243c5f09de6ec262f2db674fe5bce9b"

    def expected(self, row: Mapping[str, Any], where: str) -> str:
        text = super().expected(row, where)
        number = grading.as_number(text) if text else None
        if text and not (number is not None and number.denominator == 1 and 0 <= number <= 999):
            raise ValueError(f"{where}: answer must be a whole number from 0 to 999, found {text!r:.60}")
        return text

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """As `Reasoning.score`, and `boxed`: the share that kvpress's rule takes."""
        gold = sample.turns[0].references[0]
        return super().score(sample, out) | {"boxed": fmean(boxed(text, gold) for text in out["text"])}

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return super().summarise(rows) | {"boxed": fmean(row["scores"]["boxed"] for row in rows)}
