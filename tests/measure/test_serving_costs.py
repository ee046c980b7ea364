"""Costs: fits through made-up points, what a session yields, other devices, and the board made of them."""

from __future__ import annotations

import json

import pytest
from helpers import make
from small_models import small_model

from kvcompress import compress
from kvcompress.measure.serving import board, measured_costs
from kvcompress.measure.serving.costs import Line, MethodCosts, fit, modelled
from kvcompress.measure.serving.measured_costs import Plan, Points, label
from kvcompress.measure.serving.requests import Request
from kvcompress.measure.serving.simulation import Server
from kvcompress.methods import KIVI, Full, SnapKV

PLAN = Plan(lengths=(24, 48), shares=(0.5,), batches=(1, 2), steps=2, rounds=1, warmup=0)
FULL = MethodCosts(
    name="full",
    reuse="prefix",
    held=Line(0, 100, 100),
    kept=Line(0, 1, 1),
    token_bytes=100,
    layers=2,
    prefill=(0.0, 1e-3, 0.0, 0.0),
    step=(0.01, 0.0, 1e-6),
    r2={"step": 0.9},
    ranges={"prompt": (10, 100), "rows": (1, 4), "kept": (10, 400)},
)


def changed(**more) -> MethodCosts:
    return MethodCosts.of(FULL.as_dict() | more)


def test_a_fit_finds_its_coefficients_and_takes_none_below_zero():
    points = [(1.0, n, n * n) for n in (1.0, 2.0, 5.0, 9.0)]
    found, r2 = fit(points, [2 + 3 * n + 0.5 * n * n for _, n, _ in points])
    assert found == pytest.approx([2, 3, 0.5]) and r2 == pytest.approx(1.0)
    falling, _ = fit([(1.0, n) for n in (1.0, 2.0, 3.0)], [3.0, 2.0, 1.0])
    assert falling[1] == 0.0 and falling[0] > 0
    with pytest.raises(ValueError, match="at least 3"):
        fit(points[:2], [1.0, 1.0])


