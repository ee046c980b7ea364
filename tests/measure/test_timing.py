"""What is timed is the work, on whatever device it runs, and sides are compared round by round."""

from __future__ import annotations

import time

import pytest
import torch
from slow_device import SlowDevice

from kvcompress.measure.measuring import Timer
from kvcompress.measure.timing import Laps, Spread, by_place, in_turn, quarters, ratio, slope


def spin(seconds: float) -> float:
    """Keep a core busy; returns how long it really did."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        pass
    return time.perf_counter() - start


def test_work_of_known_length_is_measured_within_five_percent():
    timer, laps, known = Timer(), Laps(), []
    laps.lap()
    for seconds in (0.05, 0.1, 0.2):
        with timer:
            known.append(spin(seconds))
        laps.lap()
        assert timer.seconds == pytest.approx(known[-1], rel=0.05)
    assert laps.seconds() == pytest.approx(known, rel=0.05)


def test_the_timer_waits_for_a_device_that_works_asynchronously(monkeypatch):
    device = SlowDevice(monkeypatch)
    device.launch(0.05)  # left over from before: no part of what is timed
    start = time.perf_counter()
    with Timer("cuda:0") as timer:
        device.launch(0.2)
        launched = time.perf_counter() - start
    assert timer.seconds == pytest.approx(device.took[1], abs=0.04) and timer.seconds >= 0.2
    assert len(device.took) == 2 and launched < timer.seconds + 0.2


def test_laps_on_cuda_are_the_devices_though_nothing_waits_between_them(monkeypatch):
    device, laps = SlowDevice(monkeypatch), Laps("cuda:0")
    device.launch(0.05)
    laps.lap()
    start = time.perf_counter()
    for seconds in (0.1, 0.2, 0.05):
        device.launch(seconds)
        laps.lap()
    launched = time.perf_counter() - start
    assert laps.seconds() == pytest.approx(device.took[1:], abs=0.04)
    assert launched < 0.5 * sum(laps.seconds()), "launching does not wait"


def test_laps_elsewhere_wait_for_the_device(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: seen.append("waited"))
    laps = Laps("mps")
    for _ in range(3):
        laps.lap()
    assert seen == ["waited"] * 3 and len(laps.seconds()) == 2


def test_sides_run_in_turn_each_first_as_often_and_warm_ups_are_thrown_away():
    order = []
    sides = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    found, ended = in_turn(sides, rounds=3, warmup=2)
    assert "".join(order) == "bca" + "cab" + "abc" + "bca" + "cab" and not ended
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert found["a"] == [7, 12, 14], "no warm-up among the results"


def test_a_side_whose_memory_runs_out_is_left_and_the_others_go_on():
    calls = []

    def greedy():
        calls.append(1)
        if len(calls) > 2:
            raise MemoryError("no more")
        return 1.0

    found, ended = in_turn({"greedy": greedy, "modest": lambda: 2.0}, rounds=4, warmup=1)
    assert found == {"greedy": [1.0], "modest": [2.0] * 4} and len(calls) == 3
    assert list(ended) == ["greedy"] and str(ended["greedy"]) == "no more" and ended["greedy"].__traceback__ is None


def test_any_other_fault_of_a_side_is_raised():
    def faulty():
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        in_turn({"a": faulty}, rounds=1)


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 1), (1, -1)])
def test_no_rounds_are_refused(rounds, warmup):
    with pytest.raises(ValueError, match="at least 1 and 0"):
        in_turn({"a": lambda: 1}, rounds, warmup)


def test_ratios_are_of_the_same_round():
    assert ratio([2.0, 6.0, 30.0], [1.0, 2.0, 10.0]) == Spread(3.0, 2.5, 3.0, 3)
    assert ratio([1.0], []) is None and ratio([1.0], [0.0]) is None


def test_courses_are_quartered_and_sloped_by_place_not_by_round():
    rounds = [[1.0, 2.0, 3.0, 4.0, 9.0], [1.0, 2.0, 3.0, 4.0], [7.0, 7.0, 7.0, 7.0]]
    places = by_place(rounds)
    assert places == [1.0, 2.0, 3.0, 4.0]
    assert quarters(places) == places and quarters([5.0]) == [5.0] and quarters([]) == []
    assert quarters([float(i) for i in range(8)]) == [0.5, 2.5, 4.5, 6.5]
    assert slope(places) == pytest.approx(1.0) and slope([1.0]) is None
