"""Scissorhands drops, many at once, the tokens that most of the last queries gave less than an even share."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from helpers import thinned
from reference import Choice, Loop
from small_models import random_ids, small_model
from test_references import SIZES, follow

from kvcompress import compress
from kvcompress.kernels import blockwise
from kvcompress.methods import Scissorhands
from kvcompress.methods.scissorhands import PersistenceScorer


@dataclass
class LoopScissorhands(Loop):
    history: int = 400
    recent: int = 10
    drop: int = 8
    rule: str = "below"
    group_reduce: str = "mean"
    past: dict = field(default_factory=dict)
    drops: int = 0

    def observe(self, layer, b, query, key, features, row, new, offset):
        self.past.setdefault((layer, b), []).extend((at, query[:, at - offset]) for at in new)

    def decide(self, layer, b, query, key, features, row):
        cap = self.caps[b]
        decoding = query.shape[1] == 1
        recent_count = self.recent if cap >= self.recent + 1 else min(self.recent, cap // 2)
        queries = self.past[layer, b][-self.history :]
        stacked, first = torch.stack([q for _, q in queries], 1), queries[0][0]
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) <= cap or (decoding and len(columns) < cap + self.drop):
                continue
            votes = dict.fromkeys(columns, 0.0)
            for at, _ in queries:
                number = sum(c <= at for c in columns)
                if number == 0:  # all it saw is gone
                    continue
                heads = list(self.probabilities(stacked, key, features, h, columns, first, at))
                for c in columns:
                    if c > at:
                        continue
                    values = [head[c] for head in heads]
                    share = max(values) if self.group_reduce == "max" else sum(values) / len(values)
                    low = share * number < 1 - 1e-5
                    votes[c] += {"below": -float(low), "above": float(not low), "sum": share}[self.rule]
            recent = set(columns[len(columns) - recent_count :])
            if self.rule == "sum":
                order = sorted(set(columns) - recent, key=lambda c: (-votes[c], c))
                scores = {c: votes[c] for c in order}
            else:  # of equals the oldest goes
                order = sorted(set(columns) - recent, key=lambda c: (-votes[c], -c))
                scores = {c: float(-i) for i, c in enumerate(order)}
            row[h] = set(order[: cap - recent_count]) | recent
            self.drops += decoding
            self.choices[layer, b, h] = Choice(set(row[h]), scores, recent)


OPTIONS = {"history": 9, "recent": 3, "drop": 4}


@pytest.mark.parametrize(
    ("sizes", "extra"),
    thinned(SIZES, [{}, {"rule": "above"}, {"rule": "sum", "group_reduce": "max"}, {"history": 400}], every=4),
)
def test_it_keeps_what_the_loop_keeps(sizes, extra):
    """At prompt end, every few decoded tokens and in a later turn, by the votes of the last queries."""
    options = {**OPTIONS, **extra}
    later = (1,) * 9 + (6, 1, 1, 1, 1, 1)
    loop = follow(Scissorhands(budget=8, **options), LoopScissorhands, sizes=sizes, later=later, **options)
    assert loop.drops == 3 * 2 * sizes.get("num_key_value_heads", 2) * 3  # layers, rows, heads, drops of each


def test_the_size_of_blocks_changes_nothing(monkeypatch):
    """Votes are counted a few queries at a time."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 400)
    monkeypatch.setattr(blockwise, "MIN_BLOCK", 2)
    follow(Scissorhands(budget=8, **OPTIONS), LoopScissorhands, later=(1,) * 6, **OPTIONS)


def test_a_small_share_shrinks_what_is_protected():
    options = {**OPTIONS, "recent": 6}
    follow(Scissorhands(budget=0.3, **options), LoopScissorhands, lengths=[24, 15, 7], later=(1,) * 6, **options)


def test_it_drops_many_at_once_and_holds_no_more_than_its_buffer():
    """With a budget in tokens half of a buffer of twice that goes at once."""
    held = []
    with compress(small_model(), Scissorhands(budget=12, recent=3)) as session:
        session.prefill(random_ids(1, 30))
        for _ in range(30):
            session.generate(1)
            held.append(session.cache.kept_tokens().unique().tolist())
        assert session.cache.positions(0)[0, 0].tolist()[-3:] == [56, 57, 58]
    assert [n for [n] in held] == [*range(12, 24), *range(12, 24), *range(12, 18)]


def score(attention, positions, at, **options):
    scorer = PersistenceScorer(**{"history": 3, "recent": 1, **options})
    observed = SimpleNamespace(window_parts=lambda size: iter([(attention, at)]))
    return scorer.score(SimpleNamespace(positions=positions), observed, {})[0, 0]


def test_a_hand_made_case():
    """Three queries over six tokens: counts of shares below 1/t, the newest token judged by the one query that saw it."""
    attention = torch.tensor([[0.5, 0.1, 0.1, 0.3, 0, 0], [0.3, 0.1, 0.3, 0.1, 0.2, 0], [0.2, 0.1, 0.3, 0.1, 0.1, 0.2]])
    positions, at = torch.arange(6)[None, None], torch.tensor([[3, 4, 5]])
    low = -score(attention[None, None, None], positions, at)
    assert low.ceil().tolist() == [0, 3, 1, 2, 1, 0]
    assert low[0] > low[5], "of equals the later one is better"


def test_even_attention_is_not_below_an_even_share():
    positions, at = torch.arange(7)[None, None], torch.tensor([[4, 5, 6]])
    seen = positions[0] <= at[0][:, None]
    attention = torch.softmax(torch.zeros(3, 7).masked_fill(~seen, float("-inf")), -1)
    assert (-score(attention[None, None, None], positions, at)).ceil().tolist() == [0] * 7


def test_a_query_that_has_lost_all_it_saw_has_no_vote():
    """Its attention over nothing is not a number; no score is."""
    attention = torch.tensor([[float("nan")] * 3, [0.9, 0.1, 0.0]])[None, None, None]
    positions, at = torch.tensor([[[5, 6, 8]]]), torch.tensor([[3, 6]])
    for rule, expected in (("below", [0, -1, 0]), ("above", [1, 0, 0])):
        assert score(attention, positions, at, rule=rule).floor().tolist() == expected
    assert score(attention, positions, at, rule="sum").tolist() == pytest.approx([0.9, 0.1, 0.0])


def test_a_share_as_budget_drops_a_stated_number():
    assert Scissorhands(budget=0.5).parts().schedule.every == 128
    assert Scissorhands(budget=64).parts().schedule.every == 64
    assert Scissorhands(budget=64, drop=5).parts().schedule.every == 5


@pytest.mark.parametrize("options", [{"history": 0}, {"recent": -1}, {"drop": 0}, {"rule": "most"}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Scissorhands(budget=0.5, **options)
