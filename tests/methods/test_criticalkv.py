"""CriticalKV picks by attention first, then by attention times the length of the projected value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import all_held, grid, thinned
from reference import Choice, LoopH2O, LoopSnapKV, best
from small_models import ARCHITECTURES, left_padded, random_ids, small_model
from test_adakv import LoopAdaKV
from test_references import SIZES, THREE, compare, follow

from kvcompress import compress
from kvcompress.hook import observed
from kvcompress.hook.observed import projected_norms
from kvcompress.method import Allocator, Chunked, Schedule
from kvcompress.methods import AdaKV, CriticalKV, SnapKV
from kvcompress.methods.adakv import Ada
from kvcompress.methods.cake import Preference
from kvcompress.methods.criticalkv import PerturbationScorer
from kvcompress.methods.snapkv import WindowScorer
from kvcompress.models import projections


class Twice:
    """A loop's choice made again in two stages, in as many tokens of each head."""

    first_share = 0.5
    protected_first = False
    added = 0.0
    how = "mean"

    def norm(self, layer, b, h, c):
        """Mean over the group of |W_o v|, one query head after the other."""
        weight = self.model.model.layers[layer].self_attn.o_proj.weight.detach()
        value = self.reference.values[layer][b, h, c]
        dim, heads = len(value), weight.shape[1] // len(value)
        group = heads // self.reference.values[layer].shape[1]
        sizes = []
        for g in range(h * group, (h + 1) * group):
            alone = torch.zeros(heads * dim)
            alone[g * dim : (g + 1) * dim] = value
            sizes.append(float((weight @ alone).abs().sum()))
        return max(sizes) if self.how == "max" else sum(sizes) / group

    def decide(self, layer, b, query, key, features, row):
        before = [set(r) for r in row]
        super().decide(layer, b, query, key, features, row)
        for h in range(len(row)):
            if row[h] == before[h]:
                continue
            choice, count = self.choices[layer, b, h], len(row[h])
            guarded = row[h] - set(choice.scores)
            free = count - len(guarded)
            first = (
                int(count * self.first_share) - len(guarded) if self.protected_first else int(free * self.first_share)
            )
            picked = best(choice.scores, first)
            again = {c: (s + self.added) * self.norm(layer, b, h, c) for c, s in choice.scores.items()}
            rest = {c: s for c, s in again.items() if c not in picked}
            row[h] = guarded | picked | best(rest, free - len(picked))
            self.choices[layer, b, h] = Choice(set(row[h]), again | dict.fromkeys(picked, 1e9), guarded)


@dataclass
class LoopCriticalKV(Twice, LoopSnapKV):
    first_share: float = 0.5
    protected_first: bool = False
    added: float = 0.0


@dataclass
class LoopCriticalAdaKV(Twice, LoopAdaKV):
    added: float = 0.0


@dataclass
class LoopCriticalH2O(Twice, LoopH2O):
    added: float = 1e-4


OPTIONS = {"window": 3, "kernel": 3, "pooling": "avg"}


@pytest.mark.parametrize(
    ("sizes", "budget", "extra"),
    thinned(
        SIZES,
        [11, 0.4],
        [{}, {"protected_first": True}, {"first_share": 0.0}, {"first_share": 0.8, "epsilon": 0.5}],
        every=4,
    ),
)
def test_it_keeps_what_the_loop_keeps(sizes, budget, extra):
    """Both stages in a padded batch; decoded tokens are appended, a later turn chooses again."""
    extra = dict(extra)
    method = CriticalKV(budget=budget, **OPTIONS, **extra)
    added = extra.pop("epsilon", 1e-4) * OPTIONS["window"]
    later = (1, 1, 9, 1)
    loop = follow(method, LoopCriticalKV, sizes=sizes, lengths=[33, 21], later=later, added=added, **OPTIONS, **extra)
    assert all(
        len(head) == loop.caps[b] + 1 for rows in loop.kept.values() for b, row in enumerate(rows) for head in row
    )


@pytest.mark.parametrize("sizes", grid(SIZES, short=lambda sizes: sizes in ({}, THREE)))
def test_with_budgets_per_head_it_keeps_what_the_loop_keeps(sizes):
    """Ada hands out by attention; each head then has its two stages within its own number (CriticalAdaKV)."""
    method = CriticalKV(budget=10, allocator=Ada(), epsilon=0.0, **OPTIONS)
    follow(method, LoopCriticalAdaKV, sizes=sizes, lengths=[33, 21], later=(1, 1), **OPTIONS)
    with (
        compress(small_model(**sizes), method) as session,
        compress(small_model(**sizes, twin=True), AdaKV(budget=10, **OPTIONS)) as other,
    ):
        ids = random_ids(1, 33)
        assert torch.equal(session.prefill(ids).cache.kept_tokens(), other.prefill(ids).cache.kept_tokens())
        assert sizes or all_held(session) != all_held(other)


@pytest.mark.parametrize("groups", grid([1, 2, 4], short=[2].__contains__))
def test_over_accumulated_attention_it_keeps_what_the_loop_keeps_in_decode_too(groups):
    """Two stages with a decode schedule: one token per head and step, which neither stage wants."""
    method = CriticalKV(budget=8, base="h2o", schedule=Schedule(every=1))
    follow(method, LoopCriticalH2O, groups=groups, later=(1,) * 10 + (7, 1, 1))


