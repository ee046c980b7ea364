"""AIME 2024: 30 competition problems. One of them is 3.3 points: give many samples, and never compare them with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcompress.data.reasoning import Reasoning


@dataclass(frozen=True, kw_only=True)
class AIME24(Reasoning):
    """The expected answer is a whole number from 0 to 999.

    Attributes:
        path, k, temperature, top_p, batch, template, revision: see `Reasoning`. R-KV's readme has k=64.
        max_new_tokens: 32,768, as R-KV's readme; its script allows 16,384 with the prompt.
    """

    name: ClassVar[str] = "reasoning/aime24"
    file: ClassVar[str] = "aime24.jsonl"
    hub: ClassVar[tuple[str, str | None, str]] = ("HuggingFaceH4/aime_2024", None, "train")

    max_new_tokens: int = 32768
    revision: str = "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"
