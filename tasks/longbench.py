"""LongBench v1: 21 data sets, one task each (Bai et al., ACL 2024, arXiv 2308.14508; THUDM/LongBench 2e00731).

Prompts, answer lengths, post-processing and metrics are the published ones (tasks/data/longbench.yaml, pred.py, eval.py
there); `task=longbench` on the command line stands for all of them. Differences: what is cut from the middle and which
template wraps the prompt is in every record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import yaml

from kvcompress import metrics
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.prompts import resolve_template
from kvcompress.data.row_task import RowPrompt, RowTask, named
from kvcompress.data.task import Sample, Task, Turn, of_suite
from kvcompress.data.thinking import template_opens

FIELDS = ("input", "context", "answers", "all_classes", "length")
HUB = (
    "Xnhyacinth/LongBench"  # parquet; the publisher's own copy needs a loading script, which `datasets` no longer runs
)
BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, None)}  # LongBench-E's, by the rows' `length`


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each data set."""
    return yaml.safe_load((Path(__file__).parent / "data" / "longbench.yaml").read_text(encoding="utf-8"))["datasets"]


def official(row: dict[str, Any], template: str) -> dict[str, Any]:
    """A row of the Hub's copy in the fields of the published files.

    There `question` stands for `input`; where there is an `answer_prefix` as well, context, question and prefix are the
    filled-in official prompt in three parts, and what was filled in is cut out of them again.

    Raises:
        ValueError: the three parts are not the official prompt.
    """
    if "input" in row or "question" not in row:
        return row
    head, _, rest = template.partition("{context}")
    before, asks, after = rest.partition("{input}")
    asked = row["question"] + row.get("answer_prefix", "")
    prompt = row["context"] + asked
    if "answer_prefix" not in row or not prompt.startswith(head):
        return {**row, "input": row["question"]}
    label = next(before[at:] for at in range(len(before) + 1) if asked.startswith(before[at:]))
    said = asked[len(label) : len(asked) - len(after)] if asks else ""
    tail = before + said + after
    if not prompt.endswith(tail):
        raise ValueError(
            f"the Hub's copy of LongBench: its prompt ends in {prompt[-60:]!r}, the official in {tail[-60:]!r}"
        )
    return {**row, "input": said, "context": prompt[len(head) : len(prompt) - len(tail)]}


