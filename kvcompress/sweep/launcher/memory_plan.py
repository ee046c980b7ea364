"""Memory plan: whether the caches of a prefill and its cells fit a limit, and batches of cells that do."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompress.cache.layouts.dense import headroom
from kvcompress.data.task import Sample
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.method import Method
from kvcompress.sweep.launcher.cell_run import CellRun


def new_tokens(sample: Sample) -> int:
    """Tokens that a cache may grow by after the prompt."""
    return sum(len(turn.ids) + turn.max_new_tokens for turn in sample.turns)


def prefill_bytes(shared: SharedPrefill) -> int:
    """Bytes of a shared prefill: keys, values, and what was observed; twice, as a cell copies its share to decide."""
    held = shared.cache.nbytes()
    return held["allocated"] + 2 * held["scores"] + held["index"] + held["other_allocated"] + shared.windows_bytes


def cell_bytes(method: Method, shared: SharedPrefill, new: int, copies: int = 1) -> int:
    """Bytes, at most, that a cell keeps of a prompt and appends to it, with the headroom that a cache grows by.

    Args:
        new: tokens after the prompt.
        copies: 2 where it decodes as a row of a batch: what a session holds stays there beside the row.
    """
    tokens, kept = shared.ids.shape[1], float(shared.ids.shape[1])
    if method.limited:
        kept = min(kept, method.budget * tokens if isinstance(method.budget, float) else method.budget)
    slots = kept + new + headroom(int(kept) + new)
    return round(copies * slots * shared.cache.nbytes()["allocated"] / max(1, tokens))


def split_to_fit(cells: Sequence[CellRun], shared: SharedPrefill, new: int, memory: int | None) -> list[list[CellRun]]:
    """Batches of cells whose caches fit in `memory` bytes beside the full one; a cell is a batch at least."""
    if memory is None:
        return [list(cells)]
    free = memory - prefill_bytes(shared)
    found: list[list[CellRun]] = []
    left = 0
    for cell in cells:
        size = cell_bytes(cell.spec.method, shared, new, copies=2)
        if not found or size > left:
            found.append([])
            left = free
        found[-1].append(cell)
        left -= size
    return found


def bytes_over_limit(cells: Sequence[CellRun], shared: SharedPrefill, new: int, memory: int | None) -> int:
    """Bytes of the full cache with the largest cell alone where they exceed `memory`, else 0."""
    if memory is None or not cells:
        return 0
    least = prefill_bytes(shared) + max(cell_bytes(cell.spec.method, shared, new) for cell in cells)
    return least if least > memory else 0
