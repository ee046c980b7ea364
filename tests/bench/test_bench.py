"""The overhead benchmark measures what it says, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import load_script

from kvcompress.bench.overhead import CHECKS, EVICTION, Overhead, Row, measurements, plan
from kvcompress.bench.peers import Peers, backends, worker
from kvcompress.measure.measuring import Ratios
from kvcompress.methods import H2O, AdaKV, Full, SnapKV
from kvcompress.methods import METHODS as BY_NAME
from kvcompress.models.loading import random_model

METHODS = {"full": Full(), "evicting": SnapKV(budget=0.5), "window": SnapKV(budget=0.5), "mass": H2O(budget=0.5)}
METHODS |= {f"perhead@{b}": AdaKV(budget=b, window=8) for b in (0.5, 0.2)}
METHODS |= {f"uniform@{b}": SnapKV(budget=b, window=8) for b in (0.5, 0.2)}
METHODS |= {name.lower(): cls(budget=0.5) for name, cls in BY_NAME.items() if cls.budget_kind == "held_tokens"}


@pytest.fixture
def model():
    return random_model("llama", layers=2)


@pytest.mark.parametrize("check", [*CHECKS, *EVICTION], ids=lambda check: check.name)
def test_every_check_measures_and_leaves_the_model_as_it_was(model, check):
    calls = []
    before = model.config._attn_implementation
    row = Overhead(model, METHODS, pairs=2, tokens=3, progress=lambda: calls.append(1)).run(check, 128)
    assert row.ratios.a > 0 and row.ratios.b > 0 and row.ratios.aa is not None
    assert len(calls) == measurements([(check, 128)], pairs=2)
    assert model.config._attn_implementation == before and not model._forward_pre_hooks
    assert row.verdict == "", "no target is stated for this length"
    json.dumps(row.as_dict())


def test_a_slower_hook_layer_shows_in_the_ratio(model, monkeypatch):
    stock, check = Overhead._our_prefill, CHECKS[0]

    def slow(self, method, ids):
        cache, seconds, compress_seconds = stock(self, method, ids)
        return cache, 3 * seconds, compress_seconds

    monkeypatch.setattr(Overhead, "_our_prefill", slow)
    assert Overhead(model, METHODS, pairs=5, tokens=3).run(check, 128).ratios.median > 1.8


def test_decoding_starts_from_equal_copies_and_ends_at_the_stated_length(model, monkeypatch):
    seen, stock = [], Overhead.decode_seconds

    def watch(self, cache):
        start = cache.get_seq_length()
        seconds = stock(self, cache)
        seen.append((type(cache).__name__, start, cache.get_seq_length()))
        return seconds

    monkeypatch.setattr(Overhead, "decode_seconds", watch)
    Overhead(model, METHODS, pairs=2, tokens=5).run(plan(["evicted"])[0][0], 100)
    assert set(seen) == {("DynamicCache", 95, 100), ("CompressedCache", 95, 100)} and len(seen) == 8


def test_methods_steps_run_with_fixed_shapes_where_asked_and_plains_as_they_do(model, monkeypatch):
    ran, inner = [], Overhead._seconds
    monkeypatch.setattr(Overhead, "_seconds", lambda self, step: ran.append(step.__qualname__) or inner(self, step))
    row = Overhead(model, METHODS, pairs=2, tokens=3, step="static").run(plan(["evicted"])[0][0], 128)
    assert row.ratios.a > 0 and row.ratios.b > 0
    assert len(ran) == 8 and sum("decode_seconds" in name for name in ran) == 5  # plain's and A/A's, one warm-up


@pytest.mark.parametrize("length", [3, 8, 10**6])
def test_a_length_without_room_is_refused(model, length):
    with pytest.raises(ValueError, match=f"length={length}"):
        Overhead(model, METHODS, tokens=8).run(CHECKS[0], length)


def row(median, target, aa=1.0, kind="ratio"):
    ratios = Ratios(median, (median, median), 11, 1.0, median, aa, (aa, aa))
    return Row("prefill", "", "", 4096, kind, target, ratios)


def test_verdicts_allow_what_chance_strays_and_no_more():
    assert row(1.03, 1.02, aa=0.98).verdict == "met"
    assert row(1.05, 1.02, aa=0.98).verdict == "missed"
    assert row(1.05, None).verdict == ""


def test_a_share_strays_in_proportion():
    assert row(0.0405, 0.04, aa=1.02, kind="share").verdict == "met"
    assert row(0.05, 0.04, aa=1.02, kind="share").verdict == "missed"


def test_the_plan_takes_each_checks_lengths_unless_told():
    assert [(c.name, n) for c, n in plan(["decode"])] == [("decode", 4096), ("decode", 8192)]
    assert [(c.name, n) for c, n in plan(["mass", "prefill"], [64])] == [("mass", 64), ("prefill", 64)]
    assert [c.targets.get(n) for c, n in plan(["decode", "prefill"])] == [0.90, 0.86, 1.02]
    assert [c.name for c, _ in plan(["ragged", "share-cake"])] == ["ragged-0.5", "ragged-0.2", "share-cake"]
    with pytest.raises(ValueError, match="valid: prefill, decode"):
        plan(["prefil"])


@pytest.fixture
def script():
    return load_script("bench")


def test_the_command_prints_a_table_and_writes_everything_to_json(script, tmp_path, capsys):
    out = tmp_path / "o.json"
    arguments = ["overhead", "--model", "random/llama", "--pairs", "2", "--lengths", "96", "--tokens", "2"]
    status = script.overhead(
        script.parse([*arguments, "--only", "prefill,decode", "--json", str(out), "--threads", "1"])
    )
    printed = capsys.readouterr().out
    assert "1 threads" in printed and "A/A" in printed and "prefill" in printed
    content = json.loads(out.read_text())
    assert [r["check"] for r in content["rows"]] == ["prefill", "decode"]
    assert status == int(any(r["verdict"] == "missed" for r in content["rows"]))
    assert content["hardware"]["torch"] == torch.__version__ and content["settings"]["pairs"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("overhead --only prefil", "valid: prefill"),
        ("chunked --methods Snap", "Snap"),
        ("generation --methods rvk", "'rvk' is unknown"),
        ("sweep --modes none", "'none'; valid"),
        ("decode --methods snap:0.1", "'snap' is unknown"),
        ("prefill --methods snapkv:x", "'x' is no budget"),
        ("peers --only both", "valid: prefill, decode"),
        ("peers --quantized none --kvpress nowhere/python", "python of an environment"),
    ],
)
def test_every_command_is_reached_from_the_command_line(arguments, said, monkeypatch):
    """Each refuses what it does not know, before a model is loaded."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments.split(), "--model", "random/llama"])
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench.py"), run_name="__main__")


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_methods_of_ones_choice_are_measured_beside_plain(script, command, tmp_path, capsys):
    out = tmp_path / "o.json"
    arguments = (
        f"{command} --model random/llama --methods full,snapkv:40 --lengths 96 --pairs 2 --tokens 2 --json {out}"
    )
    assert script.beside_plain(script.parse(arguments.split())) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["check"], r["length"], r["method"].partition("(")[0]) for r in rows] == [
        (command, 96, "Full"),
        (command, 96, "SnapKV"),
    ]
    assert all(r["ratios"]["pairs"] == 2 and r["ratios"]["aa"] > 0 and r["verdict"] == "" for r in rows)
    assert "snapkv:40" in capsys.readouterr().out


