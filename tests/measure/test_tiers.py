"""The tier model: measured bytes over given bandwidths, labelled as a model."""

from __future__ import annotations

import json
import math

import pytest

from kvcompress.measure import offload_cost_model
from kvcompress.measure.offload_cost_model import bandwidth, break_even, main, modelled


def test_time_is_bytes_over_the_reached_share_of_the_peak():
    time = modelled(3.35e12 * 0.8, 6.4e10 * 0.4, "h100-sxm", "pcie5-x16")
    assert time.read == pytest.approx(1.0) and time.moved == pytest.approx(0.5)
    assert time.overlapped == pytest.approx(1.0) and time.in_turn == pytest.approx(1.5)
    assert time.label == "modelled"


def test_at_the_break_even_bandwidth_offloading_takes_what_the_full_cache_takes():
    read, moved, full = 2e8, 1e6, 1e9
    for overlap in (True, False):
        link = break_even(read, moved, full, "h200", overlap)
        rest = 0.0 if overlap else read / bandwidth("devices", "h200")
        assert rest + moved / link == pytest.approx(full / bandwidth("devices", "h200"))
    assert break_even(read, 0, full, "h200") == 0.0
    assert break_even(2e9, moved, full, "h200") == math.inf


def test_every_figure_has_a_source_and_unknown_names_list_the_known_ones():
    for kind in ("devices", "links"):
        assert all(
            entry["source"] and float(entry["bandwidth"]) > 1e9 for entry in offload_cost_model.figures()[kind].values()
        )
    with pytest.raises(ValueError, match="'pcie9' is none of the links in tiers.yaml: pcie4-x16, .*nvlink-c2c"):
        modelled(1, 1, "h200", "pcie9")
    with pytest.raises(ValueError, match="neither can be negative"):
        modelled(-1, 0, "h200", "pcie4-x16")


def test_the_command_prints_measured_bytes_beside_modelled_times(tmp_path, capsys):
    record = {"method": "flexicache", "variant": "heads=stable", "budget": 256}
    record |= {"kv.read_bytes_per_token": 1048576, "kv.moved_bytes_per_token": 8192}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert main([str(path), "--device", "h100-sxm", "--link", "nvme-pcie4"]) == 0
    out = capsys.readouterr().out
    assert "| flexicache heads=stable | 256 | – | – | 1024.0 | 8.0 | 0.39 | 1.46 | – |" in out
    assert "times are modelled" in out
    assert main([str(path), "--device", "abacus"]) == 1
    assert "abacus" in capsys.readouterr().err
