"""CAKE: budgets that layers compete for, handed out in a cascade, and tokens chosen by mean and variance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from helpers import all_held, examples, thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Choice, LoopSnapKV, best
from small_models import left_padded, random_ids, small_model
from test_references import SIZES, follow

from kvcompress import compress
from kvcompress.cache.layouts import ScoreSortedStore
from kvcompress.method import Chunked
from kvcompress.method.apportion import largest_remainder, proportional
from kvcompress.methods import CAKE, H2O, SnapKV
from kvcompress.methods.cake import Preference, published


def one_by_one(weights, room, total):
    """Each token goes to the layer with the largest weight / (tokens so far + 1/2) that has room."""
    counts = [0] * len(weights)
    for _ in range(min(total, sum(room))):
        open_layers = [i for i in range(len(weights)) if counts[i] < room[i]]
        counts[max(open_layers, key=lambda i: (weights[i] / (counts[i] + 0.5), -i))] += 1
    return counts


@dataclass
class LoopCAKE(LoopSnapKV):
    """All layers at once when a prompt ends: what the cascade must arrive at."""

    in_decode: bool = True
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    preferences: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)
    wanted: dict = field(default_factory=dict)

    def attention(self, layer, b, query, key, features, columns, h):
        """Per query head: the attention of each of the last queries to each column."""
        offset = self.reference.seen - query.shape[1]
        at = [c for c in range(offset, self.reference.seen) if self.reference.mask[b, c]]
        heads = [[] for _ in range(query.shape[0] // key.shape[0])]
        for q in at[-self.window :]:
            for g, probabilities in enumerate(self.probabilities(query, key, features, h, columns, offset, q)):
                heads[g].append([probabilities.get(c, 0.0) for c in columns])
        return heads

    @staticmethod
    def moments(values):
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1) if len(values) > 1 else 0.0
        return mean, variance

    def decide(self, layer, b, query, key, features, row):
        cap, prompt = self.caps[b], query.shape[1] > 1
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        entropy = variance = 0.0
        for h in range(len(row)):
            columns = sorted(row[h])
            if not prompt and len(columns) <= self.wanted[layer, b]:
                continue
            prefix = columns[: max(len(columns) - window, 0)]
            per_head = []
            for queries in self.attention(layer, b, query, key, features, columns, h):
                votes = []
                for j in range(len(prefix)):
                    mean, var = self.moments([q[j] for q in queries])
                    votes.append(mean + self.gamma * var if prompt else queries[-1][j])
                    entropy -= sum(q[j] * math.log(q[j] + 1e-10) for q in queries)
                    variance += var
                per_head.append(votes)
            pooled = self._pool(self._reduce(per_head))
            self.scores[layer, b, h] = dict(zip(prefix, pooled, strict=True)), set(columns[len(prefix) :])
            if not prompt:
                self.cut(layer, b, h, self.wanted[layer, b])
        if not prompt:
            return
        self.preferences[layer, b] = max(entropy, 1e-30) ** (1 / self.tau1) * max(variance, 1e-30) ** (1 / self.tau2)
        if layer == self.layers[-1]:
            self.share(b, cap, window)

    def share(self, b, cap, window):
        """The row's budget among all layers, then each cut to its own."""
        held = [len(self.kept[i][b][0]) for i in self.layers]
        guarded = [min(n, window) for n in held]
        weights = [self.preferences[i, b] for i in self.layers]
        room = [n - g for n, g in zip(held, guarded, strict=True)]
        counts = one_by_one(weights, room, cap * len(self.layers) - sum(guarded))
        for i, n, g in zip(self.layers, counts, guarded, strict=True):
            self.wanted[i, b] = n + g if sum(held) > cap * len(self.layers) else cap
            for h in range(len(self.kept[i][b])):
                if len(self.kept[i][b][h]) > n + g:
                    self.cut(i, b, h, n + g)
            self._write(i)

    def cut(self, layer, b, h, wanted):
        scores, recent = self.scores[layer, b, h]
        self.kept[layer][b][h] = best(scores, wanted - len(recent)) | recent
        self.choices[layer, b, h] = Choice(set(self.kept[layer][b][h]), scores, recent)


OPTIONS = {"window": 4, "kernel": 5, "pooling": "avg"}


