"""LongBench v2: 503 four-choice questions on long texts (Bai et al., ACL 2025, arXiv 2412.15204; THUDM/LongBench 2e00731).

Prompts, truncation, answer lengths and the extraction of the answer are the published ones. Decoding is greedy; the
published runs sample at temperature 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
import yaml

from kvcompress.common.prose import Encoder
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.haystack import prompt_template
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample, Turn, ended_by_force

ANSWER_TOKENS, COT_TOKENS = 128, 1024
CHOICES = "ABCD"
DOCUMENT = "$DOC$"


@lru_cache(maxsize=1)
def templates() -> dict[str, str]:
    """The published prompts: `direct`, `cot`, and `cot_ans`, which asks for the letter after the reasoning."""
    return yaml.safe_load((Path(__file__).parent / "data" / "longbench_v2.yaml").read_text(encoding="utf-8"))


def extract(text: str) -> str | None:
    """The letter an answer names in the words it was asked to use, or None."""
    text = text.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(RowTask):
    """Accuracy; by difficulty and length in the record. An answer without a letter is wrong.

    Attributes:
        cot: reason first (1,024 tokens), then ask for the letter in a prompt of its own that holds the reasoning and not
            the text, as published. That prompt is never compressed.
        max_length: None: what the tokenizer says the model takes, less the answer.
        revision: commit of the data set on the Hub, or its branch.
        source, question, template: see `RowTask`. The file is `longbench_v2/longbench_v2.jsonl`.
    """

    name: ClassVar[str] = "longbench_v2"
    metric: ClassVar[str] = "accuracy"
    folder: ClassVar[str] = "longbench_v2"
    fields: ClassVar[tuple[str, ...]] = (
        "_id", "difficulty", "length", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context",
    )  # fmt: skip
    answer_tokens: ClassVar[int] = ANSWER_TOKENS

    cot: bool = False
    revision: str = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"

    @property
    def shares_prefill(self) -> bool:  # type: ignore[override]
        # the second prompt is a sequence of its own, which decoding several cells together does not know
        return not self.cot

    def names(self) -> Sequence[str]:
        return ["longbench_v2", "data"]

    def hub(self) -> hub.Source | None:
        return hub.Source("THUDM/LongBench-v2", None, "train", self.revision)

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return COT_TOKENS if self.cot else ANSWER_TOKENS

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"difficulty": row["difficulty"], "length": row["length"]}

    def limit(self, tokenizer: Any) -> int | None:
        if self.max_length is not None:
            return self.max_length
        return prompts.room(tokenizer, self.new_tokens({}))

    def _filled(self, template: str, row: Mapping[str, Any]) -> str:
        text = template.replace("$Q$", row["question"].strip())
        for letter in CHOICES:
            text = text.replace(f"$C_{letter}$", row[f"choice_{letter}"].strip())
        return text

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        if row["answer"] not in tuple(CHOICES):
            raise ValueError(f"{where}: answer={row['answer']!r}; valid: {', '.join(CHOICES)}")
        for field in self.fields:
            jsonl.text(row, field, where)
        head, tail = templates()["cot" if self.cot else "direct"].split(DOCUMENT)
        tail = self._filled(tail, row)
        return RowPrompt(head + row["context"].strip() + tail, tail, (row["answer"],))

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        encode = Encoder(tokenizer)
        for sample, row in zip(super().samples(tokenizer), self.rows(), strict=True):
            if not self.cot:
                yield sample
                continue
            head, tail = self._filled(templates()["cot_ans"], row).split("$COT$")
            wrap = prompt_template(tokenizer, encode, head, tail, "", self.template)
            letter = Turn((*wrap.head, *wrap.tail), ANSWER_TOKENS, references=sample.turns[0].references)
            meta = {**sample.meta, "reasoning_at": len(wrap.head)}
            protocol = {**sample.protocol, "turns": "single", "questions": 1}
            yield replace(sample, turns=(*sample.turns, letter), protocol=protocol, meta=meta)

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """As `Task.run`; with `cot` the letter is then asked for in a new sequence around the reasoning."""
        out = super().run(session, replace(sample, turns=sample.turns[:1]))
        if not self.cot:
            return out
        letter, at = sample.turns[1], sample.meta["reasoning_at"]
        ids = [*letter.ids[:at], *out["tokens"][0], *letter.ids[at:]]
        session.cache = session.new_cache()
        session.append(torch.tensor([ids], device=session.model.device))
        generation = session.generate(letter.max_new_tokens, stop=letter.stop, guides=letter.guides())
        out["tokens"].append([int(token) for token in generation.tokens[0]])
        out["finished"].append(generation.finished[0])
        for name, values in ended_by_force([generation]).items():
            out.setdefault(name, []).extend(values)
        out["tpot_s"].extend(float(seconds) for seconds in generation.step_s)
        return out

    def cannot_batch(self) -> str | None:
        return super().cannot_batch() if self.cot else None

    def gold(self, sample: Sample) -> list[str] | None:
        return [f"The correct answer is ({turn.references[0]})." if turn.references else "" for turn in sample.turns]

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """1 for the right letter; `answered`: 1 where there is a letter at all."""
        letter = extract(out["text"][-1])
        return {"score": float(letter == sample.turns[0].references[0]), "answered": float(letter is not None)}

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Accuracy by difficulty and by length, with how many there are of each, and shares without a letter."""
        found: dict[str, Any] = {"unanswered_share": fmean(1 - row["scores"]["answered"] for row in rows)}
        for field in ("difficulty", "length"):
            for value in sorted({row["meta"][field] for row in rows}):
                scores = [row["scores"]["score"] for row in rows if row["meta"][field] == value]
                found[f"accuracy_{value}"], found[f"n_{value}"] = fmean(scores), len(scores)
        return found
