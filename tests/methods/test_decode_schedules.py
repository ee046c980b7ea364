"""Every method under one decode schedule, so that they can be compared: against loops, row by row, from Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from helpers import EVICTING, REPRESENTATIVE, all_held, feed, grid, make, thinned
from reference import Choice, Loop, LoopH2O, LoopSnapKV, LoopStreamingLLM, LoopTOVA, best
from small_models import left_padded, random_ids, small_model
from test_cake import LoopCAKE
from test_keydiff import LoopKeyDiff
from test_references import follow

from kvcompress import compress
from kvcompress.method import Schedule
from kvcompress.methods import CAKE, H2O, METHODS, RKV, TOVA, KeyDiff, Random, SnapKV, StreamingLLM
from kvcompress.methods.random import RandomScorer

EVERY = 5
BUDGET = 12
LENGTHS = [24, 7, 15]


@dataclass
class Interval(Loop):
    """In decode a row is cut when it holds its cap and `every` more; its queries are all remembered until then."""

    in_decode: bool = True
    every: int = EVERY
    history: dict = field(default_factory=dict)

    def observe(self, layer, b, query, key, features, row, new, offset):
        super().observe(layer, b, query, key, features, row, new, offset)
        known = self.history.get((layer, b), query[:, :0])
        self.history[layer, b] = torch.cat([known, query], 1)

    def target(self, layer, b):
        return self.caps[b]

    def decide(self, layer, b, query, key, features, row):
        if query.shape[1] == 1 and len(row[0]) < self.target(layer, b) + self.every:
            return
        self.cut_row(layer, b, query, key, features, row)

    def cut_row(self, layer, b, query, key, features, row):
        super().decide(layer, b, self.history[layer, b], key, features, row)


@dataclass
class IntervalH2O(Interval, LoopH2O): ...


@dataclass
class IntervalTOVA(Interval, LoopTOVA): ...


@dataclass
class IntervalSnapKV(Interval, LoopSnapKV): ...


@dataclass
class IntervalStreamingLLM(Interval, LoopStreamingLLM): ...


@dataclass
class IntervalKeyDiff(Interval, LoopKeyDiff): ...


@dataclass
class IntervalCAKE(Interval, LoopCAKE):
    """In decode the last window's mean and variance decide, within what the layer got when the prompt ended."""

    def target(self, layer, b):
        return self.wanted[layer, b]

    def cut_row(self, layer, b, query, key, features, row):
        if query.shape[1] > 1:
            LoopCAKE.decide(self, layer, b, query, key, features, row)
            return
        cap = self.caps[b]
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        for h in range(len(row)):
            columns = sorted(row[h])
            prefix = columns[: len(columns) - window]
            votes = []
            for queries in self.attention(layer, b, self.history[layer, b], key, features, columns, h):
                moments = [self.moments([q[j] for q in queries]) for j in range(len(prefix))]
                votes.append([mean + self.gamma * variance for mean, variance in moments])
            pooled = self._pool(self._reduce(votes))
            self.scores[layer, b, h] = dict(zip(prefix, pooled, strict=True)), set(columns[len(prefix) :])
            self.cut(layer, b, h, self.wanted[layer, b])


@dataclass
class IntervalRandom(Interval):
    """Random keeps what its own numbers say, token by token: they depend on layer, head and position alone."""

    def cut_row(self, layer, b, query, key, features, row):
        padding = int((self.reference.mask[b] == 0).sum())
        for h in range(len(row)):
            if len(row[h]) <= self.caps[b]:
                continue
            view = type("View", (), {"layer": layer, "positions": torch.arange(200).expand(1, len(row), -1)})
            draws = RandomScorer().score(view, None, {})[0, h].tolist()
            scores = {c: draws[c - padding] for c in row[h]}
            row[h] = best(scores, self.caps[b])
            self.choices[layer, b, h] = Choice(set(row[h]), scores, set())