# answers as the real worker does, with times that are known
STAND_IN = """
import json, sys
print(json.dumps({"versions": {"kvpress": "0"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "ids" in asked:
        answer = {"tokens": len(asked["ids"])}
    elif asked["press"] == "NoPress":
        answer = {"error": "AttributeError: NoPress"}
    else:
        half = asked["press"] is not None
        answer = {"seconds": 0.5 if half else 1.0, "bytes": 10 if half else 100}
    print(json.dumps(answer), flush=True)
"""


def test_peers_are_each_measured_beside_plain_of_their_own_environment(model, tmp_path):
    file = tmp_path / "worker.py"
    file.write_text(STAND_IN)
    peers = Peers(model, {"snapkv:0.5": SnapKV(budget=0.5, window=8)}, pairs=2, tokens=2)
    (ours,) = peers.ours("prefill", 64)
    assert ours.peer == "kvcompress" and ours.ratios.pairs == 2 and 0.4 < ours.bytes < 0.7
    quantized = peers.quantized("decode", 64, "fp8")
    assert quantized.side == "QuantizedCache fp8" and quantized.ratios.median > 0 and "fp8" in backends()
    with worker(Path(sys.executable), file, model, 1) as other:
        (found,) = peers.kvpress(other, ["SnapKVPress"], 0.9, "decode", 64)
        assert (found.side, found.ratios.median, found.ratios.aa, found.bytes) == ("SnapKVPress 0.9", 0.5, 1.0, 0.1)
        with pytest.raises(ValueError, match="NoPress"):
            next(peers.kvpress(other, ["NoPress"], 0.9, "decode", 64))
    assert other.process.returncode == 0


def test_a_worker_that_cannot_run_is_refused_by_name(model, tmp_path):
    with (
        pytest.raises(ValueError, match="nowhere.*python of an environment"),
        worker(Path("nowhere"), tmp_path, model, 1),
    ):
        pass
    silent = tmp_path / "silent.py"
    silent.write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match="code 3"), worker(Path(sys.executable), silent, model, 1):
        pass
    if importlib.util.find_spec("kvpress") is None:
        real = Path(__file__).parents[2] / "kvcompress" / "bench" / "outside" / "kvpress_worker.py"
        with pytest.raises(ValueError, match="No module named 'kvpress'"), worker(Path(sys.executable), real, model, 1):
            pass


def test_a_method_of_a_benchmark_takes_settings_behind_its_budget():
    from kvcompress.bench.peers import methods_of

    found = methods_of("full,snapkv:0.1,quest:512:group_reduce=max:bound_width=0.2")
    assert list(found) == ["full", "snapkv:0.1", "quest:512:group_reduce=max:bound_width=0.2"]
    quest = found["quest:512:group_reduce=max:bound_width=0.2"]
    assert (quest.budget, quest.group_reduce, quest.bound_width) == (512, "max", 0.2)
    for text, words in (
        ("nothing:0.1", "'nothing' is unknown; valid: adakv"),
        ("snapkv:much", "'much' is no budget"),
        ("quest:512:colour=red", "settings as in flexicache"),
        ("quest:512:group_reduce", "settings as in flexicache"),
        ("", "--methods is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            methods_of(text)
