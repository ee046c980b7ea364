"""ShadowKV: keys from factors of the sequence's own, values from the host, chunks chosen by their landmarks."""

from __future__ import annotations

import pytest
import torch
from pages_reference import attended, watch
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.cache import pages
from kvcompress.cache.layouts import LowRankKeyPages
from kvcompress.method import Reader
from kvcompress.method.budget import NotTogether
from kvcompress.methods import Full, Int8, ShadowKV, SnapKV
from kvcompress.methods.shadowkv import ShadowReader

SIZE = 4
ALL = 2 * 16  # numbers of a small model's keys of a token: full rank
MODEL = small_model()


def shadow(budget=8, rank=ALL, outliers=2, local=1, **options):
    return ShadowKV(budget=budget, page_size=SIZE, rank=rank, outliers=outliers, local=local, **options)


def talk(method, ids, mask, begin=lambda turn: None):
    """Logits of a prompt, steps, a question, steps, a second prompt, steps."""
    with compress(MODEL, method) as session, torch.no_grad():
        out = [session.prefill(ids, attention_mask=mask).logits]
        for turn in range(3):
            begin(turn)
            more = random_ids(len(ids), 6, 50 + turn)
            if turn:
                later = session.append if turn == 1 else lambda x: session.prefill(x, cache=session.cache).logits
                out.append(later(more))
            out += [session.step(random_ids(len(ids), 1, 10 * turn + t)) for t in range(6)]
        return torch.stack(out), session.report()


def test_full_rank_and_all_chunks_are_the_full_cache():
    """In a padded batch, over a question and a second prompt, with chunks fetched and given up on the way."""
    ids, mask = left_padded([41, 26])
    full, _ = talk(Full(), ids, mask)
    every, report = talk(shadow(budget=400), ids, mask)
    assert (full - every).abs().max() <= 2e-5
    assert report["nbytes"]["host"] > 0
    few, _ = talk(shadow(), ids, mask)
    assert (full - few).abs().max() > 1e-3


def loop_choice(queries, keys, scaling, outliers, local, k):
    """Chunks that stay and chunks chosen among the others, by loops over `keys [n, D]` of the full chunks."""
    full = len(keys) // SIZE
    means = [keys[i * SIZE : (i + 1) * SIZE].mean(0) for i in range(full)]
    least = [
        min(float(torch.cosine_similarity(key, means[i], dim=0)) for key in keys[i * SIZE : (i + 1) * SIZE])
        for i in range(full)
    ]
    free = list(range(max(0, full - local)))
    staying = set(sorted(free, key=lambda i: (least[i], i))[:outliers]) | set(range(len(free), full))
    free = [i for i in free if i not in staying]
    if not free:
        return staying, set()
    of = [torch.softmax(torch.stack([q @ means[i] * scaling for i in free]), 0) for q in queries]
    score = {i: max(float(p[n]) for p in of) for n, i in enumerate(free)}
    return staying, set(sorted(free, key=lambda i: (-score[i], i))[:k])


