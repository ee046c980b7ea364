"""ThinK holds the key channels that a loop finds strongest, and attention is that over keys with the others at 0."""

from __future__ import annotations

import pytest
import torch
from helpers import feed, held
from reference import MaskedReference, stock_logits
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.methods import SnapKV, ThinK

LENGTHS = [30, 19]


def loop_channels(query, keys, real, window, kept):
    """Strongest channels per KV head of one row, from queries `[H, n, D]` and keys `[H_kv, n, D]`."""
    columns = [c for c in range(len(real)) if real[c]]
    group, found = len(query) // len(keys), []
    for h in range(len(keys)):
        strength = []
        for d in range(keys.shape[-1]):
            of_keys = sum(float(keys[h, c, d]) ** 2 for c in columns)
            of_queries = 0.0
            for g in range(group):
                of_queries += sum(float(query[h * group + g, c, d]) ** 2 for c in columns[-window:])
            strength.append(of_keys * of_queries)
        found.append(sorted(sorted(range(len(strength)), key=lambda d: -strength[d])[:kept]))
    return found


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("pruned", [0.25, 0.5, 0.8])
def test_the_channels_held_are_those_a_loop_finds(groups, pruned):
    """Per row and KV head of a left-padded batch."""
    model, twin = small_model(groups=groups), small_model(groups=groups, twin=True)
    ids, mask = left_padded(LENGTHS)
    with compress(model, ThinK(pruned=pruned, window=5)) as session:
        session.prefill(ids, attention_mask=mask)
        with MaskedReference(twin) as reference:
            reference.forward(ids, mask)
            for layer in session.cache.layers:
                query, keys, _ = reference.captured[layer.index]
                chosen = layer.encoding.state["channels"]
                kept = max(1, round((1 - pruned) * 16))
                assert layer.store.get("keys").shape[-1] == chosen.shape[-1] == kept
                for row in range(2):
                    assert chosen[row].tolist() == loop_channels(query[row], keys[row], mask[row], 5, kept)


def test_decode_attends_to_keys_whose_other_channels_are_zero():
    """Single steps and a later turn equal each other and attention over what `keys_values` shows; values are whole."""
    model, ids, more = small_model(), random_ids(1, 30), random_ids(1, 6, 2)
    with compress(model, ThinK(pruned=0.5)) as session:
        session.prefill(ids)
        fork = session.cache.fork()
        session.append(more)
        at_once = session.append(random_ids(1, 1, 3))
        steps = [feed(model, fork, more[:, t : t + 1], torch.ones(1, 31 + t, dtype=torch.long)) for t in range(6)]
        last = feed(model, fork, random_ids(1, 1, 3), torch.ones(1, 37, dtype=torch.long))
        keys, values = fork.layers[1].keys_values()
        assert ((keys != 0).any(2).sum(-1) == 8).all() and (values != 0).all()
    assert (last[:, -1] - at_once).abs().max() <= 1e-5
    exact = stock_logits(model, torch.cat([ids, more], 1))[:, 30:]
    assert (torch.cat(steps, 1) - exact).abs().max() > 1e-2


def test_bytes_are_those_of_the_channels_held():
    model, ids = small_model(), random_ids(2, 40)
    with compress(model, ThinK(pruned=0.25)) as session:
        session.prefill(ids)
        state = 2 * 2 * 12 * 2  # channels of two rows and heads, two bytes each
        assert session.cache.nbytes()["keys_values"] == 3 * (80 * 2 * (12 + 16) * 4 + state)


def test_nothing_pruned_is_the_full_cache():
    model = small_model()
    ids, mask = left_padded(LENGTHS)
    more = random_ids(2, 3, 2)
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    with compress(model, ThinK(pruned=0.0)) as session:
        session.prefill(ids, attention_mask=mask)
        got = [feed(model, session.cache, more[:, t : t + 1], whole[:, : 31 + t]) for t in range(3)]
    assert (torch.cat(got, 1) - stock_logits(model, torch.cat([ids, more], 1), whole)[:, 30:]).abs().max() <= 1e-5


def test_eviction_and_pruned_channels_go_together():
    """SnapKV keeps what it keeps alone; channels are chosen by the keys that it keeps."""
    model, ids = small_model(), random_ids(1, 40)
    with compress(model, SnapKV(budget=0.5, window=4)) as session:
        session.prefill(ids)
        alone = held(session.cache, 0)
    with compress(model, SnapKV(budget=0.5, window=4, codec=ThinK(pruned=0.5, window=4))) as session:
        session.prefill(ids)
        assert held(session.cache, 0) == alone
        assert session.cache.layers[0].store.get("keys").shape[-1] == 8
        session.generate(4)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ThinK(pruned=1.0), "pruned=1.0 is a share of the key channels: from 0 to below 1"),
        (lambda: ThinK(pruned=-0.1), "pruned=-0.1"),
        (lambda: ThinK(window=0), "window=0; at least 1"),
    ],
)
def test_bad_settings_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
