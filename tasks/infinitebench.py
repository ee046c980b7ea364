"""InfiniteBench: 12 sets of contexts beyond 100,000 tokens (Zhang et al., ACL 2024, arXiv 2402.13718).

Prompts, cut, answer lengths and metrics are the published ones of OpenBMB/InfiniteBench 88b3daa, src/ (tasks/data/
infinitebench.yaml): `prompt=yarn-mistral` is what open models get there, `prompt=gpt4` what GPT-4 gets. Decoding is greedy.
`task=infinitebench` on the command line stands for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvcompress import metrics
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.row_task import RowPrompt, RowTask, check_fits, named, place
from kvcompress.data.task import Sample, Task, Turn, of_suite

HUB = "xinrongzhang2022/InfiniteBench"
LONGEST = 128 * 1024  # tokens of a prompt, as published
PROMPTS = ("yarn-mistral", "gpt4")
LETTERS = "ABCD"


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each set."""
    return yaml.safe_load((Path(__file__).parent / "data" / "infinitebench.yaml").read_text(encoding="utf-8"))[
        "datasets"
    ]


def _single(value: Any, where: str) -> Any:
    """An answer, or the only one of a list: published files have both forms."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{where}: answer must be one answer, or a list of one, found a list of {len(value)}")
    return value[0]


def number(value: Any, field: str, where: str, whole: bool = False) -> str:
    """A number as text, "88" or "8.5".

    Raises:
        ValueError: it is none, or with `whole` no whole one.
    """
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{where}: {field} must be a {'whole ' if whole else ''}number, found {value!r:.60}")
    return jsonl.answer(value, field, where)


def options(row: Mapping[str, Any], answer: str, where: str) -> tuple[list[str], str]:
    """The four options of a row or question, and the letter of the right one.

    Raises:
        ValueError: they are not four texts, or the answer is not among them.
    """
    found = jsonl.check(row, ("options",), where)["options"]
    if not isinstance(found, list) or len(found) != len(LETTERS):
        raise ValueError(f"{where}: options must be a list of four texts, found {found!r:.60}")
    texts = [jsonl.whole(one, "options", where) for one in found]
    if answer not in texts:
        raise ValueError(f"{where}: answer {answer!r:.60} is none of the options")
    return texts, LETTERS[texts.index(answer)]


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(RowTask):
    """One set of InfiniteBench. `dataset` and `metric` are the class's.

    Attributes:
        prompt: "yarn-mistral" or "gpt4", whose published wording it is.
        template: "official" (none for yarn-mistral; chat for gpt4 where the tokenizer has a template), "auto", "chat" or
            "none".
        max_length: tokens of a prompt at most, cut in the middle before the wrapper; None: 131,072, or what the
            tokenizer says the model takes, less the answer.
        max_new_tokens: of an answer; None: as published.
        question: "seen" during compression, or "hidden": what follows the context is appended after it.
        source: "auto" (`paths.data`/infinitebench, then the Hub), "hub", or a file or folder of JSON Lines.
        revision: commit of the data set on the Hub, or its branch.
    """

    dataset: ClassVar[str]
    folder: ClassVar[str] = "infinitebench"
    fields: ClassVar[tuple[str, ...]] = ("context", "input", "answer")
    templates: ClassVar[tuple[str, ...]] = ("official", *prompts.TEMPLATES)

    prompt: str = "yarn-mistral"
    template: str = "official"
    max_new_tokens: int | None = None
    revision: str = "90f0394333616266d9fe85824ceaf505093cbaa5"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt not in PROMPTS:
            raise ValueError(f"task.prompt={self.prompt!r}; valid: {', '.join(PROMPTS)}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"task.max_new_tokens={self.max_new_tokens}; at least 1")
        if self.prompt not in self.published["prompts"]:
            raise ValueError(
                f"task.prompt={self.prompt}: {self.dataset} is a conversation of several messages there; "
                "valid: yarn-mistral"
            )
        before, _, after = self.wording.partition("{context}")
        if self.question == "hidden" and ("{" in before or not after):
            raise ValueError(
                f"task.question=hidden: the prompt of {self.dataset} asks before the context, so that nothing would be "
                "hidden; valid: seen"
            )

    @property
    def published(self) -> dict[str, Any]:
        return settings()[self.dataset]

    @property
    def wording(self) -> str:
        return self.published["prompts"][self.prompt]

    def names(self) -> Sequence[str]:
        return [self.dataset]

    def file(self) -> Path | None:
        return None if self.source == "hub" else super().file()

    def hub(self) -> hub.File:
        return hub.File(HUB, f"{self.dataset}.jsonl", "", self.revision)

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        return self.max_new_tokens or int(self.published["max_new_tokens"])

    def limit(self, tokenizer: Any) -> int | None:
        if self.max_length is not None:
            return self.max_length
        return min(LONGEST, prompts.room(tokenizer, self.new_tokens({})))

    # ------------------------------------------------------------------ rows

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        context, asked = jsonl.text(row, "context", where), jsonl.text(row, "input", where)
        values = {"input": asked, "question": asked, **self._named(asked, where)}
        references = self._references(row, where)
        if self.published["answer"] == "choice":
            texts, _ = options(row, references[0], where)
            values |= {f"OPTION_{letter}": text for letter, text in zip(LETTERS, texts, strict=True)}
        before, _, after = self.wording.partition("{context}")
        tail = after.format(**values)
        return RowPrompt(before.format(**values) + context + tail, tail, references)

    def _named(self, asked: str, where: str) -> dict[str, str]:
        """What the prompt names of the question: the function and its call, or the number that is looked for."""
        if self.dataset == "code_run":
            call = re.search(r"func_[0-9]+\(-?[0-9]+\)", asked)
            if call is None:
                raise ValueError(f"{where}: input must name a call like func_12(3), found {asked!r:.60}")
            return {"func_call": call[0], "func": call[0].partition("(")[0]}
        if self.dataset == "math_find":
            target = re.search(r"The .+ of", asked)
            if target is None:
                raise ValueError(f"{where}: input must say 'The … of', found {asked!r:.60}")
            return {"prefix": f"What is {target[0].lower()[:-3]} in the following list?"}
        return {}

    def _references(self, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """The answers of a row as texts, by what the set's answers are."""
        value, kind = row["answer"], self.published["answer"]
        if kind == "text":
            return (jsonl.whole(_single(value, where), "answer", where),)
        if kind == "number":
            return (number(_single(value, where), "answer", where, whole=self.dataset == "code_run"),)
        if kind == "numbers":
            listed = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
            if not isinstance(listed, list) or not listed:
                raise ValueError(f"{where}: answer must be a list of numbers, found {value!r:.60}")
            return tuple(number(one, "answer", where, whole=True) for one in listed)
        if kind == "choice":
            if isinstance(value, list) and len(value) == 2 and value[1] in tuple(LETTERS):
                value = value[0]
            text = jsonl.whole(_single(value, where), "answer", where)
            return (text, options(row, text, where)[1])
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where}: answer must be a list of at least one text, found {value!r:.60}")
        return tuple(jsonl.whole(one, "answer", where) for one in value)

    # ------------------------------------------------------------------ samples

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        template, limit, new = self.template, self.limit(tokenizer), self.new_tokens({})
        if template == "official":
            template = "none" if self.prompt == "yarn-mistral" else "auto"
        hide = self.question == "hidden"
        for at, ((where, _), (_, asked)) in enumerate(zip(self.located(), self.row_prompts(), strict=True)):
            if self.metric in metrics.EXACT:
                check_fits(tokenizer, asked.references[0], new, f"{where}: answer")
            text, cut = asked.text, 0
            if limit is not None:
                text, cut = prompts.cut_text(tokenizer, text, limit, joined=True)
            with named(where):
                made = prompts.build(tokenizer, text, asked.tail, template, None, "text", hide)
            facts = prompts.describe(tokenizer, made) | {"truncated_tokens": cut}
            yield Sample(
                id=str(at),
                segments=(made.context,),
                turns=(Turn(made.question, new, references=asked.references),),
                protocol={"question": self.question, "template": made.template, "max_length": limit},
                meta={"row": place(where), **facts},
                where=where,
            )

    def gold(self, sample: Sample) -> list[str] | None:
        return [metrics.gold(self.metric, turn.references) for turn in sample.turns]

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """The published metric of the set."""
        return {"score": metrics.score(self.metric, out["text"][0], sample.turns[0].references)}


def _dataset(name: str, about: dict[str, Any]) -> type[Task]:
    text = f"InfiniteBench's {about['title']} ({about['category']}, metric {about['metric']})."
    return of_suite(InfiniteBench, "infinitebench", name, text, about["metric"], dataset=name)


globals().update({cls.__name__: cls for cls in (_dataset(name, about) for name, about in settings().items())})
