"""Rules of moving bytes between tiers, against published and hand-computed figures."""

from __future__ import annotations

import json

import pytest

from kvcompress.measure import tiers
from kvcompress.measure.offload_cost_model import main, modelled
from kvcompress.measure.transfers import (
    LayerWise,
    TierPath,
    codec_pays,
    fit_link,
    load_pays,
    piece_bytes,
    prefill_seconds,
    speculative,
    threshold,
    tokens_that_fit,
)

GIB = 2**30


@pytest.mark.parametrize(("kib", "expected"), [(32, 2.97), (128, 9.30), (512, 19.87), (8192, 30.82)])
def test_small_copies_leave_little_of_a_link(kib, expected):
    assert TierPath(3.2e10, 1e-5).effective(GIB, kib * 1024) / 1e9 == pytest.approx(expected, abs=0.01)


def test_copies_are_rounded_up_to_the_links_granule():
    path = TierPath(100.0, granule=64)
    assert path.seconds(100) == 1.28 and path.seconds(100, 10) == 6.4 and path.copies(100, 30) == 4
    assert TierPath(100.0, latency=1.0, sync=0.5).seconds(100, 50, objects=2) == 1 + 2 + 1
    assert TierPath(100.0, unified=True, latency=1.0).seconds(100) == 0.0 and path.seconds(0) == 0.0
    with pytest.raises(ValueError, match="-1 bytes"):
        path.copies(-1)
    with pytest.raises(ValueError, match="bandwidth above 0"):
        TierPath(0.0)


def test_pages_are_contiguous_by_head_by_layer_or_altogether():
    assert piece_bytes(16, 128, 2) == 4096 and piece_bytes(16, 128, 2, heads=8) == 32768
    assert piece_bytes(16, 128, 2, 8, 64) == 16 * 131072


@pytest.mark.parametrize(("load", "compute", "total", "exposed"), [(2, 3, 14, 2), (3, 2, 14, 6), (0, 3, 12, 0)])
def test_layer_wise_loading_waits_for_the_first_layer(load, compute, total, exposed):
    layers = LayerWise(4, load, compute)
    assert layers.total == total and layers.exposed == exposed and layers.in_turn == 4 * (load + compute)
    time = modelled(8.0, 12.0, "h100-sxm", "pcie4-x16", layers=4)
    assert time.overlapped == LayerWise(4, time.moved / 4, time.read / 4).total > max(time.read, time.moved)


@pytest.mark.parametrize(
    ("flops", "ratio", "expected"),
    [(312e12, 1.0, 5.859), (989e12, 1.0, 18.573), (312e12, 0.28, 1.64), (989e12, 0.28, 5.20)],
)
def test_loading_beats_computing_above_mooncakes_thresholds(flops, ratio, expected):
    shape = tiers.dimensions("llama3-70b")
    found = threshold(8192, shape.width, shape.gqa, shape.itemsize, 8 * flops, ratio)
    assert found / 1e9 == pytest.approx(expected, abs=0.005)
    nbytes, computed = 8192 * shape.token_bytes * ratio, prefill_seconds(8192, shape.layers, shape.width, 8 * flops)
    assert load_pays(nbytes, TierPath(1.01 * found), computed) and not load_pays(
        nbytes, TierPath(0.99 * found), computed
    )
    assert not load_pays(nbytes, TierPath(1.01 * found), computed, decode=computed)


def test_published_sizes_and_transfers_come_out():
    shape = tiers.dimensions("llama3-70b")
    assert shape.token_bytes == 327_680 and 131_072 * shape.token_bytes == 40 * GIB
    assert tokens_that_fit(1e12, shape.token_bytes) == pytest.approx(3.05e6, rel=0.002)
    assert tokens_that_fit(100, 10, 0.5, 2) == 10
    for link, seconds in (("rdma-4x200g", 0.494), ("rdma-8x400g", 0.226)):
        assert tiers.path(link).seconds(40 * GIB, 131072) == pytest.approx(seconds, abs=0.001)


def test_a_codec_pays_on_a_slow_link_and_speculation_moves_more():
    assert codec_pays(100, 0.25, TierPath(10), 4, 3) and not codec_pays(100, 0.25, TierPath(10), 4, 4)
    assert speculative(80, 0.8, 1e-3, 10) == (100, pytest.approx(2e-3))
    with pytest.raises(ValueError, match="hit=0"):
        speculative(1, 0, 1, 1)


