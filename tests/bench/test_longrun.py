"""What is held along a long generation, how it is timed, and the figures of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import load_script, thinned
from small_models import small_model

from kvcompress.bench import longrun
from kvcompress.method import Schedule
from kvcompress.methods import H2O, RKV, Full, SnapKV
from kvcompress.report.decode import draw_sawtooth, generations, speeds

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
METHODS = {"rkv": RKV(budget=24, window=4, interval=16), "h2o": H2O(budget=24, schedule=Schedule(every=16))}


@pytest.mark.parametrize(("name", "prompt"), thinned(list(METHODS), [8, 40], every=2))
def test_bytes_are_a_sawtooth_between_budget_and_budget_plus_interval(name, prompt):
    """At most the row itself before the first compression, budget + interval after it, and the budget right after each."""
    found = longrun.trace(small_model(num_hidden_layers=2), name, METHODS[name], prompt=prompt, tokens=120)
    assert found.broken() == [] and len(found.seen) == 121
    drops = [i for i in range(1, 121) if found.tokens[i] < found.tokens[i - 1]]
    assert len(drops) >= 5 and all(found.tokens[i] == 24 for i in drops)
    assert {b - a for a, b in zip(drops, drops[1:], strict=False)} == {16}
    first = drops[0] if prompt < 24 else 0
    assert found.tokens[:first] == found.seen[:first] and max(found.tokens[first:]) < 24 + 16
    # per token and layer: keys and values of 2 heads of 16 numbers, and a position that heads share or have each
    assert all(2 * 260 * n <= v <= 2 * 264 * n for v, n in zip(found.valid, found.tokens, strict=True))
    assert all(v <= a for v, a in zip(found.valid, found.allocated, strict=True))


def test_a_trace_that_holds_too_much_says_where():
    found = longrun.trace(small_model(num_hidden_layers=1), "rkv", METHODS["rkv"], prompt=8, tokens=60)
    tokens = list(found.tokens)
    tokens[50] = 41
    assert replace(found, tokens=tokens).broken() == [50]
    appended = longrun.trace(small_model(num_hidden_layers=1), "snapkv", SnapKV(budget=24, window=4), 40, 20)
    assert appended.broken()[0] == 1, "without a decode schedule the budget alone is the bound"


def test_all_contestants_decode_the_same_quarters_by_turns(monkeypatch):
    """Two places of one generation each, in blocks that alternate; the target is for methods that evict in decode."""
    done, run = [], longrun._Contestant.run

    def noted(self, place, ids):
        done.append((self.name, place, ids.tolist()))
        run(self, place, ids)

    monkeypatch.setattr(longrun._Contestant, "run", noted)
    monkeypatch.setattr(longrun, "BLOCK", 16)
    steps = []
    flats = longrun.flatness(
        small_model(num_hidden_layers=1), {**METHODS, "whole": Full()}, 8, 128, 16, progress=steps.append
    )
    assert [flat.name for flat in flats] == ["plain", "rkv", "h2o", "whole"]
    assert [flat.target for flat in flats] == [None, 1.1, 1.1, None]
    assert all(flat.early > 0 and flat.ratio == flat.late / flat.early for flat in flats)
    ids = {(name, place): [t for n, p, t in done if (n, p) == (name, place)] for name, place, _ in done}
    for place in (0, 1):
        assert len({json.dumps(ids[flat.name, place]) for flat in flats}) == 1 and len(ids["rkv", place]) == 2
    assert {name for name, _, _ in done[:8]} == {"plain", "rkv", "h2o", "whole"}
    assert sum(steps) == longrun.steps(3, 128)
    slow = replace(flats[1], ratio=1.2)
    assert slow.missed and not replace(slow, target=None).missed and slow.as_dict()["missed"]


def test_caches_are_at_the_places_they_claim():
    """The second quarter starts after a quarter of the output, the last one after three."""
    model = small_model(num_hidden_layers=1)
    runners = [longrun._Contestant(model, "plain", None), longrun._Contestant(model, "rkv", METHODS["rkv"])]
    for runner in runners:
        runner.reach(longrun.random_tokens(model, 120, 0), 8, (32, 96), lambda steps: None)
        assert [cache.get_seq_length() for cache in runner.caches] == [40, 104]


@pytest.mark.parametrize(("prompt", "tokens", "interval"), [(0, 256, 32), (8, 2, 32), (8, 256, 128), (900, 256, 32)])
def test_sizes_that_do_not_fit_are_refused(prompt, tokens, interval):
    with pytest.raises(ValueError, match="tokens="):
        longrun.flatness(small_model(num_hidden_layers=1), METHODS, prompt, tokens, interval)


def test_a_share_has_no_bound_in_tokens():
    with pytest.raises(ValueError, match="budget=0.5"):
        longrun.trace(small_model(num_hidden_layers=1), "rkv", RKV(budget=0.5), tokens=8)


def test_the_sawtooth_is_drawn(tmp_path):
    traces = [longrun.trace(small_model(num_hidden_layers=1), *item, prompt=8, tokens=60) for item in METHODS.items()]
    path = tmp_path / "figures" / "sawtooth.png"
    draw_sawtooth([traces[0], traces[1].as_dict()], "two methods", path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def row(*outputs):
    """A finished sample of answers given as (tokens, how they ended), each step of which takes its number in ms."""
    seconds = [step / 1000 for tokens, end in outputs for step in range(1, tokens + (end == "stop"))]
    return {"out": {"tokens": [[1] * n for n, _ in outputs], "finished": [e for _, e in outputs], "tpot_s": seconds}}


def test_speed_is_of_each_answer_from_its_own_start():
    assert [len(one) for one in generations(row((5, "length"), (3, "stop")))] == [4, 3]
    found = speeds([row((200, "length"), (70, "stop"))])
    assert [at for at, _ in found] == [32, 96, 160, 224]
    assert found[0][1] == pytest.approx(1000 / 32.5) and found[2][1] == pytest.approx(1000 / 160.5)
    together = row((5, "length"), (5, "length"))
    together["out"]["tpot_s"] = together["out"]["tpot_s"][:4]
    assert list(generations(together)) == [], "decoded as one batch: no answer has a time of its own"


def test_the_script_prints_writes_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(longrun, "BLOCK", 16)
    script = load_script("bench")
    usual = ["generation", "--model", "random/llama", "--budget", "24", "--interval", "16", "--prompt", "8"]
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = [*usual, "--tokens", "64", "--methods", "rkv,tova", "--json", str(out), "--png", str(png)]
    status = script.generation(script.parse(arguments))
    content = json.loads(out.read_text())
    assert [one["name"] for one in content["traces"]] == ["rkv", "tova"] and png.is_file()
    assert [one["name"] for one in content["flat"]] == ["plain", "rkv", "tova"]
    assert status == int(any(one["missed"] for one in content["flat"]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "within budget + interval" in printed and "target ≤ 1.1" in printed
    with pytest.raises(ValueError, match="valid: .*rkv"):
        script.generation(script.parse([*usual, "--methods", "rvk"]))
