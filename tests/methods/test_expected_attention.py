"""ExpectedAttention keeps what queries to come, drawn from those seen so far, are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

import pytest
import torch
from helpers import all_held, thinned
from reference import Choice, Loop, best
from small_models import left_padded, random_ids, small_model
from test_references import BUDGET, SIZES, compare, follow

from kvcompress import compress
from kvcompress.method import Chunked, LayerView
from kvcompress.methods import ExpectedAttention
from kvcompress.methods.expected_attention import ExpectedAttentionScorer

AHEAD = 7


@dataclass
class LoopExpectedAttention(Loop):
    """Keeps every query before rotation, and rotates the mean to each position to come, one after the other."""

    in_decode: bool = False
    sinks: int = 2
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    interval: int | None = None
    hooks: list = field(default_factory=list)
    raw: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        for i, layer in enumerate(self.model.model.layers):
            module = getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj)
            hook = module.register_forward_hook(lambda _m, _a, out, i=i: self.raw.__setitem__(i, out))
            self.hooks.append(hook)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for hook in self.hooks:
            hook.remove()

    def observe(self, layer, b, query, key, features, row, new, offset):
        if query.shape[1] == 1 and self.interval is None:  # the prompt is over
            self.queries.clear()
            return
        raw = self.raw[layer][b].view(query.shape[1], query.shape[0], query.shape[2])
        for c in new:
            if int(self.reference.mask[b, :c].sum()) >= self.sinks:
                self.queries.setdefault((layer, b), []).append(raw[c - offset].double())

    def rotation(self, position, dim):
        """The matrix whose product with a vector is the vector rotated to `position`, by the model's own angles."""
        cos, sin = self.model.model.rotary_emb(torch.zeros(1, 1, dim), torch.tensor([[position]]))
        matrix = torch.zeros(dim, dim, dtype=torch.double)
        for i in range(dim // 2):
            c, s = float(cos[0, 0, i]), float(sin[0, 0, i])
            matrix[i, i], matrix[i, i + dim // 2] = c, -s
            matrix[i + dim // 2, i], matrix[i + dim // 2, i + dim // 2] = s, c
        return matrix

    def decide(self, layer, b, query, key, features, row):
        cap, group, dim = self.caps[b], query.shape[0] // key.shape[0], query.shape[2]
        decode = query.shape[1] == 1
        real = int(self.reference.mask[b].sum())
        offset = self.reference.mask.shape[1] - real
        turns = [self.rotation(t, dim) for t in range(real, real + AHEAD)]
        seen = self.queries.get((layer, b), [])
        for h in range(len(row)):
            if len(row[h]) < cap + self.interval if decode else len(row[h]) <= cap:
                continue
            scores = dict.fromkeys(sorted(c for c in row[h] if c - offset >= self.sinks), 0.0)
            for g in range(group):
                mine = [q[h * group + g] for q in seen]
                mean = sum(mine) / len(mine) if mine else torch.zeros(dim, dtype=torch.double)
                ahead = sum(turn @ mean for turn in turns) / AHEAD
                turn, spread = sum(turns) / AHEAD, torch.zeros(dim, dim, dtype=torch.double)
                for q in mine:
                    spread += torch.outer(turn @ (q - mean), turn @ (q - mean)) / len(mine)
                logits = {}
                for c in scores:
                    k = key[h, c].double()
                    logits[c] = float(k @ ahead) * features.scaling
                    if self.covariance:
                        logits[c] += float(k @ spread @ k) * features.scaling**2 / 2
                most = max(logits.values(), default=0.0)
                total = sum(exp(x - most) for x in logits.values())
                for c, x in logits.items():
                    scores[c] += exp(x - most) / total / group
            if self.value_norm:
                for c in scores:
                    norm = float((self.reference.values[layer][b, h, c].double() ** 2).sum()) ** 0.5
                    scores[c] = (scores[c] + self.epsilon) * norm
            first = sorted(c for c in row[h] if c not in scores)[:cap]
            row[h] = best(scores, cap - len(first)) | set(first)
            self.choices[layer, b, h] = Choice(set(row[h]), scores, set(first))


OPTIONS = [{}, {"covariance": False}, {"value_norm": False}, {"epsilon": 0.5}]


@pytest.mark.parametrize(("sizes", "options"), thinned(SIZES, OPTIONS, every=4))
def test_it_keeps_what_the_loop_keeps(sizes, options):
    """Batch of a whole and a left-padded row, a later turn and decode, one to four query heads per KV head."""
    method = ExpectedAttention(budget=BUDGET, sinks=2, ahead=AHEAD, **options)
    follow(method, LoopExpectedAttention, sizes=sizes, later=(1, 1, 9, 1), **options)


@pytest.mark.parametrize("architecture", ["qwen3", "granite", "smollm3"])
def test_queries_are_taken_before_rotation_whatever_the_architecture(architecture):
    """Query norms come before, the model's own scaling is used, and layers without rotation have none."""
    options = {"no_rope_layers": [1, 1, 1]} if architecture == "smollm3" else {}
    if architecture == "qwen3":
        options = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    method = ExpectedAttention(budget=0.4, sinks=2, ahead=AHEAD)
    follow(method, LoopExpectedAttention, architecture=architecture, sizes=options, later=(1, 9))


@pytest.mark.parametrize("sinks", [0, 2, 5])
def test_short_rows_keep_their_sinks_as_far_as_they_fit(sinks):
    """A share below the sinks shrinks them; a row of sinks alone has no query to count."""
    method = ExpectedAttention(budget=0.3, sinks=sinks, ahead=AHEAD)
    with compress(small_model(), method) as session:
        ids, mask = left_padded([20, 7, 3])
        session.prefill(ids, attention_mask=mask)
        for heads in all_held(session).values():
            assert all(set(range(min(sinks, 5))) <= set(kept) for kept in heads[0])
            assert all(set(range(min(sinks, 1))) <= set(kept) for kept in heads[1])
            assert all(len(kept) == 1 for kept in heads[2])


@pytest.mark.parametrize("interval", [1, 4])
def test_in_decode_every_query_since_the_prompt_began_counts(interval):
    """A decode schedule joins the moments of prompt and decoded tokens, row by row."""
    follow(
        ExpectedAttention(budget=BUDGET, sinks=2, ahead=AHEAD, interval=interval),
        LoopExpectedAttention,
        later=(1,) * 9,
        interval=interval,
        in_decode=True,
    )


@pytest.mark.parametrize("chunk", [5, 8])
def test_chunks_keep_what_the_loop_keeps(chunk):
    """Queries of every chunk count, also of those after which nothing was evicted."""
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded([24, 15])
    method = ExpectedAttention(budget=12, sinks=2, ahead=AHEAD, prefill=Chunked(chunk=chunk))
    with compress(model, method) as session, LoopExpectedAttention(twin, 12) as loop:
        session.prefill(ids, attention_mask=mask)
        for start in range(0, 24, chunk):
            loop.step(ids[:, start : start + chunk], mask[:, start : start + chunk], prompt=True)
        compare(session, loop, [24, 15], 24)


def test_the_closed_form_is_the_mean_over_drawn_queries():
    """exp(mean + half the variance) of q·k equals the mean of exp(q·k) over many q (5% at 100,000 draws)."""
    generator = torch.Generator().manual_seed(0)
    root, mean = 0.3 * torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator)
    keys = torch.randn(1, 1, 5, 8, generator=generator)
    drawn = mean + torch.randn(100_000, 8, generator=generator) @ root.T
    expected = torch.exp(drawn @ keys[0, 0].T / 8**0.5).mean(0)
    scores = score(keys, mean, root @ root.T)
    assert torch.allclose(scores[0, 0], expected / expected.sum(), rtol=0.05)


class Still:
    """An observer of a model that does not rotate."""

    scaling = 8**-0.5

    def mean_rotation(self, ahead):
        return torch.eye(8)[None]


def score(keys, mean, spread, **options):
    count = 3.0
    state = {
        "count": torch.tensor([count]),
        "mean": mean[None, None, None],
        "spread": count * spread[None, None, None],
    }
    one = torch.ones(1, dtype=torch.long)
    positions = torch.arange(keys.shape[2])[None, None]
    view = LayerView(0, 1, lambda: (keys, torch.ones_like(keys)), positions, one, one, "prompt", 1)
    return ExpectedAttentionScorer(sinks=0, value_norm=False, **options).score(view, Still(), state)


def test_without_covariance_it_is_the_attention_of_the_mean_query():
    keys, mean = torch.randn(1, 1, 6, 8), torch.randn(8)
    attention = torch.softmax(keys[0, 0] @ mean / 8**0.5, 0)
    assert torch.allclose(score(keys, mean, torch.eye(8), covariance=False)[0, 0], attention, atol=1e-6)


def test_moments_joined_from_pieces_are_those_of_the_whole():
    """Chan's update: whatever the pieces, and rows that have nothing in one of them."""

    class Seen:
        def __init__(self, queries, positions):
            self.prerope = queries, positions

    queries = 100 + torch.randn(2, 1, 3, 20, 8, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(20).repeat(2, 1)
    positions[1, :8], positions[1, 8:] = -1, torch.arange(12)
    whole, pieces, scorer = {}, {}, ExpectedAttentionScorer(sinks=1)
    scorer.observe(None, Seen(queries, positions), whole)
    for start, stop in ((0, 3), (3, 4), (4, 11), (11, 20)):
        scorer.observe(None, Seen(queries[..., start:stop, :], positions[:, start:stop]), pieces)
    assert whole["count"].tolist() == pieces["count"].tolist() == [19, 11]
    for row, first in ((0, 1), (1, 9)):
        own = queries[row, ..., first:, :].double()
        spread = (own - own.mean(-2, keepdim=True)).transpose(-1, -2) @ (own - own.mean(-2, keepdim=True))
        for found in (whole, pieces):
            assert torch.allclose(found["mean"][row].double(), own.mean(-2), atol=1e-4)
            assert torch.allclose(found["spread"][row].double(), spread, atol=1e-3)
            assert torch.linalg.eigvalsh(found["spread"][row]).min() > -1e-3


def test_the_moments_are_freed_when_the_prompt_is_over():
    """They are as large as a small cache; only a decode schedule needs them longer."""
    ids = random_ids(1, 20)
    for interval, names in ((None, set()), (4, {"count", "mean", "spread"})):
        with compress(small_model(), ExpectedAttention(budget=8, sinks=2, interval=interval)) as session:
            session.prefill(ids)
            assert {name for layer in session.cache.full_layers for name in layer.state} == names
            assert (session.report()["kv"]["bytes_scores"] > 0) is bool(names)


@pytest.mark.parametrize(
    "options", [{"sinks": -1}, {"ahead": 0}, {"epsilon": -0.1}, {"interval": 0}, {"preset": "official"}]
)
def test_illegal_settings_are_refused(options):
    name = {"interval": "every"}.get(next(iter(options)), next(iter(options)))
    with pytest.raises(ValueError, match=name):
        ExpectedAttention(budget=0.5, **options)


def test_presets_differ_in_epsilon():
    assert ExpectedAttention(budget=0.5).epsilon == 0.0
    assert ExpectedAttention(budget=0.5, preset="kvpress").epsilon == 0.01