def test_it_takes_the_last_querys_attention_too():
    """Over TOVA's scores heads part ways: the second stage weighs each head's own values."""
    kept = held_by(CriticalKV(budget=10, base="tova"), random_ids(1, 33))
    assert all(len(head) == 10 for rows in kept.values() for head in rows[0])
    assert any(rows[0][0] != rows[0][1] for rows in kept.values())


def test_a_prompt_in_chunks_keeps_what_the_loop_keeps():
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded([33, 21])
    with compress(model, CriticalKV(budget=13, prefill=Chunked(chunk=11), **OPTIONS)) as session:
        session.prefill(ids, attention_mask=mask)
        with LoopCriticalKV(twin, 13, added=3e-4, **OPTIONS) as loop:
            for start in range(0, 33, 11):
                loop.step(ids[:, start : start + 11], mask[:, start : start + 11], prompt=True)
            compare(session, loop, [33, 21], 33)


@dataclass(frozen=True)
class Later(Allocator):
    """The same for every layer and head, decided when all have run."""

    scope = "all"

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        heads = scores[0].shape[1]
        return [(total // (n_layers * heads))[:, None].expand(-1, heads) for _ in scores]


def held_by(method, ids, mask=None, **options):
    with compress(small_model(**options), method) as session:
        session.prefill(ids, attention_mask=mask)
        return all_held(session)


def test_an_allocator_that_decides_later_gets_both_stages():
    """Scores of both stages wait with the tokens; a cascade that cuts layers again ends with exact totals."""
    ids, mask = left_padded([33, 21])
    now, later = (held_by(CriticalKV(budget=11, allocator=a, **OPTIONS), ids, mask) for a in (None, Later()))
    assert now == later
    cascade = held_by(CriticalKV(budget=11, allocator=Preference(window=3), **OPTIONS), ids, mask)
    assert sum(len(head) for rows in cascade.values() for head in rows[0]) == 11 * 3 * 2


def test_the_first_stage_alone_is_the_base():
    ids, mask = left_padded([40, 29])
    assert held_by(CriticalKV(budget=12, first_share=1.0, **OPTIONS), ids, mask) == held_by(
        SnapKV(budget=12, **OPTIONS), ids, mask
    )


def test_longer_values_are_kept_rather():
    """Of two equal attentions the one with the longer projected value stays; without attention nothing is kept for it."""
    scorer = PerturbationScorer(WindowScorer(3), epsilon=0.0)

    class Seen:
        output_norms = torch.tensor([[[[1.0, 2.0, 3.0, 9.0]], [[1.0, 1.0, 1.0, 1.0]]]])

    scores = torch.tensor([[[0.3, 0.3, 0.1, 0.0], [0.3, 0.2, float("-inf"), 0.1]]])
    second = scorer.second(scores, None, Seen())
    assert second[0, 0].argsort(descending=True).tolist() == [1, 0, 2, 3]
    assert torch.equal(second[0, 1], scores[0, 1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_norms_are_those_of_the_models_own_projection(architecture):
    """For every verified architecture: a head's value alone through the model's o_proj, without its bias."""
    model = small_model(architecture)
    projection = projections.output_projections(model)[1]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 2, 5, 16, generator=generator)
    norms = projected_norms(values, projection.weight, group=2)
    assert norms.shape == (2, 2, 2, 5) and norms.dtype == torch.float32
    for head in range(4):
        alone = torch.zeros(2, 5, 64)
        alone[..., head * 16 : (head + 1) * 16] = values[:, head // 2]
        expected = (projection(alone) - projection(torch.zeros(64))).abs().sum(-1)
        assert (norms[:, head // 2, head % 2] - expected).abs().max() <= 1e-4


def test_values_are_projected_a_block_at_a_time(monkeypatch):
    """Blocks change nothing, and no tensor of all values times the hidden size is made."""
    values, weight = torch.randn(1, 2, 50, 16), torch.randn(64, 64)
    whole = projected_norms(values, weight, 2)
    monkeypatch.setattr(observed, "CPU_ELEMENTS", 64 * 7)
    largest, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: largest.append(matmul(a, b)) or largest[-1])
    assert (projected_norms(values, weight, 2) - whole).abs().max() <= 1e-3
    assert max(t.numel() for t in largest) == 64 * 7


def test_half_precision_is_summed_in_float32():
    values = torch.full((1, 1, 1, 16), 100.0, dtype=torch.float16)
    assert float(projected_norms(values, torch.full((4096, 16), 1.0, dtype=torch.float16), 1)) == 4096 * 1600.0


def test_a_model_without_a_known_projection_is_refused_by_name():
    model = small_model(fresh=True)
    own = model.model.layers[1].self_attn.o_proj
    model.model.layers[1].self_attn.o_proj = torch.nn.Sequential(own, torch.nn.GELU())
    with pytest.raises(
        ValueError, match=r"'llama' has no output projection .* layers \[1\] .*no product with one matrix"
    ):
        compress(model, CriticalKV(budget=0.5))
    compress(model, SnapKV(budget=0.5))


@pytest.mark.parametrize("options", [{"base": "knorm"}, {"first_share": 1.5}, {"epsilon": -1.0}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CriticalKV(budget=0.5, **options)
