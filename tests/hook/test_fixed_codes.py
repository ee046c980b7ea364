"""Caches that hold codes leave the same with fixed shapes as in eager steps."""

from __future__ import annotations

import pytest
import torch
from helpers import grid
from small_models import left_padded, random_ids, small_model
from test_fixed_eviction import assert_same, course

from kvcompress import compress
from kvcompress.hook import static_decode
from kvcompress.methods import H2O, KIVI, AdaKV, GQAPool, Int8, LowRank, SnapKV, ThinK, TurboQuant

TEXT = {"tokens": 128, "length": 32}
CODECS = {
    "int8": Int8(),
    "turboquant": TurboQuant(bits=4),
    "turboquant prod": TurboQuant(bits=3, mode="prod"),
    "palu": LowRank(budget=0.5, **TEXT),
    "palu groups": LowRank(budget=0.5, head_group=2, **TEXT),
    "palu bits": LowRank(budget=0.4, bits=4, **TEXT),
    "mla": LowRank(budget=0.5, form="mla", **TEXT),
    "mla bits": LowRank(budget=0.4, form="mla", bits=4, **TEXT),
    "think": ThinK(pruned=0.5, window=4),
    "gqapool": GQAPool(),
    "snapkv int8": SnapKV(budget=0.5, window=3, codec=Int8()),
    "snapkv think": SnapKV(budget=0.5, window=3, codec=ThinK(pruned=0.4, window=4)),
}
QUICK = ("int8", "turboquant", "palu", "mla bits", "think", "gqapool", "snapkv int8")


@pytest.mark.parametrize(
    ("name", "kv_heads"), grid(CODECS, [2, 4], short=lambda name, heads: heads == 2 and name in QUICK)
)
def test_fixed_steps_over_codes_leave_what_eager_steps_leave(name, kv_heads):
    options = {} if kv_heads == 2 else {"num_key_value_heads": kv_heads}
    model, ids = small_model(**options), random_ids(1, 30)
    assert_same(*(course(model, CODECS[name], decode, ids, steps=6) for decode in ("eager", "static")))


@pytest.mark.parametrize("name", grid(CODECS, short=["int8", "palu", "think"].__contains__))
def test_padded_rows_of_codes_leave_what_eager_steps_leave(name):
    model = small_model()
    ids, mask = left_padded([20, 19, 20] if name.startswith("snapkv") else [20, 13, 17])
    assert_same(*(course(model, CODECS[name], decode, ids, mask, steps=6) for decode in ("eager", "static")))


@pytest.mark.parametrize("name", grid(CODECS, short=["int8", "turboquant", "palu", "think"].__contains__))
def test_a_step_over_codes_is_one_graph_that_asks_the_host_for_nothing(name, monkeypatch):
    """Traced with stand-ins for numbers; the graph then does what the step does, with codes as one operation a side."""
    graphs = []
    monkeypatch.setattr(
        static_decode, "_compile", lambda *args: graphs.append(static_decode.traced(*args)) or graphs[-1]
    )
    model, ids = small_model(layers=1), random_ids(1, 24)
    found = []
    for decode in ("eager", "compiled"):
        with compress(model, CODECS[name], decode=decode) as session:
            session.prefill(ids)
            found.append([session.step(random_ids(1, 1, t)) for t in range(3)])
    assert (torch.stack(found[0]) - torch.stack(found[1])).abs().max() <= 1e-5
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert any("code_dot" in target for target in called) == (name in ("int8", "turboquant"))


@pytest.mark.parametrize(
    ("method", "words"),
    [(KIVI(group=16), "codec=kivi encodes new tokens in groups"), (H2O(budget=9, codec=Int8()), "codec=int8 holds codes, and schedule")],
    ids=["KIVI", "H2O"],
)  # fmt: skip
def test_codes_that_cannot_be_stepped_over_so_are_refused_by_name(method, words):
    with pytest.raises(ValueError, match=words):
        compress(small_model(), method, decode="static")


def test_codes_of_heads_of_different_lengths_are_left_to_eager_steps():
    with compress(small_model(), AdaKV(budget=0.3, window=3, codec=Int8()), decode="auto") as session:
        session.prefill(random_ids(1, 40))
        session.generate(2)
        assert "codes, of different numbers of tokens" in session.report()["step"]["why"]
