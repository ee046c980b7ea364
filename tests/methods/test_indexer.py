"""Indexer reads the tokens that all heads of a layer together attend to most, the same for every head."""

from __future__ import annotations

import pytest
import torch
from pages_reference import attended, watch
from reference import MaskedReference
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.methods import KIVI, Full, Indexer, Int8, SnapKV
from kvcompress.methods.indexer import IndexerReader


@pytest.mark.parametrize("architecture", ["llama", "granite"])
@torch.no_grad()
def test_it_reads_the_tokens_of_the_largest_attention_summed_over_heads(architecture, monkeypatch):
    """Against a stock model's own queries and keys, masked as the steps before; rows with padding too."""
    model, twin, lengths, k = small_model(architecture), small_model(architecture, twin=True), [24, 15], 6
    ids, mask = left_padded(lengths)
    seen = watch(monkeypatch, IndexerReader)
    with compress(model, Indexer(budget=k)) as session:
        session.prefill(ids, attention_mask=mask)
        got = [session.step(random_ids(2, 1, t)) for t in range(8)]
    with MaskedReference(twin) as reference:
        reference.forward(ids, mask)
        for t in range(8):
            reference.keep = {}
            for layer, _, chosen in seen[3 * t : 3 * t + 3]:
                keep = torch.zeros(2, 2, 24 + t + 1, dtype=torch.bool)
                for b, length in enumerate(lengths):
                    assert len({frozenset(attended(head)) for head in chosen[b]}) == 1
                    for token in attended(chosen[b, 0]):
                        keep[b, :, 24 - length + token] = True
                reference.keep[layer] = keep
            expected = reference.forward(random_ids(2, 1, t))[:, -1]
            assert (got[t] - expected).abs().max() <= 1e-5
            for layer, _, chosen in seen[3 * t : 3 * t + 3]:
                queries, keys, features = reference.captured[layer]
                for b, length in enumerate(lengths):
                    total = torch.zeros(length + t + 1)
                    for h in range(4):
                        logits = keys[b, h // 2, 24 - length :] @ queries[b, h, 0] * features.scaling
                        total += torch.softmax(logits, 0)
                    assert attended(chosen[b, 0]) == set(total.topk(k).indices.tolist())


@torch.no_grad()
def test_a_budget_of_all_tokens_is_the_full_cache_and_a_step_reads_all_keys_and_the_chosen_values():
    model, ids = small_model(), random_ids(1, 20)

    def run(method):
        with compress(model, method) as session:
            session.prefill(ids)
            return torch.cat([session.step(random_ids(1, 1, t)) for t in range(5)]), session.report()["kv"]

    full, held = run(Full())
    every, _ = run(Indexer(budget=100))
    _, few = run(Indexer(budget=4))
    assert (full - every).abs().max() <= 1e-5
    assert few["read_bytes_per_token"] == 3 * 2 * (23 + 4) * 16 * 4, "23 keys in the mean of steps, 4 values"
    assert few["bytes_summaries"] == 0, "no key is held twice"
    assert few["bytes_held"] - few["bytes_tables"] == held["bytes_held"]


@pytest.mark.parametrize("codec", [Int8(), KIVI(bits=4, group=4, residual=8)])
def test_keys_in_a_codec_are_ranked_as_attention_sees_them(codec):
    model, ids = small_model(), random_ids(1, 40)
    got = []
    for method in (Full(codec=codec), Indexer(budget=100, codec=codec)):
        with compress(model, method) as session:
            session.prefill(ids)
            got.append(torch.cat([session.step(random_ids(1, 1, t)) for t in range(5)]))
            report = session.report()["kv"]
    assert (got[0] - got[1]).abs().max() <= 1e-4 and report["bytes_summaries"] == 0
    with compress(model, Indexer(budget=6, codec=codec)) as session:
        session.prefill(ids)
        session.generate(3)
        assert session.report()["kv"]["read_bytes_per_token"] <= report["bytes_held"]


def test_heads_that_hold_different_tokens_are_refused():
    with pytest.raises(ValueError, match="chooses for all heads at once"):
        SnapKV(budget=0.5, reader=IndexerReader(budget=8))
