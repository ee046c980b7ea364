"""Nothing passes from one sample, session, cache or exception to the next."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from helpers import OTHERWISE_HELD, THROUGH_MODEL, all_held, every_method, feed, fingerprint, grid, make
from reference import stock_logits
from small_models import altered, left_padded, random_ids, small_model
from transformers import AttentionInterface, AttentionMaskInterface

from kvcompress import compress
from kvcompress.method import Method, Scorer
from kvcompress.methods import METHODS, Full


def anatomy(model):
    """Everything a session might leave on a model."""
    return {
        "implementation": model.config._attn_implementation,
        "own": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "forward": {name: getattr(m.forward, "__func__", m.forward) for name, m in model.named_modules()},
        "generate": getattr(model.generate, "__func__", model.generate),
        "hooks": {
            name: tuple(len(getattr(m, kind)) for kind in vars(m) if kind.endswith("_hooks"))
            for name, m in model.named_modules()
        },
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "class": type(model),
    }


@dataclass(frozen=True, kw_only=True)
class Exploding(Method):
    """Raises in the scorer of the second layer, in prompt or in decode."""

    at: str = "prompt"

    def make_scorer(self):
        return _Exploding(self.at)


class _Exploding(Scorer):
    def __init__(self, at):
        self.at = at

    def score(self, view, observed, state):
        if view.layer == 1 and view.phase == self.at:
            raise ZeroDivisionError("in the middle of a prefill")
        return view.positions.expand(*view.keys.shape[:3]).float()


@pytest.mark.parametrize(
    ("name", "implementation"),
    grid(
        sorted(METHODS),
        ["eager", "sdpa"],
        short=lambda name, implementation: (
            name in (*OTHERWISE_HELD, "CacheBlend") if implementation == "sdpa" else name in ("Full", "H2O")
        ),
    ),
)
def test_after_the_block_the_model_is_the_stock_model(name, implementation):
    """Implementation, functions, hooks, attributes, configuration and logits are exactly those before."""
    model = small_model(attn=implementation)
    ids, mask = left_padded([12, 5])
    before, logits = anatomy(model), stock_logits(model, ids, mask)
    with compress(model, make(name, 0.5)) as session:
        session.prefill(ids, attention_mask=mask)
        session.generate(3)
        if name in THROUGH_MODEL:
            model.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert anatomy(model) == before
    assert torch.equal(stock_logits(model, ids, mask), logits)
    assert "generate" not in vars(model) and "forward" not in vars(model)


def weight_without_a_version(model):
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        weight_without_a_version,
        lambda model: model.set_attn_implementation("sdpa"),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.train(),
        lambda model: setattr(model, "generate", None),
        lambda model: setattr(model.generation_config, "eos_token_id", 3),
        lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None),
    ],
)
def test_a_test_that_alters_a_shared_model_is_noticed_and_the_next_gets_a_new_one(change):
    model = small_model(seed=77, num_hidden_layers=2)
    assert altered() == [] and small_model(seed=77, num_hidden_layers=2) is model
    change(model)
    (found,) = altered()
    assert "('seed', 77)" in found and small_model(seed=77, num_hidden_layers=2) is not model


def test_an_exception_in_a_scorer_leaves_the_stock_model():
    """After an exception in the middle of a prefill the model is the stock model, and a new session works."""
    model = small_model()
    ids = random_ids(1, 12)
    before, logits = anatomy(model), stock_logits(model, ids)
    with pytest.raises(ZeroDivisionError), compress(model, Exploding(budget=0.5)) as session:
        session.prefill(ids)
    assert anatomy(model) == before
    assert torch.equal(stock_logits(model, ids), logits)
    with compress(model, Full()) as session:
        assert (session.prefill(ids).logits - logits[:, -1]).abs().max() <= 1e-5


def test_an_exception_in_the_model_leaves_the_stock_model():
    """The same when the model itself fails between two layers."""
    model = small_model(fresh=True)
    ids = random_ids(1, 12)

    def fail(*_):
        raise ZeroDivisionError("in a layer")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), compress(model, make("H2O", 0.5)) as session:
        session.prefill(ids)
    handle.remove()
    fresh = small_model()
    assert anatomy(model)["own"] == anatomy(fresh)["own"]
    assert anatomy(model)["hooks"] == anatomy(fresh)["hooks"]
    assert model.config._attn_implementation == "eager"
    assert torch.equal(stock_logits(model, ids), stock_logits(fresh, ids))


def test_a_session_goes_on_after_a_failed_sample():
    """Within one session, a sample that fails half way does not touch the next one."""
    model = small_model()
    ids = random_ids(1, 12)
    with compress(model, make("H2O", 0.5)) as session:
        expected = session.prefill(ids).logits
        kept = all_held(session)
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.prefill(random_ids(1, 20, 3))
        handle.remove()
        assert torch.equal(session.prefill(ids).logits, expected)
        assert all_held(session) == kept


@pytest.mark.parametrize("name", every_method())
def test_a_sample_gives_the_same_logits_first_or_third(name):
    """Order of samples within a session, and a fresh session, change nothing."""
    model = small_model()
    samples = [left_padded([20, 11], seed) for seed in range(3)]

    def run(session, sample):
        ids, mask = sample
        logits = [session.prefill(ids, attention_mask=mask).logits]
        for t in range(2):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            logits.append(feed(model, session.cache, random_ids(2, 1, t), mask)[:, -1])
        return torch.stack(logits), all_held(session)

    with compress(model, make(name, 0.4)) as session:
        first, kept_first = run(session, samples[0])
        run(session, samples[1])
        run(session, samples[2])
    with compress(model, make(name, 0.4)) as session:
        run(session, samples[1])
        run(session, samples[2])
        third, kept_third = run(session, samples[0])
    assert kept_first == kept_third
    assert torch.equal(first, third)


@pytest.mark.parametrize("name", every_method(sorted(METHODS), short=OTHERWISE_HELD))
def test_fork_leaves_the_original_unchanged(name):
    """Decoding and evicting in a fork changes no byte of the original, and both go on alike."""
    model = small_model()
    ids, mask = left_padded([16, 9])
    with compress(model, make(name, 0.5)) as session:
        original = session.prefill(ids, attention_mask=mask).cache
        before, kept, length = fingerprint(original), all_held(session, original), original.get_seq_length()
        fork = original.fork()
        assert {t.untyped_storage().data_ptr() for t in tensors(original)}.isdisjoint(
            t.untyped_storage().data_ptr() for t in tensors(fork)
        )
        longer = mask
        in_fork = []
        for t in range(4):
            longer = torch.cat([longer, torch.ones(2, 1, dtype=torch.long)], 1)
            in_fork.append(feed(model, fork, random_ids(2, 1, t), longer))
        assert fingerprint(original) == before
        assert all_held(session, original) == kept
        assert (original.get_seq_length(), fork.get_seq_length()) == (length, length + 4)
        longer = mask
        for t in range(4):
            longer = torch.cat([longer, torch.ones(2, 1, dtype=torch.long)], 1)
            assert torch.equal(feed(model, original, random_ids(2, 1, t), longer), in_fork[t])
        assert all_held(session, original) == all_held(session, fork)


def tensors(cache):
    from helpers import tensors_of

    return [t for layer in cache.layers for t in tensors_of(layer) if t.numel()]


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2"])
def test_fork_copies_sliding_layers_too(architecture):
    """Layers that keep transformers' class are forked as well."""
    model = small_model(architecture)
    ids = random_ids(1, 16)
    with compress(model, make("SnapKV", 0.5)) as session:
        original = session.prefill(ids).cache
        fork = original.fork()
        mask = torch.ones(1, 17, dtype=torch.long)
        first = feed(model, fork, random_ids(1, 1, 3), mask)
        feed(model, fork, random_ids(1, 1, 4), torch.ones(1, 18, dtype=torch.long))
        assert torch.equal(feed(model, original, random_ids(1, 1, 3), mask), first)