def test_far_memories_bound_the_link_and_pools_are_shared():
    assert tiers.path(None, "gh200-hbm3").bandwidth == pytest.approx(min(0.8 * 4.5e11, 4.1e11))
    fast = {**tiers.figures(), "share": 1.0}
    assert tiers.path(None, "gh200-hbm3", source=fast).bandwidth == 4.1e11, "the link gives 450, the memory 410"
    alone, shared = (tiers.path("cxl2-x16", memory="cxl-pool-8tb", hosts=hosts) for hosts in (1, 16))
    assert alone.bandwidth == pytest.approx(5.12e10) and shared.bandwidth == pytest.approx(5.12e10)
    slow = {
        **tiers.figures(),
        "memories": {"cxl-pool-8tb": {"bandwidth": 1e11, "hosts": 16, "coherent": False, "share": 1.0}},
    }
    assert tiers.path("cxl2-x16", memory="cxl-pool-8tb", hosts=10, source=slow).bandwidth == 1e10
    assert alone.sync == 2e-6 and tiers.path("cxl2-x16").sync == 0.0
    assert tiers.path("pcie4-x16", latency=False).latency == 0.0 < tiers.path("pcie4-x16").latency
    with pytest.raises(ValueError, match="hosts=17"):
        tiers.path("cxl2-x16", memory="cxl-pool-8tb", hosts=17)
    with pytest.raises(ValueError, match="has no link of its own"):
        tiers.path(None, "h100-sxm")


def test_in_unified_memory_nothing_moves():
    assert tiers.path("pcie4-x16", "apple-m3-ultra").seconds(1e9, 4096) == 0.0
    time = modelled(1e9, 1e9, "apple-m3-ultra", "pcie4-x16")
    assert time.overlapped == time.in_turn == time.read


def test_a_fit_of_made_up_points_returns_latency_and_bandwidth():
    points = [
        (copies, size * copies, 3e-6 * copies + size * copies / 2e9)
        for copies in (1, 64, 1024)
        for size in (4096, 1 << 20)
    ]
    found = fit_link(points)
    assert found["latency"] == pytest.approx(3e-6) and found["bandwidth"] == pytest.approx(2e9) and found["r2"] > 0.999
    assert fit_link([(5, 100, 1.0), (1, 200, 2.0)])["latency"] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="at least 2"):
        fit_link(points[:1])


def test_every_entry_has_a_source_and_assumed_latencies_say_so():
    found = tiers.figures()
    for kind in ("devices", "links", "memories", "models", "claimed"):
        assert all(one["source"] for one in found[kind].values())
    for one in found["links"].values():
        assert "latency" not in one or one["latency"]["source"] in ("assumed", "measured")


def record(tmp_path, **more):
    path = tmp_path / "record.json"
    said = {
        "method": "kivi",
        "budget": 1.0,
        "kv.read_bytes_per_token": 1e6,
        "kv.moved_bytes_per_token": 1e4,
        "kv.ratio": 0.28,
    }
    path.write_text(json.dumps(said | more))
    return path


def test_the_command_says_whether_to_load_or_to_compute(tmp_path, capsys):
    page = tmp_path / "tiers.html"
    arguments = [
        str(record(tmp_path)),
        "--link",
        "pcie4-x16",
        "--link",
        "nvme-pcie4",
        "--model",
        "llama3-70b",
        "--prefix",
        "8192",
    ]
    assert main([*arguments, "--page", "16", "--capacity", "1000", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    line = out.splitlines()[-3]
    assert "| kivi | 1.0 | 0.280 | 10899135 | 81920 |" in line and "| pcie4-x16 |" in line
    assert "every time on this page is modelled" in page.read_text()
    assert main([str(record(tmp_path)), "--model", "llama3-70b", "--device", "rtx-4090"]) == 1
    assert "has no `flops`" in capsys.readouterr().err


def test_measured_links_replace_data_sheets(tmp_path, capsys):
    links = tmp_path / "links.json"
    links.write_text(
        json.dumps(
            {"links": {"pcie4-x16": {"latency": 2e-5, "bandwidth": 1e10}, "disk": {"latency": 0, "bandwidth": 1e9}}}
        )
    )
    found = tiers.with_measured(links)
    assert (
        tiers.path("pcie4-x16", source=found) == TierPath(1e10, 2e-5) and found["links"]["disk"]["source"] == "measured"
    )
    assert main([str(record(tmp_path)), "--links", str(links), "--link", "disk"]) == 0
    assert "| 10.00 |" in capsys.readouterr().out
    links.write_text("{}")
    with pytest.raises(ValueError, match="no file of `kvcompress bench links`"):
        tiers.with_measured(links)
