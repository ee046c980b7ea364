"""The kernel benchmark and the GPU's command measure what they say, on small shapes of a CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import load_script

from kvcompress.bench import gpu_checks, kernels
from kvcompress.bench.emulated_cuda import EmulatedCUDA
from kvcompress.bench.kernels import KERNELS, Kernels, Shape
from kvcompress.measure import roofline
from kvcompress.models.loading import random_model

RATES = roofline.Rates(copy=8e9, read=1e10, matmul=1e11)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    monkeypatch.setattr(roofline, "rates", lambda device, dtype: RATES)


@pytest.fixture
def script():
    return load_script("bench")


@pytest.mark.parametrize("shape", [Shape(2, 2, 3, 32, 300), Shape(1, 1, 1, 64, 17)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_gives_what_its_slow_reference_gives(kernel, shape):
    row = Kernels("cpu", torch.float32, pairs=2).run(kernel, shape)
    assert row.path == "torch" and row.error <= 1e-4 and row.reference_s > 0
    assert row.ratios.pairs == 2 and row.ratios.aa is not None
    json.dumps(row.as_dict())


def test_floors_are_the_bytes_and_operations_of_the_shape():
    """Counted by hand: 1 row, 2 KV heads of 3 query heads, heads of 32, 64 tokens, float32."""
    bench, shape = Kernels("cpu", torch.float32, pairs=1), Shape(1, 2, 3, 32, 64)
    ends = 2 * 6 * 32 * 4
    decode = bench.run("decode", shape)
    assert decode.bytes == 2 * (32 + 96) * 32 * 4 + ends and decode.operations == 4 * 32 * 3 * 128
    pages = bench.run("pages", shape)
    assert pages.bytes == 2 * 2 * 16 * 32 * 4 + ends and pages.operations == 4 * 32 * 3 * 2 * 16
    mass = bench.run("mass", shape)
    assert mass.operations == 4 * 32 * 6 * (64 * 65 // 2)
    assert mass.bytes == 4 * (2 * 6 * 64 * 32 + 2 * 2 * 64 * 32) + 2 * 4 * 6 * 64
    for row in (decode, pages, mass):
        assert row.floor_s == max(row.bytes / 1e10, row.operations / 1e11)
        assert row.of_floor == pytest.approx(row.ratios.b / row.floor_s)
        assert row.of_copy == pytest.approx(row.bytes / row.ratios.b / 8e9)


def test_a_wrong_kernel_shows_as_an_error(monkeypatch):
    stock = kernels.lane_attention

    def off(*args):
        output, p = stock(*args)
        return 1.5 * output, p

    monkeypatch.setattr(kernels, "lane_attention", off)
    assert Kernels("cpu", torch.float32, pairs=1).run("decode", Shape(1, 2, 2, 16, 40)).error > 0.01


def test_unknown_kernels_and_empty_shapes_are_refused():
    bench = Kernels("cpu", torch.float32)
    with pytest.raises(ValueError, match="no kernel named 'masss'; valid: mass"):
        bench.run("masss", Shape(1, 1, 1, 16, 8))
    with pytest.raises(ValueError, match="at least 1"):
        bench.run("mass", Shape(1, 1, 1, 16, 0))


def test_the_command_prints_each_kernel_and_writes_json(script, tmp_path, capsys):
    out = tmp_path / "o.json"
    given = f"kernels --only mass,groups --tokens 40,150 --kv 2 --group 2 --dim 32 --pairs 2 --threads 1 --json {out}"
    assert script.kernels(script.parse(given.split())) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["kernel"], r["shape"]["tokens"]) for r in rows] == [
        ("mass", 40), ("mass", 150), ("groups", 40), ("groups", 150),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "flash forward" in printed or "SDPA forward" in printed
    assert "floor" in printed and "of copy" in printed


# ---------------------------------------------------------------------- the GPU's command


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(("more", "status"), [([], 0), (["--require"], 2)])
def test_without_a_gpu_the_command_says_what_it_would_check(script, more, status, tmp_path, capsys):
    assert script.gpu(script.parse(["gpu", "--out", str(tmp_path / "h"), *more])) == status
    printed = capsys.readouterr().out
    assert "no CUDA" in printed and not (tmp_path / "h").exists()
    for said in ("80% of the measured copy bandwidth", "0.7 of the flash forward", "32768 tokens, batch 8", "0.8 of"):
        assert said in printed


def test_outcomes_are_kept_as_json_and_markdown_and_a_failure_stops_no_other(script, tmp_path, monkeypatch, capsys):
    def fails():
        raise RuntimeError("out of memory\nsecond line")

    fake = [
        gpu_checks.Check("one", "first", "at least 2", lambda: ("met", "3.00x", {"x": 3})),
        gpu_checks.Check("two", "second", "", fails),
        gpu_checks.Check("three", "third", "at most 1", lambda: ("missed", "2.00x", {})),
    ]
    monkeypatch.setattr(gpu_checks, "checks", lambda pairs=11: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_checks.measuring, "hardware", lambda device: {"device": "a GPU"})
    assert script.gpu(script.parse(["gpu", "--out", str(tmp_path), "--minutes", "0"])) == 1
    kept = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert [(c["name"], c["verdict"]) for c in kept] == [("one", "met"), ("two", "skipped"), ("three", "missed")]
    assert kept[1]["figure"] == "RuntimeError: out of memory"
    assert "| three | third | at most 1 | 2.00x | missed |" in (tmp_path / "checks.md").read_text()


def test_a_part_that_is_run_again_replaces_its_outcome_and_leaves_the_others(tmp_path, monkeypatch):
    figures = iter(["1.00x", "2.00x", "3.00x"])
    fake = [gpu_checks.Check(name, name, "", lambda: ("noted", next(figures), {})) for name in ("one", "two")]
    monkeypatch.setattr(gpu_checks, "checks", lambda pairs=11: fake)
    monkeypatch.setattr(gpu_checks.measuring, "hardware", lambda device: {"device": "a GPU"})
    assert len(list(gpu_checks.run(tmp_path, minutes=0))) == 2
    assert [o.figure for o in gpu_checks.run(tmp_path, only=["one"], minutes=0)] == ["3.00x"]
    kept = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert [(c["name"], c["figure"]) for c in kept] == [("one", "3.00x"), ("two", "2.00x")]
    with pytest.raises(ValueError, match="no part named three; valid: one, two"):
        list(gpu_checks.run(tmp_path, only=["three"], minutes=0))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "took more than 0.002 minutes"),
        ("import sys; sys.exit('a bad address')", "its process ended with 1: a bad address"),
    ],
)
def test_a_part_is_ended_in_time_and_may_die_alone(program, said):
    check = gpu_checks.Check("one", "first", "", lambda: ("met", "", {}))
    minutes = 0.002 if "sleep" in program else 1.0
    found = gpu_checks.in_part(check, 1, minutes, [sys.executable, "-S", "-c", program])
    assert (found.verdict, found.figure) == ("skipped", said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulated where there is no GPU")
@pytest.mark.parametrize("names", [["snapkv"], pytest.param([], marks=pytest.mark.long)])
def test_tokens_on_a_device_are_held_against_the_cpus(names, monkeypatch):
    """On emulated CUDA, eager and as a graph; wrong logits are found."""
    with EmulatedCUDA():
        verdict, figure, detail = gpu_checks.tokens_check(new=3, only=names)
        assert verdict == "met" and detail["snapkv, cuda auto"]["step"] == "graph", figure
        assert figure.startswith(f"{len(detail)} of {len(detail)} equal") and len(detail) == 2 * (len(names) or 8)
    monkeypatch.setattr(gpu_checks, "_last", lambda session: next(noise) + session.cache.logits.float().cpu())
    noise = iter(range(100))
    monkeypatch.setattr(gpu_checks, "load", lambda *_, **__: (random_model("llama", layers=1), None))
    assert gpu_checks.tokens_check("meta", new=3, only=["full"], steps=("eager",))[0] == "missed"


def test_a_filled_cache_decodes_at_the_length_it_was_given():
    model = random_model("llama", layers=2)
    found = gpu_checks.step_time(model, 70, 2, None, new=2, rounds=2)
    config = model.config
    size = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    least = 2 * 2 * 2 * 70 * size * 4
    assert least <= found["cache_bytes"] <= 1.3 * least and len(found["rounds_s"]) == 2 and found["tpot_s"] > 0


def test_the_decode_check_holds_the_speedup_against_what_the_bytes_allow(monkeypatch):
    monkeypatch.setattr(gpu_checks, "graphs", lambda: True)
    monkeypatch.setattr(gpu_checks, "load", lambda *_, **__: (random_model("llama", layers=1), None))
    monkeypatch.setattr(roofline, "weights", lambda model, batch: (100, 0))
    for full, expected in ((1.7, "met"), (1.5, "missed")):

        def timed(model, tokens, batch, decode, full=full):
            kept = tokens < gpu_checks.LONG
            return {"tpot_s": 1.0 if kept else full, "cache_bytes": 0 if kept else 100}

        monkeypatch.setattr(gpu_checks, "step_time", timed)
        verdict, figure, detail = gpu_checks.decode_check(1)
        assert verdict == expected and detail["allowed"] == 2.0 and "of 2.00" in figure