@pytest.mark.parametrize(("sizes", "budget"), thinned(SIZES, [9, 0.4], every=2))
def test_the_cascade_ends_where_one_decision_over_all_layers_ends(sizes, budget):
    """Layer budgets and kept positions of every head, in two rows of different length, then in decode."""
    loop = follow(
        CAKE(budget=budget, **OPTIONS),
        LoopCAKE,
        sizes={**sizes, "num_hidden_layers": 4},
        lengths=[33, 21],
        later=(1, 1, 1),
        **OPTIONS,
    )
    for b, cap in enumerate(loop.caps):
        wanted = [loop.wanted[i, b] for i in loop.layers]
        assert sum(wanted) == cap * 4 and len(set(wanted)) > 1


@pytest.mark.parametrize("settings", [{"gamma": 0.0}, {"tau1": 0.5, "tau2": 2.0}, {"tau1": math.inf, "tau2": math.inf}])
def test_gamma_and_temperatures_do_what_the_loop_does(settings):
    loop = follow(
        CAKE(budget=0.3, **OPTIONS, **settings), LoopCAKE, lengths=[40, 22], later=(1, 1), **OPTIONS, **settings
    )
    if settings.get("tau2") == math.inf:
        assert {loop.wanted[i, 0] for i in loop.layers} == {loop.caps[0]}


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_window_that_does_not_fit_shrinks(share):
    options = {"window": 8, "kernel": 3, "pooling": "avg"}
    follow(CAKE(budget=share, **options), LoopCAKE, lengths=[30, 17], later=(1, 1), **options)


def test_a_later_turn_keeps_what_the_loop_keeps():
    follow(CAKE(budget=8, **OPTIONS), LoopCAKE, lengths=[24, 15], later=(1, 7, 1, 1), **OPTIONS)


def test_no_more_than_the_budget_and_one_layer_is_held():
    """Sampled before every layer of the prompt."""
    model, budget, length = small_model(num_hidden_layers=6, fresh=True), 12, 80
    held = []
    with compress(model, CAKE(budget=budget, **OPTIONS)) as session:
        cache = session.new_cache()
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda *_: held.append(sum(int(x.counts.sum()) for x in cache.full_layers if x.store is not None))
            )
        session.prefill(random_ids(1, length), cache=cache)
        assert max(held) <= budget * 6 * 2
        assert int(cache.kept_tokens().sum()) == budget * 6 * 2


def test_chunks_hold_exactly_the_budget():
    ids, mask = left_padded([60, 50])
    with compress(small_model(), CAKE(budget=10, prefill=Chunked(chunk=16), **OPTIONS)) as session:
        cache = session.prefill(ids, attention_mask=mask).cache
        assert cache.kept_tokens().sum((0, 2)).tolist() == [60, 60]
        session.generate(8)
        assert session.cache.kept_tokens().sum((0, 2)).tolist() == [60, 60]


def test_without_variance_and_preference_it_ranks_as_snapkv():
    ids, held = random_ids(1, 40), []
    for method in (
        SnapKV(budget=10, **OPTIONS),
        CAKE(budget=10, gamma=0.0, tau1=math.inf, tau2=math.inf, **OPTIONS),
    ):
        with compress(small_model(), method) as session:
            session.prefill(ids)
            held.append(all_held(session))
    assert held[0] == held[1]


def test_other_scorers_and_other_windows_take_the_allocator():
    for method in (
        SnapKV(budget=10, window=3, allocator=Preference(window=6)),
        H2O(budget=10, allocator=Preference(window=4)),
    ):
        with compress(small_model(), method) as session:
            session.prefill(random_ids(2, 40))
            kept = session.cache.kept_tokens()
            assert kept.sum((0, 2)).tolist() == [60, 60] and len(kept.unique()) > 1
            assert method.parts().names()["allocator"] == "cake"
            session.generate(4)


weights_and_room = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 60)), min_size=1, max_size=12)


@settings(max_examples=examples(60, 200), deadline=None)
@given(layers=weights_and_room, total=st.integers(0, 400))
def test_proportional_is_exact_and_equals_handing_out_one_by_one(layers, total):
    weights, room = [max(w, 1e-6) for w, _ in layers], [r for _, r in layers]
    counts = proportional(weights, [0] * len(room), room, total)
    assert sum(counts) == min(total, sum(room))
    expected = one_by_one(weights, room, total)
    quotients = [w / (n + 0.5) for w, n in zip(weights, counts, strict=True)]
    if counts != expected:  # equal quotients may be served in another order
        assert max(abs(a - b) for a, b in zip(counts, expected, strict=True)) <= 1 and quotients
        for i, (a, b) in enumerate(zip(counts, expected, strict=True)):
            if a < b:
                j = next(j for j in range(len(counts)) if counts[j] > expected[j])
                assert weights[i] / (a + 0.5) == pytest.approx(weights[j] / (expected[j] + 0.5))


