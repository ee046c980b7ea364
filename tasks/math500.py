"""MATH-500: 500 competition problems (Hendrycks et al., 2021; the subset of Lightman et al., 2023, arXiv 2305.20050)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcompress.data.reasoning import Reasoning


@dataclass(frozen=True, kw_only=True)
class MATH500(Reasoning):
    """The expected answer is LaTeX.

    Attributes:
        path, k, temperature, top_p, batch, template, revision: see `Reasoning`.
        max_new_tokens: 16,384, as R-KV's readme; its script allows 8,192 with the prompt.
    """

    name: ClassVar[str] = "reasoning/math500"
    file: ClassVar[str] = "math500.jsonl"
    hub: ClassVar[tuple[str, str | None, str]] = ("HuggingFaceH4/MATH-500", None, "test")

    max_new_tokens: int = 16384
    revision: str = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
