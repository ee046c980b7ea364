"""LooGLE: questions, masks and summaries on documents of 24,000 words and more (Li et al., ACL 2024, arXiv 2311.04939).

Prompts, answer lengths, cut (the middle, as LongBench does) and metrics are those of bigai-nlco/LooGLE 6734382. Its open
models get the prompt without a chat template (`template=none`) and a repetition penalty of 2, which is not applied here.
METEOR, BERTScore and the GPT-4 judge are left out (`kvcompress/metrics/loogle.py` says why): a score here is none of
theirs; nor are the distances of orders, for timelines (`kind` in the samples). `task=loogle` stands for all four sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import yaml

from kvcompress.common.tokenization import plain_ids
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample, Task, of_suite
from kvcompress.metrics import loogle as metrics


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each data set."""
    return yaml.safe_load((Path(__file__).parent / "data" / "loogle.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class LooGLE(RowTask):
    """One data set of LooGLE; a sample is one question with its whole document. `dataset` and `metric` are the class's.

    Rows are documents with `qa_pairs`, as published, or questions with their context, as the Hub has them now.

    Attributes:
        max_length: tokens of a prompt at most; None: what the tokenizer says the model takes, less the answer.
        revision: commit of the data set on the Hub, or its branch.
        source, question, template: see `RowTask`. Files are `loogle/<data set>.jsonl`.
    """

    dataset: ClassVar[str]
    folder: ClassVar[str] = "loogle"
    fields: ClassVar[tuple[str, ...]] = ()

    revision: str = "main"  # no commit of it is known to us: the record says which one it was

    @property
    def published(self) -> dict[str, Any]:
        return settings()[self.dataset]

    @property
    def cloze(self) -> bool:
        return self.metric == "masks_exact"

    def names(self) -> Sequence[str]:
        return [self.dataset]

    def hub(self) -> hub.Source | hub.File | None:
        name = {"longdep_summarization": "summarization"}.get(self.dataset, self.dataset)
        return hub.File("bigai-nlco/LooGLE", f"data/{name}.jsonl", "", self.revision)

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return int(self.published["max_new_tokens"])

    def limit(self, tokenizer: Any) -> int | None:
        return self.max_length or prompts.room(tokenizer, self.new_tokens({}))

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": row["type"]} if row.get("type") else {}

    # ------------------------------------------------------------------ rows

    def located(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """All questions, each with its document and where it stands; raises as `RowTask.located`."""
        found = [
            question
            for number, (where, row) in enumerate(super().located())
            for question in self._questions(row, where, number)
        ]
        if not found:
            raise ValueError(f"{self.name}: the file holds no question")
        return found

    def _questions(self, row: dict[str, Any], where: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        summary = "{Q}" not in self.published["template"]
        if "context" in row:
            jsonl.check(row, ("context", "answer", *(() if summary else ("question",))), where)
            asked = {"input": row["context"], "Q": row.get("question"), "A": row["answer"], "type": row.get("type")}
            yield where, asked | {"_id": f"{number}-0"}
        elif summary:
            jsonl.check(row, ("input", "output"), where)
            yield where, {"input": row["input"], "Q": "", "A": row["output"], "_id": f"{number}-0"}
        else:
            jsonl.check(row, ("input", "qa_pairs"), where)
            pairs = row["qa_pairs"]
            pairs = metrics.literal(pairs) if isinstance(pairs, str) else pairs
            if not isinstance(pairs, list):
                raise ValueError(
                    f"{where}: qa_pairs must be a list of questions, or one written down, found {pairs!r:.60}"
                )
            for at, pair in enumerate(pairs):
                here = f"{where}, question {at + 1} of qa_pairs"
                jsonl.check(pair, ("Q", "A"), here)
                asked = {"input": row["input"], "Q": pair["Q"], "A": pair["A"], "type": pair.get("type")}
                yield here, asked | {"_id": f"{number}-{at}"}

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        head, _, rest = self.published["template"].partition("{input}")
        tail = rest.replace("{Q}", jsonl.text(row, "Q", where)) if "{Q}" in rest else rest
        reference = self._masks(row["A"], where) if self.cloze else jsonl.whole(row["A"], "A (the answer)", where)
        if not reference.strip():
            raise ValueError(f"{where}: A (the answer) is empty")
        return RowPrompt(head + jsonl.text(row, "input", where) + tail, tail, (reference,))

    def build(self, tokenizer: Any, row: Mapping[str, Any], asked: RowPrompt, where: str) -> prompts.Prompt:
        """As `RowTask.build`; a question is never cut."""
        limit, behind = self.limit(tokenizer), len(plain_ids(tokenizer, asked.tail))
        if limit is not None and behind > limit // 2:
            raise ValueError(
                f"{where}: Q (the question) and what follows take {behind} tokens, and the cut leaves the last {limit // 2}: "
                "take a model with more positions, or raise task.max_length"
            )
        return super().build(tokenizer, row, asked, where)

    @staticmethod
    def _masks(value: Any, where: str) -> str:
        """What stands behind each mask, written down as a Python dictionary."""
        found = metrics.literal(value) if isinstance(value, str) else value
        if not isinstance(found, dict) or not found:
            raise ValueError(f"{where}: A (the answer) must be a dictionary of masks, found {value!r:.60}")
        for mask, name in found.items():
            jsonl.whole(mask, "a mask of A", where)
            jsonl.whole(name, f"A, {mask},", where)
        return repr(found)

    # ------------------------------------------------------------------ scores

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Recall of ROUGE-L, beside the other ROUGEs and BLEU; of masks the share filled in exactly."""
        text, reference = out["text"][0], sample.turns[0].references[0]
        if not self.cloze:
            found = metrics.rouge_recalls(text, reference) | metrics.bleu(text, reference)
            return {"score": found["rougeL_recall"], **found}
        masks = metrics.literal(reference)
        exact, partial = metrics.masks_matched(text, masks)
        return {"score": exact / len(masks), "exact": exact, "partial": partial, "masks": len(masks)}

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Means of the metrics; of masks the published shares, which are of all masks of the set."""
        scores = [row["scores"] for row in rows]
        if self.cloze:
            masks = sum(one["masks"] for one in scores)
            return {f"{kind}_match": sum(one[kind] for one in scores) / masks for kind in ("exact", "partial")}
        return {name: fmean(one[name] for one in scores) for name in sorted(scores[0]) if name != "score"}


def _dataset(name: str, about: dict[str, Any]) -> type[Task]:
    return of_suite(
        LooGLE, "loogle", name, f"LooGLE's {name} (metric {about['metric']}).", about["metric"], dataset=name
    )


globals().update({cls.__name__: cls for cls in (_dataset(name, about) for name, about in settings().items())})
