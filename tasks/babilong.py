"""BABILong: facts of bAbI hidden in pages of books (Kuratov et al., 2024, arXiv 2406.10149; booydar/babilong)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvcompress.data import hub, jsonl
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample


@lru_cache(maxsize=1)
def settings() -> dict[str, Any]:
    """The published template, and prompts and labels of each subset."""
    return yaml.safe_load((Path(__file__).parent / "data" / "babilong.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class BabiLong(RowTask):
    """One question on a long text. Prompts, 20 tokens of answer, greedy, and scoring are the published ones.

    Attributes:
        subset: "qa1" … "qa5", those that have labels.
        length: "0k", "1k", … as the data set names them.
        revision: commit of the data set on the Hub, or its branch.
        source, question, template, max_length: see `RowTask`. Files are `babilong/<length>_<subset>.jsonl`.
    """

    name: ClassVar[str] = "babilong"
    metric: ClassVar[str] = "only_label"
    folder: ClassVar[str] = "babilong"
    fields: ClassVar[tuple[str, ...]] = ("input", "question", "target")
    answer_tokens: ClassVar[int] = 20

    subset: str = "qa1"
    length: str = "1k"
    revision: str = "main"  # no commit of it is known to us: the record says which one it was

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset not in settings()["subsets"]:
            raise ValueError(f"task.subset={self.subset!r}; valid: {', '.join(settings()['subsets'])}")

    def names(self) -> Sequence[str]:
        return [f"{self.length}_{self.subset}"]

    def hub(self) -> hub.Source | None:
        return hub.Source("RMT-team/babilong-1k-samples", self.length, self.subset, self.revision)

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"question": row["question"]}

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        parts = settings()["subsets"][self.subset]
        head, tail = settings()["template"].split("{context}")
        head = head.format(**{key: parts[key] for key in ("instruction", "examples", "post_prompt")})
        tail = tail.format(question=jsonl.text(row, "question", where)).rstrip()
        target = jsonl.answer(row["target"], "target", where)
        return RowPrompt((head + jsonl.text(row, "input", where) + tail).lstrip(), tail, (target,))

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """1 if the target is the only label in the first sentence of the answer; labels of the question do not count."""
        text = out["text"][0].lower().split(".")[0]
        # as published; its third mark, "Question", is never found in lower case
        text = text.split("<context>")[0].split("<example>")[0]
        labels = {label.lower() for label in settings()["subsets"][self.subset]["labels"]}
        asked = str(sample.meta["question"]).lower()
        found = {label for label in labels if label in text and label not in asked}
        return {"score": float(found == {sample.turns[0].references[0].lower()})}
