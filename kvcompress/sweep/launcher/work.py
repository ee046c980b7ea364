"""Working through a group of cells: sample by sample, one prefill for all that share it, one row per cell.

A fault ends its cell and no other. What is finished is on disk before the next thing begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcompress import tracking
from kvcompress.common.memory import is_oom, release
from kvcompress.data.task import Sample
from kvcompress.hook.joint_decoding import decode_together
from kvcompress.hook.session import compress
from kvcompress.hook.shared_prefill import SharedPrefill, prefill_once
from kvcompress.measure.measuring import without_peaks
from kvcompress.models import loading
from kvcompress.sweep import batches, sanity
from kvcompress.sweep.launcher.cell import Cell, Outcome, check_lengths, pair_id
from kvcompress.sweep.launcher.memory_plan import new_tokens, too_large, turns
from kvcompress.sweep.launcher.plan import Group, listed
from kvcompress.sweep.launcher.sample import Loaded, apart_because, checked, full_layers, row, run_sample, with_ends
from kvcompress.sweep.record import readable_row
from kvcompress.sweep.references import References

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a launcher has its cells run.

    Attributes:
        share: one prefill for all cells that can start from it.
        together: cells that share a prefill decode as rows of one batch where they can.
        check: also decode each cell alone, and fail it where the tokens differ without a close call.
        memory: bytes that the caches of a shared prefill and its cells may take, None = no limit. Cells take turns to
            fit; one at a time beside the full cache is the least.
    """

    share: bool = True
    together: bool = True
    check: bool = False
    memory: int | None = None


