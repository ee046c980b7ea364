"""FlexiCache: unstable heads choose pages at every step, stable ones by its schedule, over two tiers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import examples
from pages_reference import attended, loop_top, mask_of, watch
from reference import MaskedReference
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.cache import pages
from kvcompress.cache.layouts import PagedStore
from kvcompress.calibrate import calibration
from kvcompress.calibrate.head_profile import DATA, KIND, least_stable, overlap, profile, trace, unstable_heads
from kvcompress.methods import KIVI, AdaKV, FlexiCache, Full, Int8, Quest
from kvcompress.methods.flexicache import FlexiCacheReader

SIZE = 4


def sized(heads, layers=2, **options):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 16 * heads[0]}
    return small_model(num_hidden_layers=layers, **sizes, **options)


def mixed(budget, classes, rerank=16, **options):
    """FlexiCache with given classes, per layer and KV head True for stable."""
    reader = FlexiCacheReader(budget=budget, page_size=SIZE, rerank=rerank, classes=classes)
    return FlexiCache(budget=budget, page_size=SIZE, rerank=rerank, reader=reader, **options)


def scheduled(steps, prompt, k, rerank, stable, ranked_at):
    """Pages attended at steps 1 to `steps`, by loops: `ranked_at(t, n)` gives the k best of the n tokens at step t."""
    found, current, coming, known = [], None, None, 0
    for t in range(1, steps + 1):
        n = prompt + t
        pages_now = -(-n // SIZE)
        if not stable:
            found.append(ranked_at(t, n))
            continue
        if coming is not None:
            (current, known), coming = coming, None
        if t == 1:
            current, known = ranked_at(t, n), pages_now
        elif t % rerank == 0:
            coming = ranked_at(t, n), pages_now
        found.append(current | set(range(known, pages_now)))
    return found


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2)])
@torch.no_grad()
def test_attended_pages_equal_the_schedule_over_many_steps(heads, monkeypatch):
    """For stable and unstable heads in one layer: ranks at 1, 16, 32, …, in effect one step later; last page, tail pages."""
    model, steps, prompt, k = sized(heads), examples(50, 200), 37, 4
    seen = watch(monkeypatch, FlexiCacheReader)
    with compress(model, mixed(k * SIZE, ((True, False), (True, True)))) as session:
        session.prefill(random_ids(1, prompt))
        for t in range(steps):
            session.step(random_ids(1, 1, t))
        keys = [session.cache.keys_values(layer)[0][0] for layer in range(2)]
    group = heads[0] // 2
    for layer, kv, stable in ((0, 0, True), (0, 1, False), (1, 0, True)):
        mine = [(q, chosen) for at, q, chosen in seen if at == layer]
        assert len(mine) == steps

        def ranked_at(t, n, layer=layer, kv=kv, mine=mine):
            q = mine[t - 1][0][0, kv * group : (kv + 1) * group, 0]
            return loop_top(list(q), keys[layer][kv, :n], SIZE, k)

        wanted = scheduled(steps, prompt, k, 16, stable, ranked_at)
        for t, pages_of in enumerate(wanted):
            assert attended(mine[t][1][0, kv]) == pages_of, (layer, kv, t + 1)
            assert (prompt + t) // SIZE in pages_of, "the last page is always attended"
        if stable:
            assert len({frozenset(x) for x in wanted}) > steps // 20
            assert max(len(x) for x in wanted) <= k + -(-16 // SIZE) + 1


@pytest.mark.parametrize("heads", ["stable", "unstable", "random"])
@torch.no_grad()
def test_with_a_budget_of_all_pages_it_equals_the_full_cache(heads):
    model = small_model()
    ids, mask = left_padded([30, 17])

    def run(method):
        with compress(model, method) as session:
            out = [session.prefill(ids, attention_mask=mask).logits]
            out += [session.step(random_ids(2, 1, t)) for t in range(20)]
            out += [session.append(random_ids(2, 6, 60)), session.step(random_ids(2, 1, 61))]
            out += [
                session.prefill(random_ids(2, 9, 62), cache=session.cache).logits,
                session.step(random_ids(2, 1, 63)),
            ]
            return torch.stack(out)

    assert (run(Full()) - run(FlexiCache(budget=400, page_size=SIZE, rerank=3, heads=heads))).abs().max() <= 1e-5


@torch.no_grad()
def test_what_it_returns_is_attention_over_the_chosen_pages(monkeypatch):
    """Through promotions and demotions, logits equal a stock model's whose masks show the chosen pages only."""
    model, twin, lengths = small_model(), small_model(twin=True), [41, 28]
    ids, mask = left_padded(lengths)
    seen = watch(monkeypatch, FlexiCacheReader)
    with compress(model, mixed(12, ((True, False), (True, True), (False, True)), rerank=3)) as session:
        session.prefill(ids, attention_mask=mask)
        got = [session.step(random_ids(2, 1, t)) for t in range(20)]
        got.append(session.append(random_ids(2, 5, 50)))
        moved = [layer.store.host.moved for layer in session.cache.layers]
    assert all(int(m["promoted"].sum()) > 0 and int(m["fetched"].sum()) > 0 for m in moved)
    with MaskedReference(twin) as reference:
        reference.forward(ids, mask)
        for t in range(20):
            for layer, _, chosen in seen[3 * t : 3 * t + 3]:
                reference.keep[layer] = mask_of(chosen, lengths, SIZE, 41 + t + 1)
            assert (got[t] - reference.forward(random_ids(2, 1, t))[:, -1]).abs().max() <= 1e-5, t
        reference.keep = {}
        assert (got[20] - reference.forward(random_ids(2, 5, 50))[:, -1]).abs().max() <= 1e-5


