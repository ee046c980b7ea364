"""Working through a group of cells: sample by sample, one prefill for all that share it, one row per cell.

A fault ends its cell and no other. What is finished is on disk before the next thing begins.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcompress import models, tracking
from kvcompress.launcher.cell import Cell, Outcome, check_lengths, pair_id
from kvcompress.launcher.check import Watched, difference
from kvcompress.launcher.plan import Group
from kvcompress.layer import CompressedLayer
from kvcompress.measure import without_peaks
from kvcompress.references import References
from kvcompress.session import compress
from kvcompress.shared import SharedPrefill, prefill_once
from kvcompress.task import Sample, Task
from kvcompress.together import cannot_join, decode_together

logger = logging.getLogger(__name__)
TIMES = ("ttft_s", "prefill_s", "compress_s", "tpot_s", "prefill_peak", "decode_peak")


@dataclass(frozen=True)
class Options:
    """How a launcher has its cells run.

    Attributes:
        share: one prefill for all cells that can start from it.
        together: cells that share a prefill decode as rows of one batch where they can.
        check: also decode each cell alone, and fail it where the tokens differ without a close call.
        memory: bytes that the caches of a shared prefill and its cells may take, None = no limit.
    """

    share: bool = True
    together: bool = True
    check: bool = False
    memory: int | None = None


@dataclass
class Loaded:
    """What the cells of a group have in common."""

    model: Any
    tokenizer: Any
    samples: list[Sample]


class Worker:
    """Runs the open cells of one group.

    Args:
        load: gives model and tokenizer for a configuration.
        settled: called with each cell's outcome as soon as it is known.
        how: what a launcher asks for.
    """

    def __init__(
        self,
        load: Callable[[DictConfig], tuple[Any, Any]],
        console: Console,
        settled: Callable[[Outcome], object],
        how: Options,
    ) -> None:
        self.load, self.console, self.settled, self.how = load, console, settled, how

    def run(self, group: Group) -> None:
        """Run every cell that has no outcome yet, and give it one.

        Raises:
            KeyboardInterrupt: the records of what was begun say `partial` by then.
        """
        try:
            loaded = self._begin(group)
            if loaded is not None:
                self._samples(group, loaded)
            for cell in open_cells(group):
                self._end(cell, "ok")
        except (Exception, SystemExit) as fault:  # between samples, so it is nobody's own; other groups go on
            for cell in open_cells(group):
                self._fail(cell, fault)
        except KeyboardInterrupt:
            for cell in open_cells(group):
                self._end(cell, "partial", "interrupted")
            raise

    def _begin(self, group: Group) -> Loaded | None:
        """Model and samples, the same for all cells; None where they are not to be had."""
        first = group.cells[0]
        try:
            model, tokenizer = self.load(first.config)
            samples = list(islice(first.task.samples(tokenizer), first.config.limit))
            ends = models.eos_ids(model, tokenizer)
        except Exception as fault:
            for cell in open_cells(group):
                self._fail(cell, fault)
            return None
        for cell in open_cells(group):
            cell.total = len(samples)
            try:
                check_lengths(samples, model, cell.method)
            except ValueError as fault:
                self._fail(cell, fault)
        return Loaded(model, tokenizer, [with_ends(sample, ends) for sample in samples])

    def _samples(self, group: Group, loaded: Loaded) -> None:
        cells, first = open_cells(group), group.cells[0]
        references = References(first.folder.path.parent, [pair_id(first.identity), first.source])
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            title = cells[0].title if len(cells) == 1 else f"{len(cells)} cells · {group.cells[0].task.name}"
            total, done = len(loaded.samples) * len(cells), sum(len(cell.done) for cell in cells)
            bar = progress.add_task(title, total=total, completed=done)
            shared: SharedPrefill | None = None
            for sample in loaded.samples:
                shared = None  # before the next one is made: two would need twice the memory
                due = [cell for cell in open_cells(group) if sample.id not in cell.done]
                try:
                    sample = (
                        references.attach(first.task, sample, loaded.model, str(first.config.kernel)) if due else sample
                    )
                except Exception as fault:
                    for cell in due:
                        self._fail(cell, fault)
                    continue
                shared = self._prefill(group, loaded, sample) if group.shared and due else None
                if shared is not None and self.how.together:
                    self._together(due, loaded, sample, shared, partial(progress.advance, bar))
                for cell in due:
                    if cell.open and sample.id not in cell.done:
                        self._sample(cell, loaded, sample, shared, partial(progress.advance, bar))

    def _prefill(self, group: Group, loaded: Loaded, sample: Sample) -> SharedPrefill | None:
        """The sample's prompt without eviction; None where that fails: each cell then runs its own."""
        ids = [token for segment in sample.segments for token in segment]
        try:
            kernel = str(group.cells[0].config.kernel)
            return prefill_once(loaded.model, ids, group.needs, kernel, group.codec)
        except Exception as fault:
            text = f"{sample.id}: no shared prefill ({type(fault).__name__}: {fault}); its cells run their own"
            self.console.print(text, style="yellow", highlight=False, markup=False)
            logger.debug("shared prefill failed", exc_info=True)
        release()
        return None

    def _together(
        self,
        due: Sequence[Cell],
        loaded: Loaded,
        sample: Sample,
        shared: SharedPrefill,
        advance: Callable[[], object],
    ) -> None:
        """Run the sample for those cells whose decode steps can be rows of one batch."""
        cells = [cell for cell in due if joins(cell, shared)]
        if len(cells) < 2:
            return
        for turn in turns(cells, shared, self.how.memory):
            jobs = [(cell.method, partial(cell.task.run, sample=sample)) for cell in turn]
            with without_peaks():
                results, share = decode_together(loaded.model, jobs, shared, str(turn[0].config.kernel))
            for cell, result in zip(turn, results, strict=True):
                kind = "separate" if share == 0.0 else "together" if share == 1.0 else "partly together"
                if self.how.check and not isinstance(result, BaseException):
                    result, kind = checked(cell, loaded, sample, shared, result), f"{kind}, checked"
                self._keep(cell, loaded, sample, advance, result, kind)

    def _sample(
        self,
        cell: Cell,
        loaded: Loaded,
        sample: Sample,
        shared: SharedPrefill | None,
        advance: Callable[[], object],
    ) -> None:
        try:
            result: Any = run_sample(cell, loaded, sample, shared)
        except (Exception, SystemExit) as fault:
            result = fault
        self._keep(cell, loaded, sample, advance, result, None if shared is None else "separate")

    def _keep(
        self,
        cell: Cell,
        loaded: Loaded,
        sample: Sample,
        advance: Callable[[], object],
        result: Any,
        decoding: str | None,
    ) -> None:
        """Write down what a sample's run returned, or the fault that ended it."""
        try:
            if isinstance(result, BaseException):
                raise result
            cell.folder.append(row(cell, loaded, sample, result, decoding))
            cell.done.add(sample.id)
            advance()
            return
        except (Exception, SystemExit) as fault:
            status = self._fail(cell, fault)
        del result
        if status == "oom":
            release()

    def _fail(self, cell: Cell, fault: BaseException) -> str:
        logger.debug("cell %s failed", cell.run_id, exc_info=fault)
        status = cell.fail(fault)
        self._leave(cell)
        return status

    def _end(self, cell: Cell, status: str, error: str | None = None) -> None:
        try:
            cell.write(status, error)
        except Exception as fault:
            cell.fail(fault)
        self._leave(cell)

    def _leave(self, cell: Cell) -> None:
        outcome = cell.outcome
        assert outcome is not None
        if outcome.record:
            tracking.log(cell.config.logger, cell.folder.path)
        cell.release()
        self.settled(outcome)


