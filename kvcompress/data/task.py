"""Base class of a task: samples as token ids, `run` for one sample in a session, `score` between 0 and 1.

A task imports neither methods nor transformers; it talks to the session (`prefill`, `append`, `generate`, `report`) and
to the tokenizer it is handed. What it returns are plain values that go into a record as they are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import torch

from kvcompress.hook.generation import Guide
from kvcompress.measure.measuring import PeakMemory, synchronize

# What several questions on one compressed context have in common. In a record as `protocol.turns`.
TURNS = {
    "single": "one question",
    "independent": "each is asked of the compressed context alone: what an earlier one left is rolled back",
    "session": "each is asked after the earlier ones and the model's answers to them, which stay in the cache",
    "gold": "each is asked after the earlier ones and their right answers; the model's own are rolled back",
}


# what of `Task.run` says nothing where a run shared its prefill or its batch with others
TIMES = ("ttft_s", "prefill_s", "compress_s", "tpot_s", "prefill_peak", "decode_peak")


class AnswerRules(Protocol):
    """Rules of one answer's thinking part (`kvcompress.data.think_rules`)."""

    def guide(self) -> Guide | None:
        """A guide for a row that is decoded; None where nothing is ruled."""

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """Ids of an output as they stay in a conversation without its thoughts."""


