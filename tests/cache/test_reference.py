"""The masked reference is the stock eager model when it keeps everything, and something else when it does not."""

from __future__ import annotations

import pytest
import torch
from reference import MaskedReference, stock_logits
from small_models import ARCHITECTURES, HYBRID, WINDOW, left_padded, random_ids, small_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keep_all_equals_the_stock_eager_model(architecture):
    """With every column kept, one shot and token by token, on a left-padded batch, logits equal the stock model's."""
    model = small_model(architecture)
    ids, mask = left_padded([20, 13, 17])
    expected = stock_logits(model, ids, mask)
    with MaskedReference(model) as reference:
        first = reference.forward(ids[:, :12], mask[:, :12])
        for layer in range(model.config.num_hidden_layers):
            reference.keep[layer] = torch.ones(3, reference.captured[layer][1].shape[1], 12, dtype=torch.bool)
        chunk = reference.forward(ids[:, 12:16], mask[:, 12:16])
        steps = [reference.forward(ids[:, t : t + 1], mask[:, t : t + 1]) for t in range(16, 20)]
    got = torch.cat([first, chunk, *steps], dim=1)
    assert (got - expected)[mask.bool()].abs().max() <= 1e-5
    assert model.config._attn_implementation == "eager"
    assert torch.equal(stock_logits(model, ids, mask), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropping_columns_moves_the_logits(architecture):
    """Keeping a quarter of the prompt changes what the next tokens see, by far more than rounding."""
    model = small_model(architecture)
    ids = random_ids(1, 28)
    expected = stock_logits(model, ids)[:, 24:]
    with MaskedReference(model) as reference:
        reference.forward(ids[:, :24])
        for layer in range(model.config.num_hidden_layers):
            keep = torch.rand(
                1, reference.captured[layer][1].shape[1], 24, generator=torch.Generator().manual_seed(layer)
            )
            reference.keep[layer] = keep < 0.25
        got = reference.forward(ids[:, 24:])
    assert (got - expected).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", HYBRID)
def test_windows_are_shorter_than_the_input_and_matter(architecture):
    """The same weights with a window longer than the input give other logits."""
    ids = random_ids(1, 24)
    short = stock_logits(small_model(architecture), ids)
    long = stock_logits(small_model(architecture, sliding_window=200), ids)
    assert (short - long)[:, : WINDOW - 2].abs().max() <= 1e-5
    assert (short - long)[:, -1].abs().max() > 1e-2


def test_soft_capping_is_large_enough_to_matter():
    """Gemma 2 without its soft-cap gives other logits."""
    ids = random_ids(1, 24)
    capped = stock_logits(small_model("gemma2"), ids)
    free = stock_logits(small_model("gemma2", attn_logit_softcapping=None), ids)
    assert (capped - free).abs().max() > 1e-2


def test_attention_sinks_are_large_enough_to_matter():
    """GPT-OSS with its sinks switched off gives other logits."""
    ids = random_ids(1, 24)
    model = small_model("gpt_oss", fresh=True)
    with_sinks = stock_logits(model, ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e4)
    assert (stock_logits(model, ids) - with_sinks).abs().max() > 1e-2
