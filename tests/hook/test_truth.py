"""What our cache computes after an eviction is what the model's own eager attention computes under a mask."""

from __future__ import annotations

import pytest
import torch
from helpers import feed, grid, keep_positions
from reference import MaskedReference, stock_logits
from small_models import ARCHITECTURES, LATENT, WINDOW, left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.methods import Full

LENGTHS = [20, 9, 14]  # windows of 6 are shorter than every row
MORE = 7


def random_keeps(layers, heads, lengths, seed, share=0.4):
    """Kept positions `[B, H_kv, n]` per layer, different everywhere; some heads keep a single token."""
    generator = torch.Generator().manual_seed(seed)
    keeps = {}
    for layer in layers:
        keep = torch.rand(len(lengths), heads, max(lengths), generator=generator) < share
        for row, length in enumerate(lengths):
            keep[row, :, length:] = False
            keep[row, torch.arange(heads), torch.randint(0, length, (heads,), generator=generator)] = True
        keep[0, layer % heads] = False
        keep[0, layer % heads, 3 + layer] = True
        keeps[layer] = keep
    return keeps


def to_columns(keep, lengths):
    """From positions to columns of a left-padded batch."""
    width = max(lengths)
    columns = torch.zeros(*keep.shape[:2], width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        columns[row, :, width - length :] = keep[row, :, :length]
    return columns


def inputs(seed=0):
    ids, mask = left_padded(LENGTHS, seed)
    more = random_ids(len(LENGTHS), MORE, seed + 50)
    return ids, mask, more, torch.cat([mask, torch.ones_like(more)], 1)


def masked(model, ids, mask, more, keeps):
    """The reference: logits `[B, MORE, V]` of the tokens after the eviction."""
    with MaskedReference(model) as reference:
        reference.forward(ids, mask)
        reference.keep = {layer: to_columns(keep, LENGTHS) for layer, keep in keeps.items()}
        return reference.forward(more)


@pytest.mark.parametrize(
    ("architecture", "seed"),
    grid(ARCHITECTURES + LATENT, [0, 1], short=lambda name, seed: seed == 0 or name == "llama"),
)
def test_eviction_equals_the_masked_full_cache(architecture, seed):
    """Random kept sets per layer and head, left-padded: equal one shot, step by step and mixed; and they matter."""
    model = small_model(architecture, seed=seed)
    ids, mask, more, whole_mask = inputs(seed)
    with compress(model, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        heads = session.cache.positions(session.full_layers[0]).shape[1]
        keeps = random_keeps(session.full_layers, heads, LENGTHS, seed)
        for layer, keep in keeps.items():
            keep_positions(session.cache, layer, keep)
        assert session.full_layers
        for layer, keep in keeps.items():
            assert torch.equal(session.cache.kept_tokens()[session.full_layers.index(layer)], keep.sum(-1))
        steps_cache, mixed_cache = session.cache.fork(), session.cache.fork()
        width = ids.shape[1]
        one_shot = feed(model, session.cache, more, whole_mask)
        steps = [feed(model, steps_cache, more[:, t : t + 1], whole_mask[:, : width + t + 1]) for t in range(MORE)]
        mixed = [
            feed(model, mixed_cache, more[:, :1], whole_mask[:, : width + 1]),
            feed(model, mixed_cache, more[:, 1:5], whole_mask[:, : width + 5]),
            feed(model, mixed_cache, more[:, 5:6], whole_mask[:, : width + 6]),
            feed(model, mixed_cache, more[:, 6:], whole_mask),
        ]
    expected = masked(model, ids, mask, more, keeps)
    assert (one_shot - expected).abs().max() <= 1e-5
    assert (torch.cat(steps, 1) - expected).abs().max() <= 1e-5
    assert (torch.cat(mixed, 1) - expected).abs().max() <= 1e-5
    untouched = stock_logits(model, torch.cat([ids, more], 1), whole_mask)[:, width:]
    assert (expected - untouched).abs().amax((1, 2)).min() > 1e-2  # in every row


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_append_equals_the_masked_full_cache(architecture):
    """A question appended to an evicted cache sees what was kept and itself, and its own padding stays invisible."""
    model = small_model(architecture)
    ids, mask, more, _ = inputs()
    question_mask = torch.ones_like(more)
    question_mask[1, :3] = 0
    whole_mask = torch.cat([mask, question_mask], 1)
    following = random_ids(len(LENGTHS), 1, 90)
    with compress(model, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        keeps = random_keeps(session.full_layers, session.cache.positions(session.full_layers[0]).shape[1], LENGTHS, 4)
        for layer, keep in keeps.items():
            keep_positions(session.cache, layer, keep)
        appended = session.append(more, attention_mask=question_mask)
        after = feed(model, session.cache, following, torch.cat([whole_mask, torch.ones_like(following)], 1))
    with MaskedReference(model) as reference:
        reference.forward(ids, mask)
        reference.keep = {layer: to_columns(keep, LENGTHS) for layer, keep in keeps.items()}
        expected = reference.forward(more, question_mask)[:, -1]
        expected_after = reference.forward(following)
    assert (appended - expected).abs().max() <= 1e-5
    assert (after - expected_after).abs().max() <= 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_a_second_eviction_equals_the_masked_full_cache(architecture):
    """Evicting again, decoded tokens included, equals the intersection of both masks."""
    model = small_model(architecture)
    ids, mask, more, whole_mask = inputs()
    width = ids.shape[1]
    last = random_ids(len(LENGTHS), 3, 77)
    end_mask = torch.cat([whole_mask, torch.ones_like(last)], 1)
    lengths = [n + MORE for n in LENGTHS]
    with compress(model, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        heads = session.cache.positions(session.full_layers[0]).shape[1]
        first = random_keeps(session.full_layers, heads, LENGTHS, 0, share=0.6)
        for layer, keep in first.items():
            keep_positions(session.cache, layer, keep)
        for t in range(MORE):
            feed(model, session.cache, more[:, t : t + 1], whole_mask[:, : width + t + 1])
        second = random_keeps(session.full_layers, heads, lengths, 1, share=0.5)
        for layer, keep in second.items():
            keep[:, :, -1] = False
            for row, length in enumerate(lengths):
                keep[row, :, length - 1] = True  # what was just decoded stays: no head is empty
            keep_positions(session.cache, layer, keep)
        got = feed(model, session.cache, last, end_mask)
    with MaskedReference(model) as reference:
        reference.forward(ids, mask)
        reference.keep = {layer: to_columns(keep, LENGTHS) for layer, keep in first.items()}
        for t in range(MORE):
            reference.forward(more[:, t : t + 1])
        for layer in first:
            seen = torch.ones(len(lengths), heads, width + MORE, dtype=torch.bool)
            seen[:, :, :width] = to_columns(first[layer], LENGTHS)
            reference.keep[layer] = seen & to_columns(second[layer], lengths)
        expected = reference.forward(last)
    assert (got - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        *((a, {"sliding_window": 200}) for a in ("qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2", "gpt_oss")),
        ("gemma2", {"attn_logit_softcapping": None}),
    ],
)
def test_ignoring_a_window_or_a_soft_cap_would_show(architecture, change):
    """The reference itself moves when the feature is switched off, so that the comparison above can fail."""
    ids, mask, more, _ = inputs()
    model, other = small_model(architecture), small_model(architecture, **change)
    layers = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    keeps = random_keeps(layers, 2, LENGTHS, 0)
    assert min(LENGTHS) > WINDOW
    moved = masked(model, ids, mask, more, keeps) - masked(other, ids, mask, more, keeps)
    assert moved.abs().amax((1, 2)).min() > 1e-2


def test_future_tokens_are_invisible():
    """Changing token t moves no logit before t, in a prompt, in a later turn and across chunks."""
    model = small_model()
    ids = random_ids(1, 24)
    changed = ids.clone()
    changed[0, 18] = (ids[0, 18] + 1) % 100 + 2

    def run(tokens):
        with compress(model, Full()) as session:
            cache = session.prefill(tokens[:, :8]).cache
            return torch.cat(
                [
                    feed(model, cache, tokens[:, 8:16], torch.ones(1, 16, dtype=torch.long)),
                    feed(model, cache, tokens[:, 16:], torch.ones(1, 24, dtype=torch.long)),
                ],
                1,
            )

    moved = (run(ids) - run(changed)).abs().amax((0, 2))
    assert moved[:10].max() <= 1e-6
    assert moved[10:].max() > 1e-3