def test_nothing_outlives_the_block():
    """Session and cache are garbage once the block is left and the caller lets go; registrations do not pile up."""
    model = small_model()
    with compress(model, Full()):
        pass
    registered = len(AttentionInterface._global_mapping), len(AttentionMaskInterface._global_mapping)
    with compress(model, make("H2O", 0.5)) as session:
        session.prefill(random_ids(1, 20))
        session.generate(3)
        model.generate(random_ids(1, 20), max_new_tokens=2)
        watched = [weakref.ref(session), weakref.ref(session.cache), weakref.ref(session.cache.layers[0])]
    del session
    gc.collect()
    assert [w() for w in watched] == [None] * 3
    assert (len(AttentionInterface._global_mapping), len(AttentionMaskInterface._global_mapping)) == registered


def test_a_closed_session_refuses_to_work():
    """A session used after its block says so instead of running the stock model."""
    model = small_model()
    with compress(model, make("SnapKV", 0.5)) as session:
        cache = session.prefill(random_ids(1, 12)).cache
    for call in (
        lambda: session.prefill(random_ids(1, 12)),
        lambda: session.append(random_ids(1, 2)),
        lambda: session.generate(2),
        lambda: model(random_ids(1, 1), cache=cache),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()


def test_methods_hold_no_state_between_sequences():
    """One method object used for two models and many samples stays equal to a fresh one."""
    method = make("H2O", 0.5)
    before = repr(method), hash(method)
    for seed in (0, 1):
        model = small_model(seed=seed)
        with compress(model, method) as session:
            session.prefill(random_ids(1, 20, seed))
            session.generate(4)
    assert (repr(method), hash(method)) == before
    assert method == make("H2O", 0.5)


def test_sessions_can_be_opened_again_and_nested_on_other_models():
    """A second session on the same model after the first, with another method, is unaffected by the first."""
    model, ids = small_model(), random_ids(1, 20)
    with compress(model, make("TOVA", 0.5)) as session:
        expected = session.prefill(ids).logits
        kept = all_held(session)
    with compress(model, make("H2O", 0.2)) as session:
        session.prefill(ids)
    with compress(model, make("TOVA", 0.5)) as session:
        assert torch.equal(session.prefill(ids).logits, expected)
        assert all_held(session) == kept
