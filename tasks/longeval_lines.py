"""LongEval's lines: the number registered on one of many lines (Li et al., 2023, DachengLi1/LongChat)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress.data import jsonl
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample

MARK = "\nNow the record is over."  # where the question begins; the prompts are in the file


@dataclass(frozen=True, kw_only=True)
class LongEvalLines(RowTask):
    """Prompts are the file's; 100 tokens of answer and scoring as published (longeval/utils.py 0a4d022).

    Attributes:
        lines: 200, 300, … Files are `longeval/<lines>_lines.jsonl`.
        source, question, template, max_length: see `RowTask`.
    """

    name: ClassVar[str] = "longeval_lines"
    metric: ClassVar[str] = "last_number"
    folder: ClassVar[str] = "longeval"
    fields: ClassVar[tuple[str, ...]] = ("prompt", "expected_number")
    answer_tokens: ClassVar[int] = 100

    lines: int = 200

    def names(self) -> Sequence[str]:
        return [f"{self.lines}_lines"]

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        at = jsonl.text(row, "prompt", where).rfind(MARK)
        number = jsonl.answer(row["expected_number"], "expected_number", where)
        if not number.isdigit():
            raise ValueError(f"{where}: expected_number must be a number, found {number!r}")
        if at < 0:
            raise ValueError(f"{where}: its prompt has no {MARK.strip()!r} before the question")
        return RowPrompt(row["prompt"], row["prompt"][at:], (number,))

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """1 if the last number of the answer is the expected one."""
        numbers = re.findall(r"\d+", out["text"][0])
        return {"score": float(bool(numbers) and int(numbers[-1]) == int(sample.turns[0].references[0]))}
