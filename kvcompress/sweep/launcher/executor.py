"""Group executor: works through the samples of a group of cells, and writes one row per sample and cell.

A fault ends its cell and no other. What is finished is on disk before the next thing begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcompress.common.memory import release
from kvcompress.data.task import Sample
from kvcompress.hook.shared_prefill import SharedPrefill, prefill_once
from kvcompress.models import loading
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.cell_run import CellRun
from kvcompress.sweep.launcher.grouping import CellGroup, listed
from kvcompress.sweep.launcher.memory_plan import Starts, bytes_over_limit, new_tokens
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.sample import Workload, check_lengths, row, samples_of, separate_reason, with_ends
from kvcompress.sweep.launcher.strategies import Alone, Batched, FromPrefill, Joint, Reasons, SampleStrategy
from kvcompress.sweep.outcome import Outcome
from kvcompress.sweep.references import References

logger = logging.getLogger(__name__)
Advance = Callable[[], object]  # called for each row that is written


class GroupExecutor:
    """Runs the open cells of one group.

    Args:
        settled: called with each cell's outcome as soon as it is known.
    """

    def __init__(
        self,
        group: CellGroup,
        models: ModelPool,
        console: Console,
        settled: Callable[[Outcome], object],
        options: Options,
    ) -> None:
        self.group, self.models, self.console = group, models, console
        self.settled, self.options = settled, options
        self._said: set[str] = set()

    def run(self) -> None:
        """Run every cell that has no outcome yet, and give it one.

        Raises:
            KeyboardInterrupt: the records of what was begun say `partial` by then.
        """
        try:
            workload = self._load()
            if workload is not None:
                self._run_samples(workload)
            for cell in self.group.open_cells():
                self._finish(cell, "ok")
        except (Exception, SystemExit) as fault:  # between samples, so it is nobody's own; other groups go on
            self._fail_all(self.group.open_cells(), fault)
        except KeyboardInterrupt:
            for cell in self.group.open_cells():
                self._finish(cell, "partial", "interrupted")
            raise

    def _load(self) -> Workload | None:
        """Model and samples, the same for all cells; None where they are not to be had."""
        first = self.group.first
        try:
            # all that may be wrong with the samples is known before weights are read
            samples = samples_of(first, self.models.tokenizer(first.config))
            found = sanity.check(first.task, samples)
            for note in found.notes:
                self.console.print(f"{first.task.name}: {note}", style="yellow", highlight=False, markup=False)
            limit = self.models.positions(first.config)
        except Exception as fault:
            self._fail_all(self.group.open_cells(), fault)
            return None
        for cell in self.group.open_cells():
            try:
                cell.expect([sample.id for sample in samples], found)
                check_lengths(samples, limit, cell.spec.method)
            except (ValueError, OSError) as fault:
                self._fail(cell, fault)
        if not self.group.open_cells():
            return None
        try:
            model, tokenizer = self.models.load(first.config)
            ends = loading.eos_ids(model, tokenizer)
        except Exception as fault:
            self._fail_all(self.group.open_cells(), fault)
            return None
        return Workload(model, tokenizer, [with_ends(sample, ends) for sample in samples])

    def _run_samples(self, workload: Workload) -> None:
        cells, first = self.group.open_cells(), self.group.first
        references = References(first.sweep, [first.pair, first.source])
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            title = cells[0].spec.label if len(cells) == 1 else f"{len(cells)} cells · {first.task.name}"
            total, done = len(workload.samples) * len(cells), sum(len(cell.finished_ids) for cell in cells)
            bar = progress.add_task(title, total=total, completed=done)

            def advance() -> None:
                progress.advance(bar)

            if first.config.batch > 1:  # such a cell is a group of its own
                self._apply(Batched(workload, self.console), cells, workload, workload.samples, advance)
                return
            for sample in workload.samples:
                self._run_sample(workload, sample, references, advance)

    def _run_sample(self, workload: Workload, sample: Sample, references: References, advance: Advance) -> None:
        """Run a sample for all cells that lack it. The shared prefill lives as long as this call: two would not fit."""
        due = [cell for cell in self.group.open_cells() if sample.id not in cell.finished_ids]
        if not due:
            return
        first = self.group.first
        try:
            sample = references.attach(first.task, sample, workload.model, str(first.config.kernel))
        except Exception as fault:
            self._fail_all(due, fault)
            return
        starts = self._prefills(workload, sample) if self.group.shared else {}
        for strategy, cells in self._assign(workload, due, sample, starts):
            self._apply(strategy, cells, workload, [sample], advance)

    def _assign(
        self, workload: Workload, due: Sequence[CellRun], sample: Sample, starts: Starts
    ) -> Iterator[tuple[SampleStrategy, list[CellRun]]]:
        """Which strategy runs the sample for which cells."""
        if not starts and not self.group.joined:
            why = "the shared prefill failed" if self.group.shared else self.group.reason
            yield Alone(workload, {cell.spec.run_id: why for cell in due}), list(due)
            return
        reasons = self._separate_reasons(due, workload, sample, starts)
        if self.options.together:
            yield Joint(workload, starts, self.options), [cell for cell in due if not reasons[cell.spec.run_id]]
        apart = [cell for cell in due if reasons[cell.spec.run_id]]
        for shared in {id(one): one for one in starts.values()}.values():
            mine = [cell for cell in apart if starts.get(cell.spec.run_id) is shared]
            yield FromPrefill(workload, shared, reasons), mine
        yield Alone(workload, reasons), [cell for cell in apart if cell.spec.run_id not in starts]

    def _prefills(self, workload: Workload, sample: Sample) -> Starts:
        """By run id the sample's prompt without eviction; cells for which that fails run their own."""
        ids = [token for segment in sample.segments for token in segment]
        found: dict[str, SharedPrefill] = {}
        for cells, needs in self.group.prefills():
            try:
                made = prefill_once(workload.model, ids, needs, str(self.group.first.config.kernel))
                found |= {cell.spec.run_id: made for cell in cells}
                continue
            except Exception as fault:
                text = f"{sample.id}: no shared prefill ({type(fault).__name__}: {fault}); its cells run their own"
                self.console.print(text, style="yellow", highlight=False, markup=False)
                logger.debug("shared prefill failed", exc_info=True)
            release()
        return found

    def _separate_reasons(self, due: Sequence[CellRun], workload: Workload, sample: Sample, starts: Starts) -> Reasons:
        """By run id why a cell decodes this sample by itself, None for those that decode together; printed once."""
        if not self.options.together:
            return {cell.spec.run_id: "decoding together is switched off" for cell in due}
        found = {cell.spec.run_id: separate_reason(cell.spec, workload.model) for cell in due}
        if list(found.values()).count(None) == 1:
            found = {run_id: why or "no other cell of its prefill can join it" for run_id, why in found.items()}
        least = bytes_over_limit(due, starts, new_tokens(sample), self.options.memory)
        if least:
            limit = f"hydra.launcher.memory={(self.options.memory or 0) / 2**30:.3g}"
            takes = f"{sample.id}: the full cache and one cell take {least / 2**30:.3g} GiB"
            self._say(f"{takes}, {limit} is less; one at a time", "yellow", limit)
        for why in dict.fromkeys(filter(None, found.values())):
            specs = [cell.spec for cell in due if found[cell.spec.run_id] == why]
            self._say(f"{why}: {listed(specs)} · {specs[0].task.name} decode separately", "dim")
        return found

    def _say(self, text: str, style: str, about: str = "") -> None:
        """Print a line, once for all samples of the group."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            self.console.print(text, style=style, highlight=False, markup=False)

    def _apply(
        self,
        strategy: SampleStrategy,
        cells: Sequence[CellRun],
        workload: Workload,
        samples: Sequence[Sample],
        advance: Advance,
    ) -> None:
        """Write down what a strategy's runs returned, or the fault that ended a cell."""
        for cell, sample, result in strategy.run(cells, samples):
            status = ""
            try:
                cell.add_row(row(cell.spec, workload.tokenizer, sample, result))
                advance()
            except (Exception, SystemExit) as fault:
                status = self._fail(cell, fault)
            del result  # with a fault goes what its frames hold
            if status == "oom":
                release()

    def _fail_all(self, cells: Sequence[CellRun], fault: BaseException) -> None:
        for cell in cells:
            self._fail(cell, fault)

    def _fail(self, cell: CellRun, fault: BaseException) -> str:
        """Close a cell with the fault that ended it → its status."""
        logger.debug("cell %s failed", cell.spec.run_id, exc_info=fault)
        return self._leave(cell, cell.fail(fault)).status

    def _finish(self, cell: CellRun, status: str, error: str | None = None) -> None:
        try:
            outcome = cell.finish(status, error)
        except Exception as fault:
            outcome = cell.fail(fault)
        self._leave(cell, outcome)

    def _leave(self, cell: CellRun, outcome: Outcome) -> Outcome:
        cell.release()
        self.settled(outcome)
        return outcome
