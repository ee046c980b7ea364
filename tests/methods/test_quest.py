"""Quest keeps everything and reads the pages whose bounds on q·k are highest."""

from __future__ import annotations

import pytest
import torch
from helpers import examples, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from pages_reference import attended, loop_top, mask_of, watch
from reference import MaskedReference, stock_logits
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.cache.layouts import PagedStore
from kvcompress.cache.pages import PageIndex
from kvcompress.methods import H2O, KIVI, AdaKV, Full, Int8, Quest, SnapKV, TurboQuant
from kvcompress.methods.quest import QuestReader

MODEL = small_model()


def follow(model, method, ids, tokens, mask=None, later=None):
    """Logits of the prompt and of each token fed after it; with `later` also of some appended and one more each."""
    mask = torch.ones_like(ids) if mask is None else mask
    with compress(model, method) as session:
        out = [session.prefill(ids, attention_mask=mask).logits[:, None]]
        out += [session.step(tokens[:, t : t + 1])[:, None] for t in range(tokens.shape[1])]
        if later is not None:
            out += [session.append(later)[:, None], session.step(tokens[:, :1])[:, None]]
            out += [session.prefill(later, cache=session.cache).logits[:, None], session.step(tokens[:, 1:2])[:, None]]
        return torch.cat(out, 1), session.report()


@pytest.mark.parametrize("reduce", ["none", "max", "mean"])
@torch.no_grad()
def test_with_a_budget_of_all_pages_it_equals_the_full_cache(reduce):
    """In a left-padded batch, over later turns too; and reads what the full cache reads, and the bounds."""
    ids, mask = left_padded([30, 17])
    tokens, later = random_ids(2, 6, 1), random_ids(2, 7, 2)
    full, _ = follow(MODEL, Full(), ids, tokens, mask, later)
    method = Quest(budget=400, page_size=4, group_reduce=reduce, skip_layers=0)
    mine, report = follow(MODEL, method, ids, tokens, mask, later)
    assert (full - mine).abs().max() <= 1e-5
    assert "pages" in report["kernel"]
    assert not report["active"], "nothing was left out"