@dataclass(frozen=True, kw_only=True)
class LongBench(RowTask):
    """One data set of LongBench. `dataset` and `metric` are the class's.

    Attributes:
        extended: LongBench-E's even spread over lengths, where the data set has one; scores by length beside the mean.
        max_length: tokens of a prompt at most; None: what the tokenizer says the model takes, less the answer.
        truncation: "text", the published rule (the halves are decoded, joined, wrapped and tokenised again), or
            "tokens", exact in token space with the wrapper kept.
        template: "official" (chat where LongBench uses one and the tokenizer has it), "auto", "chat" or "none".
        question: "seen" during compression, or "hidden": what follows the context is appended after it.
        source: "auto" (`paths.data`, then the Hub), "hub", or a file or folder of JSON Lines.
        revision: commit of the data set on the Hub, or its branch.
    """

    dataset: ClassVar[str]
    folder: ClassVar[str] = "longbench_v1"
    fields: ClassVar[tuple[str, ...]] = FIELDS
    templates: ClassVar[tuple[str, ...]] = ("official", *prompts.TEMPLATES)

    extended: bool = False
    truncation: str = "text"
    template: str = "official"
    revision: str = "2e9ade51ebf45d98942056c0716234f9d5d257d5"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncation not in ("text", "tokens"):
            raise ValueError(f"task.truncation={self.truncation!r}; valid: text, tokens")
        if self.extended and not self.published["extended"]:
            names = ", ".join(name for name, about in settings().items() if about["extended"])
            raise ValueError(f"LongBench-E has no {self.dataset}; it has {names}")

    @property
    def published(self) -> dict[str, Any]:
        return settings()[self.dataset]

    def names(self) -> Sequence[str]:
        return [self.dataset + ("_e" if self.extended else "")]

    def file(self) -> Path | None:
        return None if self.source == "hub" else super().file()

    def places(self) -> list[Path]:
        data = super().places()
        return [place for folder in data for place in (folder, folder / "mini", folder.parent)]

    def hub(self) -> hub.Source:
        return hub.Source(HUB, self.names()[0], "test", self.revision)

    def from_hub(self, row: dict[str, Any]) -> dict[str, Any]:
        return official(row, self.published["template"])

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return int(self.published["max_new_tokens"])

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"length": row["length"], "classes": row["all_classes"]}

    def limit(self, tokenizer: Any) -> int | None:
        if self.max_length is not None:
            return self.max_length
        return prompts.room(tokenizer, int(self.published["max_new_tokens"]))

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        head, _, rest = self.published["template"].partition("{context}")
        tail = rest.format(input=jsonl.text(row, "input", where))
        references = jsonl.answers(row["answers"], "answers", where)
        length = row["length"]
        if self.extended and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
            raise ValueError(f"{where}: length must be a whole number of words, found {length!r:.60}")
        if self.metric == "classification":
            jsonl.answers(row["all_classes"], "all_classes", where)
        return RowPrompt(head + jsonl.text(row, "context", where) + tail, tail, references)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        template, limit = self.template, self.limit(tokenizer)
        if template == "official":
            template = "auto" if self.published["chat"] else "none"
        # a thinking part that the template opens has lines of its own; the first line behind it is what is scored
        opened = resolve_template(tokenizer, template) == "chat" and template_opens(tokenizer)
        newline = self.published["newline_stops"] and not (opened and self.published["first_line"])
        stop = tuple(plain_ids(tokenizer, "\n")[-1:]) if newline else ()
        hide = self.question == "hidden"
        for number, ((where, _), (row, asked)) in enumerate(zip(self.located(), self.row_prompts(), strict=True)):
            with named(where):
                prompt = prompts.build(tokenizer, asked.text, asked.tail, template, limit, self.truncation, hide)
            # as published: a newline cannot be all there is
            turn = Turn(prompt.question, self.new_tokens(row), stop, asked.references, min_new_tokens=1 if stop else 0)
            yield Sample(
                id=str(row.get("_id") or number),
                segments=(prompt.context,),
                turns=(turn,),
                protocol={
                    "question": self.question,
                    "template": prompt.template,
                    "truncation": self.truncation,
                    "max_length": limit,
                },
                meta={**self.about(row), **prompts.describe(tokenizer, prompt)},
            )

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """The published metric of the data set, the best over all references."""
        classes = sample.meta.get("classes") or ()
        text = self.clean(out["text"][0])
        return {"score": metrics.score(self.metric, text, sample.turns[0].references, classes)}

    def clean(self, text: str) -> str:
        """An answer as it is scored: its first line where LongBench cuts it, else all of it."""
        return text.lstrip("\n").split("\n")[0] if self.published["first_line"] else text

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of LongBench-E the mean of each bucket of lengths, as published, and how many samples it has."""
        found: dict[str, Any] = {}
        for name, (least, below) in BUCKETS.items() if self.extended else ():
            within = [
                r["score"]
                for r in rows
                if least <= r["meta"]["length"] and (below is None or r["meta"]["length"] < below)
            ]
            found |= {f"n_{name}": len(within), f"score_{name}": fmean(within) if within else None}
        return found


def _dataset(name: str, about: dict[str, Any]) -> type[Task]:
    text = f"LongBench's {name} ({about['category'].replace('_', ' ')}, metric {about['metric']})."
    return of_suite(LongBench, "longbench", name, text, about["metric"], dataset=name)


globals().update({cls.__name__: cls for cls in (_dataset(name, about) for name, about in settings().items())})
