"""Sessions that decode as rows of one batch see what they would have seen alone."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import grid, make
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.hook import joint_decoding
from kvcompress.hook.joint_decoding import decode_together
from kvcompress.hook.ragged_rows import guest_reason
from kvcompress.hook.shared_prefill import prefill_once
from kvcompress.method import Chunked, Needs
from kvcompress.methods import CAKE, TOVA, Full, SnapKV

STOP = tuple(range(2, 20))


@pytest.fixture
def ids():
    return random_ids(1, 80)


def methods(*names):
    return [make(name, budget) for name in names for budget in (0.2, 0.5, 24)]


def talk(session, ids):
    """Two answers, one of which may stop early, and a later turn that is compressed: all that can be seen of it."""
    seen = []
    session.prefill(ids)
    session.append(ids[:, :5])
    for action in (lambda: session.append(ids[:, 7:9]), lambda: session.prefill(ids[:, :30], cache=session.cache)):
        answer = session.generate(7, stop=STOP if len(seen) else ())
        report = session.report()
        report.pop("time")
        report.pop("kernel")  # that of a batch
        positions = [session.cache.positions(layer).tolist() for layer in session.full_layers]
        seen.append([answer.tokens, answer.finished, report, positions, session.cache.logits.detach()])
        action()
    seen.append([session.generate(2).tokens])
    return seen


def alone(model, method, shared, ids):
    with compress(model, method, shared=shared) as session:
        return talk(session, ids)


def assert_same(one, other, atol=1e-5):
    assert not isinstance(other, BaseException), other
    for turn, again in zip(one, other, strict=True):
        for value, found in zip(turn, again, strict=True):
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, found, atol=atol, rtol=0)
            else:
                assert value == found


@pytest.mark.parametrize("architecture", grid(["llama", "glm4", "smollm3"], short=("llama", "glm4").__contains__))
def test_tokens_reports_positions_and_logits_equal_those_of_sessions_alone(architecture, ids):
    model = small_model(architecture)
    names = ("SnapKV", "PyramidKV", "AdaKV", "Knorm", "Random") if architecture == "llama" else ("SnapKV", "AdaKV")
    chosen = [*methods(*names), Full()]
    shared = prefill_once(model, ids, Needs(window=8))
    expected = [alone(model, method, shared, ids) for method in chosen]
    found, share = decode_together(model, [(method, lambda s: talk(s, ids)) for method in chosen], shared)
    assert share > 0.9
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    assert model.config._attn_implementation == "eager" and not model._forward_pre_hooks


def test_one_forward_answers_all_rows(ids, monkeypatch):
    model, steps = small_model(fresh=True), []
    model.register_forward_hook(lambda *a: steps.append(1))
    shared = prefill_once(model, ids, Needs(window=3))
    steps.clear()

    def job(session):
        session.prefill(ids)
        return session.generate(5).tokens

    results, share = decode_together(model, [(method, job) for method in methods("SnapKV", "Random")], shared)
    assert len(steps) == 4 and share == 1.0 and all(len(tokens[0]) == 5 for tokens in results)


def test_a_job_that_raises_ends_alone(ids):
    model, shared = small_model(), None
    shared = prefill_once(model, ids, Needs(window=3))

    def bad(session):
        session.prefill(ids)
        session.generate(2)
        raise ZeroDivisionError

    def refused(session):
        session.prefill(ids)
        session.append(ids[:, :0])

    chosen = methods("SnapKV")
    jobs = [
        (chosen[0], lambda s: talk(s, ids)),
        (chosen[1], bad),
        (chosen[2], refused),
        (Full(), lambda s: talk(s, ids)),
    ]
    found, _ = decode_together(model, jobs, shared)
    assert isinstance(found[1], ZeroDivisionError) and isinstance(found[2], ValueError)
    assert_same(alone(model, chosen[0], shared, ids), found[0])
    assert_same(alone(model, Full(), shared, ids), found[3])


@pytest.mark.parametrize("after", [0, 3])
def test_a_joint_step_that_fails_leaves_each_to_decode_alone(ids, monkeypatch, after, caplog):
    model = small_model()
    shared = prefill_once(model, ids, Needs(window=3))
    chosen = methods("SnapKV", "AdaKV")[::2]
    expected = [alone(model, method, shared, ids) for method in chosen]
    calls, stock = [], model.model.layers[1].forward

    def failing(hidden_states, *args, **kwargs):
        if hidden_states.shape[0] > 1:
            calls.append(1)
            if len(calls) > after:
                raise torch.OutOfMemoryError("all rows at once")
        return stock(hidden_states, *args, **kwargs)

    monkeypatch.setattr(model.model.layers[1], "forward", failing)
    found, share = decode_together(model, [(method, lambda s: talk(s, ids)) for method in chosen], shared)
    assert len(calls) == after + 1 and share < 1 and "all rows at once" in caplog.text
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def test_an_interrupt_ends_every_thread(ids, monkeypatch):
    model = small_model()
    shared = prefill_once(model, ids, Needs(window=3))
    before = threading.active_count()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(joint_decoding.Batch, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode_together(model, [(method, lambda s: talk(s, ids)) for method in methods("SnapKV")], shared)
    assert threading.active_count() == before
    monkeypatch.undo()
    assert_same(talk_once(model, shared, ids), talk_once(model, shared, ids))


def talk_once(model, shared, ids):
    return alone(model, make("SnapKV", 0.5), shared, ids)


@pytest.mark.parametrize(
    "method, says",
    [
        (TOVA(budget=0.5), "evicts while decoding"),
        (CAKE(budget=0.5), "evicts while decoding"),
        (CAKE(budget=0.5, decode=False), None),
        (TOVA(budget=1.0), None),
        (SnapKV(budget=0.5, prefill=Chunked(chunk=8)), None),
    ],
)
def test_a_method_that_evicts_while_decoding_is_no_row_of_the_ragged_batch(method, says):
    found = guest_reason(method)
    assert found is None if says is None else says in found
