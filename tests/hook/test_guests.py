"""Sessions that decode in one forward with their own caches see what they would have seen alone."""

from __future__ import annotations

import pytest
import torch
from helpers import CODED, coded, make
from small_models import left_padded, random_ids, small_model
from test_together import assert_same

from kvcompress import compress
from kvcompress.hook import joint_forward
from kvcompress.hook.compression import Compressor
from kvcompress.hook.joint_decoding import decode_together
from kvcompress.methods import H2O, Full

FAMILIES = {
    "eviction at every step": ("H2O", "TOVA", "KeyDiff", "DuoAttention"),
    "eviction every few steps": ("RKV", "LagKV", "Scissorhands"),
    "positions before rotation, layers that wait for each other": ("StreamingLLM", "CAKE", "KVzip"),
    "readers": ("Quest", "Indexer", "FlexiCache", "ShadowKV"),
    "groups of codes": ("KIVI",),
    "codes by token": ("Int8", "TurboQuant", "ThinK"),
}


@pytest.fixture
def ids():
    return random_ids(1, 40)


def made(name):
    return coded(name) if name in CODED else make(name, 0.5)


def chat(session, ids):
    """An answer, and a later turn that is compressed with another that may stop early: all that can be seen of it."""
    seen = []
    session.prefill(ids)
    for stop in ((), range(2, 20)):
        answer = session.generate(5, stop=stop)
        report = session.report()
        report.pop("time"), report.pop("kernel")
        positions = [session.cache.positions(layer).tolist() for layer in session.full_layers]
        seen.append([answer.tokens, answer.finished, report, positions, session.cache.logits.detach()])
        if not stop:
            session.prefill(ids[:, :9], cache=session.cache)
    return seen


def rows_talk(session, ids, mask):
    """An answer of several rows, some of which may stop early, and a later turn: all that can be seen of it."""
    session.prefill(ids, mask)
    answer = session.generate(6, stop=range(2, 20))
    session.append(ids[:, -3:])
    again = session.generate(3)
    report = session.report()
    report.pop("time"), report.pop("kernel")
    positions = [session.cache.positions(layer).tolist() for layer in session.full_layers]
    return [[answer.tokens, answer.finished, again.tokens, report, positions, session.cache.logits.detach()]]


def without_headroom(seen):
    """What was seen but for the bytes of spare slots, which grow anew from where a sequence went back to."""
    for turn in seen:
        for report in (one for one in turn if isinstance(one, dict)):
            report["kv"].pop("bytes_allocated")
            for name in ("allocated", "headroom", "other_allocated"):
                report["nbytes"].pop(name)
            for moment in report["moments"]:
                moment.pop("bytes_allocated", None)
    return seen


def assert_together_as_alone(model, chosen, talk):
    """What each of these methods says together is what it says alone; returns the share of common steps."""
    expected = []
    for method in chosen:
        with compress(model, method) as session:
            expected.append(talk(session))
    found, share = decode_together(model, [(method, talk) for method in chosen], None)
    for method, one, other in zip(chosen, expected, found, strict=True):
        coded = method.parts().codec.name != "plain"  # a number on the edge of two codes takes either
        assert_same(one, other, atol=1e-3 if coded else 1e-5)
    return share


@pytest.mark.parametrize("family", FAMILIES)
def test_guests_of_each_family_see_beside_each_other_what_they_see_alone(family, ids):
    chosen = [made(name) for name in FAMILIES[family]]
    assert (
        assert_together_as_alone(small_model(), chosen if len(chosen) > 1 else chosen * 2, lambda s: chat(s, ids)) > 0.8
    )


def test_guests_and_rows_of_the_ragged_batch_decode_in_one_forward(ids):
    model, steps = small_model(fresh=True), []
    chosen = [make(name, 0.4) for name in ("SnapKV", "AdaKV", "H2O", "Quest", "TOVA")] + [coded("KIVI"), Full()]
    assert assert_together_as_alone(model, chosen, lambda s: chat(s, ids)) > 0.8
    model.register_forward_hook(lambda *a: steps.append(len(a[2].logits)))

    def answer(session):
        session.prefill(ids)
        steps.clear()
        return session.generate(5).tokens

    decode_together(model, [(method, answer) for method in chosen], None)
    assert steps == [7] * 4


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_models_with_windows_or_latents_decode_together_as_alone(architecture, ids):
    chosen = [make("SnapKV", 0.5), make("H2O", 0.5), make("AdaKV", 0.3)]
    assert assert_together_as_alone(small_model(architecture), chosen, lambda s: chat(s, ids)) > 0.8


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_guest_may_have_rows_of_different_lengths(architecture):
    ids, mask = left_padded([30, 21, 26])
    chosen = [make("SnapKV", 0.5), make("H2O", 0.5), make("Quest", 0.5), Full()]
    model = small_model(architecture)
    assert assert_together_as_alone(model, chosen, lambda s: rows_talk(s, ids, mask)) > 0.8