@dataclass(frozen=True)
class Turn:
    """One question and what may answer it.

    Attributes:
        ids: token ids appended after the context; empty where the question is part of the compressed prompt.
        max_new_tokens: tokens generated at most.
        stop: token ids any of which ends the answer. The runner adds the model's own end tokens.
        references: strings the answer is scored against.
        min_new_tokens: no stop token is picked before this many.
        rules: of its thinking part, set by the runner; None where there are none.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...] = ()
    references: tuple[str, ...] = ()
    min_new_tokens: int = 0
    rules: AnswerRules | None = field(default=None, compare=False, repr=False)

    def guides(self, rows: int = 1) -> list[Guide | None]:
        """A guide for each row that answers it, empty where it has none."""
        made = [] if self.rules is None else [self.rules.guide() for _ in range(rows)]
        return made if any(guide is not None for guide in made) else []


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        id: unique within the task and stable across runs; samples are paired by it.
        segments: token ids of the prompt that is prefilled and compressed, in order; several where a method may
            treat documents apart (their concatenation is the prompt).
        turns: questions asked on that prompt.
        protocol: how it is asked, e.g. `{"question": "seen"}`; goes into the record. `turns` says what becomes of
            several questions, see `Task.run`.
        meta: facts about the sample for reports, e.g. length and depth; plain values only.
        where: it stands in the data, as "FILE line 3", for errors.
        reference: what `Task.reference` found on the uncompressed model, set by the runner; None where none is wanted.
    """

    id: str
    segments: tuple[tuple[int, ...], ...]
    turns: tuple[Turn, ...]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, torch.Tensor] | None = field(default=None, compare=False, repr=False)
    where: str = field(default="", compare=False, repr=False)

    @property
    def order(self) -> str:
        """How its questions follow one another, one of `TURNS`."""
        return str(self.protocol.get("turns") or ("single" if len(self.turns) == 1 else "session"))

    def prompt_ids(self) -> list[int]:
        """The context and the first question, as the model sees them."""
        return [token for segment in self.segments for token in segment] + list(self.turns[0].ids)

    def total_tokens(self) -> int:
        """Positions the sample needs at most: context, questions and answers at full length; where each question is asked
        of the context alone, the longest."""
        turns = [len(turn.ids) + turn.max_new_tokens for turn in self.turns]
        return sum(map(len, self.segments)) + (max(turns) if self.order == "independent" else sum(turns))


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark: a frozen dataclass whose fields are its settings.

    Attributes:
        seed: the run's seed; every random choice of a sample derives from it.
        data: folder of data sets (`paths.data`), or None. Not a setting: what was used of it is in `fingerprint`.
    """

    name: ClassVar[str]
    version: ClassVar[str]  # raise it whenever a prompt may change
    metric: ClassVar[str]
    metric_version: ClassVar[str]  # raise it whenever a score may change
    shares_prefill: ClassVar[bool] = True  # False where the prefill itself is what is measured
    wants_reference: ClassVar[bool] = False  # True where a sample is judged against a run without compression
    opens_sessions: ClassVar[bool] = False  # True where `run` gets a session that is not open, and opens others like it
    joins: ClassVar[bool] = (
        False  # True where a `run` of its own takes a session whose steps others' join, see `in_common`
    )
    thinks: ClassVar[bool] = (
        True  # False where outputs are no answers with a thinking part: no budget of thinking applies
    )

    seed: int = 0
    data: str | None = None

    @abstractmethod
    def samples(self, tokenizer: Any) -> Iterable[Sample]:
        """Samples in a fixed order; the same settings, seed and tokenizer give the same samples."""

    @abstractmethod
    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """At least `{"score": 0..1}` from what `run` returned, with `out["text"]`: one answer per turn.

        An answer is what stands behind a thinking part, and "" where the output ended inside one; the whole text with its
        marks goes into the record.
        """

    def gold(self, sample: Sample) -> list[str] | None:
        """A right answer to each turn, as `score` gets it in `out["text"]`; None where no text is right or wrong."""
        if not all(turn.references for turn in sample.turns):
            return None
        every = self.metric == "string_match_all"
        return [", ".join(turn.references) if every else turn.references[0] for turn in sample.turns]

    def converses(self) -> bool:
        """True if the model's own answers stay in the cache for later questions."""
        return False

    def cannot_batch(self) -> str | None:
        """Why its samples cannot be rows of one batch, or None if they can: each is then run as `Task.run` does."""
        return None if type(self).run is Task.run else f"task={self.name} runs its samples in a way of its own"

    def fingerprint(self) -> dict[str, Any]:
        """Facts beside the settings that change results, e.g. which haystack was found. Part of the run id."""
        return {}

    def provenance(self) -> dict[str, Any]:
        """Where the data came from, as `protocol.*` of the record: `data`, and `revision` of a data set on the Hub."""
        return {}

    def reference(self, session: Any, sample: Sample) -> dict[str, torch.Tensor]:
        """What the uncompressed model does with a sample, as tensors on the CPU; handed back as `sample.reference`.

        Called by the runner for a task that `wants_reference`, with a session that compresses nothing, once per sample
        and sweep: the result is kept on disk for all cells that may be compared.
        """
        raise NotImplementedError(f"task {self.name} wants a reference and has no way to make one")

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a record says beyond the mean score, from finished rows of `samples.jsonl`; keys become `metrics.*`.

        Plain values: numbers, and lists of numbers for curves.
        """
        return {}

    def settings(self) -> dict[str, Any]:
        """The fields that make up this task, without seed and data folder."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("seed", "data")}

    def stated_lengths(self) -> tuple[int, ...]:
        """Tokens that prompts are made to have, for headings; empty where the data says how long they are."""
        return tuple(getattr(self, "lengths", ()))

    def effort(self, sample: Sample) -> tuple[float, float]:
        """How often `run` prefills the sample's prompt and decodes its answer, rows of a batch counted: for estimates."""
        return 1.0, 1.0

    def decoded_rows(self) -> int:
        """Rows of the batches that `run` decodes."""
        return 1

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Prefill the context, ask each turn, and say what it took.

        A first question that is part of the context has no ids of its own. A later question is a prompt of its own
        (and is compressed) where the protocol says that questions are seen, else it is appended. What it is appended
        to, `sample.order` says: the compressed context, or what the turns before it left there. A stop token is no
        part of an answer: what ends it in the conversation is in the ids of the next turn. With `think: drop` in the
        protocol an answer is put into the conversation anew without its thinking part, never compressed.

        Returns:
            `tokens` (one list of ids per turn), `finished` (per turn "stop" or "length"), `compressed` and `end`
            (`session.report()` after the compression and at the end), `ttft_s` (from the start of the prompt to the
            logits of the first token, compression included), `prefill_s`, `compress_s`, `tpot_s` (seconds of each
            decoded token), `prefill_peak` and `decode_peak` (bytes of the device, or of this process on the CPU); with a
            budget of thinking also `ended_by_force`, per turn whether its thought was.
        """
        device = session.model.device
        prompt_s, prompt_peak = prefill(session, sample)
        # outside the timed region: counting bytes is our work, not the method's
        compressed = session.report(kept_map=True)
        answers: list[Any] = []
        ends: list[dict[str, Any]] = []
        question_s, order, last = 0.0, sample.order, len(sample.turns) - 1
        held = session.cache  # what the next question is asked of
        forget = order == "session" and sample.protocol.get("think") == "drop"
        with PeakMemory(device) as decode_peak:
            for number, turn in enumerate(sample.turns):
                start = time.perf_counter()
                session.cache = held.fork() if order == "independent" and number < last else held
                if number and answers[-1].finished[0] == "stop":
                    session.cache.keep_pending(None)
                if turn.ids:
                    ids = torch.tensor([turn.ids], device=device)
                    if number and sample.protocol.get("question") == "seen":
                        session.prefill(ids, cache=session.cache)
                    else:
                        session.append(ids)
                if order == "gold" and number < last:
                    held, session.cache = session.cache, session.cache.fork()
                synchronize(device)
                if number == 0:
                    question_s = time.perf_counter() - start
                asked = session.cache.fork() if forget and number < last else None
                guides = turn.guides()
                answers.append(
                    session.generate(
                        turn.max_new_tokens, stop=turn.stop, min_new_tokens=turn.min_new_tokens, guides=guides
                    )
                )
                if asked is not None and turn.rules is not None:
                    kept = turn.rules.kept([int(token) for token in answers[-1].tokens[0]])
                    held = session.cache = asked
                    if kept:
                        session.append(torch.tensor([kept], device=device))
                if order == "independent" or number == last:
                    ends.append(session.report())
        return {
            "tokens": [[int(token) for token in answer.tokens[0]] for answer in answers],
            "finished": [answer.finished[0] for answer in answers],
            "compressed": compressed,
            "end": merged(ends),
            "ttft_s": prompt_s + question_s,
            "prefill_s": compressed["time"]["prefill_s"],
            "compress_s": compressed["time"]["compress_s"],
            "tpot_s": [float(seconds) for answer in answers for seconds in answer.step_s],
            "prefill_peak": prompt_peak,
            "decode_peak": decode_peak.peak,
            **ended_by_force(answers),
        }


def ended_by_force(answers: Sequence[Any]) -> dict[str, list[bool]]:
    """Per output of these generations whether its thought was ended by force, as of `Task.run`; nothing without guides."""
    found = [forced for answer in answers for forced in answer.forced]
    return {"ended_by_force": found} if found else {}


def merged(ends: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several sequences that went on from the same prompt: the last one's, and what any of them did."""
    end = ends[-1]
    end["active"] = any(report["active"] for report in ends)
    end["clamped"] = any(report["clamped"] for report in ends)
    end["kv"]["kept_tokens_max"] = max(report["kv"]["kept_tokens_max"] for report in ends)
    return end


def prefill(session: Any, sample: Sample) -> tuple[float, int | None]:
    """Run a sample's prompt → seconds until its logits are there, compression included, and peak memory in bytes."""
    device = session.model.device
    synchronize(device)
    with PeakMemory(device) as peak:
        start = time.perf_counter()
        session.prefill([torch.tensor([segment], device=device) for segment in sample.segments])
        synchronize(device)
        seconds = time.perf_counter() - start
    return seconds, peak.peak


def of_suite(base: type[Task], suite: str, name: str, about: str, metric: str, **members: Any) -> type[Task]:
    """The task `<suite>/<name>`: `base` with a name, a metric and class variables of its own."""
    title = "".join(part.capitalize() for part in name.replace("-", "_").split("_"))
    own = {"__doc__": about, "__module__": base.__module__, "name": f"{suite}/{name}", "metric": metric, **members}
    return dataclass(frozen=True, kw_only=True)(type(f"{base.__name__}{title}", (base,), own))
