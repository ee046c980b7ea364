"""The kernel that reads chosen pages where they lie, interpreted: what gathering them and SDPA give."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from kvcompress import compress
from kvcompress.cache import page_reading
from kvcompress.cache.layouts import PagedStore
from kvcompress.kernels import triton_pages
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.methods import Quest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
]
ENCODING = SimpleNamespace(
    groups=None,
    is_encoded=False,
    attention_kv=lambda k, v: (k, v),
    decode_output=lambda output, forward, heads: output,
)
LAYER = SimpleNamespace(encoding=ENCODING)


def stored(counts, size, shared, draw, dim=16):
    """A paged store whose positions have gaps, and three more tokens in every segment."""
    counts = torch.tensor(counts)
    total = int(counts.sum())
    packed = {"keys": torch.randn(total, dim, generator=draw), "values": torch.randn(total, dim, generator=draw)}
    packed["positions"] = torch.cat([2 * torch.arange(n) for n in counts.flatten().tolist()]).int()
    store = PagedStore(packed, counts, packed["keys"], size, shared, ())
    batch, heads = counts.shape
    for step in range(3):
        new = {name: torch.randn(batch, heads, 1, dim, generator=draw) for name in ("keys", "values")}
        new["positions"] = torch.full((batch, 1, 1), 500 + step, dtype=torch.int32)
        store.append(new, None, torch.ones(batch, dtype=torch.long))
    return store


@settings(max_examples=examples(8, 40), deadline=None)
@given(
    counts=st.lists(st.integers(1, 150), min_size=1, max_size=2),
    ragged=st.booleans(),
    group=st.sampled_from([1, 3]),
    per_query_head=st.booleans(),
    size=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 30, 400]),
    n=st.integers(1, 9),
    seed=st.integers(0, 999),
)
def test_pages_read_in_place_give_what_gathered_ones_give(counts, ragged, group, per_query_head, size, window, n, seed):
    """Pages of KV heads or query heads, partial last ones, missing ones, windows, rows of different lengths."""
    draw = torch.Generator().manual_seed(seed)
    rows = [[n, max(1, n // 2) if ragged else n] for n in counts]
    store = stored(rows, size, not ragged, draw)
    batch, kv = store.counts.shape
    heads = kv * group if per_query_head else kv
    there = store.pages().repeat_interleave(heads // kv, dim=1)
    chosen = torch.stack([torch.randperm(store.most, generator=draw) for _ in range(batch * heads)])
    chosen = chosen.view(batch, heads, -1)
    chosen = chosen.masked_fill(chosen >= there[..., None], -1)[..., :n]
    chosen[..., :1] = there[..., None] - 1  # the newest page, and it twice counts once
    chosen[..., 1:] = chosen[..., 1:].masked_fill(chosen[..., 1:] == chosen[..., :1], -1)
    q = torch.randn(batch, kv * group, 1, 16, generator=draw)
    asked = torch.full((batch, 1), 503, dtype=torch.int32)
    forward = SimpleNamespace(on=lambda name, device: asked)
    features = AttentionParams(0.25, window=window)
    expected = page_reading.attend_gathered(LAYER, store, chosen, q, forward, features, True)
    found = triton_pages.decode(q, *store.block_table(), chosen, asked, features)
    assert found.shape == expected.shape and (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("size", [16, 4])
def test_a_reader_of_pages_gets_the_same_logits_and_the_record_names_the_kernel(size, monkeypatch):
    """Pages that no matrix unit takes are gathered as before."""
    model = small_model()
    ids = torch.randint(5, 60, (1, 90), generator=torch.Generator().manual_seed(3))

    def run():
        with compress(model, Quest(budget=32, page_size=size)) as session:
            session.prefill(ids)
            session.generate(4)
            return session.cache.logits, session.report()["kernel"]

    expected, before = run()
    stock = triton_pages.usable
    monkeypatch.setattr(triton_pages.triton_decode, "usable", lambda *args: True)
    pool = torch.zeros(3, size, 16)
    assert stock(ids, pool, pool, 2) == (size == 16)
    found, after = run()
    assert "pages" in before and ("triton" in after) == (size == 16)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("size", "taken"), [(16, True), (64, True), (8, False), (24, False), (1, False)])
def test_pages_are_powers_of_two_from_16_on(size, taken, monkeypatch):
    monkeypatch.setattr(triton_pages.triton_decode, "usable", lambda *args: True)
    pool = torch.zeros(3, size, 16)
    assert triton_pages.usable(torch.zeros(1), pool, pool, 2) == taken
