"""Groups of cells: which start from one prefill, which run alone and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.hook import shared_prefill
from kvcompress.hook.scoring import needs_of
from kvcompress.method import Needs
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.launcher import sweep_file
from kvcompress.sweep.launcher.cell_run import CellRun


@dataclass(frozen=True)
class CellGroup:
    """Cells that are worked on together.

    Attributes:
        cells: in the order they were asked for.
        reason: why a cell runs alone, None where several share a prefill.
        joined: they decode together whatever prefill each starts from.
    """

    cells: tuple[CellRun, ...]
    reason: str | None = None
    joined: bool = False

    @property
    def shared(self) -> bool:
        return self.reason is None

    @property
    def first(self) -> CellSpec:
        """Specification of the first cell: model, task and sweep are those of all."""
        return self.cells[0].spec

    def open_cells(self) -> list[CellRun]:
        """Cells without an outcome."""
        return [cell for cell in self.cells if cell.open]

    def prefills(self) -> list[tuple[list[CellRun], Needs]]:
        """Open cells that start from one prefill, and what it has to observe for them."""
        found: dict[Any, list[CellRun]] = {}
        for cell in self.cells:
            if unshared_reason(cell.spec) is None:
                found.setdefault(_prefill_key(cell.spec), []).append(cell)
        several = [cells for cells in found.values() if len(cells) > 1]
        opened = [[cell for cell in cells if cell.open] for cells in several]
        return [(cells, _needs(cells)) for cells in opened if cells]


def _needs(cells: Sequence[CellRun]) -> Needs:
    needs = Needs()
    for cell in cells:
        needs |= needs_of(cell.spec.method)
    return needs


def apart_reason(spec: CellSpec) -> str | None:
    """Why nothing of a cell's work can be done together with others', None if some can."""
    if spec.config.batch > 1:
        return f"batch={spec.config.batch} puts samples together, not cells"
    if spec.config.decode != "eager":
        return f"decode={spec.config.decode} has each cell take its own steps"
    return None


def unshared_reason(spec: CellSpec) -> str | None:
    """Why a cell cannot share its prefill, None if it can."""
    reason = apart_reason(spec)
    if reason is not None:
        return reason
    if not spec.task.shares_prefill:
        return f"task={spec.task.name} measures the prefill itself"
    try:
        return shared_prefill.unsupported_reason(spec.method)
    except ValueError as error:  # it will say so again when it runs
        return str(error)


def group_cells(cells: Iterable[CellRun], share: bool = True, together: bool = True) -> list[CellGroup]:
    """Groups in order of their first cell, those of one model next to each other.

    Cells share if they agree on model, task, seed, dtype, kernel, and on whether attention mass is summed up and how: that
    takes another attention kernel, whose output differs in the last digits. Cells of a task that joins decode together
    whatever their prefill, if `together`. A cell that is finished counts as a member, so that how the others are run does
    not depend on when a sweep was interrupted.
    """
    found: dict[Any, list[CellRun]] = {}
    reasons: dict[Any, str | None] = {}
    joined: set[Any] = set()
    for number, cell in enumerate(cells):
        joins = share and together and cell.spec.task.joins
        reason = "sharing is switched off" if not share else (apart_reason if joins else unshared_reason)(cell.spec)
        key = number if reason else _common_key(cell.spec) if joins else _prefill_key(cell.spec)
        found.setdefault(key, []).append(cell)
        reasons[key] = reason
        if joins and not reason:
            joined.add(key)
    groups = []
    for key, members in found.items():
        alone = "no other cell has the same prefill" if len(members) == 1 else None
        groups.append(CellGroup(tuple(members), reasons[key] or alone, key in joined and alone is None))
    order: dict[str, int] = {}
    for group in groups:
        order.setdefault(group.first.model_key, len(order))
    return sorted(groups, key=lambda group: order[group.first.model_key])


def _common_key(spec: CellSpec) -> Any:
    """What cells with the same prompts, model and folder agree on."""
    return spec.pair, str(spec.sweep), spec.model_key, str(spec.config.kernel)


def _prefill_key(spec: CellSpec) -> Any:
    """What cells with the same prefill agree on."""
    needs, blockwise = needs_of(spec.method), spec.config.kernel == "blockwise"
    mass = (needs.mass or blockwise, needs.decay if needs.mass else None if not blockwise else 1.0)
    return spec.pair, str(spec.sweep), spec.model_key, mass


def listed(specs: Sequence[CellSpec]) -> str:
    """Cells as `method budget, budget; method …`, those that differ in other settings counted."""
    budgets: dict[str, list[str]] = {}
    for spec in specs:
        found = budgets.setdefault(str(spec.config.method.name), [])
        if spec.method.budget_kind != "none":
            found.append(str(spec.method.budget))
    texts = []
    for name, found in budgets.items():
        several = f" ({len(found) // len(set(found))} each)" if len(found) > len(set(found)) else ""
        texts.append(f"{name} {', '.join(dict.fromkeys(found))}".strip() + several)
    return "; ".join(texts)


def note_cells(specs: Iterable[CellSpec]) -> None:
    """Write down which cells each sweep has.

    Raises:
        ValueError: as of `sweep_file.note_cells`.
    """
    cells: dict[Path, dict[str, Mapping[str, Any]]] = {}
    for spec in specs:
        cells.setdefault(spec.sweep, {})[spec.run_id] = {
            "method": str(spec.config.method.name),
            "budget": spec.identity["budget"],
            "task": spec.task.name,
            "model": str(spec.config.model.name),
            "seed": spec.config.seed,
        }
    for sweep in sorted(cells):
        sweep_file.note_cells(sweep, cells[sweep])