def faulty(monkeypatch, method, when):
    """Have the observer of a method raise at its calls of decode steps for which `when(number)` holds."""
    calls, stock = [], Compressor.after_attention

    def after_attention(self, layer, q, probabilities, params, forward):
        if self.method == method and forward.phase == "decode":
            calls.append(1)
            if when(len(calls)):
                raise ZeroDivisionError("a fault of its own")
        return stock(self, layer, q, probabilities, params, forward)

    monkeypatch.setattr(Compressor, "after_attention", after_attention)


def test_a_guest_that_fails_once_goes_on_alone_as_if_nothing_had_been(ids, monkeypatch, caplog):
    model, bad, others = small_model(), H2O(budget=0.5), [make("SnapKV", 0.5), make("TOVA", 0.5), make("AdaKV", 0.4)]
    expected = []
    for method in (bad, *others):
        with compress(model, method) as session:
            expected.append(chat(session, ids))
    faulty(monkeypatch, bad, lambda number: number == 8)  # half-way through a step
    found, share = decode_together(model, [(method, lambda s: chat(s, ids)) for method in (bad, *others)], None)
    for one, other in zip(expected, found, strict=True):
        assert_same(without_headroom(one), without_headroom(other), atol=1e-3)
    assert "H2O cannot decode together (ZeroDivisionError: a fault of its own)" in caplog.text and 0.7 < share < 1


def test_a_guest_that_always_fails_ends_with_its_own_fault_and_no_other(ids, monkeypatch):
    model, bad, others = small_model(), H2O(budget=0.5), [make("TOVA", 0.5), coded("KIVI")]
    expected = []
    for method in others:
        with compress(model, method) as session:
            expected.append(chat(session, ids))
    faulty(monkeypatch, bad, lambda number: number >= 8)
    found, _ = decode_together(model, [(method, lambda s: chat(s, ids)) for method in (bad, *others)], None)
    assert isinstance(found[0], ZeroDivisionError)
    for one, other in zip(expected, found[1:], strict=True):
        assert_same(one, other, atol=1e-3)


def test_a_forward_that_fails_for_all_leaves_guests_and_rows_as_they_were(ids, monkeypatch):
    model = small_model()
    chosen = [make("H2O", 0.5), coded("KIVI"), make("Quest", 0.5), make("SnapKV", 0.5), make("AdaKV", 0.4)]
    expected = []
    for method in chosen:
        with compress(model, method) as session:
            expected.append(chat(session, ids))
    calls, stock = [], model.model.layers[1].forward

    def failing(hidden_states, *args, **kwargs):
        if hidden_states.shape[0] > 1:
            calls.append(1)
            if len(calls) > 3:
                raise torch.OutOfMemoryError("all rows at once")
        return stock(hidden_states, *args, **kwargs)

    monkeypatch.setattr(model.model.layers[1], "forward", failing)
    found, share = decode_together(model, [(method, lambda s: chat(s, ids)) for method in chosen], None)
    for one, other in zip(expected, found, strict=True):
        assert_same(without_headroom(one), without_headroom(other), atol=1e-3)
    assert len(calls) == 4 and share < 1


def test_steps_that_a_job_takes_itself_show_in_its_cache_at_once(ids):
    def steps(session):
        session.prefill(ids)
        seen = []
        for token in (3, 5, 7):
            session.step(torch.tensor([[token]]))
            seen.append(session.cache.positions(0).tolist())
        return [[seen, session.cache.logits.detach()]]

    chosen = [make("SnapKV", 0.5), make("AdaKV", 0.5), make("H2O", 0.5)]
    assert assert_together_as_alone(small_model(), chosen, steps) == 1.0


def test_a_model_whose_window_masks_are_not_verified_is_refused(ids, monkeypatch):
    monkeypatch.setattr(joint_forward.compat, "VERIFIED", ())
    with pytest.raises(ValueError, match="cannot decode together: 'gemma3_text' has layers with sliding_attention"):
        decode_together(small_model("gemma3_text"), [], None)
