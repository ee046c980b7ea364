"""Layers whose heads hold different numbers of tokens: growth, decode at the cap, and the kernel a GPU runs."""

from __future__ import annotations

import pytest
import torch
from helpers import all_held, examples, make
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.cache.layouts import RaggedStore
from kvcompress.kernels import triton_decode
from kvcompress.method import Schedule
from kvcompress.methods import AdaKV


def store_of(counts, width=8):
    counts = torch.tensor(counts)
    total = int(counts.sum())
    positions = torch.cat([torch.arange(n) for n in counts.flatten().tolist()]).int()
    return RaggedStore({"keys": torch.randn(total, width), "positions": positions}, counts)


def column(store, position, n=1, width=8):
    batch, heads = store.counts.shape
    new = torch.arange(position, position + n, dtype=torch.int32)
    return {"keys": torch.randn(batch, heads, n, width), "positions": new.expand(batch, 1, n)}


@pytest.mark.parametrize("counts", [[[700, 90, 300]], [[5, 0], [40, 1]], [[130, 130]]])
def test_growth_keeps_every_token_and_stays_near_what_is_held(counts):
    """Many tokens one by one, then several at once of which some rows have none: in order, with a bounded waste."""
    store = store_of(counts)
    expected = [[store.get("keys")[b, h][store.get("positions")[b, h] >= 0] for h in range(len(counts[0]))]
                for b in range(len(counts))]  # fmt: skip
    moves, last = 0, None
    for step in range(examples(150, 300)):
        new = column(store, 10_000 + step)
        store.append(new, None, torch.ones(len(counts), dtype=torch.long))
        moves, last = moves + (store.channels["keys"].data_ptr() != last), store.channels["keys"].data_ptr()
        expected = [[torch.cat([k, new["keys"][b, h]]) for h, k in enumerate(row)] for b, row in enumerate(expected)]
        held = int(store.counts.sum())
        assert len(store.channels["positions"]) <= 1.25 * held + 64 * store.counts.numel()
    assert moves <= 45
    new, real = column(store, 20_000, 3), torch.ones(len(counts), 3, dtype=torch.bool)
    real[-1, 0] = False
    store.append(new, real, real.sum(1))
    for b, row in enumerate(expected):
        for h, keys in enumerate(row):
            held = store.get("positions")[b, h] >= 0
            assert torch.equal(store.get("keys")[b, h][held], torch.cat([keys, new["keys"][b, h][real[b]]]))
            assert int(held.sum()) == int(store.counts[b, h])


def test_rows_are_reordered_with_their_holes():
    store = store_of([[30, 4], [7, 50]])
    store.append(column(store, 900), None, torch.ones(2, dtype=torch.long))
    store.mark_empty(torch.full((2, 2, 1), store.length - 2), torch.tensor([[True, False], [True, True]]))
    before = [[p[p >= 0].tolist() for p in row] for row in store.get("positions")]
    assert store.counts.tolist() == [[30, 5], [7, 50]] and store.holes == 1
    for copy in (store, store.fork()):
        copy.select_rows(torch.tensor([1, 0, 1]))
        after = [[p[p >= 0].tolist() for p in row] for row in copy.get("positions")]
        assert after == [before[1], before[0], before[1]]
        copy.append(column(copy, 901), None, torch.ones(3, dtype=torch.long))
        assert copy.get("positions")[..., -1].tolist() == [[901, 901]] * 3


@pytest.mark.parametrize("name", ["AdaKV", "CAKE", "H2O", "TOVA", "StreamingLLM"])
def test_at_the_cap_decode_moves_no_memory(name):
    """In many steps that each add and drop one token per head, a batch's buffers move a few times, not at every step."""
    ids, mask = left_padded([60, 41])
    moves, kinds = 0, set()
    with compress(small_model(), make(name, 25, schedule=Schedule(every=1))) as session:
        session.prefill(ids, attention_mask=mask)
        last = [None] * 3
        for _ in range(examples(40, 80)):
            session.generate(1)
            for i, layer in enumerate(session.cache.full_layers):
                pointer = next(iter(layer.store.channels.values())).data_ptr()
                moves, last[i] = moves + (pointer != last[i]), pointer
                kinds.add(layer.store.kind)
        assert session.cache.kept_tokens().double().mean((0, 2)).tolist() == [25, 25]
        sizes = session.cache.nbytes()
        tokens = sizes["full"] // int(session.cache.real.sum())
        assert sizes["allocated"] <= 1.25 * sizes["valid"] + 64 * 2 * (tokens + 4 * 3 * 2)
    assert moves <= 3 * examples(8, 12)
    assert ("ragged" in kinds) == (name == "AdaKV")


def test_a_score_that_is_no_number_is_refused_at_any_step(monkeypatch):
    """Also in the steps of decode that only look at the lowest score."""
    from kvcompress.methods.tova import TOVA

    scorer = type(TOVA(budget=10).parts().scorer)
    stock = scorer.score
    with compress(small_model(), TOVA(budget=10)) as session:
        session.prefill(random_ids(1, 30))
        session.generate(5)
        monkeypatch.setattr(scorer, "score", lambda *args: stock(*args).index_fill(2, torch.tensor([2]), float("nan")))
        with pytest.raises(ValueError, match="NaN"):
            session.generate(5)


def test_the_triton_kernel_decodes_what_torch_decodes(monkeypatch):
    """A whole model through the kernel, interpreted: the same tokens kept, the same logits."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    ids, mask = left_padded([40, 25])
    found = []
    for usable in (False, True):
        monkeypatch.setattr(triton_decode, "usable", lambda *args, usable=usable: usable)
        with compress(small_model(num_hidden_layers=2), AdaKV(budget=12, window=3)) as session:
            session.prefill(ids, attention_mask=mask)
            assert any(isinstance(layer.store, RaggedStore) for layer in session.cache.full_layers)
            logits = [session.step(random_ids(2, 1, seed)) for seed in range(2)]
            found.append((torch.stack(logits), all_held(session)))
            assert ("triton" in session.report()["kernel"]) == usable
    assert (found[0][0] - found[1][0]).abs().max() <= 1e-5 and found[0][1] == found[1][1]
