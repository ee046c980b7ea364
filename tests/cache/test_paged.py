"""The paged layout: nothing is lost and no block is owned twice, whatever is promoted, demoted, appended or reordered."""

from __future__ import annotations

import pytest
import torch
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.cache.layouts import PagedStore, RaggedStore, keep_slots
from kvcompress.cache.pages import PageIndex, top_pages

HEADS, D = 3, 4


class Model:
    """What a paged store should hold: per row and head a list of (key, value, position)."""

    def __init__(self, counts, seed, shared):
        self.generator, self.shared = torch.Generator().manual_seed(seed), shared
        self.rows = [[self.tokens(n, 0) for n in row] for row in counts]

    def tokens(self, n, first):
        return [(*torch.randn(2, D, generator=self.generator), first + i) for i in range(n)]

    def counts(self):
        return torch.tensor([[len(head) for head in row] for row in self.rows])

    def packed(self):
        flat = [token for row in self.rows for head in row for token in head]
        return {
            "keys": torch.stack([k for k, _, _ in flat]),
            "values": torch.stack([v for _, v, _ in flat]),
            "positions": torch.tensor([p for *_, p in flat], dtype=torch.int32),
        }

    def add(self, real):
        """New tokens `[B, H, n]` of which `real [B, n]` are held; as channels."""
        batch, n = real.shape
        keys, values = torch.randn(2, batch, HEADS, n, D, generator=self.generator)
        positions = torch.full((batch, 1, n), -1, dtype=torch.int32)
        for b in range(batch):
            at = max(p for head in self.rows[b] for *_, p in head) + 1
            for i in range(n):
                if real[b, i]:
                    positions[b, 0, i] = at
                    for h in range(HEADS):
                        self.rows[b][h].append((keys[b, h, i], values[b, h, i], at))
                    at += 1
        return {"keys": keys, "values": values, "positions": positions}


