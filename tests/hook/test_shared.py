"""One full prefill for several methods: each gets what it gets from a prefill of its own, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from helpers import EVICTING, LONG, grid, make, thinned
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.hook.compression import Compressor
from kvcompress.hook.observed import LayerObserved
from kvcompress.hook.shared_prefill import prefill_once, unsupported_reason
from kvcompress.method import Chunked, Needs
from kvcompress.method.scorers import ScorerOver
from kvcompress.methods import ChunkKV, CriticalKV, ExpectedAttention, Full, SnapKV, StreamingLLM
from kvcompress.methods.adakv import Ada

BUDGETS = (0.2, 0.5, 24)
UNION = Needs(window=8)
SHARING = [name for name in EVICTING if unsupported_reason(make(name, 0.5)) is None]


def needs_of(method):
    return Compressor(method, 1).needs


def followed(model, method, ids, shared=None, kernel="auto"):
    """What can be seen of a session: reports, positions, logits and tokens of a prompt, a question and a later turn."""
    seen = []
    with compress(model, method, kernel, shared=shared) as session:

        def look():
            report = session.report()
            report.pop("time")
            seen.append(report)
            seen.extend(session.cache.positions(layer) for layer in session.full_layers)
            seen.append(session.cache.logits)

        session.prefill(ids)
        look()
        session.append(ids[:, :5])
        seen.append(session.generate(4).tokens)
        look()
        session.prefill(ids[:, 3:20], cache=session.cache)
        look()
        seen.append(session.generate(4).tokens)
        look()
    return seen


@cache
def alone(method):
    """What it sees of 80 tokens by itself."""
    return followed(small_model(), method, random_ids(1, 80))


def assert_same(apart, together):
    assert len(apart) == len(together)
    for one, other in zip(apart, together, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize(
    ("name", "budget"), grid(SHARING, BUDGETS, short=lambda name, budget: budget == 0.2 or name in ("H2O", "AdaKV"))
)
def test_a_method_gets_from_a_shared_prefill_what_it_gets_from_its_own(name, budget):
    model, ids = small_model(), random_ids(1, 80)
    method = make(name, budget)
    shared = prefill_once(model, ids, needs_of(method) | Needs(window=9))
    assert_same(alone(method), followed(model, method, ids, shared))


@pytest.mark.parametrize("name", ["Quest", "ShadowKV", "FlexiCache", "Indexer"])
def test_a_reader_reads_as_many_pages_after_a_shared_prefill_as_after_its_own(name):
    """Its share is of the prompt, which ends where the shared one does, whatever is decoded."""
    model, ids, method = small_model(), random_ids(1, 81), make(name, 0.3)
    shared = prefill_once(model, ids, needs_of(method))
    assert_same(followed(model, method, ids), followed(model, method, ids, shared))


@pytest.mark.parametrize(
    "method",
    [
        ChunkKV(budget=0.4, window=3, size=4, reuse=2),
        ChunkKV(budget=0.4, window=3, preset="kvpress"),
        CriticalKV(budget=0.4, window=3, preset="code", allocator=Ada()),
        CriticalKV(budget=0.4, window=3, base="h2o"),
        CriticalKV(budget=0.4, window=3, base="tova"),
    ],
    ids=["chunkkv", "chunkkv-kvpress", "criticalkv-ada", "criticalkv-h2o", "criticalkv-tova"],
)
def test_a_scorer_over_another_that_only_scores_shares_a_prefill(method):
    model, ids = small_model(), random_ids(1, 80)
    assert unsupported_reason(method) is None
    shared = prefill_once(model, ids, needs_of(method))
    assert_same(followed(model, method, ids), followed(model, method, ids, shared))


def test_a_scorer_over_one_that_observes_does_not_share():
    @dataclass(frozen=True, kw_only=True)
    class OverObserver(SnapKV):
        def make_scorer(self):
            return ScorerOver(ExpectedAttention(budget=0.5).make_scorer())

    assert ExpectedAttention(budget=0.5).make_scorer().observes
    assert "observes more" in unsupported_reason(OverObserver(budget=0.5))


def test_a_prefill_made_under_another_adapter_or_other_weights_is_not_taken():
    """Each time the session prefills by itself, and gets what it gets without a shared prefill."""
    ids, method = random_ids(1, 40), SnapKV(budget=0.5, window=3)

    class Scaled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.scale = inner, 1.0

        def forward(self, x):
            return self.inner(x) * self.scale

    def switch(model):
        model.model.layers[0].self_attn.v_proj.scale = 2.0

    def write(model):
        model.model.layers[1].self_attn.v_proj.weight.data.mul_(2)

    for change in (switch, write):
        model = small_model(fresh=True)
        model.model.layers[0].self_attn.v_proj = Scaled(model.model.layers[0].self_attn.v_proj)
        shared = prefill_once(model, ids, needs_of(method))
        change(model)
        assert_same(followed(model, method, ids), followed(model, method, ids, shared))


@pytest.mark.parametrize(
    ("architecture", "name"),
    thinned(["gemma3_text", "gpt_oss", "qwen2", "glm4"], ["H2O", "CAKE", "AdaKV", "Full"], every=4),
)
def test_windows_soft_caps_and_sinks_are_shared_as_well(architecture, name):
    model, ids = small_model(architecture), random_ids(1, 60)
    method = make(name, 0.3) if name != "Full" else Full()
    shared = prefill_once(model, ids, needs_of(method) | Needs(window=9))
    assert_same(followed(model, method, ids), followed(model, method, ids, shared))


def test_one_prefill_serves_all_methods_and_is_left_as_it_was():
    model, ids = small_model(), random_ids(1, 80)
    methods = [make(name, budget) for name in SHARING for budget in (BUDGETS if LONG else BUDGETS[:1])] + [Full()]
    methods = [m for m in methods if not needs_of(m).mass]
    assert len({type(m) for m in methods}) >= 6
    needs = Needs()
    for method in methods:
        needs |= needs_of(method)
    shared = prefill_once(model, ids, needs)
    before = [(k.clone(), v.clone()) for k, v in map(shared.cache.keys_values, range(3))]
    for method in methods:
        assert_same(alone(method), followed(model, method, ids, shared))
    for (k, v), (k2, v2) in zip(before, map(shared.cache.keys_values, range(3)), strict=True):
        assert torch.equal(k, k2) and torch.equal(v, v2)


def test_the_attention_of_the_widest_window_is_computed_once_for_all_methods(monkeypatch):
    model = small_model("llama").eval()
    ids = random_ids(1, 60, seed=4)
    methods = [make(name, budget) for name in ("SnapKV", "AdaKV", "CAKE") for budget in (BUDGETS if LONG else (0.2,))]
    window = methods[0].parts().scorer.needs.window
    alone = [followed(model, method, ids) for method in methods]
    computed = []
    plain = LayerObserved._window
    monkeypatch.setattr(LayerObserved, "_window", lambda self, size: computed.append(size) or plain(self, size))
    shared = prefill_once(model, ids, Needs(window=window))
    held = shared.windows_bytes
    for method in methods:
        with compress(model, method, shared=shared) as session:
            session.prefill(ids)
    assert computed == [window] * len(shared.cache.layers)
    kept = [layer.shared_window_attention[window][0] for layer in shared.cache.full_layers]
    assert held == sum(p.numel() * 4 for p in kept)
    for method, before in zip(methods, alone, strict=True):
        assert_same(before, followed(model, method, ids, shared))


def test_with_the_blockwise_kernel_methods_with_and_without_mass_share():
    model, ids = small_model(), random_ids(1, 80)
    shared = prefill_once(model, ids, Needs(window=3, mass=True), "blockwise")
    for method in (make("H2O", 0.3), make("SnapKV", 0.3), Full()):
        assert_same(
            followed(model, method, ids, kernel="blockwise"), followed(model, method, ids, shared, kernel="blockwise")
        )


def test_what_is_kept_shares_no_storage_with_the_prefill():
    model, ids = small_model(), random_ids(1, 80)
    shared = prefill_once(model, ids, UNION)
    storages = {t.untyped_storage().data_ptr() for layer in shared.cache.layers for t in layer.store.channels.values()}
    for method in (make("SnapKV", 0.3), make("SnapKV", 1000), Full()):
        with compress(model, method, shared=shared) as session:
            session.prefill(ids)
            for layer in session.cache.layers:
                assert not storages & {t.untyped_storage().data_ptr() for t in layer.store.channels.values()}


def test_other_ids_are_prefilled_by_the_model():
    model, ids, other = small_model(), random_ids(1, 40), random_ids(1, 40, seed=1)
    shared = prefill_once(model, ids, UNION)
    method = make("SnapKV", 0.4)
    assert_same(followed(model, method, other), followed(model, method, other, shared))


@pytest.mark.parametrize(
    "method, says",
    [
        (SnapKV(budget=0.5, prefill=Chunked(chunk=8)), "chunked"),
        (StreamingLLM(budget=20, sinks=2, positions="compact"), "compact"),
    ],
)
def test_a_method_that_cannot_share_says_why(method, says):
    model, ids = small_model(), random_ids(1, 40)
    assert says in unsupported_reason(method)
    with compress(model, method, shared=prefill_once(model, ids, UNION)) as session:
        with pytest.raises(ValueError, match=says):
            session.prefill(ids)


@pytest.mark.parametrize("name", ["ChunkKV", "CriticalKV"])
def test_a_scorer_over_another_that_observes_nothing_itself_shares_a_prefill(name):
    assert unsupported_reason(make(name, 0.4)) is None and name in SHARING


def test_a_prefill_that_observed_too_little_is_refused():
    model, ids = small_model(), random_ids(1, 40)
    for method in (make("SnapKV", 0.5, window=9), make("H2O", 0.5)):
        with compress(model, method, shared=prefill_once(model, ids, UNION)) as session:
            with pytest.raises(ValueError, match="observed"):
                session.prefill(ids)
