"""SCBench: 12 sets of contexts with several questions each (Li et al., ICLR 2025, arXiv 2412.10319).

Prompts, cut, answer lengths and metrics are the published ones of microsoft/MInference fb56c91, scbench/ (tasks/data/
scbench.yaml). Its modes: "multi-request" is `turns=independent`, "multi-turn" `turns=gold` (right answers stand in the
conversation), and with `--disable_golden_context` `turns=session`. `task=scbench` stands for all sets. Differences: the first
question of a conversation is never part of what is compressed, and no BOS token is added twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import yaml

from kvcompress import metrics
from kvcompress.common.prose import Encoder
from kvcompress.data import conversation, hub, jsonl, prompts
from kvcompress.data.haystack import follow_up, prompt_template
from kvcompress.data.row_task import RowPrompt, RowTask, check_fits, named, place
from kvcompress.data.task import Sample, Task, Turn, of_suite
from kvcompress.metrics import code_retrieval
from kvcompress.tasks.infinitebench import LETTERS, number, options

HUB = "microsoft/SCBench"
LONGEST = 131_072  # tokens of prompt, questions and answers, as in the published scripts
APART = 1000  # tokens that the published cut leaves for a question asked apart
LEAST = 16


@lru_cache(maxsize=1)
def settings() -> dict[str, dict[str, Any]]:
    """The published settings of each set."""
    return yaml.safe_load((Path(__file__).parent / "data" / "scbench.yaml").read_text(encoding="utf-8"))["datasets"]


@dataclass(frozen=True)
class Asked:
    """One question of a context.

    Attributes:
        kind: set whose question it is; another than the task's own in sets that mix two.
        values: what fills the templates.
        references: as its metric takes them.
        said: the right answer as it stands in a conversation.
        function: name of the function that is asked for, in repositories.
    """

    kind: str
    values: Mapping[str, str]
    references: tuple[str, ...]
    said: str
    function: str = ""


@dataclass(frozen=True)
class Conversation:
    """One row: a context, `prefix` of its prompt where it has one, and questions on it."""

    where: str
    context: str
    asked: tuple[Asked, ...]
    language: str = ""
    repository: str = ""


@dataclass(frozen=True, kw_only=True)
class SCBench(RowTask):
    """One set of SCBench. The score of a sample is the mean over its questions. `dataset` and `metric` are the class's.

    Attributes:
        turns: "independent", "gold" or "session", see above and `kvcompress.data.task.TURNS`.
        max_turns: questions of a context at most.
        scoring: "official", or "whole": the answers of qa_chn and many_shot are one text each. The published scorer takes
            them for lists, so that each character counts as an answer.
        template: "auto" (chat where the tokenizer has a template, as published), "chat" or "none".
        max_length: tokens of context and prompt at most, cut in the middle; None: 131,072, or what the tokenizer says the
            model takes, less all answers and in `turns=independent` 1,000.
        max_new_tokens: of each answer; None: as published.
        source: "auto" (`paths.data`/scbench, then the Hub), "hub", or a file or folder of JSON Lines.
        revision: commit of the data set on the Hub, or its branch.
        question: "hidden": none is seen during compression.
    """

    dataset: ClassVar[str]
    folder: ClassVar[str] = "scbench"
    fields: ClassVar[tuple[str, ...]] = ("multi_turns",)

    turns: str = "independent"
    max_turns: int = 5
    scoring: str = "official"
    question: str = "hidden"
    max_new_tokens: int | None = None
    revision: str = "283310bb8c5ba6909dd9a6b1be087d2937f76f6d"

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = {"turns": conversation.ORDERS, "scoring": ("official", "whole"), "question": ("hidden",)}
        for field, values in valid.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        for field in ("max_turns", "max_new_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"task.{field}={value}; at least 1")

    @property
    def published(self) -> dict[str, Any]:
        return settings()[self.dataset]

    def names(self) -> Sequence[str]:
        return [f"scbench_{self.dataset}"]

    def file(self) -> Path | None:
        return None if self.source == "hub" else super().file()

    def hub(self) -> hub.File:
        return hub.File(HUB, f"data/scbench_{self.dataset}.jsonl", "", self.revision)

    def cannot_batch(self) -> str | None:
        return conversation.cannot_batch(self.turns)

    def _new(self, kind: str) -> int:
        """Tokens of an answer to a question of a kind at most."""
        published = self.published["max_new_tokens"]
        return self.max_new_tokens or int(published[kind] if isinstance(published, dict) else published)

    def _room(self, tokenizer: Any, count: int) -> int:
        """Tokens of a prompt at most, where rows have `count` questions.

        Raises:
            ValueError: the answers leave less than `LEAST`.
        """
        if self.max_length is not None:
            return self.max_length
        most = int(min(LONGEST, tokenizer.model_max_length))
        kinds = self.published.get("mixes") or [self.dataset]
        new = sum(map(self._new, kinds)) * count // len(kinds)
        left = most - new - (APART if self.turns == "independent" else 0)
        if left < LEAST:
            raise ValueError(
                f"task {self.name}: of {most} positions {count} answers take {new}, which leaves {max(left, 0)} for a "
                "prompt: set task.max_length, or less of task.max_new_tokens or task.max_turns"
            )
        return left

    # ------------------------------------------------------------------ rows

    def conversations(self) -> Iterator[Conversation]:
        """Every row, checked.

        Raises:
            ValueError: no data, or a row without what is needed: named with file, row, question and field.
        """
        located = self.located()
        for where, row in located:
            if not isinstance(row["multi_turns"], list) or not row["multi_turns"]:
                raise ValueError(f"{where}: multi_turns must be a list of at least one question")
        for where, row in located:
            yield self._conversation(row, where, self._most(located[0][1]))

    def _most(self, first: Mapping[str, Any]) -> int | None:
        """Questions of a row at most. As published, where the first row has no more than `max_turns`, none is cut."""
        return self.max_turns if self.max_turns < len(first["multi_turns"]) else None

    def _conversation(self, row: Mapping[str, Any], where: str, most: int | None) -> Conversation:
        field = "context" if "context" in row else "input"
        context = jsonl.check(row, (field,), where)[field]
        if self.dataset == "mf" and isinstance(context, list) and context:
            odd = next((one for one in context if type(one) is not int), None)
            if odd is not None:
                raise ValueError(f"{where}: {field} must be a list of whole numbers, found {odd!r:.60} in it")
            context = str(context)
        text = jsonl.whole(context, field, where)
        asked = tuple(
            self._asked(one, f"{where}, question {at}") for at, one in enumerate(row["multi_turns"][:most], 1)
        )
        if not any(one.function for one in asked):
            return Conversation(where, text, asked)
        about = jsonl.check(row, ("lang", "repo"), where)
        return Conversation(where, text, asked, code_retrieval.checked(about["lang"], f"{where}: lang"),
                            jsonl.whole(about["repo"], "repo", where))  # fmt: skip

    def _asked(self, turn: Any, where: str) -> Asked:
        jsonl.check(turn, ("input", "answer"), where)
        kind, said = self.dataset, jsonl.text(turn, "input", where)
        if mixes := self.published.get("mixes"):
            kind = str(jsonl.check(turn, ("task",), where)["task"]).removeprefix("scbench_")
            if kind not in mixes:
                raise ValueError(
                    f"{where}: task={turn['task']!r:.60}; valid: {', '.join(f'scbench_{m}' for m in mixes)}"
                )
        values = {"input": said, "question": said}
        value, form = turn["answer"], settings_of(kind)["answer"]
        if form == "texts":
            references = jsonl.answers(value, "answer", where)
        elif form == "number":
            references = (number(value, "answer", where),)
            target = re.search(r"The .+ is", said)
            if target is None:
                raise ValueError(f"{where}: input must say 'The … is', found {said!r:.60}")
            values["prefix"] = f"What is {target[0].lower()[:-3]}?"
        else:
            references = (jsonl.whole(value, "answer", where),)
        if form == "choice":
            texts, letter = options(turn, references[0], where)
            values |= {f"OPTION_{name}": text for name, text in zip(LETTERS, texts, strict=True)}
            references += (letter,)
        if form == "characters" and self.scoring == "official":
            references = tuple(references[0])
        if not references or not all(references):
            raise ValueError(f"{where}: answer is empty; give one, or leave the question out")
        function = jsonl.whole(jsonl.check(turn, ("name",), where)["name"], "name", where) if form == "function" else ""
        return Asked(kind, values, references, str(value), function)

    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        """The prompt of a row's first question."""
        return self._first(self._conversation(row, where, None))

    def row_prompts(self) -> Iterator[tuple[dict[str, Any], RowPrompt]]:
        for (_, row), one in zip(self.located(), self.conversations(), strict=True):
            yield row, self._first(one)

    def _first(self, one: Conversation) -> RowPrompt:
        before, _, after = self.published["first"].partition("{context}")
        asked = one.asked[0]
        tail = after.format(**asked.values)
        return RowPrompt(before.format(**asked.values) + one.context + tail, tail, asked.references)

    # ------------------------------------------------------------------ samples

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        limit = 0
        for at, one in enumerate(self.conversations()):
            limit = limit or self._room(tokenizer, len(one.asked))
            for number_, asked in enumerate(one.asked, 1):
                if self.metric_of(asked.kind) in metrics.EXACT:
                    where = f"{one.where}, question {number_}: answer"
                    check_fits(tokenizer, asked.references[0], self._new(asked.kind), where)
            made = self._apart if self.turns == "independent" else self._in_turn
            with named(one.where):
                context, ids, template, cut = made(tokenizer, one, limit)
            meta: dict[str, Any] = {"row": place(one.where), "kinds": [asked.kind for asked in one.asked]}
            if one.repository:
                meta |= {"repo": one.repository, "lang": one.language, "functions": [a.function for a in one.asked]}
            yield Sample(
                id=str(at),
                segments=(context,),
                turns=tuple(
                    Turn(tail, self._new(asked.kind), references=asked.references)
                    for tail, asked in zip(ids, one.asked, strict=True)
                ),
                protocol={"question": "hidden", "turns": self.turns, "template": template, "max_length": limit},
                meta={**meta, **prompts.facts(tokenizer, (*context, *ids[0]), cut)},
                where=one.where,
            )

    def _apart(self, tokenizer: Any, one: Conversation, limit: int) -> tuple[Any, list[tuple[int, ...]], str, int]:
        """Context, questions each on its own, template and tokens cut, as in multi-request mode."""
        encode = Encoder(tokenizer)
        # as published, the prompt of mf begins with its first question
        head = self.published["context"].partition("{context}")[0].format(prefix=one.asked[0].values["input"])
        frames = [
            prompt_template(
                tokenizer, encode, head + one.context, self.published["request"].format(**a.values), "", self.template
            )
            for a in one.asked
        ]
        context = frames[0].head
        return (
            prompts.cut_ids(context, limit),
            [frame.tail for frame in frames],
            frames[0].template,
            max(0, len(context) - limit),
        )

    def _in_turn(self, tokenizer: Any, one: Conversation, limit: int) -> tuple[Any, list[tuple[int, ...]], str, int]:
        """The same for a conversation: from the second question on with what stands before it."""
        encode, first = Encoder(tokenizer), self._first(one)
        made = prompts.build(tokenizer, first.text, first.tail, self.template, limit, "tokens", hide=True)
        ids = [made.question]
        for before, asked in zip(one.asked, one.asked[1:], strict=False):
            said = before.said if self.turns == "gold" else ""
            if made.template == "none":
                ids.append(encode(self.published["later"].format(**asked.values, pre_ans=said)))
                continue
            # as published, every later question of mf is introduced as the last one is
            values = {**asked.values, **{k: v for k, v in one.asked[-1].values.items() if k == "prefix"}}
            text, start = self.published["later_chat"].format(**values), self.published.get("starts_later", "")
            ids.append((*encode(said), *follow_up(tokenizer, encode, text, start, self.template)))
        return made.context, ids, made.template, made.truncated

    # ------------------------------------------------------------------ scores

    def metric_of(self, kind: str) -> str:
        return settings_of(kind)["metric"]

    def _functions(self, repository: str) -> list[tuple[str, str]]:
        """Name and text of every function that is asked of a repository in any row."""
        rows = self.rows()
        most = self._most(rows[0])
        asked = [turn for row in rows if row["repo"] == repository for turn in row["multi_turns"][:most]]
        return [
            (turn["name"], turn["answer"]) for turn in asked if turn.get("task", "scbench_repoqa") == "scbench_repoqa"
        ]

    def gold(self, sample: Sample) -> list[str] | None:
        right = []
        for turn, kind in zip(sample.turns, sample.meta["kinds"], strict=True):
            metric = self.metric_of(kind)
            if metric == "characters_f1":  # by the published rule a single character is all of an answer
                right.append(max(turn.references, key=lambda one: metrics.score(metric, one, turn.references)))
            else:
                right.append(metrics.gold(metric, turn.references))
        return right

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Mean over the questions of their metrics, and each question's own as `turn_1`, `turn_2`, …"""
        found = []
        functions = self._functions(sample.meta["repo"]) if "repo" in sample.meta else []
        for at, (text, turn, kind) in enumerate(zip(out["text"], sample.turns, sample.meta["kinds"], strict=True)):
            metric = self.metric_of(kind)
            if metric == "function_found":
                name, language = sample.meta["functions"][at], sample.meta["lang"]
                found.append(code_retrieval.function_found(text, name, functions, language))
            else:
                found.append(metrics.score(metric, text, turn.references))
        return conversation.scores(found)

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Mean of each place in the order of questions (what is published of multi-turn mode), over all questions
        (of multi-request mode), and of each kind where a set mixes two."""
        by_kind: dict[str, list[float]] = {}
        for row in rows:
            for at, kind in enumerate(row["meta"]["kinds"], 1):
                by_kind.setdefault(kind, []).append(row["scores"][f"turn_{at}"])
        found = conversation.by_turn(rows) | {"score_by_question": fmean(one for s in by_kind.values() for one in s)}
        if self.published.get("mixes"):
            found |= {f"score_{kind}": fmean(scores) for kind, scores in sorted(by_kind.items())}
        return found


def settings_of(kind: str) -> dict[str, Any]:
    """The settings of a kind of question; `passkey` is one of a mixed set alone."""
    return settings().get(kind) or PARTS[kind]


PARTS: dict[str, dict[str, Any]] = {"passkey": {"metric": "first_number", "answer": "text"}}


def _dataset(name: str, about: dict[str, Any]) -> type[Task]:
    text = f"SCBench's {name} ({about['category']}, metric {about['metric']})."
    return of_suite(SCBench, "scbench", name, text, about["metric"], dataset=name)


globals().update({cls.__name__: cls for cls in (_dataset(name, about) for name, about in settings().items())})
