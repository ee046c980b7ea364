"""One sample of a cell: how it is run, and the row that is written of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Any

from kvcompress.cache.layer import CompressedLayer
from kvcompress.data import prompts, think_rules, thinking
from kvcompress.data.task import TIMES, Sample, Task
from kvcompress.hook import joint_forward
from kvcompress.hook.session import Session, compress
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.measure.measuring import without_peaks
from kvcompress.method import Method
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.launcher.answer_check import MarginRecorder, compare_answers


@dataclass(frozen=True)
class Workload:
    """Model, tokenizer and samples: the same for all cells of a group."""

    model: Any
    tokenizer: Any
    samples: Sequence[Sample]


@dataclass(frozen=True)
class SampleResult:
    """What the run of a sample came to in one cell.

    Attributes:
        out: what the task returned, or the fault that ended the run.
        decoding: how tokens were decoded from a shared prefill ("separate", "together", …); None where the cell had its
            own prefill.
        why: why it did not decode together with others; None where it did.
        rows: samples that ran as rows of one batch.
    """

    out: dict[str, Any] | BaseException
    decoding: str | None = None
    why: str | None = None
    rows: int = 1


def with_ends(sample: Sample, ends: Sequence[int]) -> Sample:
    """The sample with the model's own end tokens among those that stop an answer."""
    turns = tuple(replace(turn, stop=tuple(sorted({*turn.stop, *ends}))) for turn in sample.turns)
    return replace(sample, turns=turns)


def samples_of(spec: CellSpec, tokenizer: Any) -> list[Sample]:
    """The samples of a cell's task under its rules of thinking, as many as it asks for."""
    config = spec.config
    made = islice(spec.task.samples(tokenizer), config.limit)
    return [think_rules.prepared(sample, tokenizer, str(config.think), config.think_tokens) for sample in made]


def check_lengths(samples: Sequence[Sample], limit: int | None, method: Method) -> None:
    """Refuse samples longer than the model's `limit` of positions (None: it names none), before its weights are read.

    Raises:
        ValueError: names the sample and where it stands, its length and the limit.
    """
    if limit is None or method.compact_positions:
        return
    longest = max(samples, key=lambda sample: sample.total_tokens())
    if longest.total_tokens() > limit:
        where, asked = f"{longest.where}: " if longest.where else "", len(longest.turns)
        raise ValueError(
            f"{where}sample {longest.id} needs {longest.total_tokens()} positions, "
            f"{'answer' if asked == 1 else f'{asked} questions and answers'} included; the model has {limit}; choose shorter "
            "prompts or answers (task.max_length, task.max_new_tokens), or a method with compact positions"
        )


def has_sliding_layers(model: Any, method: Method) -> bool:
    """True if a layer of the model's cache is a sliding one of transformers' own rather than one of ours."""
    with compress(model, method) as session:
        return not all(isinstance(layer, CompressedLayer) for layer in session.new_cache().layers)


def separate_reason(spec: CellSpec, model: Any) -> str | None:
    """Why a cell's decode steps cannot be taken in one forward with others', None if they can."""
    if type(spec.task).run is not Task.run and not spec.task.joins:
        return f"task={spec.task.name} steps through its answer itself"
    return joint_forward.unsupported_reason(model)


def checked(
    spec: CellSpec, workload: Workload, sample: Sample, shared: SharedPrefill | None, together: dict[str, Any]
) -> dict[str, Any] | Exception:
    """The result of decoding together, if decoding alone gives the same; else the fault."""
    try:
        kernel = str(spec.config.kernel)
        recorder = MarginRecorder()
        session = Session(workload.model, spec.method, kernel, workload.tokenizer, shared, on_logits=recorder)
        with session, without_peaks():
            alone = spec.task.run(session, sample)
        wrong = compare_answers(alone, together, recorder.margins)
        return together if wrong is None else ValueError(f"{sample.id}: {wrong}")
    except Exception as fault:
        return fault


def run_sample(spec: CellSpec, workload: Workload, sample: Sample, shared: SharedPrefill | None) -> dict[str, Any]:
    """What the task returns of one sample, run in a session of its own: nothing leaks from sample to sample."""
    peaks = nullcontext() if shared is None else without_peaks()
    kernel, decode = str(spec.config.kernel), str(spec.config.decode)
    unopened = compress(workload.model, spec.method, kernel, workload.tokenizer, shared, decode=decode)
    if spec.task.opens_sessions:
        return spec.task.run(unopened, sample)
    with unopened as session, peaks:
        return spec.task.run(session, sample)


def row(spec: CellSpec, tokenizer: Any, sample: Sample, result: SampleResult) -> dict[str, Any]:
    """One line of `samples.jsonl`.

    Raises:
        Exception: the fault that ended the run, or what the task raises over its answer; ValueError: its score is none.
    """
    if isinstance(result.out, BaseException):
        raise result.out
    out = result.out if result.decoding is None else without_times(result.out)
    meta = dict(sample.meta)
    if not {"prompt_hash", "prompt_first", "prompt_last"} <= meta.keys():
        meta = prompts.facts(tokenizer, sample.prompt_ids()) | meta
    outputs = thinking.decoded(tokenizer, sample, out["tokens"], meta["prompt_last"])
    out["text"] = [one.text for one in outputs]
    scores = spec.task.score(sample, out | {"text": [one.answer for one in outputs]})
    score = scores["score"]  # None where no answer is known
    if not (0.0 <= score <= 1.0 if score is not None else not any(turn.references for turn in sample.turns)):
        raise ValueError(f"task {spec.task.name} scored {scores['score']} on {sample.id}; a score is 0 to 1")
    how = {"decoding": result.decoding or "separate"} | ({"decoding_why": result.why} if result.why else {})
    return {
        "id": sample.id,
        "source": spec.source,
        "score": score,
        "scores": scores,
        "references": [list(turn.references) for turn in sample.turns],
        "protocol": {"turns": sample.order, "questions": len(sample.turns)}
        | dict(sample.protocol)
        | {"batch": spec.config.batch}
        | how,
        "meta": meta,
        "unfinished": sum(one.unfinished for one in outputs) / max(1, len(outputs)),
        **({"forced": fmean(out["ended_by_force"])} if out.get("ended_by_force") else {}),
        "shared": result.decoding is not None,
        "out": out,
        "rows": result.rows,
    }


def without_times(out: dict[str, Any]) -> dict[str, Any]:
    """A task's result with times and peaks None: where the prefill was another's they mean nothing."""
    cleared = {key: None if key in TIMES else value for key, value in out.items()}
    for moment in ("compressed", "end"):
        report = out.get(moment)
        if isinstance(report, dict):
            cleared[moment] = {**report, "time": None}
    return cleared
