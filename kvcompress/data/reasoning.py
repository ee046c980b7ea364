"""Base class of the reasoning tasks: problems from JSON Lines or the Hub, long generations, pass@1.

The prompt is that of R-KV's evaluation (Zefan-Cai/R-KV d15c976, run_math.py). Its readme samples 64 answers at
temperature 0.6 and top-p 0.95; its script decodes one greedily. Both are settings here, and which was used is in the
record: a greedy run and a mean of samples are not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from kvcompress.common.hashing import content_hash
from kvcompress.common.prose import Encoder
from kvcompress.data import grading, hub, jsonl, prompts, thinking
from kvcompress.data.haystack import prompt_template
from kvcompress.data.task import Sample, Task, Turn, ended_by_force, merged, prefill
from kvcompress.measure.measuring import PeakMemory

PROMPT = (
    "You are given a math problem.\n\nProblem: {question}\n\n You need to solve the problem step by step. First, you "
    "need to provide the chain-of-thought, then provide the final answer.\n\n Provide the final answer in the format: "
    "Final answer:  \\boxed{{}}"
)
TEMPERATURE, TOP_P = 0.6, 0.95  # of samples, unless told otherwise
CURVE = 256  # figures of bytes held that a sample's row keeps


@dataclass(frozen=True)
class Problem:
    """A question and the expected answer, both text; `id` is unique in its data set."""

    id: str
    question: str
    gold: str


@dataclass(frozen=True, kw_only=True)
class Reasoning(Task):
    """Problems answered by long outputs; the score is pass@1, the mean over samples of a problem.

    Attributes:
        path: JSON Lines file; "" for the data set's own file under `paths.data`, or the Hub where there is none.
        k: answers per problem. One is greedy unless a temperature is given; several are sampled.
        temperature, top_p: of sampling; None for 0.6 and 0.95, or greedy where k is 1.
        max_new_tokens: length of an answer at most, thinking included unless `think_tokens` gives it a budget of its own.
        batch: answers of a problem that are decoded together. Which are drawn depends on it, and on the seed.
        template: "auto" (the tokenizer's chat template if it has one), "chat" or "none" (as R-KV's script).
        revision: commit of the data set on the Hub, or its branch.
    """

    metric: ClassVar[str] = "pass@1"
    metric_version: ClassVar[str] = "1"
    version: ClassVar[str] = "1"
    file: ClassVar[str]  # under paths.data/reasoning
    hub: ClassVar[tuple[str, str | None, str]]  # repository, subset, split

    path: str = ""
    k: int = 1
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int = 4096
    batch: int = 1
    template: str = "auto"
    revision: str = "main"

    def __post_init__(self) -> None:
        for field in ("k", "batch", "max_new_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)}; at least 1")
        sampled = self.k > 1
        if self.temperature is None:
            object.__setattr__(self, "temperature", TEMPERATURE if sampled else 0.0)
        if self.top_p is None:
            object.__setattr__(self, "top_p", TOP_P if self.temperature else 1.0)
        assert self.temperature is not None and self.top_p is not None
        if not self.temperature >= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"task.temperature={self.temperature}, task.top_p={self.top_p}; at least 0, and in (0, 1]")
        if sampled and self.temperature == 0:
            raise ValueError(
                f"task.k={self.k} with task.temperature=0.0: greedy answers are all the same; k=1 is enough"
            )
        if self.template not in ("auto", "chat", "none"):
            raise ValueError(f"task.template={self.template!r}; valid: auto, chat, none")
        if not grading.available():
            raise ValueError(f"task {self.name} judges with math-verify: pip install 'kvcompress[reasoning]'")

    # ------------------------------------------------------------------ problems

    def expected(self, row: Mapping[str, Any], where: str) -> str:
        """The expected answer of a row, "" if it has none; `where` it stands for errors."""
        value = row.get("answer")
        return "" if value is None else jsonl.answer(value, "answer", where).strip()

    def problems(self) -> list[Problem]:
        """All problems, in the order of the data.

        Raises:
            ValueError: no data, or a row without question or answer.
        """
        found = []
        for number, (where, row) in enumerate(self._rows()):
            question, gold = row.get("question") or row.get("problem"), self.expected(row, where)
            for field, value in (("question (or problem)", question), ("answer", gold)):
                if not value:
                    raise ValueError(f"{where} has no {field}; its fields: {', '.join(row) or 'none'}")
            question = jsonl.whole(question, "question (or problem)", where)
            found.append(Problem(f"{self.name}-{number}", question, gold))
        if not found:
            raise ValueError(f"{hub.Source(*self.hub, self.revision)} on the Hub holds no sample")
        return found

    def _rows(self) -> list[tuple[str, dict[str, Any]]]:
        """All rows, each with where it stands, for errors."""

        def of_file(path: Path) -> list[tuple[str, dict[str, Any]]]:
            return [(f"{path} line {number}", row) for number, row in jsonl.numbered(path)]

        if self.path:
            return of_file(Path(self.path))
        file = Path(self.data) / "reasoning" / self.file if self.data else None
        if file is not None and file.is_file():
            return of_file(file)
        source = hub.Source(*self.hub, self.revision)
        try:
            rows = hub.fetch(source).rows
        except Exception as error:  # whatever the Hub's client raises without a network
            looked = file or "paths.data (not set)"
            raise ValueError(
                f"no data for {self.name}: looked for {looked}, then for {source} on the Hub ({type(error).__name__}: "
                f"{error}). Set task.path to a JSON Lines file, or paths.data to the folder of data sets"
            ) from None
        return [(f"{source} on the Hub, row {number}", row) for number, row in enumerate(rows, 1)]

    def provenance(self) -> dict[str, Any]:
        path = Path(self.path) if self.path else Path(self.data or "") / "reasoning" / self.file
        if self.path or (self.data and path.is_file()):
            return {"data": f"file:{content_hash(path)}"}
        source = hub.Source(*self.hub, self.revision)
        revision = hub.fetch(source).revision
        return {"data": f"hub:{source}@{revision}", "revision": revision}

    def fingerprint(self) -> dict[str, Any]:
        """What the problems are, wherever they came from: known, and refused if bad, before a model is loaded."""
        text = json.dumps([(problem.question, problem.gold) for problem in self.problems()])
        return {"problems": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if name not in ("path", "revision")}

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        encode = Encoder(tokenizer)
        for problem in self.problems():
            wrap = prompt_template(tokenizer, encode, PROMPT.format(question=problem.question), "", "", self.template)
            prompt = (*wrap.head, *wrap.tail)
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            yield Sample(
                id=problem.id,
                segments=(prompt,),
                turns=(Turn((), self.max_new_tokens, references=(problem.gold,)),),
                protocol={
                    "question": "seen",
                    "template": wrap.template,
                    "sampling": "greedy"
                    if self.temperature == 0
                    else f"{self.k} samples at {self.temperature:g}/{self.top_p:g}",
                },
                meta={
                    **prompts.facts(tokenizer, prompt),
                    "thinking": thinking.begins_thinking(tokenizer, text),  # the template opened it for the model
                },
            )

    # ------------------------------------------------------------------ running and scoring

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Prefill once, then draw `k` answers from copies of that cache.

        Returns:
            what `Task.run` does, with one entry of `tokens` and `finished` per answer, and `held`: bytes per answer
            after the prompt and along the decode, of which `end` reports the last.
        """
        device, turn = session.model.device, sample.turns[0]
        prompt_s, prompt_peak = prefill(session, sample)
        compressed, prompt = session.report(kept_map=True), session.cache
        tokens: list[list[int]] = []
        finished: list[str] = []
        tpot: list[float] = []
        ends: list[dict[str, Any]] = []
        forced: dict[str, list[bool]] = {}
        held = [float(compressed["kv"]["bytes_held"])]
        with PeakMemory(device) as decode_peak:
            for first in range(0, self.k, self.batch):
                rows = min(self.batch, self.k - first)
                session.cache = prompt.fork() if first + rows < self.k else prompt
                if rows > 1:
                    session.cache.batch_repeat_interleave(rows)

                def watch(rows: int = rows) -> None:
                    now = session.cache.nbytes()
                    held.append((now["valid"] + now["other_layers"]) / rows)

                text = f"{self.seed}:{sample.id}:{first}"
                generation = session.generate(
                    turn.max_new_tokens,
                    stop=turn.stop,
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed=int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]),
                    watch=watch,
                    guides=turn.guides(rows),
                )
                for name, values in ended_by_force([generation]).items():
                    forced.setdefault(name, []).extend(values)
                tokens += [[int(token) for token in row] for row in generation.tokens]
                finished += generation.finished
                tpot += [float(seconds) for seconds in generation.step_s]
                ends.append(session.report())
        return {
            "tokens": tokens,
            "finished": finished,
            "compressed": compressed,
            "end": merged(ends),
            "held": thinned(held),
            "ttft_s": prompt_s,
            "prefill_s": compressed["time"]["prefill_s"],
            "compress_s": compressed["time"]["compress_s"],
            "tpot_s": tpot,
            "prefill_peak": prompt_peak,
            "decode_peak": decode_peak.peak,
            **forced,
        }

    def gold(self, sample: Sample) -> list[str] | None:
        right = f"Final answer: \\boxed{{{sample.turns[0].references[0]}}}"
        return [right] * self.k

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """pass@1 over the answers, and shares of those without a final answer and of those cut off at the limit."""
        gold = sample.turns[0].references[0]
        judged = [
            grading.grade(gold, text, end == "stop") for text, end in zip(out["text"], out["finished"], strict=True)
        ]
        return {
            "score": fmean(one.right for one in judged),
            "unfinished": fmean(one.answer is None for one in judged),
            "hit_max": fmean(end == "length" for end in out["finished"]),
            "tokens": fmean(len(row) for row in out["tokens"]),
        }

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Shares over all answers, and tokens generated: on average, and per problem."""
        scores = [row["scores"] for row in rows]
        return {
            "unfinished_share": fmean(one["unfinished"] for one in scores),
            "hit_max_share": fmean(one["hit_max"] for one in scores),
            "tokens_mean": fmean(one["tokens"] for one in scores),
            "tokens": [one["tokens"] for one in scores],
            "answers_per_problem": self.k,
        }


def thinned(values: Sequence[float], most: int = CURVE) -> list[float]:
    """At most `most` of the values at even steps, the highest always among them."""
    if len(values) <= most:
        return list(values)
    step = -(-len(values) // most)
    top = max(range(len(values)), key=values.__getitem__)
    return [values[top] if start <= top < start + step else values[start] for start in range(0, len(values), step)]