@pytest.mark.parametrize("width", [1.0, 0.2])
@torch.no_grad()
def test_one_rank_per_step_is_quest_with_the_group_maximum_one_step_late(width):
    """All heads unstable: Quest by KV head, newest page forced."""
    model, ids = small_model(), random_ids(1, 40)

    def run(method):
        with compress(model, method) as session:
            session.prefill(ids)
            return torch.cat([session.step(random_ids(1, 1, t)) for t in range(12)])

    sizes = {"budget": 12, "page_size": SIZE, "bound_width": width}
    quest = Quest(group_reduce="max", skip_layers=0, min_pages=1, **sizes)
    assert torch.equal(run(quest), run(FlexiCache(heads="unstable", **sizes)))


# ---------------------------------------------------------------------- tiers


@torch.no_grad()
def test_the_host_copy_is_the_full_cache_bit_for_bit_through_many_promotions(monkeypatch):
    """At every step: full pages on the host, and what both tiers hold together, equal what the model made."""
    model, made = sized((2, 2), layers=1, max_position_embeddings=2048), []
    append = PagedStore.append

    def noted(self, new, *args, **kwargs):
        made.append((new["keys"].clone(), new["values"].clone()))
        append(self, new, *args, **kwargs)

    monkeypatch.setattr(PagedStore, "append", noted)
    with compress(model, mixed(4 * SIZE, ((True, True),), rerank=1)) as session:
        session.prefill(random_ids(1, 60))
        keys, values = (x.clone() for x in session.cache.keys_values(0))
        for t in range(examples(60, 220)):
            before = len(made)
            session.step(random_ids(1, 1, t))
            if len(made) == before:  # the first step is stored before there are pages
                keys, values = (x.clone() for x in session.cache.keys_values(0))
            else:
                keys, values = (torch.cat([x, new], 2) for x, new in zip((keys, values), made[-1], strict=True))
            layer = session.cache.layers[0]
            host = layer.store.host
            full = keys.shape[2] // SIZE
            layer.store.write_back()
            assert int(host.written.min()) == full
            for name, whole in (("keys", keys), ("values", values)):
                copied = host.channels[name][:, :, :full].flatten(2, 3)
                assert torch.equal(copied, whole[:, :, : full * SIZE])
            assert all(torch.equal(a, b) for a, b in zip(layer.keys_values(), (keys, values), strict=True))
        promoted = int(host.moved["promoted"].sum()) // host.page_bytes
    assert promoted >= examples(100, 500)
    assert int(host.moved["written"].sum() + host.moved["prompt"].sum()) == full * 2 * host.page_bytes, "once per page"


