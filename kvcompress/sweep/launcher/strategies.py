"""Sample strategies: how samples are run for cells. Alone, from a shared prefill, decoding jointly, or as a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rich.console import Console

from kvcompress.common.memory import is_oom, release
from kvcompress.data.task import Sample
from kvcompress.hook.joint_decoding import decode_together
from kvcompress.hook.session import compress
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.measure.measuring import without_peaks
from kvcompress.sweep import batches
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.launcher.cell_run import CellRun
from kvcompress.sweep.launcher.memory_plan import Starts, new_tokens, split_to_fit
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.sample import SampleResult, Workload, checked, has_sliding_layers, run_sample

Results = Iterator[tuple[CellRun, Sample, SampleResult]]
Reasons = Mapping[str, str | None]  # by run id, why a cell decodes separately


class SampleStrategy(Protocol):
    """Runs samples for cells; a fault is a result. Cells that are closed meanwhile are passed over."""

    def run(self, cells: Sequence[CellRun], samples: Sequence[Sample]) -> Results: ...


@dataclass(frozen=True)
class Alone:
    """Each cell with a prefill of its own."""

    workload: Workload
    reasons: Reasons

    def run(self, cells: Sequence[CellRun], samples: Sequence[Sample]) -> Results:
        for sample in samples:
            for cell in cells:
                why = self.reasons[cell.spec.run_id]
                yield cell, sample, SampleResult(_attempt(cell.spec, self.workload, sample, None), why=why)


@dataclass(frozen=True)
class FromPrefill:
    """Each cell from the shared prefill, its answer decoded by itself."""

    workload: Workload
    shared: SharedPrefill
    reasons: Reasons

    def run(self, cells: Sequence[CellRun], samples: Sequence[Sample]) -> Results:
        for sample in samples:
            for cell in cells:
                out, why = _attempt(cell.spec, self.workload, sample, self.shared), self.reasons[cell.spec.run_id]
                yield cell, sample, SampleResult(out, "separate", why)


@dataclass(frozen=True)
class Joint:
    """Cells from shared prefills or their own, their decode steps in common forwards; in turns where memory is limited."""

    workload: Workload
    starts: Starts
    options: Options

    def run(self, cells: Sequence[CellRun], samples: Sequence[Sample]) -> Results:
        for sample in samples:
            for turn in split_to_fit(cells, self.starts, new_tokens(sample), self.options.memory) if cells else []:
                yield from self._turn(turn, sample)

    def _turn(self, turn: Sequence[CellRun], sample: Sample) -> Results:
        jobs = [(cell.spec.method, partial(cell.spec.task.run, sample=sample)) for cell in turn]
        with without_peaks():
            kernel = str(turn[0].spec.config.kernel)
            starts = [self.starts.get(cell.spec.run_id) for cell in turn]
            results, share = decode_together(self.workload.model, jobs, starts, kernel, self.workload.tokenizer)
        kind = "separate" if share == 0.0 else "together" if share == 1.0 else "partly together"
        why = None if share else "the memory limit" if len(turn) == 1 else "no step could be taken together"
        for cell, out in zip(turn, results, strict=True):
            if self.options.check and not cell.spec.task.joins and not isinstance(out, BaseException):
                out = checked(cell.spec, self.workload, sample, self.starts.get(cell.spec.run_id), out)
                yield cell, sample, SampleResult(out, f"{kind}, checked", why)
            else:
                yield cell, sample, SampleResult(out, kind, why)


@dataclass(frozen=True)
class Batched:
    """Samples of a cell as rows of batches; a batch for which memory does not do is halved."""

    workload: Workload
    console: Console

    def run(self, cells: Sequence[CellRun], samples: Sequence[Sample]) -> Results:
        for cell in cells:
            yield from self._cell(cell, samples)

    def _cell(self, cell: CellRun, samples: Sequence[Sample]) -> Results:
        spec, model = cell.spec, self.workload.model
        due = [sample for sample in samples if sample.id not in cell.finished_ids]
        padding, config = has_sliding_layers(model, spec.method), spec.config
        left = batches.plan(due, config.batch, config.batch_memory, batches.bytes_per_token(model), padding)
        while left and cell.open:
            batch = left.pop(0)
            kernel, decode = str(config.kernel), str(config.decode)
            try:
                with compress(model, spec.method, kernel, self.workload.tokenizer, decode=decode) as session:
                    results: list[Any] = batches.run(session, batch)
            except (Exception, SystemExit) as fault:
                if len(batch) > 1 and is_oom(fault):
                    half = len(batch) // 2
                    left = [batch[:half], batch[half:], *left]
                    text = f"{spec.label}: too little memory for {len(batch)} samples at once; trying {half}"
                    self.console.print(text, style="yellow", highlight=False, markup=False)
                    del fault
                    release()
                    continue
                results = [fault] * len(batch)
            kept_first = sorted(zip(batch, results, strict=True), key=lambda pair: isinstance(pair[1], BaseException))
            for sample, out in kept_first:  # a fault ends the cell
                if cell.open:
                    yield cell, sample, SampleResult(out, rows=len(batch))


def _attempt(
    spec: CellSpec, workload: Workload, sample: Sample, shared: SharedPrefill | None
) -> dict[str, Any] | BaseException:
    try:
        return run_sample(spec, workload, sample, shared)
    except (Exception, SystemExit) as fault:
        return fault