@pytest.mark.parametrize("lengths", [[45], [43, 35]])
@torch.no_grad()
def test_chunks_are_those_that_loops_over_landmarks_choose(lengths, monkeypatch):
    """Exact softmax over landmarks, the largest over a group; outliers, last chunks and what came later always."""
    seen = watch(monkeypatch, ShadowReader)
    ids, mask = left_padded(lengths)
    with compress(MODEL, shadow(budget=12)) as session:
        session.prefill(ids, attention_mask=mask)
        for t in range(9):
            session.step(random_ids(len(lengths), 1, t))
        keys = [session.cache.keys_values(layer)[0] for layer in range(3)]
    for t in range(9):
        for layer, q, chosen in seen[3 * t : 3 * t + 3]:
            for b, length in enumerate(lengths):
                for h in range(2):
                    first = keys[layer][b, h, : length // SIZE * SIZE]
                    queries = list(q[b, 2 * h : 2 * h + 2, 0])
                    staying, wanted = loop_choice(queries, first, 0.25, 2, 1, 3)
                    later = set(range(length // SIZE, -(-(length + 1 + t) // SIZE)))
                    assert attended(chosen[b, h]) == staying | wanted | later, (t, layer, b, h)
                    assert not staying & wanted


class Loops(Reader):
    """The same chunks slot by slot, from a cache that holds everything as it is."""

    name = "shadow_loops"

    def __init__(self):
        self.known = {}

    def select(self, q, index, state):
        rows, positions = [], index.positions.expand(len(q), 2, -1)
        for b in range(len(q)):
            for h in range(2):
                slots = [i for i, p in enumerate(positions[b, h].tolist()) if p >= 0]
                first = self.known.setdefault((index.layer, b, h), (len(slots) - 1) // SIZE * SIZE)
                queries = list(q[b, 2 * h : 2 * h + 2, 0])
                staying, wanted = loop_choice(queries, index.keys[b, h, slots[:first]], 0.25, 2, 1, 2)
                read = [i for c in sorted(staying | wanted) for i in range(c * SIZE, (c + 1) * SIZE)]
                rows.append([slots[i] for i in [*read, *range(first, len(slots))]])
        most = max(map(len, rows))
        return torch.tensor([row + [-1] * (most - len(row)) for row in rows]).view(len(q), 2, most)


def test_at_full_rank_it_is_attention_over_the_chosen_chunks():
    """Over three turns; a second prompt is factored anew."""
    ids, mask = left_padded([41, 26])
    loops = Loops()
    expected, _ = talk(Full(reader=loops), ids, mask, begin=lambda turn: loops.known.clear() if turn == 2 else None)
    found, _ = talk(shadow(), ids, mask)
    assert (found - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_values_on_the_host_are_the_full_caches_and_keys_are_the_best_of_their_rank():
    """Values bit for bit; keys that stay are exact, the others the truncated singular vectors give, rotated."""
    ids, rank = random_ids(1, 60), 7
    with compress(MODEL, Full()) as session:
        session.prefill(ids)
        exact = [session.cache.keys_values(layer) for layer in range(1)]
    with compress(MODEL, shadow(rank=rank)) as session:
        session.prefill(ids)
        for t in range(12):
            session.step(random_ids(1, 1, t))
        layer, turns = session.cache.layers[0], session.cache.spec.codec_rope[0]
        store, tiers = layer.store, session.cache.tiers(0)
        keys, values = session.cache.keys_values(0)
        assert list(store.host.channels) == ["values"] and int(store.host.written.min()) == 15
        held = store.host.channels["values"][:, :, :15].flatten(2, 3)
        assert torch.equal(held, values[:, :, :60]) and torch.equal(values[:, :, :60], exact[0][1])
        stay, told = store.host.moved["promoted"], session.report()["kv"]
        fetched = sum(int(x.store.host.moved["promoted"].sum()) for x in session.cache.layers)
        assert told["moved_bytes_per_token"] == fetched // 12, "values alone"
        assert store.host.moved["rebuilt"] * 16 == stay * rank, (
            "a value of 16 numbers moved, a key made of as many as the rank"
        )
        outliers = layer.reader_state["outliers"]
    whole, at = exact[0][0], torch.arange(60)[None, None]
    before = turns.unrotate(whole, at).transpose(1, 2).flatten(2)[0]
    u, s, vh = torch.linalg.svd(before, full_matrices=False)
    best = ((u[:, :rank] * s[:rank]) @ vh[:rank]).view(60, 2, 16).transpose(0, 1)[None]
    best = turns.rotate(best, at)
    assert (tiers == 1).any() and int(stay.sum()) > 0
    for h in range(2):
        for page in range(15):
            place = slice(page * SIZE, (page + 1) * SIZE)
            kept = page in outliers[0, h] or page >= 14
            near = whole if kept else best
            off = (keys[0, h, place] - near[0, h, place]).abs().max()
            assert off <= 1e-4, (h, page)
            assert not kept or off == 0
    assert (best - whole).abs().max() > 1e-2


@torch.no_grad()
def test_the_error_of_rebuilt_keys_is_the_least_of_each_rank():
    """Eckart and Young: the root of the sum of the squared singular values left out; nothing at full rank."""
    generator = torch.Generator().manual_seed(0)
    keys, counts = torch.randn(2, 3, 24, 4, generator=generator), torch.tensor([24, 16])
    everything = torch.ones(2, 3, 6, dtype=torch.bool)
    everything[1, :, 4:] = False
    before = None
    for rank in (1, 3, 6, 11, 12, 40):
        found = LowRankKeyPages.of(keys, torch.zeros(2, 24), counts, 4, rank, lambda x, at: x)
        got = found.pages(everything)
        wanted = torch.cat([keys[0].view(-1, 4, 4), keys[1, :, :16].reshape(-1, 4, 4)])
        error = float((got - wanted).norm())
        least = [
            torch.linalg.svdvals(keys[b, :, :n].transpose(0, 1).flatten(1))[rank:].square().sum()
            for b, n in ((0, 24), (1, 16))
        ]
        assert abs(error - float(sum(least)) ** 0.5) <= 1e-4
        assert before is None or error <= before + 1e-5
        before = error
    assert before <= 1e-4
    assert torch.equal(found.rows(torch.tensor([1])).pages(everything[1:]), got[18:])


@torch.no_grad()
def test_device_bytes_are_factors_landmarks_and_what_stays():
    with compress(MODEL, shadow(rank=8)) as session:
        session.prefill(random_ids(1, 63))
        session.step(random_ids(1, 1))
        held, kv = session.cache.nbytes(), session.report()["kv"]
        layer = session.cache.layers[0]
        resident = int(layer.store.resident().sum())
    chosen, landmarks, fetched = 2 * 6 * SIZE * 2 * 16 * 4, 2 * 15 * 16 * 4, 2 * 2 * SIZE * 16 * 4
    rebuilt = 2 * 2 * SIZE * 8 * 4  # 8 coordinates for each token of a chunk and head
    assert kv["read_bytes_per_token"] == 3 * (chosen + landmarks + rebuilt), (
        "two outliers, one last, two chosen, the tail"
    )
    assert kv["moved_bytes_per_token"] == 3 * fetched, "values of the chunks chosen"
    factors = 60 * 8 + 8 * ALL + 60
    assert resident <= 2 * (2 + 1 + 2 + 1) * SIZE
    assert held["keys_values"] == 3 * 4 * factors + sum(
        int(x.store.resident().sum()) * 2 * 16 * 4 for x in session.cache.layers
    )
    assert held["summaries"] == 3 * 2 * 15 * 16 * 4 and kv["bytes_held"] == held["valid"]
    assert held["host"] >= 3 * 2 * 60 * 16 * 4, "values alone"
    assert kv["ratio"] < 0.9 and kv["bytes_host"] == held["host"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ShadowKV(budget=4), "budget=4 tokens is less than one page.*at least 8"),
        (lambda: ShadowKV(budget=64, rank=0), "rank=0 holds nothing of a key"),
        (lambda: ShadowKV(budget=64, page_size=1), "page_size=1 makes each key its own landmark"),
        (lambda: ShadowKV(budget=64, outliers=-1), "outliers=-1, local=4: numbers of chunks"),
        (lambda: ShadowKV(budget=64, codec=Int8()), "makes keys from factors.*codec=plain"),
        (lambda: SnapKV(budget=0.5, reader=ShadowReader(budget=64)), "holds their keys together.*eviction per head"),
    ],
)
def test_what_cannot_be_is_refused_before_work(build, words):
    with pytest.raises((ValueError, NotTogether), match=words):
        build()


@torch.no_grad()
def test_a_short_answer_reads_chosen_chunks_from_the_factors():
    """From the first step on: rank 1 and full rank differ, and full rank is the exact keys."""
    ids, answers = random_ids(1, 47), {}
    for rank in (1, ALL):
        with compress(MODEL, shadow(rank=rank)) as session:
            session.prefill(ids)
            answers[rank] = torch.cat([session.step(random_ids(1, 1, t)) for t in range(2)])
    off = (answers[1] - answers[ALL]).abs().amax(1)
    assert off[0] > 1e-3 and off[1] > 1e-3


@pytest.mark.parametrize("length", [47, 48, 49])
@torch.no_grad()
def test_landmarks_and_factors_are_of_the_prompt_alone(length):
    """Also where the first decoded token completes a chunk."""
    answers = []
    for first in (3, 90):
        with compress(MODEL, shadow(rank=5)) as session:
            session.prefill(random_ids(1, length))
            keys = session.cache.keys_values(0)[0]
            session.step(torch.tensor([[first]]))
            layer = session.cache.layers[0]
            answers.append((layer.reader_state["summaries"], layer.store.host.rebuilt.basis))
    full = length // SIZE * SIZE
    assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])
    assert (answers[0][0] - keys[:, :, :full].unflatten(2, (-1, SIZE)).mean(3)).abs().max() <= 1e-5


def test_models_whose_keys_cannot_be_turned_back_and_hosts_too_small_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="holds latents.*take another method"):
        compress(small_model("deepseek_v3"), shadow()).__enter__()
    monkeypatch.setattr(pages, "free_memory", lambda: 40 * 3 * 2 * 16 * 4 - 1)
    with compress(MODEL, shadow()) as session:
        with pytest.raises(ValueError, match="the host tier needs .* for 1 x 40 tokens"):
            session.prefill(random_ids(1, 40))
        session.prefill(random_ids(1, 39))


