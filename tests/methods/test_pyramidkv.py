"""PyramidKV: SnapKV's choice within budgets that fall from layer to layer and add up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import LoopSnapKV
from small_models import left_padded, random_ids, small_model
from test_references import SIZES, follow

from kvcompress import compress
from kvcompress.method import Chunked
from kvcompress.methods import H2O, PyramidKV, SnapKV
from kvcompress.methods.pyramidkv import Pyramid


def released(layers, cap, window, real, beta=20):
    """Tokens per layer as the released code counts them."""
    base = cap - window
    least = base // beta
    most = base * 2 - least
    if most >= real - window:
        most = real - window
        least = base * 2 - most
    step = (most - least) // (layers - 1)
    if real < cap:
        return [real] * layers
    if real < base * 2:
        return [cap] * layers
    return [most - layer * step + window for layer in range(layers)]


def numbers(layers, cap, window, real, beta=20):
    """The same pyramid with steps that are not whole, rounded so that it adds up: from both ends to the middle."""
    if layers == 1 or real < (cap - window) * 2:
        return [cap] * layers
    counts = released(layers, cap, window, real, beta)
    first, last = counts[0], 2 * cap - counts[0]
    for layer in range(layers):
        from_the_end = layers - 1 - layer
        if layer < from_the_end:
            counts[layer] = first - (layer * (first - last)) // (layers - 1)
        elif layer == from_the_end:
            counts[layer] = cap
        else:
            counts[layer] = 2 * cap - counts[from_the_end]
    return counts


@dataclass
class LoopPyramidKV(LoopSnapKV):
    """SnapKV with the layer's own cap in place of the row's."""

    def decide(self, layer, b, query, key, features, row):
        cap, real = self.caps[b], int(self.reference.mask[b].sum())
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        wanted = numbers(len(self.layers), cap, window, real)[self.layers.index(layer)] if real > cap else real
        narrow, whole = self.window, list(self.caps)
        self.window, self.caps[b] = window, wanted
        if wanted < window + 1:  # nothing beside the window
            for h in range(len(row)):
                row[h] = set(sorted(row[h])[-wanted:])
        else:
            super().decide(layer, b, query, key, features, row)
        self.window, self.caps = narrow, whole


OPTIONS = {"window": 3, "kernel": 3}


@pytest.mark.parametrize(("sizes", "budget"), thinned(SIZES, [8, 0.3], every=2))
def test_it_keeps_what_the_loop_keeps(sizes, budget):
    """Two rows of different length, five layers, decoded tokens appended."""
    follow(
        PyramidKV(budget=budget, **OPTIONS),
        LoopPyramidKV,
        sizes={**sizes, "num_hidden_layers": 5},
        lengths=[36, 23],
        later=(1, 1),
        **OPTIONS,
    )


@pytest.mark.parametrize("budget", [6, 0.25, 0.4])
def test_layers_hold_exactly_what_the_formula_says_and_add_up(budget):
    """Per layer and row, and in total: the same number as without a pyramid."""
    ids, mask = left_padded([48, 30])
    with compress(small_model(num_hidden_layers=6), PyramidKV(budget=budget, **OPTIONS)) as session:
        kept = session.prefill(ids, attention_mask=mask).cache.kept_tokens()
    for row, real in enumerate((48, 30)):
        cap = budget if isinstance(budget, int) else round(budget * real)
        assert kept[:, row].tolist() == [[n, n] for n in numbers(6, cap, 3, real)]
        assert int(kept[:, row].sum()) == cap * 6 * 2


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 40),
    window=st.integers(0, 40),
    extra=st.integers(1, 300),
    more=st.integers(1, 3000),
    beta=st.integers(1, 30),
)
def test_numbers_fall_add_up_and_fit(layers, window, extra, more, beta):
    cap = window + extra
    real = cap + more
    counts = Pyramid(beta=beta).numbers(cap, real, window, layers)
    assert sum(counts) == cap * layers
    assert counts == sorted(counts, reverse=True)
    assert counts[0] <= real and counts[-1] >= max(window, 1)
    if layers > 1 and window:
        assert counts == numbers(layers, cap, window, real, beta)
        published = Pyramid(beta=beta, totals="published").numbers(cap, real, window, layers)
        assert published == released(layers, cap, window, real, beta)
        assert cap * layers <= sum(published) <= cap * layers + (layers - 1) ** 2 / 2
    assert Pyramid(beta=1).numbers(cap, real, window, layers) == [cap] * layers
    inside = Pyramid(beta=beta, protected_inside=True).numbers(cap, real, window, layers)
    assert sum(inside) == cap * layers and inside[-1] >= max(window, 1) and inside[0] <= real


def test_the_papers_numbers():
    """128 tokens in 32 layers: what the released code gives its first and last layer, and that it exceeds the mean."""
    published = Pyramid(totals="published").numbers(128, 4000, 8, 32)
    assert (published[0], published[-1], sum(published) / 32) == (242, 25, 133.5)
    exact = Pyramid().numbers(128, 4000, 8, 32)
    assert (exact[0], exact[-1], sum(exact)) == (242, 14, 128 * 32)


def of_kvpress(layers, real, share, window, beta=20):
    """Tokens per layer as kvpress counts them, in fractions until the end."""
    mean = real * share
    least = mean / beta
    most = 2 * mean - least
    if most >= real - window:
        most, least = real - window, 2 * mean - (real - window)
    if not real >= most >= least >= window:
        return [round(mean)] * layers
    step = (most - least) / (layers - 1)
    return [round(most - layer * step) for layer in range(layers)]


def test_the_numbers_of_kvpress_where_the_budget_is_no_whole_number_of_tokens():
    """Half of 553 tokens: rounded first, the pyramid would be flat at 276."""
    allocator = PyramidKV(budget=0.5, preset="kvpress").make_allocator()
    assert allocator.numbers(276, 553, 64, 4) == [489, 347, 206, 64] == of_kvpress(4, 553, 0.5, 64)


@settings(max_examples=300, deadline=None)
@given(
    layers=st.integers(2, 40),
    real=st.integers(66, 5000),
    share=st.floats(0.02, 0.99),
    window=st.sampled_from([8, 32, 64]),
    beta=st.integers(1, 30),
)
def test_every_layer_holds_what_kvpress_counts(layers, real, share, window, beta):
    cap = round(share * real)
    if cap <= window or cap >= real:
        return
    allocator = PyramidKV(budget=share, preset="kvpress", window=window, beta=beta).make_allocator()
    found = allocator.numbers(cap, real, window, layers)
    assert found == of_kvpress(layers, real, share, window, beta)
    assert abs(sum(found) - share * real * layers) <= layers / 2 + 1e-6 or len(set(found)) == 1
    assert window <= min(found) and max(found) <= real and found == sorted(found, reverse=True)


def test_a_session_holds_what_kvpress_counts():
    with compress(small_model(num_hidden_layers=4), PyramidKV(budget=0.5, preset="kvpress", window=4)) as session:
        kept = session.prefill(random_ids(1, 41)).cache.kept_tokens()
        assert kept[:, 0].tolist() == [[n, n] for n in of_kvpress(4, 41, 0.5, 4)] == [[n, n] for n in (37, 26, 15, 4)]
        session.generate(3)
    with compress(small_model(num_hidden_layers=4), PyramidKV(budget=20, preset="kvpress", window=4)) as session:
        kept = session.prefill(random_ids(1, 200)).cache.kept_tokens()[:, 0, 0].tolist()
    assert kept == of_kvpress(4, 200, 0.1, 4) == [20] * 4  # the last layer could not hold the window


def test_short_prompts_are_flat():
    """Below twice the budget every layer gets the same: SnapKV."""
    ids, held = random_ids(1, 30), []
    for cls in (SnapKV, PyramidKV):
        with compress(small_model(), cls(budget=20, **OPTIONS)) as session:
            cache = session.prefill(ids).cache
            held.append([cache.positions(i) for i in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


def test_any_scorer_takes_it_and_one_layer_is_no_error():
    with compress(small_model(num_hidden_layers=4), H2O(budget=8, allocator=Pyramid(beta=4))) as session:
        session.prefill(random_ids(2, 40))
        kept = session.cache.kept_tokens()
        assert kept[:, 0, 0].tolist() == numbers(4, 8, 4, 40, beta=4) and session.generate(4).tokens
        assert session.cache.kept_tokens().sum() == 8 * 4 * 2 * 2
    with compress(small_model(num_hidden_layers=1), PyramidKV(budget=8, **OPTIONS)) as session:
        assert session.prefill(random_ids(1, 40)).cache.kept_tokens().unique().tolist() == [8]


def test_the_chunks_of_a_prompt_never_exceed_the_total():
    ids, mask = left_padded([48, 41])
    with compress(small_model(), PyramidKV(budget=10, prefill=Chunked(chunk=12), **OPTIONS)) as session:
        cache = session.prefill(ids, attention_mask=mask).cache
        assert (cache.kept_tokens().sum((0, 2)) <= 10 * 3 * 2).all()
        assert max(moment["tokens_held"] for moment in session.report()["moments"]) <= 10


@pytest.mark.parametrize("options", [{"beta": 0}, {"totals": "some"}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PyramidKV(budget=0.5, **options)
