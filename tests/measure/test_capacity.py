"""The simulation against cases worked out by hand, and what it must never lose; the task that feeds and checks it."""

from __future__ import annotations

import io
import random

import pytest
import torch
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from small_models import small_model

from kvcompress import compress
from kvcompress.measure import capacity_points, latency
from kvcompress.measure.capacity_points import Points, agreement, points
from kvcompress.measure.serving_simulation import Costs, highest_rate, poisson, saturated, serve, simulate
from kvcompress.methods import Full, SnapKV
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.record import read_rows
from kvcompress.tasks import Capacity

UNIT = Costs(prefill_s=2.0, step_s=((1, 1.0), (2, 1.5)), held=10, prefill=30, weights=100)


def test_one_request_takes_its_prompt_and_its_steps():
    found = simulate(UNIT, 4, [5.0], output=3)
    (one,) = found.requests
    assert (one.first, one.done, one.tokens) == (7.0, 9.0, 3)
    assert (one.ttft, one.tpot) == (2.0, 1.0) and (found.seconds, found.busy, found.area) == (4.0, 4.0, 4.0)


def test_two_at_once_wait_for_each_others_prompts_and_step_together():
    """Prompts 0-2 and 2-4, then two steps of 1.5: both are done at 7."""
    found = simulate(UNIT, 2, [0.0, 0.0], output=3)
    first, second = found.requests
    assert (first.first, second.first, first.done, second.done) == (2.0, 4.0, 7.0, 7.0)
    assert first.tpot == 2.5 and second.tpot == 1.5, "the second's prompt is in the first's time per token"
    assert found.most == 2 and found.area == 2 * 1 + 2 * 2 + 3 * 2


def test_with_one_slot_the_second_waits_until_the_first_is_done():
    found = simulate(UNIT, 1, [0.0, 1.0], output=3)
    first, second = found.requests
    assert (first.done, second.first, second.done) == (4.0, 6.0, 8.0)
    assert second.ttft == 5.0 and found.most == 1 and found.busy == found.seconds == 8.0


def test_a_prompt_is_let_in_between_two_steps_of_others():
    """0-2 prompt of the first, 2-3 a step; the second came at 2.5: prompt 3-5; steps of two 5-6.5; one alone 6.5-7.5."""
    found = simulate(UNIT, 2, [0.0, 2.5], output=3)
    first, second = found.requests
    assert (first.first, first.done) == (2.0, 6.5) and (second.first, second.done) == (5.0, 7.5)


def test_an_idle_engine_waits_for_the_next_request():
    found = simulate(UNIT, 2, [0.0, 100.0], output=2)
    assert [one.done for one in found.requests] == [3.0, 103.0]
    assert found.busy == 6.0 and found.seconds == 103.0


def test_targets_count_those_that_met_both():
    found = simulate(UNIT, 1, [0.0, 1.0], output=3)
    assert found.goodput(ttft=2.0, tpot=1.0) == 1 / 8 and found.attained(2.0, 1.0) == 0.5
    assert found.goodput(5.0, 1.0) == 2 / 8 and found.goodput(5.0, 0.9) == 0.0
    said = found.figures(2.0, 1.0)
    assert said["tokens_per_s"] == 6 / 8 and said["requests_per_s"] == 2 / 8 and said["busy"] == 1.0
    assert said["running_mean"] == 1.0 and said["ttft_s"]["median"] == 3.5


def test_time_that_is_up_leaves_requests_unfinished():
    found = simulate(UNIT, 1, [0.0, 1.0], output=3, until=5.0)
    assert [one.done for one in found.requests] == [4.0, None] and found.requests[1].tokens == 1
    assert len(found.completed) == 1


def test_slots_are_what_fits_beside_weights_and_one_running_prompt():
    assert [UNIT.slots(memory) for memory in (100, 129, 130, 139, 140, 175)] == [0, 0, 1, 1, 2, 5]


