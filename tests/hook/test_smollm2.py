"""The embedded model: identity with plain transformers, and what is really held and freed."""

from __future__ import annotations

import pytest
import torch
from helpers import EXACT, LONG, grid
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.hook.shared_prefill import prefill_once
from kvcompress.method import Needs
from kvcompress.methods import H2O, KIVI, METHODS, Int8, LowRank, SnapKV, TurboQuant

pytestmark = pytest.mark.model

PROMPT, ROWS = 16, 3


def batch(rows: int):
    ids = torch.randint(100, 40000, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 3 + 6 * row] = 0
    return ids, mask


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.long), ROWS])
@torch.no_grad()
def test_no_method_changes_a_logit_at_budget_1(smollm2, rows):
    """Prompt and decoding: within 1e-4 of plain transformers, and the same tokens.

    Without a limit all methods go one way: two go it with padding, in decode for a quarter of the prompt's length. With `--long`
    four go it for three times the prompt, and the others alone and for eight tokens.
    """
    model, _ = smollm2
    ids, mask = batch(rows)
    most = 3 * PROMPT if LONG else PROMPT // 4
    options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    whole = ("Full", "H2O", "SnapKV", "StreamingLLM") if LONG else ("H2O", "StreamingLLM")
    for name in EXACT if rows == 1 else whole:
        method = METHODS[name]
        with compress(model, method(budget=1.0)) as session:
            steps = most if name in whole else 8
            found = model.generate(ids, attention_mask=mask, **{**options, "max_new_tokens": steps})
            assert session.report()["evicted"] == 0
        assert torch.equal(found.sequences, expected.sequences[:, : ids.shape[1] + steps]), name
        for a, b in zip(found.logits, expected.logits[:steps], strict=True):
            assert (a - b).abs().max() <= 1e-4, name


@pytest.mark.parametrize(
    ("method", "budget"),
    grid([SnapKV, H2O], [0.1, 0.25, 0.5], short=lambda method, budget: (method, budget) == (H2O, 0.25)),
)
@torch.no_grad()
def test_bytes_held_are_the_budgets_share_of_the_full_cache(smollm2, method, budget):
    """Keys, values and positions within 2% of budget x full; allocated at most 1.25 times that and one block."""
    model, _ = smollm2
    ids = torch.randint(100, 40000, (1, 200))
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, logits_to_keep=1)
    full = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    with compress(model, method(budget=budget)) as session:
        held = session.prefill(ids).cache.nbytes()
    assert held["full"] == full
    assert held["valid"] == pytest.approx(budget * full, rel=0.02)
    block = 64 * full // 200
    assert held["allocated"] <= 1.25 * held["valid"] + block


@pytest.mark.long
@torch.no_grad()
def test_quantised_caches_hold_what_they_claim_at_2000_tokens(smollm2):
    """Codes, scales, exact tokens and positions within 3% of the formula; float32 elsewhere."""
    model, _ = smollm2
    ids, n = torch.randint(100, 40000, (1, 2000)), 2000
    pairs, full = n * 30 * 3 * 2, n * 30 * 3 * 2 * 64 * 4
    positions = n * 30 * 4
    coded = (1920 + 1872) / 2 / n
    claims = {
        KIVI(bits=4): coded * pairs * 64 * (4 + 32 / 32) / 8 + (1 - coded) * full + positions,
        KIVI(bits=2): coded * pairs * 64 * (2 + 32 / 32) / 8 + (1 - coded) * full + positions,
        Int8(): pairs * (64 + 2) + positions,
        TurboQuant(bits=4): pairs * (64 / 2 + 2) + positions,
    }
    text = {"text": "prose", "tokens": 512, "length": 256}  # short, as quality is not looked at here
    claims |= {
        LowRank(budget=0.5, **text): 0.5 * full,
        LowRank(budget=0.5, head_group=3, **text): 0.5 * full,
        LowRank(budget=0.1, bits=4, head_group=3, **text): 0.1 * full,
        LowRank(budget=0.5, form="mla", **text): 0.5 * full,
    }
    shared = prefill_once(model, ids, Needs())
    for method, claim in claims.items():
        with compress(model, method, shared=shared) as session:
            held = session.prefill(ids).cache.nbytes()
        assert held["valid"] == pytest.approx(claim, rel=0.03), method
        assert held["full"] == full and held["allocated"] <= 1.25 * held["valid"]
