"""Memory plan: whether the caches of a prefill and its cells fit a limit, and batches of cells that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcompress.cache.layouts.dense import headroom
from kvcompress.data.task import Sample
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.method import Method
from kvcompress.sweep.launcher.cell_run import CellRun

Starts = Mapping[str, SharedPrefill]  # by run id the prefill that a cell starts from; one that is missing makes its own


def new_tokens(sample: Sample) -> int:
    """Tokens that a cache may grow by after the prompt."""
    return sum(len(turn.ids) + turn.max_new_tokens for turn in sample.turns)


def prefill_bytes(shared: SharedPrefill) -> int:
    """Bytes of a shared prefill: keys, values, and what was observed; twice, as a cell copies its share to decide."""
    held = shared.cache.nbytes()
    return held["allocated"] + 2 * held["scores"] + held["index"] + held["other_allocated"] + shared.windows_bytes


def cell_bytes(method: Method, shared: SharedPrefill, new: int, copies: int = 1, rows: int = 1) -> int:
    """Bytes, at most, that a cell keeps of a prompt and appends to it, with the headroom that a cache grows by.

    Args:
        new: tokens after the prompt.
        copies: 2 where it decodes with others: what a session held before its answer stays beside what decodes.
        rows: of the batch that it decodes.
    """
    tokens, kept = shared.ids.shape[1], float(shared.ids.shape[1])
    if method.limited:
        kept = min(kept, method.budget * tokens if isinstance(method.budget, float) else method.budget)
    slots = kept + new + headroom(int(kept) + new)
    return round(copies * rows * slots * shared.cache.nbytes()["allocated"] / max(1, tokens))


def split_to_fit(cells: Sequence[CellRun], starts: Starts, new: int, memory: int | None) -> list[list[CellRun]]:
    """Batches of cells whose caches fit in `memory` bytes beside the full ones; a cell is a batch at least."""
    if memory is None:
        return [list(cells)]
    if not starts:  # what a token takes is not known
        return [[cell] for cell in cells]
    free, any_start = memory - _prefills_bytes(starts), next(iter(starts.values()))
    found: list[list[CellRun]] = []
    left = 0
    for cell in cells:
        start = starts.get(cell.spec.run_id, any_start)
        size = cell_bytes(cell.spec.method, start, new, copies=2, rows=cell.spec.task.decoded_rows())
        if not found or size > left:
            found.append([])
            left = free
        found[-1].append(cell)
        left -= size
    return found


def bytes_over_limit(cells: Sequence[CellRun], starts: Starts, new: int, memory: int | None) -> int:
    """Bytes of the full caches with the largest cell alone where they exceed `memory`, else 0."""
    if memory is None or not cells or not starts:
        return 0
    any_start = next(iter(starts.values()))
    largest = max(cell_bytes(c.spec.method, any_start, new, rows=c.spec.task.decoded_rows()) for c in cells)
    least = _prefills_bytes(starts) + largest
    return least if least > memory else 0


def _prefills_bytes(starts: Starts) -> int:
    return sum(prefill_bytes(shared) for shared in {id(one): one for one in starts.values()}.values())
