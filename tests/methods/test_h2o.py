"""H2O's options: mass that fades from query to query, and mass divided by how many queries could see the key."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import thinned
from reference import Choice, LoopH2O, best
from small_models import left_padded, random_ids, small_model
from test_references import BUDGET, LOPSIDED, SIZES, Lopsided, compare, follow

from kvcompress import compress
from kvcompress.kernels import blockwise
from kvcompress.method import Chunked, Needs
from kvcompress.methods import H2O


@dataclass
class LoopFadingH2O(LoopH2O):
    """Each query first lets all that was summed up fade, then adds its own attention."""

    decay: float = 1.0
    normalise: bool = False

    def observe(self, layer, b, query, key, features, row, new, offset):
        for at in new:
            for h in range(key.shape[0]):
                for mass in self.mass.get((layer, b, h), []):
                    for c in mass:
                        mass[c] *= self.decay
            visible = [{c for c in columns if c <= at} for columns in row]
            super().observe(layer, b, query, key, features, visible, [at], offset)

    def decide(self, layer, b, query, key, features, row):
        if not self.normalise:
            super().decide(layer, b, query, key, features, row)
            return
        for h in range(len(row)):
            cap, columns = self.cap(layer, b, h), sorted(row[h])
            if len(columns) <= cap:
                continue
            count = int(cap * self.recent_share)
            recent = set(columns[len(columns) - count :])
            scores = {}
            for c in set(columns) - recent:
                seen = sum(self.decay**k for k in range(self.reference.seen - c))
                means = [mass.get(c, 0.0) / seen for mass in self.mass[layer, b, h]]
                scores[c] = max(means) if self.group_reduce == "max" else sum(means) / len(means)
            row[h] = best(scores, cap - count) | recent
            self.choices[layer, b, h] = Choice(set(row[h]), scores, recent)


SETTINGS = [
    {"decay": 0.9},
    {"normalise": True},
    {"decay": 0.8, "normalise": True, "recent_share": 0.25},
    {"decay": 0.95, "group_reduce": "max", "recent_share": 0.0},
]


@pytest.mark.parametrize(("sizes", "options"), thinned(SIZES, SETTINGS, every=4))
def test_options_keep_what_the_loop_keeps(sizes, options):
    """In the prompt of a padded batch, in decode and in a later turn, mass fades by one factor per query of the row."""
    later = (1, 1, 1, 1, 7, 1, 1)
    follow(H2O(budget=BUDGET, **options), LoopFadingH2O, sizes=sizes, later=later, **options)


def test_mass_fades_where_heads_hold_different_numbers():
    options = {"decay": 0.9}
    method = H2O(budget=BUDGET, allocator=Lopsided(), **options)
    follow(method, LoopFadingH2O, lengths=[40, 37], later=(1, 1, 1, 6, 1), shares=LOPSIDED, **options)


@pytest.mark.parametrize("options", SETTINGS)
def test_a_prompt_in_chunks_keeps_what_the_loop_keeps(options):
    """Mass carries over, and fades, from chunk to chunk, also where a chunk gives a padded row nothing."""
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded([24, 9])
    with compress(model, H2O(budget=BUDGET, prefill=Chunked(chunk=8), **options)) as session:
        session.prefill(ids, attention_mask=mask)
        with LoopFadingH2O(twin, BUDGET, **options) as loop:
            for start in range(0, 24, 8):
                loop.step(ids[:, start : start + 8], mask[:, start : start + 8], prompt=True)
            compare(session, loop, [24, 9], 24)


def masses(method, ids, mask, steps=0):
    with compress(small_model(), method) as session:
        session.prefill(ids, attention_mask=mask)
        session.generate(steps) if steps else None
        return [layer.held().get("mass") for layer in session.cache.full_layers]


def test_chunks_and_blocks_of_queries_do_not_change_the_mass(monkeypatch):
    """Weights are those of the whole prompt, however it is cut."""
    ids, mask = left_padded([31, 20])
    whole = masses(H2O(budget=100, decay=0.9), ids, mask)
    chunked = masses(H2O(budget=100, decay=0.9, prefill=Chunked(chunk=7)), ids, mask)
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 400)
    monkeypatch.setattr(blockwise, "MIN_BLOCK", 1)
    blocks = masses(H2O(budget=100, decay=0.9), ids, mask)
    for other in (chunked, blocks):
        assert all((a - b).abs().max() <= 1e-5 for a, b in zip(whole, other, strict=True))


def test_faded_mass_sums_to_the_weights_of_the_queries():
    """Each query hands out 1, so all mass together is 1 + decay + decay^2 + … over the queries of a row."""
    ids, mask = left_padded([20, 11])
    for layer in masses(H2O(budget=100, decay=0.9), ids, mask, steps=4):
        for row, real in enumerate((20, 11)):
            expected = sum(0.9**k for k in range(real + 3))  # the last token picked is not fed yet
            held = layer.shape[2] - (20 - real)
            assert (layer[row, :, -held:].sum(1) - expected).abs().max() <= 1e-4


def test_without_decay_nothing_is_multiplied():
    """The default is what it was: a decay of 1 gives the same bits as code that knows no decay."""
    ids = random_ids(1, 30)
    plain = masses(H2O(budget=10), ids, None, steps=5)
    assert all(torch.equal(a, b) for a, b in zip(plain, masses(H2O(budget=10, decay=1.0), ids, None, 5), strict=True))


def test_a_long_decay_forgets_in_full_precision():
    """A weight many queries away is the power itself, not a product of rounded factors."""
    from kvcompress.cache.forward import Forward

    positions = torch.arange(100_000, dtype=torch.int32)[None]
    forward = Forward("prompt", 100_000, None, positions, torch.tensor([100_000]), positions)
    weights = forward.weights(0.9999, torch.device("cpu"))
    assert float(weights[0, 0]) == pytest.approx(0.9999**99_999, rel=1e-6) and float(weights[0, -1]) == 1.0


def test_one_session_has_one_decay():
    assert (Needs(mass=True, decay=0.9) | Needs(window=3)).decay == 0.9
    with pytest.raises(ValueError, match="one decay"):
        Needs(mass=True, decay=0.9) | Needs(mass=True)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5])
def test_an_illegal_decay_is_refused(decay):
    with pytest.raises(ValueError, match="decay"):
        H2O(budget=0.5, decay=decay)
