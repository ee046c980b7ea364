"""Links measured and fitted; the simulation beside real batches of a tiny model; the page from made-up costs."""

from __future__ import annotations

import json

import pytest
from helpers import load_script

from kvcompress import load
from kvcompress.bench import links, serving
from kvcompress.measure.serving.costs import Line, MethodCosts
from kvcompress.measure.serving.measured_costs import Plan
from kvcompress.measure.tiers import path, with_measured
from kvcompress.methods import KIVI, Full, SnapKV

PLAN = Plan(lengths=(24, 48), shares=(0.5,), batches=(1, 2), steps=2, rounds=1, warmup=0)


def test_copies_and_file_reads_are_measured_contiguous_and_scattered(tmp_path):
    points = list(links.Links("cpu", 1 << 20, 1, (4096, 65536, 1 << 20), tmp_path).run())
    assert {point.way for point in points} == {"memcpy", "memcpy-scattered", "disk", "disk-scattered"}
    assert [point.copies for point in points if point.way == "memcpy"] == [256, 16, 1]
    assert all(point.bandwidth > 0 for point in points) and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="a granule"):
        links.Links("cpu", 100)


def test_measured_links_can_stand_for_data_sheets(tmp_path, monkeypatch, capsys):
    bench, out = load_script("bench"), tmp_path / "deep" / "links.json"
    points = [links.Point("memcpy", size, 8, 8 * (1e-6 + size / 2e9)) for size in (4096, 65536)]
    monkeypatch.setattr(links, "GRANULES", (4096, 65536))
    monkeypatch.setattr(links.Links, "run", lambda self: iter(points))
    assert bench.links(bench.parse(["links", "--no-disk", "--json", str(out)])) == 0
    assert path("memcpy", source=with_measured(out)).bandwidth == pytest.approx(2e9)
    assert "1.00 µs a copy, 2.00 GB/s" in capsys.readouterr().out


def test_real_batches_of_mixed_lengths_are_simulated_from_other_lengths():
    methods = {"full": Full(), "snapkv:0.25": SnapKV(budget=0.25, window=3), "kivi": KIVI(group=4, residual=8)}
    model, tokenizer = load("random/llama")
    found = list(serving.check(model, tokenizer, methods, PLAN, (2, 3), 4))
    assert [(one.method, len(one.lengths)) for one in found] == [(name, size) for name in methods for size in (2, 3)]
    assert all(one.throughput > 0 and one.first_token > 0 and one.real_tokens_per_s > 0 for one in found)
    for one in found:
        assert not set(one.lengths) & set(PLAN.lengths) and max(one.lengths) < 48


def test_the_simulation_of_a_batch_takes_prompts_in_turn_and_steps_together():
    costs = MethodCosts(
        "x", "prefix", Line(0, 1, 1), Line(0, 1, 1), 1, 1, (0.0, 0.1, 0.0, 0.0), (0, 0), (1.0, 0.5, 0.0)
    )
    rate, firsts = serving.simulated(costs, (10, 20), 3)
    assert firsts == pytest.approx([1.0, 3.0]) and rate == pytest.approx(6 / (3 + 2 * 2.0))


def test_a_simulation_that_is_far_off_is_missed():
    near = serving.Agreement("x", (3,), 4, 1.14, (1, 1), 0.81, (1, 1), 1.0, 1.0, 1)
    assert not near.missed
    for throughput, first in ((1.16, 1.0), (0.84, 1.0), (1.0, 1.21)):
        assert serving.Agreement("x", (3,), 4, throughput, (1, 1), first, (1, 1), 1.0, 1.0, 1).missed


def test_the_page_is_made_from_a_file_of_costs(tmp_path):
    full = MethodCosts(
        name="full",
        reuse="prefix",
        held=Line(0, 100, 100),
        kept=Line(0, 1, 1),
        token_bytes=100,
        layers=2,
        prefill=(0.0, 1e-3, 0.0, 0.0),
        step=(0.01, 0.0, 1e-6),
        r2={"prefill": 1.0, "step": 1.0},
        ranges={"prompt": (10, 100)},
    )
    held = {"fixed": 0, "per_prompt": 10, "per_output": 100}
    tenth = MethodCosts.of(full.as_dict() | {"name": "tenth", "reuse": "whole", "held": held})
    costs, trace, out = tmp_path / "costs.json", tmp_path / "trace.jsonl", tmp_path / "out"
    costs.write_text(
        json.dumps({"costs": [full.as_dict(), tenth.as_dict()], "hardware": {"cpu": "made up", "threads": 1}})
    )
    row = {"input_length": 30, "output_length": 3, "block_size": 10}
    rows = [row | {"timestamp": 300 * n, "hash_ids": [n % 3, 10 + n % 3, 100 + n]} for n in range(30)]
    trace.write_text("".join(json.dumps(one) + "\n" for one in rows))
    bench = load_script("bench")
    arguments = ["serving-page", "--costs", str(costs), "--traces", str(trace), "--length-scale", "1", "--slots", "2,4"]
    assert bench.serving_page(bench.parse([*arguments, "--halvings", "3", "--out", str(out)])) == 0
    said = (out / "serving.md").read_text()
    assert "| tenth | whole | 0.100 |" in said and "Simulated: trace" in said and "made up" in said
    assert (out / "serving.csv").read_text().splitlines()[1].endswith(",True")
    names = (
        "serving-hits",
        "serving-goodput",
        "serving-first-token",
        "serving-classes",
        "tiers-pages",
        "tiers-thresholds",
    )
    for name in names:
        assert (out / f"{name}.png").stat().st_size > 5000
    costs.write_text(json.dumps({"costs": [tenth.as_dict()]}))
    with pytest.raises(ValueError, match="no costs of the full cache"):
        bench.serving_page(bench.parse([*arguments, "--out", str(out)]))
