"""AdaKV: SnapKV's choice within budgets per head that follow the pooled scores of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from helpers import thinned
from reference import Choice, LoopSnapKV, best
from small_models import left_padded, random_ids, small_model
from test_references import SIZES, follow

from kvcompress import compress
from kvcompress.cache.layouts import RaggedStore
from kvcompress.methods import H2O, AdaKV, SnapKV
from kvcompress.methods.adakv import Ada


def handed_out(scores, even, alpha, safeguard, total_per_head, window):
    """Tokens beside the window per head; `scores[h]` is a list. Each total is the even one times the heads."""
    heads = len(scores)
    sure = 0 if safeguard == "mix" else max(0, math.floor(total_per_head * alpha) - window)
    hits = [min(sure, len(s)) for s in scores]
    rest = []
    for h, values in enumerate(scores):
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        rest += [(-values[i], h, i) for i in order[sure:]]
    for _, h, _ in sorted(rest)[: even * heads - sum(hits)]:
        hits[h] += 1
    if safeguard == "first":
        return hits
    shares = [round(n * (1 - alpha) + even * alpha, 9) for n in hits]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(heads), key=lambda h: (counts[h] - shares[h], h))
    for h in by_remainder[: even * heads - sum(counts)]:
        counts[h] += 1
    return counts


@dataclass
class LoopAdaKV(LoopSnapKV):
    alpha: float = 0.2
    safeguard: str = "mix"
    counts: dict = field(default_factory=dict)

    def decide(self, layer, b, query, key, features, row):
        """SnapKV's scores of all heads, then the heads' own numbers."""
        cap = self.caps[b]
        before = [set(r) for r in row]
        if all(len(r) <= cap for r in row):
            return
        super().decide(layer, b, query, key, features, row)
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        choices = [self.choices[layer, b, h] for h in range(len(row))]
        scores = [[c.scores[column] for column in sorted(c.scores)] for c in choices]
        counts = handed_out(scores, cap - window, self.alpha, self.safeguard, cap, window)
        self.counts[layer, b] = [n + window for n in counts]
        for h, choice in enumerate(choices):
            recent = set(sorted(before[h])[len(before[h]) - window :])
            row[h] = best(choice.scores, counts[h]) | recent
            self.choices[layer, b, h] = Choice(set(row[h]), choice.scores, recent)


OPTIONS = {"window": 3, "kernel": 3, "pooling": "avg"}


@pytest.mark.parametrize(
    ("sizes", "budget", "settings"),
    thinned(SIZES, [9, 0.4], [{}, {"alpha": 0.5}, {"alpha": 0.5, "safeguard": "first"}, {"alpha": 0.0}], every=4),
)
def test_it_keeps_what_the_loop_keeps(sizes, budget, settings):
    """Numbers and positions of every head, in two rows of different length, with decoded tokens appended."""
    settings = {"alpha": 0.2, "safeguard": "mix", **settings}
    loop = follow(
        AdaKV(budget=budget, **OPTIONS, **settings),
        LoopAdaKV,
        sizes=sizes,
        lengths=[33, 21],
        later=(1, 1),
        **OPTIONS,
        **settings,
    )
    heads = sizes.get("num_key_value_heads", 2)
    assert all(sum(counts) == loop.caps[b] * heads for (_, b), counts in loop.counts.items())
    assert heads == 1 or any(len(set(counts)) > 1 for counts in loop.counts.values())


def test_rows_and_layers_have_exact_totals_and_no_head_is_empty():
    """Whatever alpha, safeguard and budget: a row's heads add up in every layer."""
    ids, mask = left_padded([40, 23])
    for budget in (0.05, 0.1, 0.3, 0.9, 4, 7):
        for options in ({}, {"alpha": 0.0}, {"safeguard": "first"}, {"alpha": 1.0}, {"normalise": True}):
            with compress(small_model(groups=1), AdaKV(budget=budget, window=3, **options)) as session:
                kept = session.prefill(ids, attention_mask=mask).cache.kept_tokens()
            for row, real in enumerate((40, 23)):
                cap = budget if isinstance(budget, int) else max(1, round(budget * real))
                assert (kept[:, row].sum(1) == 4 * cap).all() and kept.min() >= 1


