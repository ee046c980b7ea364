"""KeyDiff keeps the keys that point away from the mean of all keys."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import thinned
from reference import Choice, Loop, best
from small_models import left_padded, random_ids, small_model
from test_references import BUDGET, SIZES, compare, follow

from kvcompress import compress
from kvcompress.method import OneShot
from kvcompress.methods import KeyDiff
from kvcompress.methods.keydiff import KeyDifferenceScorer


@dataclass
class LoopKeyDiff(Loop):
    sinks: int = 0
    window: int = 0

    def decide(self, layer, b, query, key, features, row):
        cap = self.caps[b]
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) <= cap:
                continue
            length = {c: sum(float(x) ** 2 for x in key[h, c]) ** 0.5 for c in columns}
            mean = [sum(float(key[h, c, d]) / length[c] for c in columns) / len(columns) for d in range(key.shape[2])]
            size = sum(x * x for x in mean) ** 0.5
            cosine = {
                c: sum(float(x) * y for x, y in zip(key[h, c], mean, strict=True)) / length[c] / size for c in columns
            }
            guarded = set(columns[: self.sinks]) | set(columns[len(columns) - self.window :])
            scores = {c: -cosine[c] for c in columns if c not in guarded}
            row[h] = best(scores, cap - len(guarded)) | guarded
            self.choices[layer, b, h] = Choice(set(row[h]), scores, guarded)


@pytest.mark.parametrize(("sizes", "budget"), thinned(SIZES, [BUDGET, 0.3], every=2))
def test_it_keeps_what_the_loop_keeps(sizes, budget):
    """In prompt, decode and a later turn the anchor is that of the keys still held."""
    follow(KeyDiff(budget=budget), LoopKeyDiff, sizes=sizes, later=(1, 1, 1, 9, 1, 1))


def test_sinks_and_a_window_can_be_protected():
    options = {"sinks": 2, "window": 3}
    follow(KeyDiff(budget=BUDGET, **options), LoopKeyDiff, later=(1,) * 6, **options)


@pytest.mark.parametrize("lengths", [[24, 15], [31, 24]])
def test_a_prompt_in_blocks_keeps_what_the_loop_keeps_block_by_block(lengths):
    """After each block what is held is cut to the budget; no more than budget and block is ever held."""
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded(lengths)
    width = ids.shape[1]
    with compress(model, KeyDiff(budget=BUDGET, block=8)) as session, LoopKeyDiff(twin, BUDGET) as loop:
        loop.layers = session.full_layers
        got = session.prefill(ids, attention_mask=mask).logits
        for start in range(0, width, 8):
            expected = loop.step(ids[:, start : start + 8], mask[:, start : start + 8], prompt=True)[:, -1]
        compare(session, loop, lengths, width)
        assert max(moment["tokens_held"] for moment in session.report()["moments"]) <= BUDGET
        assert session.report()["kv"]["kept_tokens_max"] <= BUDGET + 8
    assert (got - expected).abs().max() <= 2e-5


def test_a_block_as_long_as_the_prompt_is_one_shot():
    model, ids = small_model(), random_ids(1, 40)
    held = []
    for options in ({"block": 0}, {"block": 40}, {"block": 100}, {"prefill": OneShot()}, {"preset": "kvpress"}):
        with compress(model, KeyDiff(budget=10, **options)) as session:
            held.append(session.prefill(ids).cache.positions(1))
    assert all(torch.equal(held[0], other) for other in held)


def score(keys, positions=None):
    positions = torch.arange(keys.shape[2]).expand(keys.shape[:3]) if positions is None else positions
    return KeyDifferenceScorer().score(SimpleNamespace(keys=keys, positions=positions), None, {})


def test_scores_are_cosines():
    """In [-1, 1]; unchanged by the length of a key, by a common rotation, and by what lies in empty slots."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 12, 16, generator=generator)
    plain = score(keys)
    assert plain.abs().max() <= 1 + 1e-6
    longer = keys.clone()
    longer[:, :, 3] *= 50
    assert (score(longer) - plain).abs().max() <= 1e-5
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0]
    assert (score(keys @ turn) - plain).abs().max() <= 1e-5
    order = torch.randperm(12, generator=generator)
    assert (score(keys[:, :, order]) - plain[:, :, order]).abs().max() <= 1e-5
    padded = torch.cat([torch.full((2, 2, 3, 16), float("nan")), keys], 2)
    positions = torch.cat([torch.full((2, 2, 3), -1), torch.arange(12).expand(2, 2, 12)], 2)
    assert (score(padded, positions)[:, :, 3:] - plain).abs().max() <= 1e-5


def test_an_outlier_is_best_and_copies_are_worst():
    keys = torch.ones(1, 1, 9, 4) + 0.01 * torch.randn(1, 1, 9, 4, generator=torch.Generator().manual_seed(0))
    keys[0, 0, 4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert score(keys)[0, 0].argmax() == 4


@pytest.mark.parametrize("options", [{"block": -1}, {"sinks": -1}, {"window": -1}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        KeyDiff(budget=0.5, **options)