def test_steps_lie_on_straight_lines_between_measured_numbers_and_beyond():
    costs = Costs(1.0, ((1, 1.0), (4, 2.5), (8, 3.0)), 1, 1, 1)
    assert [costs.step(n) for n in (1, 2, 4, 6, 8, 16)] == pytest.approx([1.0, 1.5, 2.5, 2.75, 3.0, 4.0])
    assert Costs(1.0, ((2, 3.0),), 1, 1, 1).step(4) == 6.0 and Costs(1.0, ((2, 3.0),), 1, 1, 1).step(1) == 3.0
    for wrong in ((), ((2, 1.0), (1, 1.0)), ((0, 1.0),)):
        with pytest.raises(ValueError, match="from 1 on, rising"):
            Costs(1.0, wrong, 1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 5),
    output=st.integers(1, 6),
    count=st.integers(1, 25),
    cut=st.booleans(),
)
def test_no_request_token_or_second_is_lost(seed, slots, output, count, cut):
    rng = random.Random(seed)
    costs = Costs(rng.uniform(0.1, 3), ((1, rng.uniform(0.1, 1)), (4, rng.uniform(1, 3))), 1, 1, 1)
    arrivals = poisson(rng.uniform(0.05, 2), count, seed)
    found = simulate(costs, slots, arrivals, output, until=rng.uniform(1, 20) if cut else None)
    done = found.completed
    waiting = [one for one in found.requests if one.first is None]
    unfinished = [one for one in found.requests if one.first is not None and one.done is None]
    assert len(found.requests) == count == len(done) + len(waiting) + len(unfinished)
    assert cut or len(done) == count
    assert all(one.tokens == output for one in done) and all(one.tokens == 0 for one in waiting)
    assert all(0 < one.tokens < output for one in unfinished) and len(unfinished) <= slots
    assert found.most <= slots and found.busy <= found.seconds + 1e-9
    assert all(one.first - one.arrived >= costs.prefill_s - 1e-9 for one in done)
    firsts = [one.first for one in found.requests if one.first is not None]
    assert firsts == sorted(firsts), "first come, first served"
    if not cut and output > 1:
        # a request is there from the beginning of its prompt to its end (Little's law, exactly)
        there = sum(one.done - one.first + costs.prefill_s for one in done)
        assert found.area == pytest.approx(there)


def test_more_memory_or_faster_steps_never_serve_less():
    base = [len(r.completed) / r.seconds for r in (saturated(UNIT, slots, 8) for slots in (1, 2, 4))]
    assert base == sorted(base)
    faster = Costs(2.0, ((1, 0.5), (2, 0.7)), 10, 30, 100)
    assert saturated(faster, 2, 8).seconds < saturated(UNIT, 2, 8).seconds


def test_arrivals_come_at_the_rate_asked_for():
    times = poisson(4.0, 4000, seed=1)
    assert times[0] == 0.0 and times == sorted(times) and times[-1] == pytest.approx(1000, rel=0.06)
    assert poisson(4.0, 10, seed=1) == times[:10] != poisson(4.0, 10, seed=2)


def test_of_several_rates_where_the_targets_begin_to_fail_the_highest_is_found_on_the_way_down():
    def attained(rate):
        return 1.0 if rate <= 1.0 or 2.0 <= rate <= 3.0 else 0.0

    assert highest_rate(attained, 8.0, steps=20, fall=0.8) == pytest.approx(3.0, abs=1e-4)
    assert highest_rate(lambda rate: 0.0, 8.0, fall=0.8) == 0.0


def test_the_highest_rate_is_where_the_targets_begin_to_fail():
    assert highest_rate(lambda rate: 1.0 if rate <= 3.0 else 0.0, 8.0, steps=20) == pytest.approx(3.0, abs=1e-4)
    assert highest_rate(lambda rate: 1.0, 8.0) == 8.0 and highest_rate(lambda rate: 0.0, 8.0) == pytest.approx(
        0, abs=0.01
    )