def test_alpha_one_is_snapkv():
    ids, held = random_ids(2, 40), []
    for method in (
        SnapKV(budget=10, **OPTIONS),
        *(AdaKV(budget=10, alpha=1.0, safeguard=s, **OPTIONS) for s in ("mix", "first")),
    ):
        with compress(small_model(), method) as session:
            cache = session.prefill(ids).cache
            held.append([cache.positions(i) for i in range(3)])
    for other in held[1:]:
        assert all(torch.equal(a, b) for a, b in zip(held[0], other, strict=True))


def allocate(scores, total, **options):
    return Ada(**options).allocate([scores], [None], 1, 1, torch.tensor([total]))[0][0].tolist()


def test_identical_heads_get_the_same():
    scores = torch.rand(1, 1, 20, generator=torch.Generator().manual_seed(0)).expand(1, 4, 20)
    assert allocate(scores, 40) == [10] * 4


def test_without_a_floor_the_kept_mass_is_the_largest_there_is():
    """alpha 0 keeps the best scores of the whole layer: no other split of the same total keeps more."""
    scores = torch.rand(1, 3, 12, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 0.7, 1.4])[:, None]
    counts = allocate(scores, 15, alpha=0.0)
    kept = sum(float(scores[0, h].sort(descending=True).values[:n].sum()) for h, n in enumerate(counts))
    assert kept == pytest.approx(float(scores.flatten().sort(descending=True).values[:15].sum()))


def test_the_floor_holds():
    """A head without any of the best scores keeps alpha of its even part, beside what it protects."""
    scores = torch.full((1, 2, 30), 0.01)
    scores[0, 1, :25] = 1.0
    scores[:, :, 28:] = float("inf")
    for safeguard, floor in (("mix", 2 + int(8 * 0.5)), ("first", int(10 * 0.5))):
        counts = allocate(scores, 20, alpha=0.5, safeguard=safeguard)
        assert counts[0] == floor and sum(counts) == 20


def test_rounding_to_the_nearest_may_miss_the_total():
    generator = torch.Generator().manual_seed(2)
    off = []
    for _ in range(40):
        scores = torch.rand(1, 5, 30, generator=generator)
        assert sum(allocate(scores, 55, alpha=0.3)) == 55
        off.append(sum(allocate(scores, 55, alpha=0.3, rounding="nearest")) - 55)
    assert any(off) and max(abs(x) for x in off) <= 5


def test_what_heads_do_not_hold_goes_to_others_and_what_fits_all_stays():
    scores = torch.rand(1, 3, 20, generator=torch.Generator().manual_seed(3))
    scores[0, 0, :17] = float("-inf")
    counts = allocate(scores, 30)
    assert counts[0] <= 3 and sum(counts) == 30
    assert allocate(scores, 60) == [9, 26, 25]


def test_heads_are_held_without_padding_waste():
    """One layer, one head with most of the budget: allocated bytes follow what is held, not the longest head."""

    model = small_model(groups=1)
    with compress(model, AdaKV(budget=0.2, alpha=0.0, window=4)) as session:
        session.prefill(random_ids(1, 200))
        sizes, kept = session.cache.nbytes(), session.cache.kept_tokens()
        assert kept.sum() == 40 * 3 * 4
        assert any(isinstance(layer.store, RaggedStore) for layer in session.cache.full_layers)
        assert sizes["allocated"] <= 1.25 * sizes["valid"]
        assert session.append(random_ids(1, 3)).isfinite().all() and session.generate(5).tokens


def test_any_scorer_takes_it():
    with compress(small_model(groups=1), H2O(budget=10, allocator=Ada())) as session:
        session.prefill(random_ids(2, 40))
        before = session.cache.kept_tokens()
        assert (before.sum(2) == 40).all() and len(before.unique()) > 1
        session.generate(6)
        assert torch.equal(session.cache.kept_tokens(), before)


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"safeguard": "last"}, {"rounding": "up"}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaKV(budget=0.5, **options)
