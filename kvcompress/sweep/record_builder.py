"""Record builder: a cell's finished samples and its specification as one flat record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcompress.measure.measuring import hardware
from kvcompress.models import loading
from kvcompress.sweep import record, record_schema
from kvcompress.sweep.aggregate import aggregate
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.sanity import Sanity

Rows = Sequence[Mapping[str, Any]]


def build(spec: CellSpec, rows: Rows, status: str, error: str | None, expected: int, sanity: Sanity) -> dict[str, Any]:
    """The record of a cell.

    Args:
        rows: finished samples, as in `samples.jsonl`.
        status: what the run came to; "ok" is looked into: it may be `partial`, `oom` or `inactive` by its samples.
        expected: samples there are, 0 where that is not known.
        sanity: how right and empty answers of its samples are scored.

    Raises:
        Exception: whatever the task's summary raises.
    """
    found = aggregate(rows)
    if status == "ok":
        status = _classify(spec, rows, found, expected)
    shared = any(row.get("shared") for row in rows)
    if shared or any(row.get("rows", 1) > 1 for row in rows):  # what some samples took alone says nothing of the others
        found |= {key: None for key in found if key.startswith(("time.", "memory."))}
    task, parts = spec.task, spec.identity["parts"]
    built: dict[str, Any] = dict.fromkeys(record_schema.KEYS)
    built |= found
    if rows and status not in ("failed", "oom"):
        built |= {f"metrics.{name}": value for name, value in task.summarise(rows).items()}
    built |= {f"parts.{name}": value for name, value in parts.items()}
    built |= record.versions()
    machine = hardware(loading.resolve_device(spec.config.device))
    built |= {f"versions.{name}": value for name, value in machine.items()}
    return built | {
        "run_id": spec.run_id,
        "status": status,
        "model": spec.config.model.name,
        "task": task.name,
        "method": spec.config.method.name,
        "budget": spec.identity["budget"],
        "seed": spec.config.seed,
        "dtype": spec.identity["dtype"],
        "device": spec.identity["device"],
        "metric": f"{task.metric}/{task.metric_version}",
        "parts.preset": spec.method.preset,
        "variant": spec.variant,
        "protocol.chunking": parts["prefill"],
        "protocol.shared": shared,
        "protocol.task_version": task.version,
        "protocol.lengths": ", ".join(map(str, task.stated_lengths())) or None,
        "protocol.pair": spec.pair,
        **{f"protocol.{name}": value for name, value in task.provenance().items()},
        "sanity.gold": sanity.gold,
        "sanity.empty": sanity.empty,
        "notes": sorted({*(built["notes"] or ()), *sanity.notes}),
        "error": error,
    }


def _classify(spec: CellSpec, rows: Rows, found: Mapping[str, Any], expected: int) -> str:
    """Status of a cell that was worked through without a fault."""
    if found["n_samples"] < max(expected, 1):
        return "partial"
    if rows and all(row["out"].get("oom") for row in rows):
        return "oom"
    if found.get("share_inactive") == 1.0 and _should_have_acted(spec, rows):
        return "inactive"
    return "ok"


def _should_have_acted(spec: CellSpec, rows: Rows) -> bool:
    """True if the method can drop tokens, or reuses chunks and no prompt had one: all of it is recomputed at ratio 1
    too, and that is a result."""
    reuse = [(row["out"].get("end") or {}).get("reuse") or {} for row in rows]
    without = spec.method.parts().prefill.needs_segments and not any(one.get("chunks") for one in reuse)
    return spec.method.limited or without
