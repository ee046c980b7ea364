"""Methods that evict while decoding pick, keep and predict the same with fixed shapes as in eager steps."""

from __future__ import annotations

import pytest
import torch
from helpers import grid, held, make
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.hook import static_decode
from kvcompress.method import Schedule
from kvcompress.methods import CAKE, H2O, StreamingLLM

BUDGET = 7
STEPS = 3 * BUDGET
EACH_STEP = {
    "H2O": make("H2O", BUDGET),
    "H2O fading": make("H2O", BUDGET, decay=0.9, normalise=True, recent_share=0.25),
    "TOVA": make("TOVA", BUDGET),
    "KeyDiff": make("KeyDiff", BUDGET, block=0, sinks=1, window=2),
    "StreamingLLM": make("StreamingLLM", BUDGET, positions="original"),
    "StreamingLLM compact": make("StreamingLLM", BUDGET, positions="compact"),
    "QFilters": make("QFilters", BUDGET),
    "CAKE": make("CAKE", BUDGET),
    "CAKE gate": make("CAKE", BUDGET, gate=True, repair="published", reduce_first=False),
}
EVERY_FEW = {
    "RKV": make("RKV", BUDGET, interval=5),
    "RKV total": make("RKV", BUDGET, interval=5, align="total"),
    "LagKV": make("LagKV", 12),
    "Scissorhands": make("Scissorhands", BUDGET),
    "SnapKV interval": make("SnapKV", BUDGET).replace(schedule=Schedule(every=4)),
    "H2O interval": make("H2O", BUDGET).replace(schedule=Schedule(every=6)),
    "H2O newline": make("H2O", BUDGET).replace(schedule=Schedule(newline=True, newline_ids=tuple(range(0, 128, 3)))),
    "H2O thinking": make("H2O", BUDGET).replace(
        schedule=Schedule(every=4, until="</think>", until_ids=tuple(range(0, 128, 9)))
    ),
}
OTHERS = {
    "SnapKV": make("SnapKV", BUDGET),
    "H2O in the prompt only": make("H2O", BUDGET, decode=False),
    "AdaKV": make("AdaKV", BUDGET),
    "CriticalKV": make("CriticalKV", BUDGET),
    "PyramidKV": make("PyramidKV", BUDGET),
}
ALL = EACH_STEP | EVERY_FEW | OTHERS
FAMILIES = {
    "H2O",
    "TOVA",
    "KeyDiff",
    "StreamingLLM compact",
    "QFilters",
    "CAKE",
    "RKV",
    "Scissorhands",
    "H2O newline",
    "AdaKV",
}


def course(model, method, decode, ids, mask=None, steps=STEPS):
    """All that a generation, a second turn and another generation leave: tokens, logits, positions and bytes."""
    tokens, logits, kept, nbytes, how = [], [], [], [], []
    with compress(model, method, decode=decode) as session:

        def note():
            cache = session.cache
            kept.append([held(cache, layer.index) for layer in cache.full_layers])
            nbytes.append({kind: cache.nbytes()[kind] for kind in ("keys_values", "full", "index")})
            assert all(sorted(head) == head for layer in kept[-1] for row in layer for head in row)

        def watch():
            logits.append(session.cache.logits.clone())
            how.append(session.report()["step"]["how"] if len(how) % 7 == 3 else "")  # now and then someone looks

        for turn, n in ((ids, steps), (random_ids(len(ids), 5, seed=9), BUDGET)):
            new = mask if turn is ids else None
            session.prefill(turn, attention_mask=new, cache=session.cache)
            tokens.append(session.generate(n, watch=watch).tokens)
            note()
        evicted = [layer.evicted for layer in session.cache.full_layers]
        twin = session.cache.fork()
        session.append(random_ids(len(ids), 3, seed=4))
        session.generate(4, watch=watch)
        note()
        session.cache = twin
        session.generate(6, watch=watch)
        note()
        return tokens, torch.stack(logits), kept, nbytes, evicted, session.report()["step"], set(how)


def assert_same(eager, fixed, how="static"):
    assert fixed[5]["how"] == how and eager[5]["how"] == "eager", fixed[5]
    assert fixed[0] == eager[0]
    assert torch.allclose(fixed[1], eager[1], atol=1e-5, rtol=1e-4)
    assert fixed[2] == eager[2]
    assert fixed[4] == eager[4]
    assert fixed[3][0]["index"] > 0  # what the step keeps beside the cache is counted
    for ours, theirs in zip(fixed[3], eager[3], strict=True):
        assert {k: ours[k] for k in ("keys_values", "full")} == {k: theirs[k] for k in ("keys_values", "full")}


@pytest.mark.parametrize(
    ("name", "kv_heads"), grid(ALL, [2, 1, 4], short=lambda name, heads: heads == 2 and name in FAMILIES)
)
def test_fixed_steps_leave_what_eager_steps_leave(name, kv_heads):
    model, ids = small_model(num_key_value_heads=kv_heads, num_hidden_layers=2), random_ids(1, 24)
    assert_same(course(model, ALL[name], "eager", ids), course(model, ALL[name], "static", ids))


