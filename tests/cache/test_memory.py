"""Memory is measured over live storage, and what is evicted is really freed."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVICTING,
    OTHERWISE_HELD,
    as_published,
    every_method,
    examples,
    feed,
    grid,
    grows,
    live_storages,
    make,
    storage_bytes,
    tensors_of,
)
from small_models import left_padded, random_ids, small_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress import compress
from kvcompress.methods import METHODS, Full, SnapKV

LENGTH, HEAD = 300, 64
BLOCK = 64  # slots of headroom a growing layer may have
EDGES = [("AdaKV", 0.05), ("CAKE", 0.05), ("SnapKV", 0.05), ("H2O", 0.5), ("StreamingLLM", 0.5)]


def wide(**options):
    """A model whose heads are as wide as real ones, so that positions weigh what they weigh in practice."""
    return small_model(head_dim=HEAD, **options)


def full_bytes(model, tokens):
    config = model.config
    return 2 * tokens * config.num_hidden_layers * config.num_key_value_heads * HEAD * 4


def block_bytes(cache):
    """One block of slots in every layer."""
    keys_values = cache.nbytes()["full"] // int(cache.real.sum())
    layers, rows, heads = cache.kept_tokens().shape
    return BLOCK * rows * (keys_values + 4 * layers * heads)


def held_bytes(cache):
    """Bytes behind everything the cache's layers reach."""
    return storage_bytes([t for layer in cache.layers for t in tensors_of(layer)])


@pytest.mark.parametrize(
    ("name", "budget"),
    grid(EVICTING, [0.05, 0.25, 0.5], short=lambda name, budget: budget == 0.25 or (name, budget) in EDGES),
)
def test_bytes_after_eviction_follow_the_budget(name, budget):
    """Valid bytes are budget × full within 2%, allocated at most 1.25 × valid plus one block, and really that.

    With the method's own settings on a long prompt: totals are equal whoever hands out the budget. Queries that are
    remembered for a decode schedule come on top: as many whatever the budget, and counted with the scores.
    """
    length = 1000 if budget == 0.25 else 2000
    model = wide(max_position_embeddings=8192)  # KVzip repeats the prompt behind it
    with compress(model, as_published(name, budget)) as session:
        session.prefill(random_ids(1, length))
        sizes = session.cache.nbytes()
        held, block = held_bytes(session.cache), block_bytes(session.cache)
        queries = [tensor for layer in session.cache.full_layers if layer.queries for tensor in layer.queries.tensors]
        held -= storage_bytes(queries)
        assert sizes["scores"] >= storage_bytes(queries)
        report = session.report()["kv"]
    assert sizes["full"] == full_bytes(model, length)
    assert abs(sizes["valid"] / (budget * sizes["full"]) - 1) <= 0.02
    assert sizes["valid"] == sizes["keys_values"] + sizes["positions"]
    assert sizes["valid"] <= sizes["allocated"] <= 1.25 * sizes["valid"] + block
    assert sizes["allocated"] <= held <= 1.3 * sizes["valid"] + block
    assert sizes["host"] == 0
    assert report["bytes_held"] == sizes["valid"] and report["bytes_allocated"] == sizes["allocated"]
    assert report["bytes_full"] == sizes["full"] and abs(report["ratio"] - sizes["valid"] / sizes["full"]) < 1e-9
    assert report["kept_tokens_mean"] == round(budget * length)
    assert report["storage"] == "real"


