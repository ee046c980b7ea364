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
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvcompress import models, tracking
from kvcompress.launcher.cell import Cell, Outcome, check_lengths
from kvcompress.launcher.plan import Group
from kvcompress.measure import without_peaks
from kvcompress.session import compress
from kvcompress.shared import SharedPrefill, prefill_once
from kvcompress.task import Sample

logger = logging.getLogger(__name__)
TIMES = ("ttft_s", "prefill_s", "compress_s", "tpot_s", "prefill_peak", "decode_peak")


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
    """

    def __init__(
        self,
        load: Callable[[DictConfig], tuple[Any, Any]],
        console: Console,
        settled: Callable[[Outcome], object],
    ) -> None:
        self.load, self.console, self.settled = load, console, settled

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
        except KeyboardInterrupt:
            for cell in open_cells(group):
                self._end(cell, "partial", "interrupted")
            raise

    def _begin(self, group: Group) -> Loaded | None:
        """Model and samples, the same for all cells; None where they are not to be had."""
        first = group.cells[0]
        try:
            model, tokenizer = self.load(first.config)
            samples = list(first.task.samples(tokenizer))[: first.config.limit]
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
        cells = open_cells(group)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            title = cells[0].title if len(cells) == 1 else f"{len(cells)} cells · {group.cells[0].task.name}"
            total, done = len(loaded.samples) * len(cells), sum(len(cell.done) for cell in cells)
            bar = progress.add_task(title, total=total, completed=done)
            for sample in loaded.samples:
                due = [cell for cell in open_cells(group) if sample.id not in cell.done]
                shared = self._prefill(group, loaded, sample) if group.shared and due else None
                for cell in due:
                    self._sample(cell, loaded, sample, shared, progress, bar)

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

    def _sample(
        self,
        cell: Cell,
        loaded: Loaded,
        sample: Sample,
        shared: SharedPrefill | None,
        progress: Progress,
        bar: TaskID,
    ) -> None:
        try:
            cell.folder.append(row(cell, loaded, sample, shared))
        except Exception as fault:
            status = self._fail(cell, fault)
            if status != "oom":
                return
        else:
            progress.advance(bar)
            return
        release()  # out here the fault, and with it what the failed frames held, is gone

    def _fail(self, cell: Cell, fault: Exception) -> str:
        logger.debug("cell %s failed", cell.run_id, exc_info=fault)
        status = cell.fail(fault)
        self._leave(cell)
        return status

    def _end(self, cell: Cell, status: str, error: str | None = None) -> None:
        cell.write(status, error)
        self._leave(cell)

    def _leave(self, cell: Cell) -> None:
        outcome = cell.outcome
        assert outcome is not None
        rows = list(cell.folder.rows().values())
        tracking.log(cell.config.logger, outcome.record, cell.identity, rows, cell.config.sweep.name)
        cell.release()
        self.settled(outcome)


def open_cells(group: Group) -> list[Cell]:
    return [cell for cell in group.cells if cell.open]


def with_ends(sample: Sample, ends: Sequence[int]) -> Sample:
    """The sample with the model's own end tokens among those that stop an answer."""
    turns = tuple(replace(turn, stop=tuple(sorted({*turn.stop, *ends}))) for turn in sample.turns)
    return replace(sample, turns=turns)


def row(cell: Cell, loaded: Loaded, sample: Sample, shared: SharedPrefill | None) -> dict[str, Any]:
    """Run one sample of one cell: its line of `samples.jsonl`."""
    peaks = nullcontext() if shared is None else without_peaks()
    # a session of its own: nothing leaks from sample to sample
    with compress(loaded.model, cell.method, str(cell.config.kernel), shared) as session, peaks:
        out = cell.task.run(session, sample)
    if shared is not None:
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
        "protocol": dict(sample.protocol),
        "meta": dict(sample.meta),
        "shared": shared is not None,
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
