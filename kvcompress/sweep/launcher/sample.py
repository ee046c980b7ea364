"""One sample of a cell: how it is run, and the row that is written of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from kvcompress.cache.layer import CompressedLayer
from kvcompress.data import prompts, thinking
from kvcompress.data.task import TIMES, Sample, Task
from kvcompress.hook.joint_decoding import cannot_join
from kvcompress.hook.session import compress
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.measure.measuring import without_peaks
from kvcompress.method import Method
from kvcompress.sweep.launcher.cell import Cell
from kvcompress.sweep.launcher.check import Watched, difference


@dataclass
class Loaded:
    """What the cells of a group have in common."""

    model: Any
    tokenizer: Any
    samples: list[Sample]


def with_ends(sample: Sample, ends: Sequence[int]) -> Sample:
    """The sample with the model's own end tokens among those that stop an answer."""
    turns = tuple(replace(turn, stop=tuple(sorted({*turn.stop, *ends}))) for turn in sample.turns)
    return replace(sample, turns=turns)


def full_layers(model: Any, method: Method) -> list[bool]:
    """Per layer of the model's cache whether it is one of ours, rather than a sliding one of transformers' own."""
    with compress(model, method) as session:
        return [isinstance(layer, CompressedLayer) for layer in session.new_cache().layers]


def apart_because(cell: Cell, shared: SharedPrefill) -> str:
    """Why this cell's decode steps cannot be rows of a batch with others'; empty if they can."""
    if not all(isinstance(layer, CompressedLayer) for layer in shared.cache.layers):
        return "the model has sliding-window layers, whose rows cannot be put together"
    if type(cell.task).run is not Task.run:
        return f"task={cell.task.name} steps through its answer itself"
    return cannot_join(cell.method) or ""


def checked(
    cell: Cell, loaded: Loaded, sample: Sample, shared: SharedPrefill, together: dict[str, Any]
) -> dict[str, Any] | Exception:
    """The result of decoding together, if decoding alone gives the same; else the fault."""
    try:
        with (
            Watched(loaded.model, cell.method, str(cell.config.kernel), loaded.tokenizer, shared) as session,
            without_peaks(),
        ):
            alone = cell.task.run(session, sample)
        wrong = difference(alone, together, session.leads)
        return together if wrong is None else ValueError(f"{sample.id}: {wrong}")
    except Exception as fault:
        return fault


def run_sample(cell: Cell, loaded: Loaded, sample: Sample, shared: SharedPrefill | None) -> dict[str, Any]:
    """What the task says of one sample, run in a session of its own: nothing leaks from sample to sample."""
    peaks = nullcontext() if shared is None else without_peaks()
    kernel, decode = str(cell.config.kernel), str(cell.config.decode)
    unopened = compress(loaded.model, cell.method, kernel, loaded.tokenizer, shared, decode=decode)
    if cell.task.opens_sessions:
        return cell.task.run(unopened, sample)
    with unopened as session, peaks:
        return cell.task.run(session, sample)


def row(
    cell: Cell, loaded: Loaded, sample: Sample, out: dict[str, Any], decoding: str | None, why: str
) -> dict[str, Any]:
    """One line of `samples.jsonl`; `decoding` says how tokens came to be if the prefill was shared, `why` why apart."""
    if decoding is not None:
        out = without_times(out)
    meta = dict(sample.meta)
    if not {"prompt_hash", "prompt_first", "prompt_last"} <= meta.keys():
        meta = prompts.facts(loaded.tokenizer, sample.prompt_ids()) | meta
    outputs = thinking.decoded(loaded.tokenizer, sample, out["tokens"], meta["prompt_last"])
    out["text"] = [one.text for one in outputs]
    scores = cell.task.score(sample, out | {"text": [one.answer for one in outputs]})
    if not (math.isfinite(scores["score"]) and 0.0 <= scores["score"] <= 1.0):
        raise ValueError(f"task {cell.task.name} scored {scores['score']} on {sample.id}; a score is 0 to 1")
    how = {"decoding": decoding or "separate"} | ({"decoding_why": why} if why else {})
    return {
        "id": sample.id,
        "source": cell.source,
        "score": scores["score"],
        "scores": scores,
        "references": [list(turn.references) for turn in sample.turns],
        "protocol": {"turns": sample.order, "questions": len(sample.turns)}
        | dict(sample.protocol)
        | {"batch": cell.config.batch}
        | how,
        "meta": meta,
        "unfinished": sum(one.unfinished for one in outputs) / max(1, len(outputs)),
        "shared": decoding is not None,
        "out": out,
    }


def without_times(out: dict[str, Any]) -> dict[str, Any]:
    """What a run took when its prefill was another's says nothing: times and peaks become None."""
    cleared = {key: None if key in TIMES else value for key, value in out.items()}
    for moment in ("compressed", "end"):
        report = out.get(moment)
        if isinstance(report, dict):
            cleared[moment] = {**report, "time": None}
    return cleared