@torch.no_grad()
def test_device_bytes_of_stable_heads_are_those_of_k_and_tail_pages():
    """At 4,096 tokens and K = 16 pages of 16: measured on the layers' own storage, positions and bounds beside it."""
    model, k = sized((2, 2), layers=1, max_position_embeddings=8192), 16
    with compress(model, FlexiCache(budget=16 * k, heads="stable")) as session:
        session.prefill(random_ids(1, 4080))
        token = 2 * 16 * 4
        assert session.cache.nbytes()["keys_values"] == 4080 * 2 * token
        for t in range(16):
            session.step(random_ids(1, 1, t))
            tail = (4080 + t + 1 + 15) // 16 - 256  # pages since the ranking at step 1, which saw 256
            sizes, tiers = session.cache.nbytes(), session.cache.tiers(0)
            slots = (k + tail) * 16 - (-(4080 + t + 1)) % 16
            assert sizes["keys_values"] == 2 * slots * token
            assert (tiers == 0).sum((0, 2)).tolist() == [slots, slots]
        held = session.cache.positions(0)
        assert held.shape == tiers.shape and torch.equal(held[0, 0], torch.arange(4096)), "all tiers are listed"
        assert sizes["allocated"] <= 1.25 * (sizes["valid"] + 2 * 16 * token) and sizes["host"] >= 2 * 4096 * token
        kv = session.report()["kv"]
    assert kv["ratio"] < 0.2 and kv["bytes_host"] == sizes["host"]
    # read: 16 pages per head, at steps 1 and 16 also all bounds
    bounds = 2 * 256 * 2 * 16 * 4
    assert kv["read_bytes_per_token"] == 2 * 16 * 16 * token + 2 * bounds // 16


