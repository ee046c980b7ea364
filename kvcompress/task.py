"""What a task is: samples as token ids, a way to run one sample in a session, and a score between 0 and 1.

A task imports neither methods nor transformers; it talks to the session (`prefill`, `append`, `generate`, `report`) and
to the tokenizer it is handed. What it returns are plain values that go into a record as they are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

from kvcompress.measure import PeakMemory, synchronize


@dataclass(frozen=True)
class Turn:
    """One question and what may answer it.

    Attributes:
        ids: token ids appended after the context; empty where the question is part of the compressed prompt.
        max_new_tokens: tokens generated at most.
        stop: token ids any of which ends the answer. The runner adds the model's own end tokens.
        references: strings the answer is scored against.
        min_new_tokens: no stop token is picked before this many.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...] = ()
    references: tuple[str, ...] = ()
    min_new_tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        id: unique within the task and stable across runs; samples are paired by it.
        segments: token ids of the prompt that is prefilled and compressed, in order; several where a method may
            treat documents apart (their concatenation is the prompt).
        turns: questions asked on that prompt.
        protocol: how it is asked, e.g. `{"question": "seen"}`; goes into the record.
        meta: facts about the sample for reports, e.g. length and depth; plain values only.
        reference: what `Task.reference` found on the uncompressed model, set by the runner; None where none is wanted.
    """

    id: str
    segments: tuple[tuple[int, ...], ...]
    turns: tuple[Turn, ...]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, torch.Tensor] | None = field(default=None, compare=False, repr=False)

    def prompt_ids(self) -> list[int]:
        """The context and the first question, as the model sees them."""
        return [token for segment in self.segments for token in segment] + list(self.turns[0].ids)

    def total_tokens(self) -> int:
        """Positions the sample needs at most: context, every question and every answer at full length."""
        return sum(map(len, self.segments)) + sum(len(turn.ids) + turn.max_new_tokens for turn in self.turns)


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

    seed: int = 0
    data: str | None = None

    @abstractmethod
    def samples(self, tokenizer: Any) -> Iterable[Sample]:
        """Samples in a fixed order; the same settings, seed and tokenizer give the same samples."""

    @abstractmethod
    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """At least `{"score": 0..1}` from what `run` returned (`out["text"]`: one string per turn)."""

    def fingerprint(self) -> dict[str, Any]:
        """Facts beside the settings that change results, e.g. which haystack was found. Part of the run id."""
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

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Prefill the context, ask each turn, and say what it took.

        A first question that is part of the context has no ids of its own. A later question is a prompt of its own
        (and is compressed) where the protocol says that questions are seen, else it is appended.

        Returns:
            `tokens` (one list of ids per turn), `finished` (per turn "stop" or "length"), `compressed` and `end`
            (`session.report()` after the compression and at the end), `ttft_s` (from the start of the prompt to the
            logits of the first token, compression included), `prefill_s`, `compress_s`, `tpot_s` (seconds of each
            decoded token), `prefill_peak` and `decode_peak` (bytes of the device, or of this process on the CPU).
        """
        device = session.model.device
        prompt_s, prompt_peak = prefill(session, sample)
        compressed = session.report(
            kept_map=True
        )  # outside the timed region: counting bytes is our work, not the method's
        tokens: list[list[int]] = []
        finished: list[str] = []
        tpot: list[float] = []
        question_s = 0.0
        with PeakMemory(device) as decode_peak:
            for number, turn in enumerate(sample.turns):
                start = time.perf_counter()
                if turn.ids:
                    ids = torch.tensor([turn.ids], device=device)
                    if number and sample.protocol.get("question") == "seen":
                        session.prefill(ids, cache=session.cache)
                    else:
                        session.append(ids)
                synchronize(device)
                if number == 0:
                    question_s = time.perf_counter() - start
                generation = session.generate(turn.max_new_tokens, stop=turn.stop, min_new_tokens=turn.min_new_tokens)
                tokens.append([int(token) for token in generation.tokens[0]])
                finished.append(generation.finished[0])
                tpot.extend(float(seconds) for seconds in generation.step_s)
        return {
            "tokens": tokens,
            "finished": finished,
            "compressed": compressed,
            "end": session.report(),
            "ttft_s": prompt_s + question_s,
            "prefill_s": compressed["time"]["prefill_s"],
            "compress_s": compressed["time"]["compress_s"],
            "tpot_s": tpot,
            "prefill_peak": prompt_peak,
            "decode_peak": decode_peak.peak,
        }


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
