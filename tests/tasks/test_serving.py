"""The task that measures a method's costs and serves traces with them: records, bad input, what is marked."""

from __future__ import annotations

import io
import json
import random

import pytest
from composed import composed
from rich.console import Console

from kvcompress.measure import latency
from kvcompress.measure.serving import measured_costs
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.record import read_rows
from kvcompress.tasks import Serving

TINY = [
    "task.lengths=[24,48]",
    "task.shares=[0.5]",
    "task.batches=[1,2]",
    "task.steps=2",
    "task.rounds=1",
    "task.warmup=0",
]


@pytest.fixture
def trace(tmp_path):
    """Forty requests of two conversations and strangers, in blocks of 16 tokens."""
    rng, rows, fresh = random.Random(0), [], 100
    for number in range(40):
        size = rng.randint(2, 6)
        lead = [[1, 2, 3, 4], [50, 51], []][number % 3][:size]
        ids = [*lead, *range(fresh, fresh + size - len(lead))]
        fresh += size
        rows.append(
            {
                "timestamp": 500 * number,
                "input_length": 16 * size,
                "output_length": 3,
                "hash_ids": ids,
                "block_size": 16,
            }
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path, trace):
    def go(*overrides):
        fixed = ["model=random", "task=serving", f"task.traces=[{trace}]", "task.length_scale=2", *TINY, "device=cpu"]
        fixed += [
            "task.full_slots=[2,4]",
            "task.halvings=3",
            f"paths.results={tmp_path}",
            "sweep.name=test",
            "paths.data=null",
        ]
        return Scheduler(Console(file=io.StringIO()))(composed(*fixed, *overrides))

    return go


def test_a_record_says_what_is_simulated_at_each_memory_beside_the_full_cache(run):
    found = run("method=snapkv", "method.window=4", "budget=0.25")
    assert found.status == "ok", found.record.get("error")
    (row,) = read_rows(found.folder / "samples.jsonl")
    (memories,) = row["out"]["serving"].values()
    record = found.record
    assert record["metrics.simulated"] is True and record["protocol.simulated"] == "True"
    assert record["protocol.length_scale"] == "2" and list(memories) == ["slots2", "slots4"]
    for name, said in memories.items():
        ours, full = said["sides"]["method"], said["sides"]["full"]
        assert ours["reuse"] == "whole" and full["reuse"] == "prefix" and ours["ratio"] < 0.5 < full["ratio"]
        assert ours["at"]["simulated"] is True and ours["load"] == full["load"]
        assert record[f"metrics.trace.jsonl.{name}.hit_rate"] == ours["at"]["hit_rate"]
        assert record[f"metrics.trace.jsonl.{name}.full.goodput_rate"] == full["goodput_rate"] > 0
        assert ours["unlimited"] == full["unlimited"] == full["curve"]["unlimited"]
        assert full["curve"]["hit"] == sorted(full["curve"]["hit"]) and len(ours["at"]["ttft_quantiles"]) == 51
    assert {"prefill", "step", "compress"} == set(row["out"]["costs"]["method"]["r2"])
    assert record["metrics.ratio_goodput_rate"] > 0 and record["kv.ratio"] < 0.5


def test_modelled_costs_are_marked_as_going_beyond_what_was_measured(run):
    found = run("method=int8", "task.costs=modelled", "task.length_scale=null", "task.full_slots=[4]")
    assert found.status == "ok", found.record.get("error")
    (row,) = read_rows(found.folder / "samples.jsonl")
    assert (
        row["out"]["costs"]["method"]["source"] == "modelled" and row["out"]["costs"]["full"]["token_bytes"] == 131072
    )
    assert found.record["metrics.trace.jsonl.slots4.extrapolated"] is True


def test_a_policy_that_knows_the_future_is_marked_a_bound(run):
    found = run("method=full", "task.policy=belady", "task.full_slots=[2]")
    assert found.status == "ok", found.record.get("error")
    assert found.record["metrics.trace.jsonl.slots2.bound"] is True


def test_costs_come_from_a_file_and_change_the_run_id(run, tmp_path):
    plain = run("method=full", "task.full_slots=[2]")
    (row,) = read_rows(plain.folder / "samples.jsonl")
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": [row["out"]["costs"]["full"]]}))
    found = run("method=full", "task.full_slots=[2]", f"task.costs={file}")
    assert found.status == "ok", found.record.get("error")
    (again,) = read_rows(found.folder / "samples.jsonl")
    assert again["out"]["costs"]["method"] == row["out"]["costs"]["full"] and found.folder != plain.folder
    refused = run("method=int8", "task.full_slots=[2]", f"task.costs={file}")
    assert refused.status != "ok" and "no costs of 'int8'" in str(refused.record.get("error"))


def test_a_broken_line_ends_the_run_before_anything_is_measured(run, trace, monkeypatch):
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([*lines[:2], lines[2][:20], *lines[3:]]))
    monkeypatch.setattr(measured_costs, "points", None)
    found = run("method=full")
    assert found.status != "ok" and "trace.jsonl line 3: no JSON" in str(found.record.get("error"))


def test_a_request_longer_than_the_memory_is_refused_with_its_line(run):
    found = run("method=full", "task.memory=1e-5")
    assert (
        found.status != "ok" and "line " in str(found.record.get("error")) and "GiB" in str(found.record.get("error"))
    )


def test_memory_that_runs_out_is_recorded(run, monkeypatch):
    import torch

    def limited(session, ids, plan):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(measured_costs, "points", limited)
    monkeypatch.setattr(latency, "works", lambda session, ids, shape, full: shape.batch <= 1)
    assert run("method=full").status == "oom"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "mru"}, "valid: fifo, lru, lfu, belady, kvflow, kvflow-oracle"),
        ({"order": "x"}, "valid: fcfs"),
        ({"batching": "x"}, "valid: iteration"),
        ({"pools": (1,)}, r"task.pools=\[1\]"),
        ({"swap_link": "wire"}, "'wire' is none of the links"),
        ({"swap": "x"}, "valid: swap, recompute"),
        ({"costs": "modelled", "device_model": "abacus"}, "'abacus' is none of the devices"),
        ({"traces": ()}, "task.traces"),
        ({"length_scale": 0}, "task.length_scale=0"),
        ({"lengths": (256,)}, "two or more"),
        ({"batches": (1,)}, "two or more"),
        ({"source": "x"}, "random, text"),
    ],
)
def test_settings_that_simulate_nothing_are_refused_by_name(given, says):
    with pytest.raises(ValueError, match=says):
        Serving(**given)


def test_a_trace_that_is_not_there_is_named_with_those_that_are_known(tmp_path):
    with pytest.raises(ValueError, match="trace 'x': no such file.*mooncake_conversation"):
        Serving(data=str(tmp_path)).trace("x")