@settings(max_examples=examples(10, 25), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    steps=st.integers(1, 9),
    size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 99),
)
def test_every_bound_is_at_least_the_largest_logit_of_its_page(lengths, steps, size, seed):
    ids, mask = left_padded(lengths, seed)
    with compress(MODEL, Quest(budget=size, page_size=size, skip_layers=0)) as session, torch.no_grad():
        session.prefill(ids, attention_mask=mask)
        for t in range(steps):
            session.step(random_ids(len(lengths), 1, t))
        session.append(random_ids(len(lengths), 3, seed))
        for layer in session.cache.layers:
            store = layer.store
            keys, positions = layer.keys_values()[0], layer.positions()
            assert isinstance(store, PagedStore)
            q = torch.randn(64, keys.shape[3], generator=torch.Generator().manual_seed(seed))
            both = torch.cat([q.clamp(min=0), (-q).clamp(min=0)], 1)
            for b, length in enumerate(lengths):
                held = int((positions[b, 0] >= 0).sum())
                assert held == length + steps + 3
                for h in range(keys.shape[1]):
                    for page in range(-(-held // size)):
                        mine = keys[b, h, page * size : min((page + 1) * size, held)]
                        bound = both @ store.bounds[b, h, page]
                        true = (q @ mine.T).amax(1)
                        assert (bound >= true - 1e-4).all()
                        if size == 1:
                            assert (bound - true).abs().max() <= 1e-4, "a page of one token knows its logit"


@pytest.mark.parametrize(
    ("heads", "reduce", "width"),
    [
        ((2, 2), "none", 1.0),
        ((6, 2), "none", 1.0),
        ((6, 2), "max", 1.0),
        ((6, 2), "max", 0.2),
        ((6, 2), "mean", 1.0),
        ((4, 1), "none", 0.0),
        ((4, 1), "none", 1.0),
        ((4, 1), "max", 1.0),
    ],
)
@torch.no_grad()
def test_attended_pages_equal_the_loop_over_many_steps(heads, reduce, width, monkeypatch):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 16 * heads[0]}
    model, steps = small_model(num_hidden_layers=2, **sizes), examples(30, 200)
    options = {"group_reduce": reduce, "force_last": reduce != "mean", "bound_width": width}
    method = Quest(budget=20, page_size=4, skip_layers=1, **options)
    seen = watch(monkeypatch, QuestReader)
    with compress(model, method) as session:
        session.prefill(random_ids(1, 30))
        for t in range(steps):
            session.step(random_ids(1, 1, t))
        keys = session.cache.keys_values(1)[0][0]
    assert len(seen) == steps and {layer for layer, *_ in seen} == {1}
    group = heads[0] // heads[1]
    for t, (_, q, chosen) in enumerate(seen):
        n = 31 + t
        for head in range(chosen.shape[1]):
            kv = head // group if reduce == "none" else head
            queries = [q[0, head, 0]] if reduce == "none" else list(q[0, kv * group : (kv + 1) * group, 0])
            wanted = loop_top(queries, keys[kv, :n], 4, 5, reduce, method.force_last, width)
            assert attended(chosen[0, head]) == wanted, (t, head)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@torch.no_grad()
def test_what_it_returns_is_attention_over_the_chosen_pages(reduce, monkeypatch):
    """Logits of every step equal a stock model's whose masks show those pages only; rows with padding too."""
    model, twin = small_model(), small_model(twin=True)
    lengths, size = [26, 15], 4
    ids, mask = left_padded(lengths)
    seen = watch(monkeypatch, QuestReader)
    with compress(model, Quest(budget=12, page_size=size, group_reduce=reduce, skip_layers=1)) as session:
        session.prefill(ids, attention_mask=mask)
        got = [session.step(random_ids(2, 1, t)) for t in range(8)]
        got.append(session.append(random_ids(2, 3, 50)))
    with MaskedReference(twin) as reference:
        reference.forward(ids, mask)
        for t in range(8):
            reference.keep = {}
            for layer, _, chosen in [entry for entry in seen if entry[0] >= 1][2 * t : 2 * t + 2]:
                reference.keep[layer] = mask_of(chosen, lengths, size, 26 + t + 1)
            expected = reference.forward(random_ids(2, 1, t))[:, -1]
            assert (got[t] - expected).abs().max() <= 1e-5
        reference.keep = {}
        assert (got[8] - reference.forward(random_ids(2, 3, 50))[:, -1]).abs().max() <= 1e-5
    assert (got[7] - stock_logits(small_model(), torch.cat([ids, *[random_ids(2, 1, t) for t in range(8)]], 1),
                                  torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], 1))[:, -1]).abs().max() > 1e-3  # fmt: skip


@torch.no_grad()
def test_rows_of_a_batch_read_what_they_read_alone():
    """Also when a row has ended for a while, which the others do not notice, and after rows changed places."""
    lengths = [29, 18]
    ids, mask = left_padded(lengths)
    method = Quest(budget=0.3, page_size=4, skip_layers=0, min_pages=1)
    tokens = random_ids(2, 12, 3)
    with compress(MODEL, method) as session:
        session.prefill(ids, attention_mask=mask)
        out = [session.step(tokens[:, t : t + 1], real=torch.tensor([True, t < 5])) for t in range(10)]
        session.append(random_ids(2, 2, 9))
        session.cache.reorder_cache(torch.tensor([1, 0]))
        last = session.step(tokens[:, 10:11].flip(0)).flip(0)
        rows = [session.report(row=row)["kv"] for row in (1, 0)]
    for b, length in enumerate(lengths):
        with compress(MODEL, method) as session:
            session.prefill(ids[b : b + 1, -length:])
            for t in range(10 if b == 0 else 5):
                assert (session.step(tokens[b : b + 1, t : t + 1]) - out[t][b]).abs().max() <= 1e-5
            session.append(random_ids(2, 2, 9)[b : b + 1])
            assert (session.step(tokens[b : b + 1, 10:11]) - last[b]).abs().max() <= 1e-5
            alone = session.report()["kv"]
        for name in ("read_bytes_per_token", "moved_bytes_per_token", "bytes_held", "ratio"):
            assert rows[b][name] == alone[name], name