@torch.no_grad()
def test_bytes_moved_are_promoted_pages_and_new_ones_written_back(monkeypatch):
    """None for unstable heads; as many demoted as promoted."""
    model = small_model()
    seen = watch(monkeypatch, FlexiCacheReader)
    page = SIZE * 2 * 16 * 4
    with compress(model, mixed(12, ((True, True), (True, False), (False, False)), rerank=5)) as session:
        session.prefill(random_ids(1, 48))
        for t in range(21):
            session.step(random_ids(1, 1, t))
        moved = session.report()["kv"]["moved_bytes_per_token"]
        stores = [layer.store for layer in session.cache.layers]
    assert stores[2].host is None and stores[1].host.heads == (0,)
    expected = 0
    for layer, heads in ((0, (0, 1)), (1, (0,))):
        for h in heads:
            sets = [attended(chosen[0, h]) for at, _, chosen in seen if at == layer]
            for t in range(1, 21):  # what was not read before, and is no new page
                newest = (48 + t) // SIZE
                expected += len([p for p in sets[t] - sets[t - 1] if p < newest - 1]) * page
            expected += ((48 + 20) // SIZE - 48 // SIZE) * page
    assert moved == expected // 21


@torch.no_grad()
def test_rows_of_a_batch_move_and_read_what_they_do_alone():
    model, lengths = small_model(), [44, 23]
    ids, mask = left_padded(lengths)
    method = mixed(0.3, ((True, False), (True, True), (False, True)), rerank=4)
    tokens = random_ids(2, 16, 3)
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        out = [session.step(tokens[:, t : t + 1], real=torch.tensor([True, t < 9])) for t in range(14)]
        twin = session.cache.fork()
        session.cache.reorder_cache(torch.tensor([1, 0]))
        session.append(random_ids(2, 2, 9).flip(0))
        last = session.step(tokens[:, 15:].flip(0)).flip(0)
        session.cache = twin
        session.append(random_ids(2, 2, 9))
        assert torch.equal(session.step(tokens[:, 15:]), last), "a fork and a cache with its rows exchanged agree"
        rows = [session.report(row=row)["kv"] for row in (0, 1)]
    for b, length in enumerate(lengths):
        with compress(model, method) as session:
            session.prefill(ids[b : b + 1, -length:])
            for t in range(14 if b == 0 else 9):
                assert (session.step(tokens[b : b + 1, t : t + 1]) - out[t][b]).abs().max() <= 1e-5, (b, t)
            session.append(random_ids(2, 2, 9)[b : b + 1])
            assert (session.step(tokens[b : b + 1, 15:]) - last[b]).abs().max() <= 1e-5
            alone = session.report()["kv"]
        for name in ("read_bytes_per_token", "moved_bytes_per_token", "bytes_held"):
            assert rows[b][name] == alone[name], (b, name)


# ---------------------------------------------------------------------- with other parts


@torch.no_grad()
def test_it_offloads_codes_and_what_an_allocator_per_head_left():
    """All pages equal the composition without it; few pages still hold everything, codes on the host too."""
    model = small_model()
    ids, mask = left_padded([40, 25])
    reader = FlexiCacheReader(budget=400, page_size=SIZE, rerank=3, heads="random", unstable=0.5)
    for method in (Int8(), AdaKV(budget=0.5, window=3), AdaKV(budget=0.5, window=3, codec=Int8())):

        def run(method):
            with compress(model, method) as session:
                out = [session.prefill(ids, attention_mask=mask).logits]
                out += [session.step(random_ids(2, 1, t)) for t in range(10)]
                held = [session.cache.keys_values(i)[0].sum() for i in range(3)]
                return torch.stack(out), session.report(), torch.stack(held)

        expected, _, _ = run(method)
        every, report, _ = run(method.replace(reader=reader))
        _, fewer, _ = run(method.replace(reader=replace(reader, budget=8)))
        assert (expected - every).abs().max() <= 1e-4
        assert report["nbytes"]["host"] > 0 and fewer["nbytes"]["keys_values"] < report["nbytes"]["keys_values"]
        assert fewer["kv"]["moved_bytes_per_token"] > 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: FlexiCache(budget=64, rerank=0), "rerank=0; stable heads are ranked every 1 or more steps"),
        (lambda: FlexiCache(budget=64, unstable=1.5), r"unstable=1.5 is not a share of the heads in \[0, 1\]"),
        (lambda: FlexiCache(budget=15), "budget=15 tokens is less than one page.*at least 16"),
        (lambda: FlexiCache(budget=64, codec=KIVI()), "codec=plain, int8 or turboquant"),
    ],
)
def test_what_cannot_be_is_refused_before_work(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_host_tier_beyond_free_memory_is_refused_before_the_prompt_runs(monkeypatch):
    monkeypatch.setattr(pages, "free_memory", lambda: 10_000)
    with compress(small_model(), FlexiCache(budget=16, heads="stable")) as session:
        with pytest.raises(ValueError, match="the host tier needs .* for 1 x 40 tokens, but .* are free: shorten"):
            session.prefill(random_ids(1, 40))
        session.prefill(random_ids(1, 13))
    with compress(small_model(), FlexiCache(budget=16, heads="unstable")) as session:
        session.prefill(random_ids(1, 40))


# ---------------------------------------------------------------------- the profile


def test_stability_is_one_for_equal_sets_and_nothing_for_chance():
    """Against loops, with the numbers of pages that grow."""
    generator = torch.Generator().manual_seed(0)
    sets = [torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(3)]) for _ in range(16)]
    held = [20 + i // 4 for i in range(16)]
    expected = []
    for head in range(3):
        total = 0.0
        for s in range(1, 16):
            shared = len(set(sets[0][head].tolist()) & set(sets[s][head].tolist())) / 5
            total += max(0.0, (shared - 5 / held[s]) / (1 - 5 / held[s]))
        expected.append(total / 15)
    assert (overlap(sets, held) - torch.tensor(expected)).abs().max() <= 1e-6
    assert overlap([sets[0]] * 16, held).tolist() == [1.0] * 3
    assert overlap([torch.tensor([[0, 1]]), torch.tensor([[2, 3]])], [9, 9]).tolist() == [0.0]


def test_the_heads_most_often_among_the_least_stable_are_unstable():
    share, mean = torch.tensor([[0.5, 0.1], [0.5, 0.9]]), torch.tensor([[0.2, 0.9], [0.3, 0.1]])
    assert least_stable(share, mean, 3) == [3, 2, 0]


def test_a_profile_is_found_by_the_weights_and_not_taken_for_another_models(
    tmp_path, monkeypatch, filters_for_random_models
):
    monkeypatch.setattr(calibration, "find", filters_for_random_models)  # as it is
    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    model, other = small_model(num_hidden_layers=2), small_model(num_hidden_layers=2, seed=5)
    ask = r"kvcompress profile-heads --model .*heads=random, stable or unstable"
    with pytest.raises(ValueError, match=f"no head profile for .*{ask}"):
        compress(model, FlexiCache(budget=16))
    tensors, said = profile(
        model, [random_ids(1, 80, s)[0] for s in range(2)], prompt=40, pages=3, page_size=4, note=lambda line: None
    )
    assert said["windows"] == 4 and 0 <= said["halves"]["unstable_in_common"] <= 1
    path = calibration.folders(KIND, DATA)[0] / "mine.safetensors"
    calibration.save(path, model, tensors, said)
    assert calibration.load(path)[1]["pages"] == 3
    chosen = unstable_heads("profile", model, 1)
    assert chosen == unstable_heads(str(path), model, 1) and len(chosen) == 1
    with compress(model, FlexiCache(budget=16)) as session:
        classes = session.method.parts().reader.classes
        assert {(i, h) for i, row in enumerate(classes) for h, stable in enumerate(row) if not stable} == chosen
    with pytest.raises(ValueError, match=f"is a profile of another model.*{ask}"):
        compress(other, FlexiCache(budget=16, heads=str(path)))
    with pytest.raises(ValueError, match=f"neither a file nor one of profile.*{ask}"):
        compress(other, FlexiCache(budget=16, heads="nowhere"))


def test_a_profile_needs_more_pages_than_are_read_and_more_than_a_window_of_steps():
    ids = random_ids(1, 60)[0]
    with pytest.raises(ValueError, match="no more than K = 10 pages of 4"):
        trace(small_model(), ids, 40, 10, 4)
    with pytest.raises(ValueError, match="more than one window of 16 is needed"):
        trace(small_model(), ids, 50, 4, 4)
    with pytest.raises(ValueError, match="no text to profile on"):
        profile(small_model(), [], prompt=40)


def test_the_script_writes_a_profile_with_provenance(tmp_path, capsys):
    root = Path(__file__).parent.parent.parent
    spec = importlib.util.spec_from_file_location("profile_heads", root / "scripts" / "profile_heads.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "p.safetensors"
    arguments = ["--model", "random/llama", "--texts", "1", "--prompt", "60", "--steps", "33", "--pages", "5"]
    assert script.main([*arguments, "--page-size", "4", "--out", str(out)]) == 0
    tensors, said = calibration.load(out)
    assert tensors["frequency"].shape == tensors["instability"].shape
    assert said["text"].startswith("generated prose") and said["command"].startswith("kvcompress profile-heads")
    assert "two halves: unstable in common" in capsys.readouterr().out
    assert script.main([*arguments[:-1], "99", "--out", str(out)]) == 1
    assert "K = 99 pages" in capsys.readouterr().err