def test_a_prompt_shorter_than_a_chunk_is_read_whole():
    ids = random_ids(1, 2)
    got = []
    for method in (Full(), shadow()):
        with compress(MODEL, method) as session, torch.no_grad():
            session.prefill(ids)
            got.append(torch.cat([session.step(random_ids(1, 1, t)) for t in range(9)]))
    assert (got[0] - got[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("architecture", ["gemma2", "glm4", "gpt_oss", "phi3", "qwen3", "smollm3"])
@torch.no_grad()
def test_keys_come_back_whatever_way_a_model_turns_them(architecture):
    """Half-split and interleaved, partial, scaled and not at all; with query-key norm, soft caps, sinks, sliding layers."""
    model = small_model(architecture)
    with compress(model, shadow()) as session:
        session.prefill(random_ids(1, 50))
        before = {layer: session.cache.keys_values(layer) for layer in session.full_layers}
        for t in range(6):
            session.step(random_ids(1, 1, t))
        for layer, pair in before.items():
            assert bool((session.cache.tiers(layer) == 1).any())
            keys, values = session.cache.keys_values(layer)
            assert (keys[:, :, :50] - pair[0]).abs().max() <= 1e-4 * pair[0].abs().max()
            assert torch.equal(values[:, :, :50], pair[1])


@pytest.mark.parametrize("rank", [9, ALL])
@torch.no_grad()
def test_rows_of_a_batch_are_what_they_are_alone_and_forks_and_exchanged_rows_go_on(rank):
    """With an ended row for a while, a question, and factors that lose something."""
    lengths = [44, 31]
    ids, mask = left_padded(lengths)
    tokens, method = random_ids(2, 16, 3), shadow(rank=rank)
    with compress(MODEL, method) as session:
        session.prefill(ids, attention_mask=mask)
        out = [session.step(tokens[:, t : t + 1], real=torch.tensor([True, t < 9])) for t in range(14)]
        twin = session.cache.fork()
        session.cache.reorder_cache(torch.tensor([1, 0]))
        session.append(random_ids(2, 2, 9).flip(0))
        last = session.step(tokens[:, 15:].flip(0)).flip(0)
        session.cache = twin
        session.append(random_ids(2, 2, 9))
        assert (session.step(tokens[:, 15:]) - last).abs().max() <= 1e-5
        rows = [session.report(row=row)["kv"] for row in (0, 1)]
    for b, length in enumerate(lengths):
        with compress(MODEL, method) as session:
            session.prefill(ids[b : b + 1, -length:])
            for t in range(14 if b == 0 else 9):
                assert (session.step(tokens[b : b + 1, t : t + 1]) - out[t][b]).abs().max() <= 1e-4, (b, t)
            session.append(random_ids(2, 2, 9)[b : b + 1])
            assert (session.step(tokens[b : b + 1, 15:]) - last[b]).abs().max() <= 1e-4
            alone = session.report()["kv"]
        for name in ("read_bytes_per_token", "moved_bytes_per_token", "bytes_held", "bytes_summaries"):
            assert rows[b][name] == alone[name], name