def open_cells(group: Group) -> list[Cell]:
    return [cell for cell in group.cells if cell.open]


def with_ends(sample: Sample, ends: Sequence[int]) -> Sample:
    """The sample with the model's own end tokens among those that stop an answer."""
    turns = tuple(replace(turn, stop=tuple(sorted({*turn.stop, *ends}))) for turn in sample.turns)
    return replace(sample, turns=turns)


def joins(cell: Cell, shared: SharedPrefill) -> bool:
    """True if this cell's decode steps can be rows of a batch: its task asks the session alone, its cache is ours."""
    ours = all(isinstance(layer, CompressedLayer) for layer in shared.cache.layers)
    return ours and type(cell.task).run is Task.run and cannot_join(cell.method) is None


def turns(cells: Sequence[Cell], shared: SharedPrefill, memory: int | None) -> list[list[Cell]]:
    """The cells in as many turns as it takes for the caches of each turn to fit beside the full one.

    A cell holds what it keeps twice while it decodes with others: in its own cache, and in a row.
    """
    full, tokens = shared.cache.nbytes()["valid"], shared.ids.shape[1]
    found: list[list[Cell]] = [[]]
    room = left = None if memory is None else max(0, memory - full)
    for cell in cells:
        share = 1.0
        if cell.method.limited:
            share = min(
                1.0, cell.method.budget if isinstance(cell.method.budget, float) else cell.method.budget / tokens
            )
        if left is not None and room is not None:
            left -= round(2 * share * full)
            if left < 0 and found[-1]:
                found.append([])
                left = room - round(2 * share * full)
        found[-1].append(cell)
    return found


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
    with compress(loaded.model, cell.method, str(cell.config.kernel), loaded.tokenizer, shared) as session, peaks:
        return cell.task.run(session, sample)


def row(cell: Cell, loaded: Loaded, sample: Sample, out: dict[str, Any], decoding: str | None) -> dict[str, Any]:
    """One line of `samples.jsonl`; `decoding` says how tokens came to be if the prefill was shared."""
    if decoding is not None:
        out = without_times(out)
    out["text"] = [loaded.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out["tokens"]]
    scores = cell.task.score(sample, out)
    if not (math.isfinite(scores["score"]) and 0.0 <= scores["score"] <= 1.0):
        raise ValueError(f"task {cell.task.name} scored {scores['score']} on {sample.id}; a score is 0 to 1")
    return {
        "id": sample.id,
        "source": cell.source,
        "score": scores["score"],
        "scores": scores,
        "references": [list(turn.references) for turn in sample.turns],
        "protocol": dict(sample.protocol) | {"decoding": decoding or "separate"},
        "meta": dict(sample.meta),
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


def release() -> None:
    """Give memory back before the next cell."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