@settings(max_examples=examples(60, 200), deadline=None)
@given(layers=weights_and_room, total=st.integers(0, 400))
def test_a_cascade_never_wants_a_token_back(layers, total):
    """One more layer at the same total leaves every other with what it had or less."""
    before = []
    for seen in range(1, len(layers) + 1):
        weights, room = [w for w, _ in layers[:seen]], [r for _, r in layers[:seen]]
        counts = proportional(weights, [0] * seen, room, total)
        assert all(now <= then for now, then in zip(counts, before, strict=False))
        before = counts


@settings(max_examples=examples(50, 100), deadline=None)
@given(layers=st.lists(st.floats(0, 40), min_size=1, max_size=12))
def test_largest_remainders_add_up(layers):
    total = round(sum(layers))
    counts = largest_remainder(layers, [0] * len(layers), [1000] * len(layers), total)
    assert sum(counts) == total and all(abs(n - s) < 1.0001 for n, s in zip(counts, layers, strict=True))


def test_the_published_repair_by_hand():
    """Cut down to whole numbers, clipped at 5 with the surplus shared, then one by one to the total."""
    assert published([1.0, 1.0, 1.0], [9, 9, 9], 10) == [4, 3, 3]
    assert published([8.0, 1.0, 1.0], [5, 9, 9], 10) == [5, 3, 2]
    assert published([0.0, 0.0], [4, 4], 4) == [2, 2]


def test_the_published_repair_stays_close_to_the_total():
    """The released code's loss is small; ours has none."""
    ids = random_ids(1, 120)
    with compress(small_model(num_hidden_layers=8), CAKE(budget=20, preset="code", **OPTIONS)) as session:
        kept = session.prefill(ids).cache.kept_tokens().sum()
    assert 0.98 * 20 * 8 * 2 <= kept <= 20 * 8 * 2 + 8 * 2


def test_the_gate_leaves_short_prompts_whole_until_decode():
    """Up to budget plus window nothing goes when the prompt ends; decode then holds the budget. Row by row."""
    ids, mask = left_padded([15, 14])
    for gate, expected in ((True, [11, 14]), (False, [11, 11])):
        with compress(small_model(), CAKE(budget=11, gate=gate, window=3, kernel=5)) as session:
            kept = session.prefill(ids, attention_mask=mask).cache.kept_tokens().double()
            assert kept.mean((0, 2)).tolist() == expected
            session.generate(3)
            assert session.cache.kept_tokens().double().mean((0, 2)).tolist() == [11, 11]
    assert CAKE(preset="code").gate is True and CAKE().gate is False


def test_a_cascade_lets_go_at_the_end_of_a_ranking_without_copying():
    """Between its first cut and the end of the prompt a layer's tensors stay where they are, and get fewer."""
    model, seen = small_model(num_hidden_layers=6, fresh=True), {}
    with compress(model, CAKE(budget=150, **OPTIONS)) as session:
        cache = session.new_cache()

        def look(*_):
            for i, layer in enumerate(cache.full_layers):
                if isinstance(layer.store, ScoreSortedStore):
                    pieces = [piece["keys"].data_ptr() for piece in layer.store._pieces]
                    assert len(pieces) * layer.store.size < int(layer.counts.max()) + layer.store.size
                    seen.setdefault(i, []).append(pieces)

        for layer in model.model.layers:
            layer.register_forward_pre_hook(look)
        session.prefill(random_ids(1, 700), cache=cache)
        assert not any(isinstance(layer.store, ScoreSortedStore) for layer in cache.full_layers)
    assert any(len(pieces[0]) > len(pieces[-1]) for pieces in seen.values())
    for pieces in seen.values():
        assert all(later == earlier[: len(later)] for earlier, later in zip(pieces, pieces[1:], strict=False))


def test_one_layer_is_said():
    model = small_model(num_hidden_layers=1)
    with pytest.warns(UserWarning, match="has one"), compress(model, CAKE(budget=10, **OPTIONS)) as session:
        session.prefill(random_ids(1, 40))
        assert session.cache.kept_tokens().unique().tolist() == [10]
        assert session.report()["notes"]


@pytest.mark.parametrize("options", [{"gamma": -1.0}, {"tau1": 0.0}, {"repair": "some"}, {"window": 1}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CAKE(budget=0.5, **options)
