"""LagKV keeps, of every chunk, what is unusual for the chunk after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import thinned
from reference import Choice, Loop, best
from small_models import random_ids, small_model
from test_references import SIZES, follow

from kvcompress import compress
from kvcompress.methods import LagKV


def spread(chunk, reference):
    """Per token: softmax over the chunk of the deviation over channels, scaled to the reference's range."""
    deviations = []
    for token in chunk:
        scaled = []
        for d, x in enumerate(token):
            low, high = min(t[d] for t in reference), max(t[d] for t in reference)
            scaled.append((x - low) / (high - low + 1e-6))
        mean = sum(scaled) / len(scaled)
        deviations.append(math.sqrt(sum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1)))
    return torch.tensor(deviations).softmax(0).tolist()  # in float32: small ones are 0


@dataclass
class LoopLagKV(Loop):
    sinks: int = 2
    lag: int = 3
    value_weight: float = 1.0
    cross: bool = False

    def decide(self, layer, b, query, key, features, row):
        cap, value = self.caps[b], self.reference.values[layer][b]
        prompt = query.shape[1] > 1
        sinks, lag = self.sinks, self.lag
        if cap < sinks + lag + 1:
            lag = min(lag, cap // 2)
            sinks = min(sinks, cap - lag - 1)
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) <= cap or (not prompt and len(columns) < cap + self.lag):
                continue
            scores = {c: 2 + i / len(columns) for i, c in enumerate(columns)}  # after the chunks: the latest first
            start = sinks
            while lag and start + 2 * lag <= len(columns):
                chunk, after = columns[start : start + lag], columns[start + lag : start + 2 * lag]
                of = {
                    which: spread([x[h, c].tolist() for c in chunk], [x[h, c].tolist() for c in after])
                    for which, x in (("key", key), ("value", value))
                }
                both = [k + self.value_weight * v for k, v in zip(of["key"], of["value"], strict=True)]
                order = sorted(range(lag), key=lambda i: (-both[i], i))
                for rank, i in enumerate(order):
                    scores[chunk[i]] = both[i] / (1 + self.value_weight) if self.cross else 1 - rank / lag
                start += lag
            guarded = set(columns[:sinks]) | set(columns[len(columns) - lag :] if lag else [])
            scores = {c: s for c, s in scores.items() if c not in guarded}
            row[h] = best(scores, cap - len(guarded)) | guarded
            self.choices[layer, b, h] = Choice(set(row[h]), scores, guarded)


@pytest.mark.parametrize(("sizes", "options"), thinned(SIZES, [{}, {"value_weight": 0.0}, {"cross": True}], every=3))
def test_it_keeps_what_the_loop_keeps(sizes, options):
    """Several chunks, two rows, decode until `lag` more tokens have come, twice, and a later turn."""
    options = {"sinks": 2, "lag": 3, **options}
    follow(LagKV(budget=10, **options), LoopLagKV, sizes=sizes, later=(*[1] * 8, 7, 1, 1), **options)


@pytest.mark.parametrize(("budget", "lag"), thinned([0.1, 0.3, 0.5, 12], [2, 4, 9], every=3))
def test_lags_of_any_length_and_small_shares_keep_what_the_loop_keeps(budget, lag):
    """The lag shrinks where the budget cannot hold it, and where no two chunks fit the latest are kept."""
    options = {"sinks": 1, "lag": lag}
    follow(LagKV(budget=budget, **options), LoopLagKV, lengths=[33, 18, 7], later=(), **options)


def test_every_chunk_keeps_the_same_number():
    """A budget of sinks + tail + r of each chunk keeps r of each chunk: what the paper's ratio does."""
    sinks, lag, chunks, rest = 2, 8, 5, 3
    length = sinks + lag * (chunks + 1) + rest
    budget = sinks + lag + rest + chunks * lag // 4
    with compress(small_model(), LagKV(budget=budget, sinks=sinks, lag=lag)) as session:
        cache = session.prefill(random_ids(1, length)).cache
        for layer in session.full_layers:
            for head in cache.positions(layer)[0].tolist():
                per_chunk = [sum(sinks + i * lag <= p < sinks + (i + 1) * lag for p in head) for i in range(chunks)]
                assert per_chunk == [lag // 4] * chunks
                assert head[:sinks] == list(range(sinks)) and head[-lag - rest :] == list(
                    range(length - lag - rest, length)
                )


def test_a_channel_that_does_not_vary_gives_no_nan():
    from kvcompress.methods.lagkv import LagScorer

    keys = torch.zeros(1, 12, 4)
    assert LagScorer(0, 3).order(keys, keys, 0, 3).isfinite().all()


def test_scores_do_not_see_scale_or_shift_of_a_channel():
    from kvcompress.methods.lagkv import LagScorer

    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 40, 8, generator=generator), torch.randn(2, 40, 8, generator=generator)
    scale, shift = torch.rand(8, generator=generator) + 0.5, torch.randn(8, generator=generator)
    scorer = LagScorer(4, 6, cross=True)
    difference = scorer.order(keys, values, 4, 6) - scorer.order(keys * scale + shift, values, 4, 6)
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("options", [{"sinks": -1}, {"lag": 1}, {"value_weight": -1.0}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LagKV(budget=0.5, **options)
    with pytest.raises(ValueError, match="sinks plus window need 144"):
        LagKV(budget=100)