SCHEDULES = [Schedule(every=EVERY), Schedule(every=EVERY, align="total"), None]
FAMILY = [
    (H2O, IntervalH2O, {}),
    (TOVA, IntervalTOVA, {}),
    (partial(StreamingLLM, positions="original"), IntervalStreamingLLM, {"sinks": 2}),
    (SnapKV, IntervalSnapKV, {"window": 3, "kernel": 3}),
    (partial(KeyDiff, block=0), IntervalKeyDiff, {}),
    (CAKE, IntervalCAKE, {"window": 4, "kernel": 3, "pooling": "avg"}),
    (Random, IntervalRandom, {}),
]


@pytest.mark.parametrize(("member", "budget"), thinned(FAMILY, [BUDGET, 0.5], every=2))
def test_under_an_interval_it_keeps_what_the_loop_keeps(member, budget):
    """Rows of different length are each cut when they hold `every` more than their own cap, by the method's rule."""
    method, loop_class, options = member
    follow(
        method(budget=budget, schedule=Schedule(every=EVERY), **options),
        loop_class,
        lengths=LENGTHS,
        later=(1,) * 3 * EVERY,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "align"),
    grid(EVICTING, ["row", "total"], short=lambda name, align: align == "row" or name in ("H2O", "AdaKV")),
)
def test_every_method_holds_the_cap_and_less_than_an_interval_more(name, align):
    """Whatever the allocator gave each head, all rows go back to their prompt's counts when their turn comes."""
    model = small_model(num_hidden_layers=2)
    ids, mask = left_padded(LENGTHS)
    method = make(name, 12, schedule=Schedule(every=EVERY, align=align))
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        target = torch.stack([layer.target for layer in session.cache.full_layers])
        for step in range(2 * EVERY + 2):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            before = session.cache.kept_tokens()
            feed(model, session.cache, random_ids(3, 1, step), mask)
            counts = session.cache.kept_tokens()
            for b, length in enumerate(LENGTHS):
                total = length + step + 1
                due = (before + 1 - target)[:, b].max() >= EVERY
                if align == "total":
                    due = (before + 1 - target)[:, b].max() > 0 and total % EVERY == 0
                expected = torch.minimum(before + 1, target)[:, b] if due else before[:, b] + 1
                assert torch.equal(counts[:, b], expected)
            assert (counts < target + EVERY).all()


def run(model, method, ids, mask, stops, steps):
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        output = session.generate(steps, stop=stops)
        return output.tokens, output.finished, all_held(session)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *thinned((*REPRESENTATIVE, "RKV"), SCHEDULES, every=3),
        *grid([name for name in EVICTING if name not in (*REPRESENTATIVE, "RKV")], SCHEDULES, short=lambda *_: False),
    ],
)
def test_rows_that_finish_at_different_times_get_what_they_get_alone(name, schedule):
    """Three prompts of different length, ended by stop tokens one after the other: tokens and kept positions."""
    model = small_model(num_hidden_layers=2)
    ids, mask = left_padded(LENGTHS, 3)
    method = make(name, BUDGET, schedule=schedule)
    if name == "RKV" and schedule is None:
        method = method.replace(interval=EVERY)
    free = [run(model, method, ids[b : b + 1, -n:], None, (), 14)[0][0] for b, n in enumerate(LENGTHS[:2])]
    stops = [free[0][6], free[1][12]]
    together = run(model, method, ids, mask, stops, 16)
    for b, length in enumerate(LENGTHS):
        tokens, finished, held = run(model, method, ids[b : b + 1, -length:], None, stops, 16)
        assert together[0][b] == tokens[0] and together[1][b] == finished[0]
        assert {layer: rows[b] for layer, rows in together[2].items()} == {
            layer: rows[0] for layer, rows in held.items()
        }
    assert len({len(tokens) for tokens in together[0]}) > 1, "the rows end at different times"


def test_the_family_has_a_schedule_of_its_own_beside_the_common_one():
    """`schedule` replaces a method's own; the record names it."""
    assert METHODS["H2O"](budget=0.5).parts().names()["schedule"] == "prompt+every1"
    for cls in METHODS.values():
        named = cls(budget=0.5)
        replaced = named.replace(schedule=Schedule(every=128, align="total"))
        assert replaced.parts().names()["schedule"] == "prompt+every128(total)"
    assert RKV(budget=64).parts().names()["schedule"] == "prompt+every128"
    assert str(Schedule(prompt=False)) == "never"
