"""Key-value retrieval: one pair of a JSON object of random identifiers (Liu et al., TACL 2024, arXiv 2307.03172)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcompress import metrics
from kvcompress.data import jsonl
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample

# nelson-liu/lost-in-the-middle 04cbd0d (MIT), prompts/kv_retrieval*.prompt, as its tests state them
HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\n{aware}JSON data:\n"
AWARE = 'Key: "{key}"\n\n'
TAIL = '\n\nKey: "{key}"\nCorresponding value:'


@dataclass(frozen=True, kw_only=True)
class KVRetrieval(RowTask):
    """Prompt, 100 tokens of answer and scoring are the published ones.

    Attributes:
        keys: pairs in the object: 75, 140 or 300. Files are `lost_in_the_middle/kv-retrieval-<keys>_keys.jsonl`.
        gold_index: move the wanted pair to this place, as the paper does; None: where the file has it.
        query_aware: name the key before the data as well.
        source, question, template, max_length: see `RowTask`.
    """

    name: ClassVar[str] = "kv_retrieval"
    metric: ClassVar[str] = "contains"
    folder: ClassVar[str] = "lost_in_the_middle"
    fields: ClassVar[tuple[str, ...]] = ("ordered_kv_records", "key", "value")
    answer_tokens: ClassVar[int] = 100

    keys: int = 75
    gold_index: int | None = None
    query_aware: bool = False

    def names(self) -> Sequence[str]:
        return [f"kv-retrieval-{self.keys}_keys"]

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        pair = [row["key"], row["value"]]
        return {"pairs": len(row["ordered_kv_records"]), "gold_index": self._pairs(row).index(pair)}

    def _pairs(self, row: Mapping[str, Any]) -> list[list[str]]:
        pairs, pair = [list(pair) for pair in row["ordered_kv_records"]], [row["key"], row["value"]]
        if self.gold_index is not None:
            pairs.remove(pair)
            pairs.insert(self.gold_index, pair)
        return pairs

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        pairs = row["ordered_kv_records"]
        if not isinstance(pairs, list) or [row["key"], row["value"]] not in pairs:
            raise ValueError(f"{where}: ordered_kv_records does not hold its key and value")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{where}: ordered_kv_records must be a list of pairs")
        jsonl.text(row, "key", where)
        references = (jsonl.answer(row["value"], "value", where),)
        for number, (key, value) in enumerate(pairs, 1):
            jsonl.answer(key, f"key of pair {number}", where)
            jsonl.answer(value, f"value of pair {number}", where)
        if self.gold_index is not None and not 0 <= self.gold_index < len(pairs):
            raise ValueError(f"task.gold_index={self.gold_index}; {where} has places 0 to {len(pairs) - 1}")
        data = "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in self._pairs(row)) + "}"
        head = HEAD.format(aware=AWARE.format(key=row["key"]) if self.query_aware else "")
        tail = TAIL.format(key=row["key"])
        return RowPrompt(head + data + tail, tail, references)

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """1 if the answer contains the value, case ignored."""
        return {"score": metrics.score("string_match_part", out["text"][0], sample.turns[0].references)}
