"""Floors of a decode step: bytes are those of the weights and of the cache, rates are the device's."""

from __future__ import annotations

import pytest
import torch
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.measure import roofline
from kvcompress.measure.roofline import Rates, Step, beside, between, of_report, rates, weights
from kvcompress.methods import Full, SnapKV
from kvcompress.models.loading import random_model


def held(model, method, batch=2, length=40):
    with compress(model, method) as session:
        session.prefill(random_ids(batch, length))
        return session.report()["kv"], session.cache.nbytes()


@pytest.mark.parametrize("method", [Full(), SnapKV(budget=0.5, window=3)])
def test_bytes_of_a_step_are_the_weights_and_what_the_cache_counts(method):
    model = small_model()
    kv, nbytes = held(model, method)
    found = of_report(model, kv, batch=2)
    unread = model.get_input_embeddings().weight  # of an untied embedding a row per sequence
    read = sum(p.numel() * 4 for p in model.parameters()) - unread.numel() * 4 + 2 * unread.shape[1] * 4
    assert found.weights == read
    assert found.cache == nbytes["keys_values"] and found.bytes == read + nbytes["keys_values"]


def test_operations_are_those_of_a_loop_over_matrices_and_heads():
    model, kept = small_model(), 7
    config = model.config
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    expected = 3 * sum(2 * p.shape[0] * p.shape[1] for p in matrices)
    for _ in range(config.num_hidden_layers * config.num_attention_heads * 3):
        expected += 2 * 2 * config.head_dim * kept  # scores, and the weighted sum of values
    assert roofline.step(model, 100, kept, batch=3).operations == expected


def test_a_tied_embedding_is_read_once_as_the_output_matrix():
    tied = random_model("llama", layers=1, tie_word_embeddings=True)
    table = tied.get_input_embeddings().weight
    assert weights(tied)[0] == sum({p.data_ptr(): p.numel() * 4 for p in tied.parameters()}.values())
    assert weights(tied)[1] >= 2 * table.numel()


def test_of_experts_as_many_are_read_as_a_batch_can_choose():
    model = random_model("qwen3_moe", layers=1)
    experts = sum(p.numel() * 4 for n, p in model.named_parameters() if ".experts." in n)
    assert experts > 0
    one, two, many = (weights(model, batch)[0] for batch in (1, 2, 16))
    row = model.get_input_embeddings().weight.shape[1] * 4
    assert two - one == experts // 2 + row, "two of four experts a token"
    assert many - two == 14 * row, "all four"


def test_the_floor_is_whatever_takes_longer():
    slow = Rates(copy=10.0, read=20.0, matmul=4.0)
    assert slow.bandwidth == 20.0
    assert Step(weights=60, cache=40, operations=4).floor(slow) == 5.0
    assert Step(weights=60, cache=40, operations=40).floor(slow) == 10.0


def test_rates_are_measured_once_and_plausible(monkeypatch):
    first = rates("cpu", torch.float32)
    assert 1e8 < first.copy < 1e13 and 1e8 < first.read < 1e13 and 1e8 < first.matmul < 1e15
    monkeypatch.setattr(roofline, "Timer", lambda device: pytest.fail("measured before"))
    assert rates("cpu", torch.float32) is first


def test_a_saving_under_five_percent_is_noted_and_a_larger_one_is_not(monkeypatch):
    model = small_model()
    monkeypatch.setattr(roofline, "rates", lambda device, dtype: Rates(1e9, 1e9, 1e15))
    read, _ = weights(model)
    for cache, noted in ((0.04, True), (0.5, False)):
        full = {"read_bytes_per_token": int(cache * read), "kept_tokens_mean": 100.0}
        ours = {"read_bytes_per_token": 0, "kept_tokens_mean": 0.0}
        found, notes = beside(model, ours, full, 1, tpot=1.0)
        assert found["predicted_saving"] == pytest.approx(cache / (1 + cache), rel=1e-3)
        assert found["floor_s"] == pytest.approx(read / 1e9) and found["of_floor"] == pytest.approx(1e9 / read)
        assert bool(notes) == noted
        if noted:
            assert "at most 3.8% faster" in notes[0]
    assert beside(model, full, full, 1, tpot=1.0)[1] == [], "the full cache itself saves nothing and need not say so"
    assert "predicted_saving" not in beside(model, full, None, 1, tpot=1.0)[0]


def test_halfway_between_two_reports():
    ends = [{"read_bytes_per_token": b, "kept_tokens_mean": k} for b, k in ((10, 2.0), (20, 3.0))]
    assert between(*ends) == {"read_bytes_per_token": 15, "kept_tokens_mean": 2.5}
