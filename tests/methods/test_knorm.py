"""Knorm keeps the tokens whose keys have the smallest norm, and gives its first layers what it says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import thinned
from reference import Choice, Loop, best
from small_models import left_padded, random_ids, small_model
from test_references import BUDGET, SIZES, compare, follow

from kvcompress import compress
from kvcompress.methods import Knorm
from kvcompress.methods.knorm import First


@dataclass
class LoopKnorm(Loop):
    in_decode: bool = False
    skip_layers: int = 0

    def decide(self, layer, b, query, key, features, row):
        real = int(self.reference.mask[b].sum())
        cap = first_layers(self.caps[b], real, self.skip_layers, len(self.layers))[layer]
        for h in range(len(row)):
            if len(row[h]) > cap:
                scores = {c: -(sum(float(x) ** 2 for x in key[h, c]) ** 0.5) for c in sorted(row[h])}
                row[h] = best(scores, cap)
                self.choices[layer, b, h] = Choice(set(row[h]), scores, set())


def first_layers(cap, real, skip, layers):
    """The first `skip` layers get all they can hold out of at most half of everything, the others the rest."""
    if skip == 0 or skip >= layers or cap >= real:
        return [cap] * layers
    whole = min(real, max(cap, cap * layers // (2 * skip)))
    while cap * layers - whole * skip < layers - skip:
        whole -= 1
    counts = [whole] * skip + [0] * (layers - skip)
    for i in range(cap * layers - whole * skip):
        counts[skip + i % (layers - skip)] += 1
    return counts


@pytest.mark.parametrize(("sizes", "budget"), thinned(SIZES, [BUDGET, 0.25, 0.5], every=3))
def test_it_keeps_what_the_loop_keeps(sizes, budget):
    """Batch of a whole and a left-padded row, a later turn and decode."""
    follow(Knorm(budget=budget, skip_layers=0), LoopKnorm, sizes=sizes, later=(1, 1, 9, 1), lengths=[24, 15])


@pytest.mark.parametrize("budget", [0.1, 0.5, 10])
def test_the_first_layers_are_kept_within_the_same_total(budget):
    """Equal totals: what the first layers get is missing in the others, as the loop counts it."""
    model, twin = (small_model(num_hidden_layers=5, twin=twin) for twin in (False, True))
    ids, mask = left_padded([40, 21])
    with compress(model, Knorm(budget=budget)) as session, LoopKnorm(twin, budget, skip_layers=2) as loop:
        loop.layers = session.full_layers
        session.prefill(ids, attention_mask=mask)
        loop.step(ids, mask)
        kept = session.cache.kept_tokens()
        assert kept.sum(0).tolist() == [[cap * 5, cap * 5] for cap in loop.caps]
        compare(session, loop, [40, 21], 40)


def test_published_totals_keep_the_first_layers_on_top():
    model = small_model(num_hidden_layers=4)
    with compress(model, Knorm(budget=0.25, preset="code")) as session:
        session.prefill(random_ids(1, 40))
        assert session.cache.kept_tokens()[:, 0, 0].tolist() == [40, 40, 10, 10]
    with compress(model, Knorm(budget=0.25, preset="kvpress")) as session:
        session.prefill(random_ids(1, 40))
        assert session.cache.kept_tokens()[:, 0, 0].tolist() == [10] * 4


@pytest.mark.parametrize("layers", range(1, 9))
@pytest.mark.parametrize("cap", [1, 2, 7, 30])
def test_numbers_add_up_and_never_rise_after_the_first_layers(layers, cap):
    for real in (cap, cap + 1, 3 * cap, 100 * cap):
        counts = First().numbers(cap, real, layers)
        assert sum(counts) == cap * layers and min(counts) >= 1 and max(counts) <= max(real, cap)
        assert counts == sorted(counts, reverse=True)
        assert counts == first_layers(cap, real, 2, layers)


def test_kept_keys_are_no_longer_than_dropped_ones():
    """The sign of the score: the mean norm of what is kept is below that of all."""
    model = small_model()
    ids = random_ids(1, 40)
    with compress(model, Knorm(budget=1.0)) as session:
        everything = session.prefill(ids).cache.keys_values(1)[0].norm(dim=-1)
    with compress(model, Knorm(budget=0.5, skip_layers=0)) as session:
        kept = session.prefill(ids).cache.keys_values(1)[0].norm(dim=-1)
    assert bool((kept.amax(-1) <= everything.median(-1).values + 1e-6).all())


def test_a_model_with_query_key_norm_is_warned_about():
    """The warning names the model's type and is in the report; other models give none."""
    model = small_model("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.warns(UserWarning, match="qwen3 normalises its keys"), compress(model, Knorm(budget=0.5)) as session:
        session.prefill(random_ids(1, 20))
        assert session.report()["notes"] == [*session.notes] != []
    with compress(small_model(), Knorm(budget=0.5)) as session:
        session.prefill(random_ids(1, 20))
        assert session.report()["notes"] == []


def test_the_score_does_not_see_rotation():
    """A rotation of a key at its position leaves its norm, and so the score."""
    keys = torch.randn(1, 2, 10, 16, generator=torch.Generator().manual_seed(0))
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))[0]

    class View:
        pass

    view, turned = View(), View()
    view.keys, turned.keys = keys, keys @ turn
    from kvcompress.methods.knorm import KeyNormScorer

    difference = KeyNormScorer().score(view, None, {}) - KeyNormScorer().score(turned, None, {})
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("options", [{"skip_layers": -1}, {"totals": "most"}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Knorm(budget=0.5, **options)
