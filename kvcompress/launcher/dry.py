"""`dry=true`: what a sweep would do, and roughly how long it would take, from a short calibration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from kvcompress.launcher.cell import Cell
from kvcompress.launcher.plan import Group
from kvcompress.method import Method
from kvcompress.session import compress
from kvcompress.task import Sample

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


def estimate(
    groups: Sequence[Group], load: Callable[[DictConfig], tuple[Any, Any]], console: Console
) -> dict[str, str]:
    """Print cells, groups, prefills saved, tokens and time. Nothing is written.

    Returns:
        by run id why a cell could not begin: its model cannot be loaded, or its samples cannot be had.
    """
    faults: dict[str, str] = {}
    table = Table(
        "cells", "model", "task", "to do", "samples", "prefills", "saved", "prompt tokens", "new tokens", box=None
    )
    total_s = alone_s = 0.0
    speeds: dict[int, tuple[float, float, float]] = {}
    for group in groups:
        first = group.cells[0]
        todo = [cell for cell in group.cells if cell.look() is None]
        names = ", ".join(f"{cell.config.method.name} {cell.method.budget}" for cell in group.cells)
        if not todo:
            table.add_row(names, first.config.model.name, first.task.name, *["0"] * 6)
            continue
        try:
            model, tokenizer = load(first.config)
            samples = list(islice(first.task.samples(tokenizer), first.config.limit))
        except Exception as fault:
            faults |= {cell.run_id: f"{type(fault).__name__}: {fault}" for cell in todo}
            continue
        if id(model) not in speeds:
            speeds = {id(model): calibrate(model)}
        left = [[cell for cell in todo if sample.id not in rows_of(cell)] for sample in samples]
        runs = sum(map(len, left))
        prefills = sum(bool(cells) for cells in left) if group.shared else runs
        sums = [cost(sample, speeds[id(model)]) for sample in samples]
        for cells, (prompt_s, rest_s) in zip(left, sums, strict=True):
            prefilled = bool(cells) if group.shared else len(cells)
            total_s += prefilled * prompt_s + len(cells) * rest_s
            alone_s += len(cells) * (prompt_s + rest_s)
        prompt = sum(len(sample.prompt_ids()) * len(cells) for sample, cells in zip(samples, left, strict=True))
        new = sum(
            turn.max_new_tokens * len(cells)
            for sample, cells in zip(samples, left, strict=True)
            for turn in sample.turns
        )
        numbers = (len(todo), runs, prefills, runs - prefills, prompt, new)
        table.add_row(names, first.config.model.name, first.task.name, *(f"{n:,}" for n in numbers))
    console.print(table)
    shown = (
        f"about {duration(total_s)}; cell by cell {duration(alone_s)} (from a short calibration; compression left out)"
    )
    console.print(shown, highlight=False)
    return faults


def rows_of(cell: Cell) -> set[str]:
    """Samples of a cell that are finished already."""
    return set(cell.folder.rows(None if cell.config.resume == "any" else cell.source))


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
