"""Dry run (`dry=true`): the plan of a sweep, and a time estimate from a short calibration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvcompress.data.task import Sample
from kvcompress.hook.session import compress
from kvcompress.method import Method
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.cell_run import CellRun
from kvcompress.sweep.launcher.grouping import CellGroup, listed
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.sample import samples_of
from kvcompress.sweep.outcome import nothing_to_do

SHORT, LONG = 128, 512  # tokens of the calibration's prompts
STEPS = 8  # decoded tokens of the calibration


def calibrate(model: Any, repeats: int = 2) -> tuple[float, float, float]:
    """Seconds `a * n + b * n²` of a prompt of n tokens, and seconds per decoded token: `(a, b, decode)`.

    The best of some repeats of two short prompts: an estimate, not a measurement.
    """
    vocabulary = model.config.get_text_config().vocab_size
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONG + STEPS
    long = min(LONG, max(limit - STEPS, 8))
    short = max(long // 4, 4)
    seconds: dict[int, list[float]] = {short: [], long: []}
    decode = []
    with compress(model, Method()) as session:
        for _ in range(repeats):
            for length in seconds:
                ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
                start = time.perf_counter()
                session.prefill(ids.to(model.device))
                seconds[length].append(time.perf_counter() - start)
            decode += session.generate(STEPS).step_s
    per_short, per_long = min(seconds[short]) / short, min(seconds[long]) / long
    b = max(0.0, (per_long - per_short) / (long - short))
    return max(per_long - b * long, 0.0), b, min(decode) if decode else 0.0


def estimate(groups: Sequence[CellGroup], models: ModelPool, console: Console) -> dict[str, str]:
    """Print cells, groups, prefills saved, tokens and time. Nothing is written.

    Returns:
        by run id why a cell could not begin: its model cannot be loaded, its samples cannot be had, or their right answers
        do not score 1.
    """
    faults: dict[str, str] = {}
    rows: dict[Any, PlanRow] = {}
    speeds: dict[int, tuple[float, float, float]] = {}
    for number, group in enumerate(groups):
        first = group.first
        key = number if group.shared else ("alone", first.config.model.name, first.task.name)
        row = rows.setdefault(key, PlanRow(str(first.config.model.name), first.task.name, group.shared))
        row.cells += group.cells
        todo = [cell for cell in group.cells if cell.check_finished() is None]
        if not todo:
            continue
        try:
            # all that may be wrong with the samples is known before weights are read, as in a run
            samples = samples_of(first, models.tokenizer(first.config))
            found = sanity.check(first.task, samples)
            model, _ = models.load(first.config)
        except Exception as fault:
            faults |= {cell.spec.run_id: f"{type(fault).__name__}: {fault}" for cell in todo}
            continue
        for note in found.notes:
            console.print(f"{first.task.name}: {note}", style="yellow", highlight=False, markup=False)
        if id(model) not in speeds:
            speeds = {id(model): calibrate(model)}
        row.add(todo, samples, speeds[id(model)])
    cells = [cell for group in groups for cell in group.cells]
    if cells and not faults and not any(row.todo for row in rows.values()):
        console.print(nothing_to_do(len(cells)), highlight=False, markup=False)
    else:
        show(list(rows.values()), console)
    return faults


@dataclass
class PlanRow:
    """Work of a group, or of all cells of a task that run alone."""

    model: str
    task: str
    shared: bool
    cells: list[CellRun] = field(default_factory=list)
    todo: int = 0
    runs: int = 0
    prefills: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    alone_s: float = 0.0

    def add(self, todo: Sequence[CellRun], samples: Sequence[Sample], speed: tuple[float, float, float]) -> None:
        """Count what these cells have to do."""
        self.todo += len(todo)
        finished = [set(cell.stored_rows()) for cell in todo]
        for sample in samples:
            due = sum(sample.id not in done for done in finished)
            prefills = min(due, 1) if self.shared else due
            prompt_s, rest_s = cost(sample, speed)
            prompts, answers = todo[0].spec.task.effort(sample)
            prompt_s, rest_s = prompts * prompt_s, answers * rest_s
            self.runs += due
            self.prefills += prefills
            self.prompt_tokens += due * len(sample.prompt_ids())
            self.new_tokens += due * sum(turn.max_new_tokens for turn in sample.turns)
            self.seconds += prefills * prompt_s + due * rest_s
            self.alone_s += due * (prompt_s + rest_s)

    def numbers(self) -> tuple[int, ...]:
        """Cells and samples to do, prefills, those saved, tokens of prompts and new ones."""
        return self.todo, self.runs, self.prefills, self.runs - self.prefills, self.prompt_tokens, self.new_tokens


def show(rows: Sequence[PlanRow], console: Console) -> None:
    """The cells of each group in a line, then the numbers: 80 columns hold them."""
    table = Table("group", "to do", "samples", "prefills", "saved", "prompt tokens", "new tokens", box=None)
    for number, row in enumerate(rows, 1):
        how = f"{len(row.cells)} cells share each prefill" if row.shared else f"{len(row.cells)} alone"
        seeds = ", ".join(dict.fromkeys(str(cell.spec.config.seed) for cell in row.cells))
        text = f"{number}: {row.model} · {row.task} · seed {seeds} · {how}: {listed([cell.spec for cell in row.cells])}"
        console.print(text, highlight=False, markup=False)
        table.add_row(str(number), *(f"{n:,}" for n in row.numbers()))
    if len(rows) > 1:
        table.add_row("all", *(f"{sum(column):,}" for column in zip(*(row.numbers() for row in rows), strict=True)))
    console.print(table)
    total, alone = sum(row.seconds for row in rows), sum(row.alone_s for row in rows)
    text = f"about {duration(total)}; cell by cell {duration(alone)} (from a short calibration; compression left out)"
    console.print(text, highlight=False)


def cost(sample: Sample, speed: tuple[float, float, float]) -> tuple[float, float]:
    """Seconds of a sample's prompt, and of its questions and answers at full length."""
    a, b, decode = speed
    n = sum(map(len, sample.segments))
    later = sum(len(turn.ids) for turn in sample.turns)
    return a * n + b * n * n, later * (a + b * n) + decode * sum(turn.max_new_tokens for turn in sample.turns)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
