"""Any task of lm-eval (EleutherAI's lm-evaluation-harness) on a compressed model. Needs the extra `eval`.

lm-eval gives documents, prompts, filters and metrics; prompts are tokenised as its HFLM does. One sample is one
document with all its requests. Of a continuation that is scored the context is compressed first
(`kvcompress.data.lm_eval_requests`); a text to be completed is a prompt like any other, compressed when it ends.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import stdev
from typing import Any, ClassVar

import torch

from kvcompress.common.hashing import digest
from kvcompress.data import prompts
from kvcompress.data.lm_eval_index import SEED, Loaded, load
from kvcompress.data.lm_eval_requests import (
    Completion,
    Continuation,
    answer_text,
    check_rolling,
    complete,
    draw_seed,
    log_likelihoods,
    prompt_of,
)
from kvcompress.data.task import Sample, Task, Turn, ended_by_force
from kvcompress.measure.measuring import PeakMemory

PERCENT = ("bleu", "chrf", "chrf++")  # metrics of lm-eval whose best value is 100
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
TEXTS = (*PERCENT, "ter")  # metrics that read the texts again for every draw

Request = Continuation | Completion
Values = dict[tuple[str, str], Any]  # by metric and filter, as a task of lm-eval returns them for one document


@dataclass(frozen=True)
class Document(Sample):
    """One document: `asked` are its requests, each of one or (a long text in windows) more parts."""

    asked: tuple[tuple[Request, ...], ...] = field(default=(), compare=False, repr=False)

    def total_tokens(self) -> int:
        parts = [part for parts in self.asked for part in parts]
        written = [part.max_new_tokens for part in parts if isinstance(part, Completion)]
        thought = max(turn.max_new_tokens for turn in self.turns) - max(written, default=0)  # with a budget of thinking
        return max(part.total_tokens() for part in parts) + max(0, thought)


@dataclass(frozen=True, kw_only=True)
class LMEval(Task):
    """The score of a document is one of its task's metrics; all of them, over all documents, are `metrics.*`.

    Attributes:
        tasks: names of tasks, groups or tags of lm-eval, patterns, or yaml files. Their documents come by turns, so that
            `limit`, which counts documents over all tasks, touches each.
        include_path: folder with yaml files of your own.
        num_fewshot: examples before each document; None: as the task says, else 0. A 0 in the task's yaml stands.
        template: "none" (as lm-eval's default), "chat" or "auto" (chat where the tokenizer has a template).
        system: system message, in front of the task's own description.
        multiturn: with a chat template, examples are turns of their own.
        max_length: longest sequence; beyond it tokens are cut on the left. None: what the tokenizer says.
        held_back: last tokens of a context that are fed after its compression, where a continuation is scored.
        score_by: the metric that is the score, `METRIC` or `METRIC,FILTER`; "auto": the first that is better when higher
            and known for one document alone.
        scale: the best value of that metric, for one that does not end at 1.
        unsafe_code: allow tasks that run code which the model writes.
    """

    name: ClassVar[str] = "lm_eval"
    version: ClassVar[str] = "1"
    metric_version: ClassVar[str] = "1"

    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    num_fewshot: int | None = None
    template: str = "none"
    system: str | None = None
    multiturn: bool = True
    max_length: int | None = None
    held_back: int = 1
    score_by: str = "auto"
    scale: float = 1.0
    unsafe_code: bool = False

    def __post_init__(self) -> None:
        if self.template not in prompts.TEMPLATES:
            raise ValueError(f"task.template={self.template!r}; valid: {', '.join(prompts.TEMPLATES)}")
        for name, least in (("num_fewshot", 0), ("held_back", 0), ("max_length", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"task.{name}={value}; at least {least}")
        if not self.scale > 0:
            raise ValueError(f"task.scale={self.scale}; above 0")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"task.include_path={self.include_path!r} is no folder")

    @property
    def metric(self) -> str:  # type: ignore[override]
        """On boards: which of lm-eval's tasks; which of its metrics is `metrics.TASK.score_is`."""
        return ",".join(self.tasks)

    def loaded(self) -> Loaded:
        """The tasks with their data.

        Raises:
            ValueError: lm-eval is not installed, no task is named, or see `load`.
        """
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError("task lm_eval needs the package lm-eval: pip install 'kvcompress[eval]'")
        if not self.tasks:
            raise ValueError("task.tasks is empty; names of lm-eval's tasks, e.g. task.tasks=[hellaswag,gsm8k]")
        return load(self.tasks, self.include_path, self.num_fewshot, self.unsafe_code)

    def settings(self) -> dict[str, Any]:
        # where the yaml files lie is no setting: what they say is in the fingerprint
        return {name: value for name, value in super().settings().items() if name != "include_path"}

    def fingerprint(self) -> dict[str, Any]:
        """Versions, data and first prompts; what cannot be asked here is refused before a model is loaded."""
        loaded, first = self.loaded(), {}
        self._seed(loaded)
        for name, docs in loaded.docs.items():
            requests = self._requests(loaded, name, 0, docs[0], None)
            for request in requests:
                if request.request_type not in KINDS:
                    raise ValueError(
                        f"lm-eval's task {name} asks for {request.request_type}; known: {', '.join(KINDS)}"
                    )
            first[name] = digest([request.args for request in requests])
        return {**loaded.facts, "first": first}

    # ------------------------------------------------------------------ samples

    def _seed(self, loaded: Loaded) -> None:
        for task in loaded.tasks.values():
            task.set_fewshot_seed(seed=SEED + self.seed)

    def _requests(self, loaded: Loaded, name: str, number: int, doc: Any, chat: Any) -> list[Any]:
        """lm-eval's requests for one document; examples are drawn, so documents come in order."""
        task = loaded.tasks[name]
        context = task.fewshot_context(
            doc,
            num_fewshot=task.get_config("num_fewshot") or 0,
            system_instruction=self.system,
            apply_chat_template=chat is not None,
            fewshot_as_multiturn=self.multiturn,
            chat_template=chat,
            gen_prefix=task.doc_to_prefix(doc),
        )
        made = task.construct_requests(
            doc=doc,
            ctx=context,
            metadata=(name, number, task.get_config("repeats") or 1),
            apply_chat_template=chat is not None,
            chat_template=chat,
        )
        return made if isinstance(made, list) else [made]

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        from kvcompress.data.lm_eval_encoding import Encoding

        template = prompts.resolve_template(tokenizer, self.template)
        known = tokenizer.model_max_length
        encoding = Encoding(tokenizer, self.max_length or (int(known) if known and known < 1 << 24 else None))
        chat = encoding.apply_chat_template if template == "chat" else None
        loaded = self.loaded()
        self._seed(loaded)

        def documents(name: str) -> Iterator[Document]:
            for number, doc in enumerate(loaded.docs[name]):
                try:
                    yield self._document(loaded, name, number, doc, encoding, chat)
                except ValueError as error:
                    raise ValueError(f"{name} document {number}: {error}") from error

        for row in zip_longest(*(documents(name) for name in loaded.tasks)):
            yield from (document for document in row if document is not None)

    def _document(self, loaded: Loaded, name: str, number: int, doc: Any, encoding: Any, chat: Any) -> Document:
        requests = self._requests(loaded, name, number, doc, chat)
        asked: list[tuple[Request, ...]] = []
        for request in requests:
            if request.request_type == "generate_until":
                asked.append((encoding.completion(*request.args),) * (request.repeats or 1))
            elif request.request_type == "loglikelihood_rolling":
                asked.append(tuple(encoding.windows(*request.args)))
            else:
                asked.append((encoding.pair(*request.args),))
        parts = [part for group in asked for part in group]
        kinds = [request.request_type for request in requests]
        expected = () if "loglikelihood_rolling" in kinds else _texts(loaded.tasks[name].doc_to_target(doc))
        lengths = [part.max_new_tokens for part in parts if isinstance(part, Completion)] or [0]
        cut_out = max(part.truncated for part in parts)
        return Document(
            id=f"{name}-{number}",
            segments=(prompt_of(parts[0], self.held_back),),
            turns=tuple(Turn((), length, references=expected) for length in lengths),
            protocol={
                "question": "seen",
                "template": "none" if chat is None else "chat",
                "max_length": encoding.limit,
                "held_back": self.held_back,
            },
            meta={
                "task": name,
                "document": number,
                "kinds": kinds,
                **prompts.facts(encoding.tokenizer, parts[0].context, cut_out),
            },
            asked=tuple(asked),
        )

    # ------------------------------------------------------------------ running

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Ask all of a document's requests.

        Returns:
            as `Task.run`, with one entry of `tokens` and `finished` per text written; `responses`: per request what
            lm-eval's metrics take (log-probability and whether it is greedy, the sum over a text, or texts).
        """
        assert isinstance(sample, Document)
        device, tokenizer = session.model.device, session.tokenizer
        compressed: list[dict[str, Any]] = []
        ends: list[dict[str, Any]] = []
        out: dict[str, Any] = {"tokens": [], "finished": [], "tpot_s": [], "responses": []}
        if "loglikelihood_rolling" in sample.meta["kinds"]:
            check_rolling(session.method)
        forced = [part for parts in sample.asked for part in parts if isinstance(part, Continuation)]
        with PeakMemory(device) as peak:
            likely = log_likelihoods(
                session,
                forced,
                self.held_back,
                lambda: compressed.append(session.report()),
                lambda: ends.append(session.report()),
            )
            scored = iter(likely)
            for kind, parts in zip(sample.meta["kinds"], sample.asked, strict=True):
                if kind == "loglikelihood":
                    out["responses"].append([list(next(scored))])
                elif kind == "loglikelihood_rolling":
                    out["responses"].append([sum(next(scored)[0] for _ in parts)])
                else:
                    out["responses"].append([])
                    base = None
                    for number, part in enumerate(parts):
                        assert isinstance(part, Completion)
                        if base is None:
                            base = session.prefill(torch.tensor([part.context], device=device)).cache
                            compressed.append(session.report())
                        session.cache = base.fork() if number + 1 < len(parts) else base
                        turn = sample.turns[len(out["tokens"])]
                        seed = draw_seed(self.seed, sample.id, len(out["tokens"]))
                        written = complete(
                            session, part, turn.stop, tokenizer, seed, turn.guides(), turn.max_new_tokens
                        )
                        for key, values in ended_by_force([written]).items():
                            out.setdefault(key, []).extend(values)
                        ends.append(session.report())
                        out["tokens"].append([int(token) for token in written.tokens[0]])
                        out["finished"].append(written.finished[0])
                        out["tpot_s"].extend(float(seconds) for seconds in written.step_s)
                        out["responses"][-1].append(answer_text(part, out["tokens"][-1], tokenizer))
        end = dict(ends[-1])
        end["active"] = any(report["active"] for report in ends)
        end["clamped"] = any(report["clamped"] for report in ends)
        first = compressed[0]
        return out | {
            "compressed": first,
            "end": end,
            "prefill_s": first["time"]["prefill_s"],
            "compress_s": first["time"]["compress_s"],
            "prefill_peak": peak.peak,  # of all that is asked of the document
            "decode_peak": None,
        }

    # ------------------------------------------------------------------ scoring

    def _values(self, loaded: Loaded, name: str, number: int, kinds: Sequence[str], responses: Sequence[Any]) -> Values:
        """What lm-eval's filters and metrics make of one document's responses."""
        from lm_eval.api.instance import Instance

        task, doc = loaded.tasks[name], loaded.docs[name][number]
        requests = [
            Instance(kind, doc, (), place, (name, number, len(found)))  # type: ignore[arg-type]
            for place, (kind, found) in enumerate(zip(kinds, responses, strict=True))
        ]
        for request, found in zip(requests, responses, strict=True):
            request.resps = [tuple(one) if isinstance(one, list) else one for one in found]
        for chain in task._filters:
            chain.apply(requests)
        return {
            (metric, chain.name): value
            for chain in task._filters
            for metric, value in task.process_results(doc, [one.filtered_resps[chain.name] for one in requests]).items()
        }

    def gold(self, sample: Sample) -> list[str] | None:
        """None: a document's target need not be what lm-eval's filters and metrics give full marks."""
        return None

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """The chosen metric as `score`, and every metric that is a number for one document."""
        loaded, name = self.loaded(), sample.meta["task"]
        values = self._values(loaded, name, sample.meta["document"], sample.meta["kinds"], out["responses"])
        numbers = {f"{m},{f}": float(value) for (m, f), value in values.items() if _is_number(value)}
        return {"score": self._score(loaded.tasks[name], values), **numbers}

    def _chosen(self, task: Any, values: Values) -> tuple[str, str]:
        """Metric and filter of the score."""
        if self.score_by != "auto":
            for key in values:
                if self.score_by in (key[0], ",".join(key)):
                    return key
            have = ", ".join(",".join(key) for key in values)
            raise ValueError(f"task.score_by={self.score_by!r}: lm-eval's task {task.task_name} has {have}")
        higher = task.higher_is_better()
        good = [key for key, value in values.items() if higher.get(key[0], True) and _is_number(value)]
        return (good or list(values))[0]

    def _score(self, task: Any, values: Values) -> float:
        """The chosen metric of one document, 0 to 1."""
        key = self._chosen(task, values)
        metric, value = key[0], values[key]
        # of expected and chosen answer, for all documents only
        if metric in ("f1", "mcc") and isinstance(value, tuple):
            return float(value[0] == value[1])
        higher = task.higher_is_better().get(metric, True)
        if not _is_number(value) or not higher:
            value = task.aggregation()[metric]([value])
        value = float(value) / (100.0 if metric in PERCENT and self.scale == 1.0 else self.scale)
        if not higher:  # 1 at the best: perplexity 1 and error 0
            value = 1 / max(1.0, value) if "perplexity" in metric else 1 / (1 + max(0.0, value))
        if not -1e-6 <= value <= 1 + 1e-6:
            raise ValueError(
                f"{','.join(key)} is {value}; a score is 0 to 1: set task.scale, or task.score_by to another"
            )
        return min(1.0, max(0.0, value))

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`TASK.METRIC,FILTER` with `_stderr` as lm-eval names them, for every task and group; `score_is` per task."""
        from lm_eval.api.metrics import mean

        loaded = self.loaded()
        found: dict[str, Any] = {}
        results: dict[str, dict[str, Any]] = {}
        for name, task in loaded.tasks.items():
            mine = [row for row in rows if row["meta"]["task"] == name]
            if not mine:
                continue
            made = [
                self._values(loaded, name, row["meta"]["document"], row["meta"]["kinds"], row["out"]["responses"])
                for row in mine
            ]
            results[name] = {"sample_len": len(made)}
            for key in dict.fromkeys(key for values in made for key in values):
                items = [values[key] for values in made if key in values]
                combine = task.aggregation().get(key[0], mean)
                results[name][",".join(key)] = combine(items)
                error = _stderr(key[0], combine, items)
                if error is not None:
                    results[name][f"{key[0]}_stderr,{key[1]}"] = error
            found[f"{name}.score_is"] = ",".join(self._chosen(task, made[0]))
            found[f"{name}.documents"] = len(made)
        for name, group in loaded.groups.items():
            if any(task.task_name in results for task in group.get_all_tasks()):
                results[name] = group.aggregate(results)
        for name, values in results.items():
            for metric, value in values.items():
                if "," in metric and _is_number(value):
                    found[f"{name}.{metric}"] = float(value)
        return found


def _texts(expected: Any) -> tuple[str, ...]:
    """A document's answer or answers as texts."""
    return tuple(map(str, expected)) if isinstance(expected, (list, tuple)) else (str(expected),)


def _is_number(value: Any) -> bool:
    """True of Python's and numpy's numbers and truth values."""
    return not isinstance(value, (str, tuple, list, dict)) and hasattr(value, "__float__") and math.isfinite(value)


def _stderr(metric: str, combine: Any, items: Sequence[Any]) -> float | None:
    """Standard error of a metric over documents: closed for a mean, else by resampling; None for a single document."""
    from lm_eval.api.metrics import mean, mean_stderr

    if len(items) < 2:
        return None
    if combine is mean:
        return float(mean_stderr(items))
    draw = random.Random(0)
    draws = range(100 if metric in TEXTS else 1000)
    return stdev(float(combine(draw.choices(items, k=len(items)))) for _ in draws)
