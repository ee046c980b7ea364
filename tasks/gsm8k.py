"""GSM8K: 1,319 word problems of grade-school mathematics (Cobbe et al., 2021, arXiv 2110.14168)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress.data.reasoning import Reasoning


@dataclass(frozen=True, kw_only=True)
class GSM8K(Reasoning):
    """The expected answer is what follows `####` in the data set's solution, a number.

    Attributes:
        path, k, temperature, top_p, batch, template, revision: see `Reasoning`.
        max_new_tokens: 4,096. R-KV's script allows 8,192 with the prompt.
    """

    name: ClassVar[str] = "reasoning/gsm8k"
    file: ClassVar[str] = "gsm8k_test.jsonl"
    hub: ClassVar[tuple[str, str | None, str]] = ("openai/gsm8k", "main", "test")

    max_new_tokens: int = 4096
    revision: str = "740312add88f781978c0658806c59bc2815b9866"

    def expected(self, row: Mapping[str, Any], where: str) -> str:
        return super().expected(row, where).rpartition("####")[2].strip().replace(",", "")