@pytest.mark.parametrize(
    ("name", "lengths"),
    grid(
        ALL,
        [(20, 13, 17), (20, 5, 14)],
        short=lambda name, lengths: (
            name in ("H2O", "StreamingLLM compact", "CAKE", "RKV", "AdaKV") and lengths[1] == 13
        ),
    ),
)
def test_padded_rows_leave_what_eager_steps_leave(name, lengths):
    model = small_model(num_hidden_layers=2)
    ids, mask = left_padded(list(lengths))
    assert_same(course(model, ALL[name], "eager", ids, mask), course(model, ALL[name], "static", ids, mask))


@pytest.mark.long
def test_heads_that_keep_all_grow_beside_heads_that_drop_a_token_each_step():
    model, ids = small_model(num_hidden_layers=2), random_ids(1, 24)
    method = make("DuoAttention", 12)
    assert_same(course(model, method, "eager", ids), course(model, method, "static", ids))


@pytest.mark.parametrize("name", grid(ALL, short=["H2O", "AdaKV"].__contains__))
def test_a_row_that_has_ended_neither_takes_nor_drops_a_token(name):
    model = small_model(num_hidden_layers=2)
    ids, mask = left_padded([20, 16, 18])
    found = []
    for decode in ("eager", "static"):
        with compress(model, ALL[name], decode=decode) as session:
            session.prefill(ids, attention_mask=mask)
            tokens = session.generate(STEPS, until=lambda row: len(row) > 2 and row[-1] % 4 == 0).tokens
            found.append((tokens, [held(session.cache, layer.index) for layer in session.cache.full_layers]))
    assert len({len(row) for row in found[0][0]}) > 1
    assert found[0] == found[1]


def test_a_prompt_below_the_budget_grows_to_it_first():
    model, ids = small_model(), random_ids(1, 5)
    method = StreamingLLM(budget=BUDGET, sinks=2)
    assert_same(course(model, method, "eager", ids), course(model, method, "static", ids))


@pytest.mark.parametrize(
    "name",
    grid(ALL, short=["H2O", "TOVA", "KeyDiff", "StreamingLLM compact", "QFilters", "CAKE", "AdaKV"].__contains__),
)
def test_a_step_is_one_graph_that_asks_the_host_for_nothing(name, monkeypatch):
    """Traced with stand-ins for numbers, which refuse every question; the graph then does what the step does."""
    graphs = []
    monkeypatch.setattr(
        static_decode, "_compile", lambda *args: graphs.append(static_decode.traced(*args)) or graphs[-1]
    )
    model, ids, found = small_model(num_hidden_layers=1, fresh=True), random_ids(1, 20), []
    for decode in ("eager", "compiled"):
        with compress(model, ALL[name], decode=decode) as session:
            session.prefill(ids)
            found.append((session.generate(BUDGET).tokens, held(session.cache, 0)))
    assert graphs and found[0] == found[1]
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert not called & {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}


@pytest.mark.parametrize("name", ["H2O", "SnapKV", "RKV"])
def test_one_capture_serves_the_prompts_that_follow(name, monkeypatch):
    model, captures, found = small_model(num_hidden_layers=2), [], []
    monkeypatch.setattr(static_decode, "captured", lambda run, device: captures.append(run) or run)
    for decode in ("eager", "static"):
        with compress(model, ALL[name], decode=decode) as session:
            session.stepper.decode = "graph" if decode == "static" else decode  # which asks for a CUDA device
            for seed in (1, 2):
                session.prefill(random_ids(1, 20 + seed, seed=seed))
                found.append((session.generate(12).tokens, held(session.cache, 0)))
    assert found[:2] == found[2:] and len(captures) == 1


def test_buffers_that_another_cache_still_holds_are_left_alone(monkeypatch):
    model, captures = small_model(), []
    monkeypatch.setattr(static_decode, "captured", lambda run, device: captures.append(run) or run)
    with compress(model, H2O(budget=BUDGET), decode="static") as session:
        session.stepper.decode = "graph"
        session.prefill(random_ids(1, 20))
        session.generate(5)
        first, before = session.cache, held(session.cache, 0)
        session.prefill(random_ids(1, 20, seed=2))
        session.generate(5)
        assert held(first, 0) == before and len(captures) == 2


def test_a_scorer_that_does_not_say_that_it_can_be_traced_is_refused_by_name():
    method = make("ExpectedAttention", BUDGET).replace(schedule=Schedule(every=1))
    with pytest.raises(ValueError, match="decode=static: .*ExpectedAttention"):
        compress(small_model(), method, decode="static")
    with compress(small_model(), method, decode="auto") as session:
        session.prefill(random_ids(1, 20))
        session.generate(3)
        assert session.report()["step"]["how"] == "eager" and session.report()["step"]["why"]


def test_cake_comes_down_to_its_budget_in_an_eager_step_first():
    model, ids = small_model(), random_ids(1, BUDGET + 2)
    method = CAKE(budget=BUDGET, window=4, preset="code")
    assert_same(course(model, method, "eager", ids), course(model, method, "static", ids))
