"""Passkey: a number among repeated lines (Mohtashami and Jaggi, 2023, arXiv 2305.16300), as KIVI's examples have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.data import jsonl
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample

# jy-yuan/KIVI 52f7615 (MIT), long_context_example.py
QUESTION, ANSWER = "What is the pass key?", " The pass key is "


@dataclass(frozen=True, kw_only=True)
class Passkey(RowTask):
    """Prompt and start of the answer are KIVI's; it prints answers and scores none, so containment is our rule.

    Attributes:
        max_new_tokens: None for KIVI's: as many tokens as the pass key has characters.
        source, question, template, max_length: see `RowTask`. The file is `passkey/passkey_examples.jsonl`.
    """

    name: ClassVar[str] = "passkey"
    metric: ClassVar[str] = "contains"
    folder: ClassVar[str] = "passkey"
    fields: ClassVar[tuple[str, ...]] = ("input", "target")

    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"task.max_new_tokens={self.max_new_tokens}; at least 1 is needed")

    def names(self) -> Sequence[str]:
        return ["passkey_examples", "kivi_passkey_examples"]

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return self.max_new_tokens or len(str(row["target"]))

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        target = jsonl.answer(row["target"], "target", where)
        if not target or target not in jsonl.text(row, "input", where):
            raise ValueError(f"{where}: its input does not hold its target {target!r}")
        return RowPrompt(row["input"] + QUESTION, QUESTION, (target,), ANSWER)

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """1 if the answer contains the pass key."""
        return {"score": metrics.score("string_match_part", out["text"][0], sample.turns[0].references)}