class Worker:
    """Runs the open cells of one group.

    Args:
        load: gives model and tokenizer for a configuration; tokenizer: the tokenizer alone.
        settled: called with each cell's outcome as soon as it is known.
        how: what a launcher asks for.
    """

    def __init__(
        self,
        load: Callable[[DictConfig], tuple[Any, Any]],
        tokenizer: Callable[[DictConfig], Any],
        console: Console,
        settled: Callable[[Outcome], object],
        how: Options,
    ) -> None:
        self.load, self.tokenizer = load, tokenizer
        self.console, self.settled, self.how = console, settled, how
        self._said: set[str] = set()

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
            # all that may be wrong with the samples is known before weights are read
            samples = list(islice(first.task.samples(self.tokenizer(first.config)), first.config.limit))
            found = sanity.check(first.task, samples)
            for note in found.notes:
                self.console.print(f"{first.task.name}: {note}", style="yellow", highlight=False, markup=False)
            model, tokenizer = self.load(first.config)
            ends = loading.eos_ids(model, tokenizer)
        except Exception as fault:
            for cell in open_cells(group):
                self._fail(cell, fault)
            return None
        for cell in open_cells(group):
            cell.sanity = found
            try:
                cell.keep([sample.id for sample in samples])
                check_lengths(samples, model, cell.method)
            except (ValueError, OSError) as fault:
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
            if first.config.batch > 1:  # such a cell is a group of its own
                for cell in cells:
                    self._batches(cell, loaded, partial(progress.advance, bar))
                return
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
                why = self._apart(group, due, sample, shared)
                if shared is not None and self.how.together:
                    together = [cell for cell in due if not why[cell.run_id]]
                    self._together(together, loaded, sample, shared, partial(progress.advance, bar))
                for cell in due:
                    if cell.open and sample.id not in cell.done:
                        self._sample(cell, loaded, sample, shared, partial(progress.advance, bar), why[cell.run_id])

    def _prefill(self, group: Group, loaded: Loaded, sample: Sample) -> SharedPrefill | None:
        """The sample's prompt without eviction; None where that fails: each cell then runs its own."""
        ids = [token for segment in sample.segments for token in segment]
        try:
            kernel = str(group.cells[0].config.kernel)
            return prefill_once(loaded.model, ids, group.needs, kernel)
        except Exception as fault:
            text = f"{sample.id}: no shared prefill ({type(fault).__name__}: {fault}); its cells run their own"
            self.console.print(text, style="yellow", highlight=False, markup=False)
            logger.debug("shared prefill failed", exc_info=True)
        release()
        return None

    def _apart(self, group: Group, due: Sequence[Cell], sample: Sample, shared: SharedPrefill | None) -> dict[str, str]:
        """By run id why a cell decodes this sample by itself, empty for those that decode together; said once."""
        if shared is None:
            why = "the shared prefill failed" if group.shared else group.reason
            return {cell.run_id: why for cell in due}
        if not self.how.together:
            return {cell.run_id: "decoding together is switched off" for cell in due}
        found = {cell.run_id: apart_because(cell, shared) for cell in due}
        if list(found.values()).count("") == 1:
            found = {run_id: why or "no other cell of its prefill can join it" for run_id, why in found.items()}
        least = too_large(due, shared, new_tokens(sample), self.how.memory)
        if least:
            limit = f"hydra.launcher.memory={(self.how.memory or 0) / 2**30:.3g}"
            takes = f"{sample.id}: the full cache and one cell take {least / 2**30:.3g} GiB"
            self._say(f"{takes}, {limit} is less; one at a time", "yellow", limit)
        for why in dict.fromkeys(filter(None, found.values())):
            cells = [cell for cell in due if found[cell.run_id] == why]
            self._say(f"{why}: {listed(cells)} · {cells[0].task.name} decode separately", "dim")
        return found

    def _say(self, text: str, style: str, about: str = "") -> None:
        """Print a line, once for all samples of a group."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            self.console.print(text, style=style, highlight=False, markup=False)

    def _together(
        self,
        cells: Sequence[Cell],
        loaded: Loaded,
        sample: Sample,
        shared: SharedPrefill,
        advance: Callable[[], object],
    ) -> None:
        """Run the sample for those cells whose decode steps can be rows of one batch."""
        for turn in turns(cells, shared, new_tokens(sample), self.how.memory) if cells else []:
            jobs = [(cell.method, partial(cell.task.run, sample=sample)) for cell in turn]
            with without_peaks():
                results, share = decode_together(loaded.model, jobs, shared, str(turn[0].config.kernel))
            for cell, result in zip(turn, results, strict=True):
                kind = "separate" if share == 0.0 else "together" if share == 1.0 else "partly together"
                why = "" if share else "the memory limit" if len(turn) == 1 else "no step could be taken together"
                if self.how.check and not isinstance(result, BaseException):
                    result, kind = checked(cell, loaded, sample, shared, result), f"{kind}, checked"
                self._keep(cell, loaded, sample, advance, result, kind, why)

    def _sample(
        self,
        cell: Cell,
        loaded: Loaded,
        sample: Sample,
        shared: SharedPrefill | None,
        advance: Callable[[], object],
        why: str,
    ) -> None:
        try:
            result: Any = run_sample(cell, loaded, sample, shared)
        except (Exception, SystemExit) as fault:
            result = fault
        self._keep(cell, loaded, sample, advance, result, None if shared is None else "separate", why)

    def _batches(self, cell: Cell, loaded: Loaded, advance: Callable[[], object]) -> None:
        """Run a cell's samples as rows of batches; a batch for which memory does not do is halved."""
        due = [sample for sample in loaded.samples if sample.id not in cell.done]
        config, padding = cell.config, any(not kind for kind in full_layers(loaded.model, cell.method))
        left = batches.plan(due, config.batch, config.batch_memory, batches.bytes_per_token(loaded.model), padding)
        while left and cell.open:
            batch = left.pop(0)
            try:
                kernel, decode = str(config.kernel), str(config.decode)
                with compress(loaded.model, cell.method, kernel, loaded.tokenizer, decode=decode) as session:
                    results: list[Any] = batches.run(session, batch)
            except (Exception, SystemExit) as fault:
                if len(batch) > 1 and is_oom(fault):
                    half = len(batch) // 2
                    left = [batch[:half], batch[half:], *left]
                    text = f"{cell.title}: too little memory for {len(batch)} samples at once; trying {half}"
                    self.console.print(text, style="yellow", highlight=False, markup=False)
                    del fault
                    release()
                    continue
                results = [fault] * len(batch)
            for sample, result in zip(batch, results, strict=True):
                if cell.open:
                    self._keep(cell, loaded, sample, advance, result, None, "", len(batch))

    def _keep(
        self,
        cell: Cell,
        loaded: Loaded,
        sample: Sample,
        advance: Callable[[], object],
        result: Any,
        decoding: str | None,
        why: str,
        rows: int = 1,
    ) -> None:
        """Write down what a sample's run returned, or the fault that ended it."""
        try:
            if isinstance(result, BaseException):
                raise result
            cell.folder.append(readable_row(row(cell, loaded, sample, result, decoding, why) | {"rows": rows}))
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
