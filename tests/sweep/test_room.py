"""Cells take turns where memory is limited, and what they then hold at once is within the limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import LONG
from sweeps import SHARED, TOGETHER, cells, left, sweep

from kvcompress.hook import joint_decoding
from kvcompress.hook.joint_decoding import Batch, BatchedSession
from kvcompress.sweep import record
from kvcompress.sweep.launcher import memory_plan, strategies
from kvcompress.sweep.launcher.options import Options

# methods, budgets, and limits as multiples of a full cache
METHODS, BUDGETS, SHARES = ("full,snapkv,knorm,random,adakv", "0.5,0.25,0.1,64", (6, 2.5)) if LONG else (
    "full,snapkv,knorm,adakv", "0.5,0.1", (2.5,))  # fmt: skip
CELLS = METHODS.count(",") * (BUDGETS.count(",") + 1) + 1


def storages(what, found, seen):
    """Bytes of every storage that tensors within `what` live in, by address."""
    if id(what) in seen:
        return
    seen.add(id(what))
    if torch.is_tensor(what):
        found[what.untyped_storage().data_ptr()] = what.untyped_storage().nbytes()
    elif isinstance(what, dict):
        for value in what.values():
            storages(value, found, seen)
    elif isinstance(what, (list, tuple)):
        for value in what:
            storages(value, found, seen)
    elif type(what).__module__.startswith("kvcompress"):
        for name, value in vars(what).items():
            if name not in ("model", "batch", "handoff", "owner"):
                storages(value, found, seen)


@pytest.fixture
def peak(monkeypatch):
    """The most bytes that a shared prefill, the cells that start from it and their rows held at any decode step."""
    now = SimpleNamespace(bytes=0, cells=0, turns=[])
    members, shared = [], []
    step, run, enter = Batch.step, strategies.decode_together, BatchedSession.__init__

    def watched(batch, asked):
        logits = step(batch, asked)
        found: dict = {}
        seen: set = set()
        for held in (shared[-1], batch.cache, *(member.cache for member in members)):
            storages(held, found, seen)
        now.bytes = max(now.bytes, sum(found.values()))
        return logits

    def turn(model, jobs, prefill, *how):
        members.clear()
        shared[:] = [prefill[0]]
        now.turns.append(len(jobs))
        return run(model, jobs, prefill, *how)

    def entered(member, *args):
        members.append(member)
        enter(member, *args)

    monkeypatch.setattr(Batch, "step", watched)
    monkeypatch.setattr(BatchedSession, "__init__", entered)
    monkeypatch.setattr(strategies, "decode_together", turn)
    return now


def test_what_cells_hold_at_once_is_within_the_limit(tmp_path, peak):
    sweep(cells(tmp_path / "free", METHODS, BUDGETS, "limit=1"), TOGETHER)
    assert peak.turns == [CELLS]
    free = peak.bytes
    full = record.read_record(next((tmp_path / "free").glob("test/*/record.json")))["kv.bytes_full"]
    for share in SHARES:
        peak.turns.clear()
        peak.bytes = 0
        sweep(cells(tmp_path / str(share), METHODS, BUDGETS, "limit=1"), Options(memory=int(share * full)))
        assert peak.bytes <= share * full < free, f"{share}: {peak.bytes / full}"
        assert len(peak.turns) > 1 and sum(peak.turns) == CELLS
        assert left(tmp_path / str(share)) == left(tmp_path / "free")


def test_what_is_reckoned_for_a_turn_covers_what_it_holds_and_little_more(tmp_path, peak, monkeypatch):
    """A limit that was reckoned too large would make cells take turns for nothing."""
    reckoned, stock = [], memory_plan.split_to_fit

    def watched(cells, starts, new, memory):
        shared = next(iter(starts.values()))
        rows = sum(memory_plan.cell_bytes(cell.spec.method, shared, new, 2) for cell in cells)
        reckoned.append(memory_plan.prefill_bytes(shared) + rows)
        return stock(cells, starts, new, memory)

    monkeypatch.setattr(strategies, "split_to_fit", watched)
    sweep(cells(tmp_path, "snapkv,knorm,adakv", "0.9,0.8", "limit=1"), TOGETHER)
    assert 0.75 * reckoned[0] < peak.bytes <= reckoned[0]


def test_a_cell_whose_turn_is_its_own_says_that_it_was_for_memory(tmp_path):
    outcomes, _ = sweep(cells(tmp_path, "snapkv,knorm", "0.5", "limit=1"), Options(memory=1))
    assert {o.record["protocol.decoding_why"] for o in outcomes} == {"the memory limit"}
    assert {o.record["protocol.decoding"] for o in outcomes} == {"separate"}


def test_a_limit_below_the_full_cache_and_one_cell_is_said_once_and_cells_run_one_at_a_time(tmp_path, monkeypatch):
    made, stock = [], joint_decoding.decode_together
    monkeypatch.setattr(strategies, "decode_together", lambda *a: made.append(len(a[1])) or stock(*a))
    outcomes, text = sweep(cells(tmp_path, "snapkv,knorm", "0.5,0.2", "limit=1"), Options(memory=1000))
    assert {o.status for o in outcomes} == {"ok"} and made == [1] * 4
    assert text.count("the full cache and one cell take") == 1
    _, text = sweep(cells(tmp_path / "enough", "snapkv,knorm", "0.5", "limit=1"), Options(together=False, memory=2**30))
    assert "the full cache and one cell" not in text and SHARED.memory is None