def test_points_of_a_known_machine_give_its_costs_back():
    found = Points()
    for n in (64, 128, 256):
        for p in (0, n // 2):
            pairs = (n - p) ** 2 + 2 * 0.25 * p * (n - p)  # a quarter of the prefix is left to attend to
            found.prompts[n, p] = 0.1 + 2e-3 * (n - p) + 1e-6 * pairs + 5e-4 * p, 1e-4 * n
        found.steps[n, 1] = 0.03 + 2e-5 * n / 4, n / 4  # one row by itself is another machine
        for rows in (3, 8):
            found.steps[n, rows] = 0.05 + 0.01 * rows + 1e-5 * rows * n / 4, rows * n / 4
        for g in (1, 9):
            found.held[n, g] = 10 * n + 40 * g, n / 4 + g, 40 * (n / 4 + g), 40 * (n + g)
    costs = measured_costs.costs("made up", "whole", [found], 2)
    assert costs.prefill == pytest.approx((0.1, 2e-3, 1e-6, 5e-4)) and costs.step == pytest.approx((0.05, 0.01, 1e-5))
    assert costs.step_s(1, 100) == pytest.approx(0.032) and costs.step_s(2, 100) == pytest.approx(0.071)
    assert costs.compress == pytest.approx((0.0, 1e-4), abs=1e-9) and costs.token_bytes == pytest.approx(40)
    assert costs.held.at(100, 5) == pytest.approx(1200) and costs.kept.at(100, 5) == pytest.approx(30)
    assert costs.read_ratio == pytest.approx(1.0) and min(costs.r2.values()) > 0.999
    assert costs.prefill_s(100, 40) == pytest.approx(0.1 + 0.12 + 1e-6 * (3600 + 1200) + 0.02 + 0.01)
    assert costs.ranges["prompt"] == (64, 256) and costs.extrapolated(300, 4, 10) == ["prompt"]


def test_chunks_of_a_prompt_behind_a_reused_prefix_add_up_to_the_whole_of_it():
    costs = changed(
        reuse="whole", kept={"fixed": 0, "per_prompt": 0.25, "per_output": 1}, prefill=(0.0, 1e-3, 1e-6, 0.0)
    )
    parts = costs.compute_s(40, 60, 40) + costs.compute_s(60, 100, 40)
    assert parts == pytest.approx(costs.prefill_s(100, 40))
    assert changed(prefill=(0.0, 1e-3, 1e-6, 0.0)).compute_s(40, 100, 40) == pytest.approx(0.06 + 1e-6 * 8400)


@pytest.mark.parametrize("name", ["Full", "SnapKV", "KIVI", "Quest", "CacheBlend"])
def test_a_session_yields_bytes_that_its_report_counts(name):
    method = make(name, 16 if name == "Quest" else 0.5)
    with compress(small_model(), method) as session:
        found = measured_costs.points(session, list(range(5, 53)), PLAN)
    assert set(found.prompts) == {(24, 0), (24, 12), (48, 0), (48, 24)}
    assert set(found.steps) == {(24, 1), (24, 2), (48, 1), (48, 2)}
    costs = measured_costs.costs(label(method), method.cache_reuse, [found], 2)
    held = found.held[48, 3][0]
    assert costs.held.at(48, 3) == pytest.approx(held, rel=0.05)
    assert 1.2 * held < found.end["kv"]["bytes_held"] < 2.05 * held, "the last batch has two rows, one of them shorter"
    assert (costs.ratio < 0.6) == (name in ("SnapKV", "KIVI")) and costs.token_bytes > 0


def test_rows_of_a_step_have_two_lengths():
    method = Full()
    with compress(small_model("llama"), method) as session:
        found = measured_costs.points(session, list(range(1, 49)), Plan((24, 48), (0.5,), (1, 3), 2, 1, 0))
    step_tokens = (2 + 3) / 2  # behind one untimed step
    assert found.steps[48, 1][1] == pytest.approx(48 + step_tokens)
    assert found.steps[48, 3][1] == pytest.approx(2 * 48 + 28 + 3 * step_tokens)


def test_labels_say_method_settings_and_budget():
    assert [label(one) for one in (Full(), SnapKV(budget=0.1), KIVI(bits=4))] == ["full", "snapkv 0.1", "kivi bits=4"]


def test_costs_come_back_from_json():
    assert MethodCosts.of(json.loads(json.dumps(FULL.as_dict()))) == FULL
    with pytest.raises(ValueError, match="costs of x"):
        MethodCosts.of({"name": "x"})
    with pytest.raises(ValueError, match="reuse='some'"):
        changed(reuse="some")


def test_modelled_costs_are_the_devices_and_keep_the_measured_share_of_bytes():
    small = changed(held={"fixed": 0, "per_prompt": 25, "per_output": 100}, compress=(0.0, 1e-4))
    ours, full = (modelled(one, "h100-sxm", "llama3-70b") for one in (small, FULL))
    assert full.token_bytes == 327_680 and ours.held.per_prompt == pytest.approx(327_680 / 4)
    assert full.compute_s(0, 8192) == pytest.approx(80 * (4 * 8192**3 + 22 * 8192**3) / (0.8 * 9.89e14))
    assert ours.compress_s(100, 0) / ours.compute_s(0, 100) == pytest.approx(0.1)
    assert ours.source == "modelled" and ours.extrapolated(1, 1, 1) == ["prompt", "rows", "kept"]
    with pytest.raises(ValueError, match="no `flops`"):
        modelled(FULL, "rtx-4090", "llama3-8b")


def requests(count: int = 60) -> list[Request]:
    found = []
    for number in range(count):
        shared = tuple(range(4)) if number % 2 else tuple(range(10, 12))
        blocks = (*shared, 100 + 2 * number, 101 + 2 * number)
        found.append(Request(0.5 * number, 10 * len(blocks), 4, blocks, 10))
    return found


def test_the_board_compares_methods_at_their_own_goodput_and_at_one_load():
    quarter = changed(name="quarter", held={"fixed": 0, "per_prompt": 25, "per_output": 25})
    served, targets = requests(), board.Targets.of(FULL, requests(), 25.0)
    memory = board.memory_of(FULL, served, 2)
    found = board.compare(served, {"quarter": quarter, "full": FULL}, "full", Server(memory), targets, 5)
    ours, full = found["quarter"], found["full"]
    assert list(found) == ["full", "quarter"] and full["to_base"] == 1.0
    assert ours["at"]["hit_rate"] >= full["at"]["hit_rate"] > 0
    assert min(ours["goodput_rate"], full["goodput_rate"]) > 0
    assert ours["load"] == full["load"] and full["at"]["attained"] >= 0.9
    assert 0 < ours["share_of_unlimited"] <= 1.0
    curve = board.curve(served, quarter, FULL.token_bytes, memory, "lru")
    assert curve["hit"] == sorted(curve["hit"]) and curve["hit"][-1] == pytest.approx(curve["own"])
    with pytest.raises(ValueError, match="meets its targets .* at no rate"):
        board.compare(served, {"full": FULL}, "full", Server(memory), board.Targets(1e-9, 1e-9), 3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lengths": (64,)}, "two or more"),
        ({"batches": (4,)}, "two or more"),
        ({"shares": (1.0,)}, "below 1"),
        ({"steps": 1}, "steps=1"),
    ],
)
def test_plans_that_fit_nothing_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        Plan(**given)
