"""Cells that share a prefill measure the same drift from the full model as cells run alone."""

from __future__ import annotations

import io

from composed import composed
from rich.console import Console

from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import Fidelity

SHORT = ("model=random", "task=fidelity", "task.prompt_tokens=80", "task.continuation_tokens=10", "task.n_texts=2")
CELLS = [(method, budget) for method in ("full", "snapkv", "h2o") for budget in (0.5, 0.2)]


def cells(folder):
    fixed = [*SHORT, "device=cpu", "paths.data=null", f"paths.results={folder}", "sweep.name=s"]
    return [composed(*fixed, f"method={method}", f"budget={budget}") for method, budget in CELLS]


def drift(outcomes):
    kept = ("kl", "perplexity", "curve_kl", "curve_agreement")
    return {
        o.run_id: [o.record["score"], o.record["kv.bytes_peak"], *(o.record[f"metrics.{key}"] for key in kept)]
        for o in outcomes
        if o.status == "ok"
    }


def test_shared_cells_measure_what_they_measure_alone_with_one_reference_per_text(tmp_path, monkeypatch):
    calls = []
    reference = Fidelity.reference
    monkeypatch.setattr(Fidelity, "reference", lambda *a: calls.append(a) or reference(*a))
    shared = Scheduler(Console(file=io.StringIO())).sweep(cells(tmp_path / "shared"))
    assert len(calls) == 2 and any(o.record.get("protocol.shared") for o in shared)
    alone = []
    for one in cells(tmp_path / "alone"):
        alone.append(Scheduler(Console(file=io.StringIO()))(one))
    assert len(drift(shared)) == 5 and drift(shared) == drift(alone)


def test_a_reference_that_fails_is_a_fault_of_every_cell(tmp_path, monkeypatch):
    def broken(self, session, sample):
        raise RuntimeError("no reference")

    monkeypatch.setattr(Fidelity, "reference", broken)
    outcomes = Scheduler(Console(file=io.StringIO())).sweep(cells(tmp_path))
    assert {o.status for o in outcomes if o.status != "same"} == {"failed"}
    assert all("no reference" in o.note for o in outcomes if o.status == "failed")