@pytest.mark.parametrize("name", every_method())
def test_bytes_of_a_padded_batch_count_real_tokens(name):
    """`full` and `valid` count real tokens only; pads weigh nothing in either."""
    model = wide()
    ids, mask = left_padded([LENGTH, LENGTH // 3])
    with compress(model, make(name, 0.25)) as session:
        session.prefill(ids, attention_mask=mask)
        sizes = session.cache.nbytes()
    assert sizes["full"] == full_bytes(model, LENGTH + LENGTH // 3)
    assert abs(sizes["valid"] / (0.25 * sizes["full"]) - 1) <= 0.02


def test_the_full_cache_weighs_what_a_dynamic_cache_weighs():
    """Full holds the same keys and values plus positions, and allocates little more, in prompt and decode."""
    model = wide()
    with compress(model, Full()) as session:
        session.prefill(random_ids(1, LENGTH))
        for _ in range(2):
            sizes = session.cache.nbytes()
            assert sizes["keys_values"] == sizes["full"]
            assert sizes["positions"] <= 0.02 * sizes["full"]
            assert sizes["allocated"] <= 1.25 * sizes["valid"] + block_bytes(session.cache)
            session.generate(70)  # beyond a block
        assert sizes["full"] > full_bytes(model, LENGTH)


@pytest.mark.parametrize("name", every_method())
def test_the_old_storage_is_freed(name):
    """After a prompt at budget 0.25 no tensor of the un-evicted size is alive anywhere in the process.

    Heads that are to hold everything are held, and no more than they: then only the sum says something.
    """
    model = wide()
    unevicted = 2 * LENGTH * HEAD * 4
    with compress(model, make(name, 0.25)) as session:
        before = set(live_storages())
        session.prefill(random_ids(1, LENGTH))
        new = {pointer: size for pointer, size in live_storages().items() if pointer not in before}
        assert session.cache is not None
    large = [size for size in new.values() if size >= 0.5 * unevicted]
    assert large == [] or grows(make(name, 0.25))
    assert sum(new.values()) <= 0.25 * 1.5 * full_bytes(model, LENGTH)


@pytest.mark.parametrize("which", ["first", "last", "ragged"])
def test_a_kept_slice_is_a_copy(which):
    """Keeping the first or last slots, which a view could do, frees the rest as well."""
    with compress(wide(), Full()) as session:
        cache = session.prefill(random_ids(1, LENGTH)).cache
        kept = torch.zeros(1, 2, LENGTH, dtype=torch.bool)
        if which == "first":
            kept[:, :, :50] = True
        elif which == "last":
            kept[:, :, -50:] = True
        else:
            kept[:, 0, :80] = kept[:, 1, :20] = True
        before = cache.keys_values(0)[0][kept]
        for layer in cache.layers:
            layer.retain(kept)
        positions, keys = cache.positions(0), cache.keys_values(0)[0]
        assert torch.equal(keys[positions >= 0], before)
        assert (positions >= 0).sum() == 100
        for layer in cache.layers:
            held = storage_bytes(tensors_of(layer))
            assert held <= 100 * (2 * HEAD * 4 + 4) + 1024


@pytest.mark.parametrize("name", every_method(short=("H2O", "StreamingLLM", "CAKE", "AdaKV", "RKV")))
def test_decoding_at_the_cap_does_not_grow(name):
    """Methods with a decode schedule hold the same bytes after many steps, allocated ones included."""
    if make(name, 0.5).parts().schedule.every is None or grows(make(name, 0.5)):
        pytest.skip("appends decoded tokens")
    model = wide()
    with compress(model, make(name, 0.25)) as session:
        session.prefill(random_ids(1, LENGTH))
        before = session.cache.nbytes()
        session.generate(70)
        after = session.cache.nbytes()
        held, block = held_bytes(session.cache), block_bytes(session.cache)
    assert after["keys_values"] == before["keys_values"]
    assert after["allocated"] <= 1.25 * after["valid"] + block
    assert held <= 1.35 * after["valid"] + block


@pytest.mark.parametrize("name", ["Full", "SnapKV", "H2O"])
def test_growth_in_decode_is_amortised(name):
    """In many decode steps the storage of a layer moves a logarithmic number of times, not once per step."""
    model = small_model(num_hidden_layers=1)
    steps, prompt = examples(100, 200), 12
    moves, last = 0, None
    with compress(model, make(name, 1.0 if name == "Full" else 10)) as session:
        session.prefill(random_ids(1, prompt))
        mask = torch.ones(1, prompt, dtype=torch.long)
        for t in range(steps):
            mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
            feed(model, session.cache, random_ids(1, 1, t), mask)
            pointers = {t.untyped_storage().data_ptr() for t in tensors_of(session.cache.layers[0]) if t.dim() >= 4}
            moves += pointers != last
            last = pointers
            sizes = session.cache.nbytes()
            assert sizes["allocated"] <= 1.25 * sizes["valid"] + block_bytes(session.cache)
    assert moves <= 24


class Largest(TorchDispatchMode):
    """Notes the largest tensor any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and value.numel():
                self.numel = max(self.numel, value.untyped_storage().nbytes() // value.element_size())
        return out


@pytest.mark.parametrize("name", EVICTING)
def test_observation_needs_memory_linear_in_the_length(name):
    """Twice the prompt makes the largest tensor at most about twice as large: no L × L matrix anywhere."""
    model = small_model(num_hidden_layers=1, max_position_embeddings=8192)
    largest = []
    for length in (1024, 2048):
        with compress(model, make(name, 0.25)) as session, Largest() as mode:
            session.prefill(random_ids(1, length))
        largest.append(mode.numel)
        assert mode.numel <= 4 * length * length // 2
    assert largest[1] <= 2.3 * largest[0]


@pytest.mark.parametrize("name", every_method(sorted(METHODS), short=OTHERWISE_HELD))
def test_forks_count_their_own_bytes(name):
    """A fork reports the same bytes as its original and shares no storage with it."""
    model = small_model()
    with compress(model, make(name, 0.5)) as session:
        cache = session.prefill(random_ids(1, 40)).cache
        fork = cache.fork()
        for key in ("keys_values", "positions", "valid", "full"):
            assert fork.nbytes()[key] == cache.nbytes()[key]


def test_report_tells_what_happened():
    """Evictions, kept tokens per layer, the moments and the longest held are those of the run."""
    model = wide()
    with compress(model, make("SnapKV", 0.25)) as session:
        session.prefill(random_ids(1, 80))
        session.generate(5)
        report = session.report()
    assert report["active"] is True and report["clamped"] is False
    assert report["evicted"] == 60 * 2 * 3
    assert report["kept_per_layer"] == [24.0, 24.0, 24.0] or report["kept_per_layer"] == [25.0, 25.0, 25.0]
    assert report["kv"]["kept_tokens_max"] >= report["kv"]["kept_tokens_mean"]
    assert report["moments"][0]["moment"] == "prompt" and report["moments"][0]["seen"] == 80
    assert report["moments"][0]["tokens_held"] == 20.0
    assert report["time"]["prefill_s"] > 0 and report["time"]["compress_s"] >= 0
    with compress(model, Full()) as session:
        session.prefill(random_ids(1, 20))
        assert session.report()["active"] is False and session.report()["evicted"] == 0


def test_a_cache_says_in_one_line_how_many_tokens_it_holds():
    model = small_model("llama")
    with compress(model, SnapKV(budget=20, window=4)) as session:
        assert "nothing evictable held" in repr(session.new_cache())
        session.prefill(torch.arange(1, 61)[None])
        assert repr(session.cache).startswith("CompressedCache(") and "20 of 60 tokens per head" in repr(session.cache)
