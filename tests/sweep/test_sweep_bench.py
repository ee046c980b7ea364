"""The benchmark of sweeps runs the same cells in every mode."""

from __future__ import annotations

import pytest
from sweeps import left

from kvcompress.bench.sweep import MODES, SweepBench
from kvcompress.sweep import record


def test_every_mode_runs_the_same_cells(tmp_path):
    bench = SweepBench(tmp_path, "random", ("snapkv", "cake:decode=false"), (0.5,), length=450, new=3)
    totals = list(bench.run())
    assert [total.mode for total in totals] == list(MODES) and totals[0].ratio == 1.0
    assert all(total.seconds > 0 and total.cells == 2 and total.full > 0 for total in totals)
    found = {}
    for mode in MODES:
        (tmp_path / mode.replace(" ", "-")).rename(tmp_path / "test")
        found[mode] = left(tmp_path)
        flags = {record.read_record(path)["protocol.shared"] for path in tmp_path.glob("test/*/record.json")}
        assert flags == {mode != "one by one"}
        (tmp_path / "test").rename(tmp_path / f"seen {mode}")
    assert len(found["one by one"]) == 2
    assert found["one by one"] == found["shared prefill"] == found["decoded together"]


def test_a_cell_that_fails_ends_the_benchmark(tmp_path):
    bench = SweepBench(tmp_path, "random", ("snapkv",), (10,), length=500, new=3)
    with pytest.raises(ValueError, match="at least 33"):
        list(bench.run())