def check(store, model, size, host):
    counts = model.counts()
    assert torch.equal(store.counts, counts)
    table, blocks = store.table, len(store.pool["keys"])
    on_device = table[table >= 0].tolist()
    assert len(set(on_device)) == len(on_device), "no block belongs to two pages"
    assert sorted(on_device + store._free) == list(range(blocks)), "every block belongs to a page or is free"
    pages = -(-counts // size)
    for name, place in (("keys", 0), ("values", 1)):
        got = store.get(name)
        for b, row in enumerate(model.rows):
            for h, head in enumerate(row):
                assert torch.equal(got[b, h, : len(head)], torch.stack([token[place] for token in head]))
    positions = store.get("positions").expand(-1, HEADS, -1)
    for b, row in enumerate(model.rows):
        for h, head in enumerate(row):
            assert positions[b, h].tolist() == [p for *_, p in head] + [-1] * (store.length - len(head))
            here, there = table[b, h, : pages[b, h]] >= 0, range(int(pages[b, h]))
            assert not bool((table[b, h, pages[b, h] :] >= 0).any()), "no page past the last"
            if h not in host:
                assert bool(here.all())
            else:
                written = int(store.host.written[b, host.index(h)])
                assert all(here[p] or p < written for p in there), "every page is in one tier at least"
                assert written <= len(head) // size
                keys = store.host.channels["keys"][b, host.index(h)].flatten(0, 1)
                copied = [torch.stack([k for k, *_ in head[: written * size]])] if written else []
                assert all(torch.equal(keys[: written * size], whole) for whole in copied)
            for page in there:
                k = torch.stack([k for k, *_ in head[page * size : (page + 1) * size]])
                assert torch.equal(store.bounds[b, h, page], torch.cat([k.amax(0), (-k).amax(0)])), "bounds are exact"
    assert (store.tiers() == 1).sum() == sum(
        size for b in range(len(counts)) for h in host for p in range(int(pages[b, h])) if table[b, h, p] < 0
    )


actions = st.lists(
    st.one_of(
        st.tuples(st.just("token"), st.integers(1, 9)),
        st.tuples(st.just("rows"), st.integers(0, 2**16)),
        st.tuples(st.just("several"), st.integers(0, 2**16)),
        st.tuples(st.just("hold"), st.integers(0, 2**16)),
        st.tuples(st.just("bring"), st.integers(0, 2**16)),
        st.tuples(st.just("fork"), st.just(0)),
    ),
    max_size=8,
)


@settings(max_examples=examples(60, 120), deadline=None)
@given(
    counts=st.lists(st.integers(1, 21), min_size=1, max_size=2),
    ragged=st.booleans(),
    size=st.sampled_from([1, 2, 4, 5]),
    host=st.sampled_from([(), (0,), (1, 2), (0, 1, 2)]),
    todo=actions,
    seed=st.integers(0, 999),
)
def test_no_page_is_lost_and_none_owned_twice(counts, ragged, size, host, todo, seed):
    rows = [[max(1, n - 3 * h * ragged) for h in range(HEADS)] for n in counts]
    model = Model(rows, seed, not ragged)
    packed = model.packed()
    store = PagedStore(packed, model.counts(), packed["keys"], size, not ragged, host)
    check(store, model, size, host)
    for name, number in todo:
        generator, batch = torch.Generator().manual_seed(number), len(model.rows)
        if name == "token":
            for _ in range(number):
                store.append(
                    model.add(torch.ones(batch, 1, dtype=torch.bool)), None, torch.ones(batch, dtype=torch.long)
                )
        elif name == "several":
            real = torch.rand(batch, 6, generator=generator) < 0.7
            store.append(model.add(real), real, real.sum(1))
        elif name == "rows":
            index = torch.randint(batch, (batch,), generator=generator)
            store.select_rows(index)
            model.rows = [[list(head) for head in model.rows[i]] for i in index.tolist()]
        elif name == "fork":
            old, store = store, store.fork()
            for value in old.pool.values():  # which the copy has no part in
                value.fill_(7)
            if old.host is not None:
                old.host.channels["keys"].fill_(7)
        else:
            most = int((-(-model.counts() // size)).max())
            chosen = torch.stack([torch.randperm(most, generator=generator)[:2] for _ in range(batch * HEADS)])
            chosen = chosen.view(batch, HEADS, -1)
            chosen[chosen >= (-(-model.counts() // size))[..., None]] = -1
            getattr(store, name)(chosen)
            assert not bool(store.missing(chosen).any()), "what is asked for is on the device"
            got = store.read("values", chosen).view(batch, HEADS, -1, size, D)
            for b, h, i in (chosen >= 0).nonzero().tolist():
                tokens = model.rows[b][h][int(chosen[b, h, i]) * size :][:size]
                assert torch.equal(got[b, h, i, : len(tokens)], torch.stack([v for _, v, _ in tokens]))
            if name == "hold" and host:
                for b in range(batch):
                    for place, h in enumerate(host):
                        kept = {int(p) for p in chosen[b, h] if p >= 0}
                        kept |= set(range(int(store.host.written[b, place]), -(-len(model.rows[b][h]) // size)))
                        assert {p for p in range(store.table.shape[2]) if store.table[b, h, p] >= 0} == kept
        check(store, model, size, host)
    plain = keep_slots(store, (store.get("positions") >= 0).expand(-1, HEADS, -1))
    order = [token for row in model.rows for head in row for token in head]
    found = plain.packed((plain.get("positions") >= 0).expand(-1, HEADS, -1))
    assert torch.equal(found["keys"], torch.stack([k for k, *_ in order])), "back from pages, all is as it was"
    assert found["positions"].tolist() == [p for *_, p in order]


def test_a_pool_shrinks_with_what_it_holds_and_grows_by_little():
    """Allocated bytes follow what is on the device, and writing back happens once per page."""
    model = Model([[64] * HEADS], 0, True)
    packed = model.packed()
    store = PagedStore(packed, model.counts(), packed["keys"], 4, True, (0, 1, 2))
    blocks = len(store.pool["keys"])
    assert blocks <= 48 * 1.25
    store.hold(torch.tensor([[[0, 15]] * HEADS]))
    assert len(store.pool["keys"]) <= 6 + 8 and int((store.table >= 0).sum()) == 6
    for _ in range(40):
        store.append(model.add(torch.ones(1, 1, dtype=torch.bool)), None, torch.ones(1, dtype=torch.long))
    store.write_back()
    moved, page = store.host.moved, store.host.page_bytes
    assert moved["prompt"].tolist() == [48 * page] and moved["written"].tolist() == [30 * page]
    assert len(store.pool["keys"]) <= 36 * 1.25 + 4
    check(store, model, 4, (0, 1, 2))


def test_ragged_segments_become_pages_and_come_back_ragged():
    counts = torch.tensor([[5, 9, 2]])
    packed = Model([[5, 9, 2]], 0, False).packed()
    store = PagedStore(packed, counts, packed["keys"], 4, False, ())
    back = keep_slots(store, (store.get("positions") >= 0).expand(-1, HEADS, -1))
    assert isinstance(back, RaggedStore) and torch.equal(back.counts, counts)


def test_the_best_pages_are_the_first_of_equals_and_the_last_is_forced():
    scores = torch.tensor(
        [[[1.0, 3.0, 3.0, 0.0, float("-inf")]], [[1.0, 0.0, float("-inf"), float("-inf"), float("-inf")]]]
    )
    assert top_pages(scores, torch.tensor([2, 3])).tolist() == [[[1, 2, -1]], [[0, 1, -1]]]
    assert top_pages(scores, torch.tensor([2, 2])).tolist() == [[[1, 2]], [[0, 1]]]
    assert top_pages(scores, torch.tensor([1, 1])).tolist() == [[[1]], [[0]]]
    assert top_pages(scores[1:], torch.tensor([4])).tolist() == [[[0, 1, -1, -1]]]
    last = torch.tensor([[3], [1]])
    assert top_pages(scores, torch.tensor([2, 1]), last).tolist() == [[[3, 1]], [[1, -1]]]


def test_a_bound_is_the_sum_over_channels_of_the_larger_product():
    generator = torch.Generator().manual_seed(0)
    keys, q = torch.randn(1, 2, 12, D, generator=generator), torch.randn(1, 4, 1, D, generator=generator)
    high, low = keys.view(1, 2, 3, 4, D).amax(3), keys.view(1, 2, 3, 4, D).amin(3)
    index = PageIndex(0, 4, torch.tensor([[3, 2]]), torch.cat([high, -low], -1), torch.tensor([12]), torch.tensor([1]))
    found = index.upper(q)
    for h in range(4):
        for page in range(3):
            expected = sum(max(float(q[0, h, 0, d] * x[0, h // 2, page, d]) for x in (high, low)) for d in range(D))
            if h >= 2 and page == 2:
                expected = float("-inf")
            assert (
                float(found[0, h // 2, h % 2, page]) == expected or abs(found[0, h // 2, h % 2, page] - expected) < 1e-5
            )
    assert torch.equal(index.upper(q, torch.tensor([1])), found[:, 1:]) and index.scored == 3


@pytest.mark.parametrize("width", [0.0, 0.3, 1.0])
def test_with_less_width_a_score_lies_nearer_to_the_middle_of_the_bounds(width):
    generator = torch.Generator().manual_seed(1)
    keys, q = torch.randn(1, 2, 12, D, generator=generator), torch.randn(1, 4, 1, D, generator=generator)
    high, low = keys.view(1, 2, 3, 4, D).amax(3), keys.view(1, 2, 3, 4, D).amin(3)
    bounds, pages = torch.cat([high, -low], -1), torch.tensor([[3, 3]])
    index = PageIndex(0, 4, pages, bounds, torch.tensor([12]), torch.tensor([1]))
    found = index.upper(q, width=width)
    for h in range(4):
        for page in range(3):
            expected = 0.0
            for d in range(D):
                top, bottom, x = (float(y) for y in (high[0, h // 2, page, d], low[0, h // 2, page, d], q[0, h, 0, d]))
                expected += x * (top + bottom) / 2 + width * abs(x) * (top - bottom) / 2
            assert abs(float(found[0, h // 2, h % 2, page]) - expected) < 1e-5
    single = PageIndex(0, 1, pages * 4, torch.cat([keys, -keys], -1), torch.tensor([12]), torch.tensor([1]))
    true = torch.einsum("bhgd,bhpd->bhgp", q.view(1, 2, 2, D), keys)
    assert (single.upper(q, width=width) - true).abs().max() < 1e-5, "a page of one token has no width"
