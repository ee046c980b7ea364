"""LongBench v1: 21 data sets, one task each (Bai et al., ACL 2024, arXiv 2308.14508; THUDM/LongBench 2e00731).

Prompts, answer lengths, post-processing and metrics are the published ones (tasks/data/longbench.yaml, pred.py, eval.py
there); `task=longbench` on the command line stands for all of them. Differences: what is cut from the middle and which
template wraps the prompt is in every record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvcompress import jsonl, metrics, prompts
from kvcompress.task import Sample, Task, Turn

FIELDS = ("input", "context", "answers", "all_classes", "length")
HUB = (
    "Xnhyacinth/LongBench"  # parquet; the publisher's own copy needs a loading script, which `datasets` no longer runs
)
MARGIN = 64  # positions left free beside prompt and answer where max_length follows from the model


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each data set."""
    return yaml.safe_load((Path(__file__).parent / "data" / "longbench.yaml").read_text(encoding="utf-8"))["datasets"]


@lru_cache(maxsize=32)
def from_hub(repository: str, name: str, revision: str | None) -> tuple[dict[str, Any], ...]:
    """Rows of one data set on the Hub, in the fields of the published files."""
    from datasets import load_dataset

    rows = [dict(row) for row in load_dataset(repository, name, split="test", revision=revision)]
    for row in rows:
        if "input" not in row and "question" in row:
            row["input"] = row.pop("question")
    return tuple(jsonl.check(row, FIELDS, f"{repository} {name} row {i}") for i, row in enumerate(rows))


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """One data set of LongBench. `dataset` and `metric` are the class's.

    Attributes:
        extended: LongBench-E's even spread over lengths, where the data set has one.
        max_length: tokens of a prompt at most; None: what the tokenizer says the model takes, less the answer.
        truncation: "text", the published rule (the halves are decoded, joined, wrapped and tokenised again), or
            "tokens", exact in token space with the wrapper kept.
        template: "official" (chat where LongBench uses one and the tokenizer has it), "auto", "chat" or "none".
        question: "seen" during compression, or "hidden": what follows the context is appended after it.
        source: "auto" (`paths.data`, then the Hub), "hub", or a file or folder of JSON Lines.
        revision: of the data set on the Hub.
    """

    dataset: ClassVar[str]
    version: ClassVar[str] = "1"
    metric_version: ClassVar[str] = "1"

    extended: bool = False
    max_length: int | None = None
    truncation: str = "text"
    template: str = "official"
    question: str = "seen"
    source: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        valid = {
            "truncation": ("text", "tokens"),
            "template": ("official", *prompts.TEMPLATES),
            "question": ("seen", "hidden"),
        }
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        if self.max_length is not None and self.max_length < 16:
            raise ValueError(f"task.max_length={self.max_length}; at least 16 tokens")
        if self.extended and not self.about["extended"]:
            names = ", ".join(name for name, about in settings().items() if about["extended"])
            raise ValueError(f"LongBench-E has no {self.dataset}; it has {names}")

    @property
    def about(self) -> dict[str, Any]:
        return settings()[self.dataset]

    def file(self) -> Path | None:
        """The JSON Lines file to read, or None for the Hub."""
        name = self.dataset + ("_e" if self.extended else "")
        if self.source == "hub":
            return None
        if self.source != "auto":
            path = Path(self.source).expanduser()
            if path.is_file():
                return path
            found = jsonl.find(name, [path])
            if found is None:
                raise ValueError(f"task.source={self.source!r} is no file and no folder with {name}.jsonl")
            return found
        data = Path(self.data) if self.data else None
        return jsonl.find(name, [data and data / "longbench_v1", data and data / "longbench_v1" / "mini", data])

    def rows(self) -> Sequence[dict[str, Any]]:
        """The records, in the order of the file.

        Raises:
            ValueError: a broken or incomplete file, or no data where it was looked for.
        """
        path = self.file()
        if path is not None:
            return jsonl.read(path, FIELDS)
        name = self.dataset + ("_e" if self.extended else "")
        try:
            return from_hub(HUB, name, self.revision)
        except Exception as error:
            looked = f"{self.data}/longbench_v1" if self.data else "paths.data (not set)"
            raise ValueError(
                f"no data for longbench/{self.dataset}: looked for {name}.jsonl in {looked}, then for {HUB} on the Hub "
                f"({type(error).__name__}: {error}). Set paths.data or task.source"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        path = self.file()
        if path is None:
            return {"data": f"hub:{HUB}@{self.revision or 'newest'}", "records": len(self.rows())}
        return {"data": jsonl.content_hash(path), "records": len(self.rows())}

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        about = self.about
        template = self.template
        if template == "official":
            template = "auto" if about["chat"] else "none"
        limit = self.max_length
        if limit is None:
            limit = int(min(tokenizer.model_max_length, 1 << 20)) - about["max_new_tokens"] - MARGIN
        stop = tuple(tokenizer.encode("\n", add_special_tokens=False)[-1:]) if about["newline_stops"] else ()
        head, _, rest = about["template"].partition("{context}")
        for number, row in enumerate(self.rows()):
            tail = rest.format(input=row["input"])
            hide = self.question == "hidden"
            prompt = prompts.build(
                tokenizer, head + row["context"] + tail, tail, template, limit, self.truncation, hide
            )
            turn = Turn(
                ids=prompt.question,
                max_new_tokens=about["max_new_tokens"],
                stop=stop,
                references=tuple(str(answer) for answer in row["answers"]),
                min_new_tokens=1 if stop else 0,  # as published: a newline cannot be all there is
            )
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
                meta={"length": row["length"], "classes": row["all_classes"], **prompts.describe(tokenizer, prompt)},
            )

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """The published metric of the data set, the best over all references."""
        classes = sample.meta.get("classes") or ()
        text = self.clean(out["text"][0])
        return {"score": metrics.score(self.metric, text, sample.turns[0].references, classes)}

    def clean(self, text: str) -> str:
        """An answer as it is scored: its first line where LongBench cuts it, else all of it."""
        return text.lstrip("\n").split("\n")[0] if self.about["first_line"] else text


def _dataset(name: str, about: dict[str, Any]) -> type[LongBench]:
    members = {
        "__doc__": f"LongBench's {name} ({about['category'].replace('_', ' ')}, metric {about['metric']}).",
        "__module__": __name__,
        "name": f"longbench/{name}",
        "dataset": name,
        "metric": about["metric"],
    }
    title = "".join(part.capitalize() for part in name.replace("-", "_").split("_"))
    return dataclass(frozen=True, kw_only=True)(type(f"LongBench{title}", (LongBench,), members))


globals().update({cls.__name__: cls for cls in (_dataset(name, about) for name, about in settings().items())})