def test_a_smaller_cache_serves_more_at_the_same_memory():
    small = Costs(2.2, UNIT.step_s, 2, 30, 100)
    ours, full = (serve(cost, 150, 8, 50.0, 5.0, (0.5,), 200, 0) for cost in (small, UNIT))
    assert ours["simulated"] is True and ours["slots"] == 11 and full["slots"] == 3
    assert ours["saturated"]["tokens_per_s"] > full["saturated"]["tokens_per_s"] > 0
    assert full["rates"][0]["completed"] == 200 and 0 < full["goodput_rate"]
    nothing = serve(UNIT, 120, 8, 1.0, 1.0, (0.5,), 10, 0)
    assert nothing["slots"] == 0 and nothing["saturated"] is None and nothing["goodput_rate"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, [0.0], 2), "slots=0"),
        ((1, [], 2), "arrivals"),
        ((1, [1.0, 0.0], 2), "in order"),
        ((1, [0.0], 0), "output=0"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        simulate(UNIT, *arguments)


# ---------------------------------------------------------------------------------------------- measured points


def test_agreement_is_exact_where_the_real_run_takes_what_its_parts_take():
    end = {"kv": {"bytes_allocated": 10}}
    real = 6 * 2.0 + 7 * UNIT.step(6)
    found = [Points(2.0 * slow, {1: 1.0 * slow, 2: 1.5 * slow}, real * slow, end=end) for slow in (1, 3, 1)]
    assert agreement(found, 6, 8)["ratio"] == pytest.approx(1.0), "a slow round is compared with itself"
    assert agreement(found, 6, 8)["ratio_q3"] == pytest.approx(1.0)
    assert agreement([Points(2.0, {1: 1.0, 2: 1.5}, 2 * real, end=end)], 6, 8)["ratio"] == pytest.approx(2.0)


def test_points_time_each_number_of_requests_from_the_same_cache():
    model = small_model()
    with compress(model, SnapKV(budget=0.5, window=3)) as session:
        found = points(session, list(range(5, 35)), 6, [1, 3], check=2)
    assert set(found.steps_s) == {1, 3} and min(found.steps_s.values()) > 0 and found.prefill_s > 0
    assert found.end["kv"]["kept_tokens_mean"] == 15 + 5 and found.compressed["kv"]["kept_tokens_mean"] == 15
    assert found.batch_s > 0


@pytest.fixture
def run(tmp_path):
    tiny = [
        "task.lengths=[32]",
        "task.output=6",
        "task.rounds=2",
        "task.batches=[1,2,4]",
        "task.check=3",
        "task.requests=40",
    ]

    def go(*overrides):
        fixed = ["model=random", "task=capacity", *tiny, "device=cpu", f"paths.results={tmp_path}", "sweep.name=test"]
        return Scheduler(Console(file=io.StringIO()))(composed(*fixed, "paths.data=null", *overrides))

    return go


def test_a_record_says_what_is_simulated_beside_the_full_cache_and_the_real_run(run):
    found = run("method=snapkv", "method.window=4", "budget=0.25")
    assert found.status == "ok", found.record.get("error")
    (row,) = read_rows(found.folder / "samples.jsonl")
    details, record = row["out"]["capacity"], found.record
    assert details["full"]["slots"] == 4 < details["method"]["slots"] and details["method"]["simulated"] is True
    assert record["metrics.simulated"] is True and record["protocol.simulated"] == "True"
    assert record["metrics.L32.slots"] == details["method"]["slots"] and record["metrics.L32.full.slots"] == 4
    assert record["metrics.L32.ratio_tokens_per_s"] == pytest.approx(
        record["metrics.L32.tokens_per_s"] / record["metrics.L32.full.tokens_per_s"]
    )
    assert record["metrics.ratio_tokens_per_s"] == record["metrics.L32.ratio_tokens_per_s"]
    assert 0.2 < record["metrics.L32.agreement"] < 5.0 and details["method"]["extrapolated"]
    assert len(details["full"]["rates"]) == 3 and details["full"]["rates"][0]["completed"] == 40
    assert record["time.ttft_s"] > 0 and record["kv.ratio"] < 0.5


def test_a_run_out_of_memory_is_recorded_with_the_last_good_size(run, monkeypatch):
    def limited(session, ids, output, batches, check):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(capacity_points, "points", limited)
    monkeypatch.setattr(latency, "works", lambda session, ids, shape, full: shape.batch <= 1)
    found = run("method=snapkv", "budget=0.25")
    assert found.status == "oom"
    (row,) = read_rows(found.folder / "samples.jsonl")
    assert row["out"]["oom"]["last_good"] == {"prompt": 32, "batch": 1, "output": 6}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"check": 0}, "task.check=0"),
        ({"memory": -1.0}, "task.memory=-1.0"),
        ({"rates": ()}, "task.rates"),
        ({"output": 1}, "at least 2"),
        ({"source": "x"}, "random, text"),
    ],
)
def test_settings_that_simulate_nothing_are_refused_by_name(given, says):
    with pytest.raises(ValueError, match=says):
        Capacity(**given)


def test_less_memory_than_the_weights_is_refused():
    task = Capacity(memory=1e-6, lengths=(8,))
    session = compress(small_model(), Full())
    from kvcompress.models.random_models import byte_tokenizer

    with pytest.raises(ValueError, match="the weights alone take"):
        task.run(session, next(iter(task.samples(byte_tokenizer()))))