@torch.no_grad()
def test_a_fork_goes_on_by_itself():
    method = Quest(budget=8, page_size=4, skip_layers=0)
    with compress(MODEL, method) as session:
        session.prefill(random_ids(1, 30))
        for t in range(6):
            session.step(random_ids(1, 1, t))
        first, fork = session.cache, session.cache.fork()
        a = [session.step(random_ids(1, 1, 20 + t)) for t in range(5)]
        session.cache = fork
        b = [session.step(random_ids(1, 1, 20 + t)) for t in range(5)]
        assert torch.equal(torch.cat(a), torch.cat(b))
        for one, two in zip(first.layers, fork.layers, strict=True):
            assert torch.equal(one.store.bounds, two.store.bounds)
            assert one.store.bounds.data_ptr() != two.store.bounds.data_ptr()


def test_the_page_of_a_long_key_that_the_query_repeats_is_read():
    """q = c * key, among keys a quarter as long, chosen with the newest page."""
    generator = torch.Generator().manual_seed(0)
    keys, planted = torch.randn(80, 16, generator=generator), 37
    keys[planted] *= 4
    packed = {"keys": keys, "values": keys, "positions": torch.arange(80, dtype=torch.int32)}
    store = PagedStore(packed, torch.tensor([[80]]), keys, 4, True, ())
    index = PageIndex(0, 4, store.pages(), store.shown_bounds(), torch.tensor([80]), torch.tensor([1]))
    for c in (0.1, 1.0, 50.0):
        q = (c * keys[planted]).view(1, 1, 1, 16)
        chosen = QuestReader(budget=8, page_size=4, min_pages=1).select(q, index, {})
        assert attended(chosen[0, 0]) == {planted // 4, 19}


@torch.no_grad()
def test_bytes_read_are_pages_and_bounds():
    """First layers whole, the others K pages per query head and the bounds of all pages; float32, 16 channels."""
    with compress(MODEL, Quest(budget=12, page_size=4, skip_layers=1, min_pages=1)) as session:
        session.prefill(random_ids(1, 31))
        session.step(random_ids(1, 1))
        report = session.report()
    token = 2 * 16 * 4
    whole, pages, bounds = 32 * 2 * token, 3 * 4 * 4 * token, 8 * 2 * 2 * 16 * 4
    assert report["kv"]["read_bytes_per_token"] == whole + 2 * (pages + bounds)
    assert report["active"] and report["kv"]["moved_bytes_per_token"] == 0
    assert report["nbytes"]["keys_values"] == 3 * 32 * 2 * token
    assert report["nbytes"]["index"] > 0 and report["nbytes"]["host"] == 0


def test_a_share_is_of_the_prompt_in_whole_pages_and_at_least_three():
    reader = QuestReader(budget=0.25)
    assert reader.count(torch.tensor([1000, 130, 8])).tolist() == [15, 2, 1]
    assert QuestReader(budget=1024).count(torch.tensor([8])).tolist() == [64]
    assert QuestReader().min_pages == 3 and not Quest(preset="code", budget=64).force_last


# ---------------------------------------------------------------------- together with other parts


@pytest.mark.parametrize("codec", [Int8(), TurboQuant(), KIVI(group=4, residual=8)], ids=lambda x: type(x).__name__)
@torch.no_grad()
def test_over_a_codec_all_pages_equal_the_codec_alone_and_few_do_not(codec):
    """Bounds are those of keys as the codec returns them."""
    ids, mask = left_padded([30, 17])
    tokens, later = random_ids(2, 6, 1), random_ids(2, 7, 2)
    expected, _ = follow(MODEL, codec, ids, tokens, mask, later)
    every, _ = follow(MODEL, Quest(budget=400, page_size=4, skip_layers=0, codec=codec), ids, tokens, mask, later)
    few, report = follow(
        MODEL, Quest(budget=8, page_size=4, skip_layers=0, min_pages=1, codec=codec), ids, tokens, mask
    )
    assert (expected - every).abs().max() <= 1e-4
    assert (expected[:, 6] - few[:, 6]).abs().max() > 1e-3
    assert report["nbytes"]["codes"] > 0


@torch.no_grad()
def test_bounds_over_codes_bound_the_decoded_keys():
    with compress(MODEL, Quest(budget=8, page_size=4, skip_layers=0, codec=Int8())) as session:
        session.prefill(random_ids(1, 21))
        for t in range(7):
            session.step(random_ids(1, 1, t))
        for layer in session.cache.layers:
            keys, bounds = layer.keys_values()[0], layer.store.shown_bounds()
            pages = keys.view(1, 2, 7, 4, 16)
            assert torch.equal(bounds, torch.cat([pages.amax(3), (-pages).amax(3)], -1))


@torch.no_grad()
def test_it_reads_pages_of_what_an_allocator_per_head_left():
    """Heads hold different numbers of tokens; pages are those of the held slots."""
    ids, mask = left_padded([40, 25])
    tokens, later = random_ids(2, 9, 1), random_ids(2, 5, 2)
    plain = AdaKV(budget=0.5, window=3)
    expected, _ = follow(MODEL, plain, ids, tokens, mask, later)
    all_pages = plain.replace(reader=QuestReader(budget=400, page_size=4, skip_layers=0))
    every, _ = follow(MODEL, all_pages, ids, tokens, mask, later)
    few = plain.replace(reader=QuestReader(budget=8, page_size=4, skip_layers=0, min_pages=1))
    other, report = follow(MODEL, few, ids, tokens, mask, later)
    assert (expected - every).abs().max() <= 1e-5
    assert (expected - other)[:, 1:].abs().max() > 1e-3
    assert report["evicted"] > 0 and report["kv"]["read_bytes_per_token"] > 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Quest(budget=8), "budget=8 tokens is less than one page.*at least 16"),
        (lambda: Quest(budget=64, page_size=0), "page_size=0; a page holds at least 1 token"),
        (lambda: Quest(budget=64, bound_width=1.5), r"bound_width=1.5 is not in \[0, 1\]"),
        (lambda: Quest(budget=64, group_reduce="sum"), "group_reduce='sum'; valid: none, max, mean"),
        (lambda: Quest(budget=64, skip_layers=-1), "skip_layers=-1"),
        (lambda: Quest(budget=64, min_pages=0), "min_pages=0"),
        (lambda: QuestReader(budget=1.0), "budget=1.0 reads everything"),
        (lambda: Quest(budget=64, codec=KIVI(group=24, residual=24)), "a page_size that divides the codec's group"),
        (lambda: H2O(budget=0.5, reader=QuestReader()), "schedule"),
        (lambda: SnapKV(budget=64, schedule=H2O().make_schedule(), reader=QuestReader()), "schedule=prompt"),
    ],
)
def test_what_cannot_be_is_refused_before_work(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@torch.no_grad()
def test_through_generate_it_is_the_same_as_step_by_step():
    ids = random_ids(2, 24)
    with compress(MODEL, Quest(budget=8, page_size=4, skip_layers=1, min_pages=1)) as session:
        out = MODEL.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        session.prefill(ids)
        assert session.generate(8).tokens == out[:, 24:].tolist()
        mask = torch.ones(2, 24 + 9, dtype=torch.long)
        assert (
            feed(MODEL, session.cache, random_ids(2, 1), mask[:, : session.cache.get_seq_length() + 1]).isfinite().all()
        )
