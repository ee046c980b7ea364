"""ZeroSCROLLS: ten sets of summaries, questions and orders on long texts (Shaham et al., EMNLP 2023, arXiv 2305.14196).

Prompts are in the data; cut and answer lengths are those of tau-nlp/zero_scrolls c994676 (experiments/api): the end of
the document gives way, and a chat model is asked for no explanation and gets no start of an answer. Answers of the test
split are hidden: `task.split=test` leaves its samples unscored, and `scripts/report.py --submission FOLDER` writes the file
that the leaderboard takes. `task=zero_scrolls` on the command line stands for all ten sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import yaml

from kvcompress import metrics
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.row_task import RowPrompt, RowTask
from kvcompress.data.task import Sample, Task, of_suite
from kvcompress.metrics import scrolls

SPLITS = ("validation", "test")
NO_REASONS = "Do not provide any explanation."
SPARE, CHAT_SPARE = 1, 9  # tokens that the published cut leaves free, and more of them in a chat
WHOLE = ("letter_accuracy", "exp_similarity", "concordance")  # what is cut off of such an answer loses all of it


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each data set."""
    return yaml.safe_load((Path(__file__).parent / "data" / "zero_scrolls.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class ZeroScrolls(RowTask):
    """One data set of ZeroSCROLLS. `dataset` and `metric` are the class's.

    Attributes:
        split: "validation", about 20 samples with answers, or "test", whose answers are hidden.
        max_length: tokens of a prompt at most; None: what the tokenizer says the model takes, less the answer.
        revision: commit of the data set on the Hub, or its branch.
        source, question, template: see `RowTask`. Files are `zero_scrolls/<data set>/<split>.jsonl`, as in the zip files.
    """

    dataset: ClassVar[str]
    folder: ClassVar[str] = "zero_scrolls"
    fields: ClassVar[tuple[str, ...]] = (
        "id", "input", "document_end_index", "query_start_index", "query_end_index", "truncation_seperator",
    )  # fmt: skip

    split: str = "validation"
    revision: str = "main"  # no commit of it is known to us: the record says which one it was

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in SPLITS:
            raise ValueError(f"task.split={self.split!r}; valid: {', '.join(SPLITS)}")

    @property
    def published(self) -> dict[str, Any]:
        return settings()[self.dataset]

    @property
    def whole_answers(self) -> bool:  # type: ignore[override]
        return self.metric in WHOLE

    def names(self) -> Sequence[str]:
        return [f"{self.dataset}/{self.split}", f"{self.dataset}_{self.split}"]

    def hub(self) -> hub.Source | hub.File | None:
        member = f"{self.dataset}/{self.split}.jsonl"
        return hub.File("tau/zero_scrolls", f"{self.dataset}.zip", member, self.revision)

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return int(self.published["max_new_tokens"])

    def limit(self, tokenizer: Any) -> int | None:
        return self.max_length or prompts.room(tokenizer, self.new_tokens({}))

    def located(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """All samples; rows of one `id`, which repeat an input with other answers, are one."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for where, row in super().located():
            name = jsonl.text(row, "id", where)
            if name not in found:
                found[name] = (where, row | {"_id": name, "outputs": []})
            elif found[name][1]["input"] != row["input"]:
                raise ValueError(f"{where}: id {name!r} is that of {found[name][0]}, which has another input")
            answer = self._answer(row.get("output"), where)
            if answer is None and self.split != "test":
                raise ValueError(
                    f"{where}: output is {row.get('output')!r}, and only answers of the test split are hidden: give the answer, "
                    "leave the row out, or set task.split=test"
                )
            found[name][1]["outputs"] += [] if answer is None else [answer]
        return list(found.values())

    def _answer(self, value: Any, where: str) -> str | None:
        """An expected answer; None where it is hidden."""
        if value is None or value == "" or (value == "None" and self.metric in WHOLE):
            return None
        answer = jsonl.whole(value, "output", where)
        if self.metric in WHOLE:
            try:
                metrics.score(self.metric, "", [answer])
            except ValueError as error:
                raise ValueError(f"{where}: output: {error}") from None
        return answer

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        text = jsonl.text(row, "input", where)
        jsonl.text(row, "truncation_seperator", where)
        at = [row[field] for field in ("document_end_index", "query_start_index", "query_end_index")]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in at) or not 0 < at[0] <= at[1] <= at[2]:
            raise ValueError(
                f"{where}: document_end_index, query_start_index and query_end_index must be rising numbers, found {at}"
            )
        if at[2] > len(text):
            raise ValueError(f"{where}: query_end_index is {at[2]}, and input has {len(text)} characters")
        if "\n\n" not in text:
            raise ValueError(f"{where}: input has no empty line behind its instruction")
        return RowPrompt(text, text[at[0] :], tuple(row["outputs"]))

    def build(self, tokenizer: Any, row: Mapping[str, Any], asked: RowPrompt, where: str) -> prompts.Prompt:
        """The published prompt: with a chat template that of its chat models, else that of the others."""
        chat = prompts.resolve_template(tokenizer, self.template) == "chat"
        text, document, query = asked.text, row["document_end_index"], row["query_start_index"]
        if chat:
            text = text[: row["query_end_index"]]
            if self.published["kind"] != "summary":
                instruction, gap, rest = text.partition("\n\n")
                text = f"{instruction.strip()} {NO_REASONS}{gap}{rest}"
                moved = len(NO_REASONS) + 1
                document, query = document + moved, query + moved
        tail, limit, cut = text[document:], self.limit(tokenizer), 0
        ids = plain_ids(tokenizer, text)
        if limit is not None and len(ids) > limit:
            tail = row["truncation_seperator"] + text[query:]
            behind = len(plain_ids(tokenizer, tail))
            kept = limit - behind - SPARE - (CHAT_SPARE if chat else 0)
            if kept < 1:
                raise ValueError(
                    f"{where}: what follows the document in input takes {behind} tokens, and a prompt may have {limit}: "
                    "take a model with more positions, or raise task.max_length"
                )
            text, cut = tokenizer.decode(ids[:kept], skip_special_tokens=True) + tail, len(ids) - kept - behind
        hide = self.question == "hidden"
        if hide and not tail.strip():
            raise ValueError(f"{where}: {self.name} asks nothing behind the document in a chat: set task.question=seen")
        built = prompts.build(tokenizer, text, tail, self.template, None, "text", hide)
        return replace(built, truncated=max(0, cut))

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, Any]:
        """The published metric, the best over all references; None where the answers are hidden."""
        references, text = sample.turns[0].references, out["text"][0]
        if not references:
            return {"score": None}
        found = {"score": metrics.score(self.metric, text, references)}
        if self.metric == "rouge_geometric":
            each = [scrolls.rouges(text, reference) for reference in references]
            found |= {name: max(one[name] for one in each) for name in scrolls.ROUGES}
        return found

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of summaries the published score: the geometric mean of the set's three mean ROUGEs."""
        if self.metric != "rouge_geometric" or any(row["scores"]["score"] is None for row in rows):
            return {}
        means = {name: fmean(row["scores"][name] for row in rows) for name in scrolls.ROUGES}
        return means | {"zero_scrolls_score": scrolls.geometric_mean(means)}


def _dataset(name: str, about: dict[str, Any]) -> type[Task]:
    text = f"ZeroSCROLLS' {name} (metric {about['metric']})."
    return of_suite(ZeroScrolls, "zero_scrolls", name, text, about["metric"], dataset=name)


globals().update({cls.__name__: cls for cls in (_dataset(name, about) for name, about in settings().items())})
