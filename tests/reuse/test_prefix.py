"""Prefix reuse: what was prefilled before, behind the same ids, is loaded, and nothing comes out differently."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import every_method, make
from small_models import LATENT, CharacterTokenizer, random_ids, small_model
from test_kvstore import Rounding

from kvcompress import compress
from kvcompress.method import Method
from kvcompress.method.budget import NotTogether
from kvcompress.method.parts import OneShot
from kvcompress.methods import H2O, METHODS, CacheBlend, Full, SnapKV, StreamingLLM
from kvcompress.reuse.disk_tier import DiskTier
from kvcompress.reuse.kv_store import KVStore
from kvcompress.reuse.prefix import PrefixReuse

FULL_ATTENTION = ("llama", "mistral", "qwen3_moe", "phi3", "smollm3", "granite", "olmo2", "glm4", "starcoder2", *LATENT)
SIZES = (5, 17, 9, 12, 6)


def segments_of(sizes=SIZES, seed=0):
    return list(random_ids(1, sum(sizes), seed).split(sizes, dim=1))


def outcome(model, method, segments, store, how=None):
    """Logits of the prompt and of three decoded tokens, positions, keys and values held, what was reused."""
    with compress(model, method, store=store) as session:
        first = session.prefill(segments, how=how).logits
        tokens = random_ids(1, 3, 9)
        logits = torch.cat([first, *(session.step(tokens[:, i : i + 1]) for i in range(3))])
        held = [(session.cache.positions(i), *session.cache.keys_values(i)) for i in session.full_layers]
        return logits, held, session.report().get("reuse")


def same(one, other, tolerance=1e-5):
    assert torch.allclose(one[0], other[0], atol=tolerance, rtol=0)
    for (at, *tensors), (there, *others) in zip(one[1], other[1], strict=True):
        assert torch.equal(at, there)
        for a, b in zip(tensors, others, strict=True):
            assert torch.allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("architecture", FULL_ATTENTION)
def test_a_loaded_prefix_gives_what_a_full_prefill_gives_in_every_architecture(architecture):
    model, segments = small_model(architecture), segments_of()
    store = KVStore(model)
    full = outcome(model, Full(), segments, store)
    for _ in range(2):
        reused = outcome(model, Full(prefill=PrefixReuse()), segments, store)
        same(full, reused)
    assert reused[2]["tokens_reused"] == sum(SIZES[:-1]) and reused[2]["tokens_recomputed"] == 0


def test_the_longest_prefix_of_whole_segments_is_loaded_and_what_follows_is_computed():
    model, store = small_model(), None
    store = KVStore(model)
    segments, other = segments_of(), segments_of(seed=5)
    outcome(model, Full(prefill=PrefixReuse()), segments, store)
    cases = {
        0: [other[0], *segments[1:]],
        22: [*segments[:2], *other[2:]],
        31: [*segments[:3], other[3], segments[4]],
        43: [*segments[:4], other[4]],
    }
    for reused, prompt in cases.items():
        found = outcome(model, Full(prefill=PrefixReuse()), prompt, store)
        assert found[2]["tokens_reused"] == reused, reused
        assert found[2]["tokens_recomputed"] == sum(SIZES[:-1]) - reused
        assert found[2]["recompute_share"] == pytest.approx(1 - reused / sum(SIZES))
        same(outcome(model, Full(), prompt, store), found)


def test_segments_in_another_order_share_nothing_behind_the_first_that_differs():
    model = small_model()
    store, (a, b, c, d, e) = KVStore(model), segments_of()
    outcome(model, Full(prefill=PrefixReuse()), [a, b, c, d, e], store)
    found = outcome(model, Full(prefill=PrefixReuse()), [a, c, b, d, e], store)
    assert found[2]["tokens_reused"] == a.shape[1]
    same(outcome(model, Full(), [a, c, b, d, e], store), found)


def test_the_same_segment_twice_is_stored_once_per_place():
    model = small_model()
    store, (a, b, _, _, e) = KVStore(model), segments_of()
    for reused in (0, a.shape[1] + 2 * b.shape[1]):
        found = outcome(model, Full(prefill=PrefixReuse()), [a, b, b, e], store)
        assert found[2]["tokens_reused"] == reused
        same(outcome(model, Full(), [a, b, b, e], store), found)
    assert store.stats.stored == 3


@pytest.mark.parametrize("name", every_method())
def test_methods_evict_after_a_loaded_prefix_what_they_evict_after_a_full_prefill_or_are_refused(name):
    model, segments = small_model(), segments_of()
    store = KVStore(model)
    try:
        method = make(name, 0.4, prefill=PrefixReuse())
    except NotTogether as refusal:
        assert "makes no query" in str(refusal)
        return
    full = outcome(model, make(name, 0.4), segments, store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            reused = outcome(model, method, segments, store)
            same(full, reused)
    assert reused[2]["tokens_reused"] > 0


def test_methods_that_add_up_the_attention_of_all_queries_are_refused():
    with pytest.raises(NotTogether, match="makes no query of their tokens"):
        H2O(budget=0.5, prefill=PrefixReuse())
    H2O(budget=0.5, prefill=OneShot())


def test_a_window_longer_than_the_question_takes_segments_before_it_along():
    model, segments = small_model(), segments_of()
    store, method = KVStore(model), SnapKV(budget=24, window=10)
    for reused in (0, sum(SIZES[:-2])):  # 6 tokens of question are too few, with the segment before it there are 18
        found = outcome(model, method.replace(prefill=PrefixReuse()), segments, store)
        assert found[2]["tokens_reused"] == reused
        same(outcome(model, method, segments, store), found)


def test_compact_positions_follow_a_loaded_prefix():
    model, segments = small_model(), segments_of()
    store, method = KVStore(model), StreamingLLM(budget=20, positions="compact")
    for _ in range(2):
        found = outcome(model, method.replace(prefill=PrefixReuse()), segments, store)
        same(outcome(model, method, segments, store), found)
    assert found[2]["tokens_reused"] == sum(SIZES[:-1])


def test_a_damaged_file_is_computed_again_and_changes_nothing(tmp_path):
    model, segments = small_model(), segments_of()
    full = outcome(model, Full(), segments, KVStore(model))
    outcome(model, Full(prefill=PrefixReuse()), segments, KVStore(model, folder=tmp_path))
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == len(SIZES) - 1
    for path in files[:2]:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    store = KVStore(model, memory_bytes=0, folder=tmp_path)
    with pytest.warns(UserWarning, match="is damaged in"):
        found = outcome(model, Full(prefill=PrefixReuse()), segments, store)
    same(full, found)
    assert store.stats.damaged >= 1
    whole = KVStore(model, memory_bytes=0, folder=tmp_path)
    found = outcome(model, Full(prefill=PrefixReuse()), segments, whole)
    same(full, found)
    assert whole.stats.damaged == 0 or found[2]["tokens_reused"] < sum(SIZES[:-1])


@pytest.mark.filterwarnings("ignore:.*is damaged in")
@pytest.mark.parametrize("method", [Full(prefill=PrefixReuse()), CacheBlend(ratio=1.0)], ids=["prefix", "cacheblend"])
def test_a_prompt_ends_however_often_its_files_are_damaged_while_they_are_read(tmp_path, monkeypatch, method):
    """Another process writes over each file once it was opened, again and again."""
    model, segments = small_model(), segments_of()
    full = outcome(model, Full(), segments, KVStore(model))
    outcome(model, method, segments, KVStore(model, folder=tmp_path))
    stock, damaged = DiskTier.open, []

    def opened(tier, key, ids):
        tier._refused.clear()  # it was written anew
        found = stock(tier, key, ids)
        if found is not None:
            damaged.append(key)
            content = found.path.read_bytes()
            found.path.write_bytes(content[:-8] + bytes(8))
        return found

    monkeypatch.setattr(DiskTier, "open", opened)
    found = outcome(model, method, segments, KVStore(model, memory_bytes=0, folder=tmp_path))
    assert len(damaged) >= len(segments)
    same(full, found)


def test_a_prompt_without_segments_a_batch_and_a_later_turn_are_prefilled_whole():
    model = small_model()
    store, method = KVStore(model), Full(prefill=PrefixReuse())
    with compress(model, method, store=store) as session:
        session.prefill(random_ids(1, 20))
        session.prefill([random_ids(2, 8), random_ids(2, 9)])
        session.prefill([random_ids(1, 8, 1), random_ids(1, 9)], cache=session.prefill(random_ids(1, 20)).cache)
        assert session.cache.get_seq_length() == 37
    assert store.stats.stored == 0


def test_an_empty_segment_and_a_prompt_beyond_the_models_positions_are_refused_before_any_work():
    model, method = small_model(max_position_embeddings=64), Full(prefill=PrefixReuse())
    with compress(model, method, store=KVStore(model)) as session:
        with pytest.raises(ValueError, match="segment 2 of 3 of the prompt is empty: leave it out"):
            session.prefill([random_ids(1, 4), random_ids(1, 0), random_ids(1, 4)])
        with pytest.raises(ValueError, match="reaches 78 tokens.*64 positions.*the longest has 70"):
            session.prefill([random_ids(1, 4), random_ids(1, 70), random_ids(1, 4)])


def test_a_model_with_sliding_windows_is_refused_by_name():
    model = small_model("gemma2")
    with compress(model, Full(prefill=PrefixReuse())) as session, pytest.raises(ValueError, match="'gemma2'.*sliding"):
        session.prefill([random_ids(1, 4), random_ids(1, 4)])


def test_a_store_of_another_model_is_refused():
    one, other = small_model(), small_model(seed=3)
    with (
        pytest.raises(ValueError, match=r"another model \(weights .*KVStore\(model\)"),
        compress(other, Method(), store=KVStore(one, tokenizer=CharacterTokenizer())),
    ):
        pass


@pytest.mark.parametrize("name", ["Int8", "KIVI"])
@pytest.mark.parametrize("scorer", [False, True])
def test_a_codec_codes_after_a_loaded_prefix_what_it_codes_after_a_full_prefill(name, scorer):
    small = {"bits": 4, "group": 8, "residual": 16} if name == "KIVI" else {}
    model, segments = small_model(head_dim=32, hidden_size=128), segments_of()
    store, coded = KVStore(model), METHODS[name](**small)
    method = SnapKV(budget=0.5, window=4, codec=coded) if scorer else coded
    full = outcome(model, method, segments, store)
    for reused in (0, sum(SIZES[:-1])):
        found = outcome(model, method.replace(prefill=PrefixReuse()), segments, store)
        assert found[2]["tokens_reused"] == reused
        # a code may fall on the other side of a step by rounding; the prompt's own logits are exact
        assert torch.allclose(full[0][:1], found[0][:1], atol=1e-5, rtol=0)
        assert torch.allclose(full[0], found[0], atol=1e-3, rtol=0)


def test_a_store_of_codes_is_refused_as_prefix_reuse_is_exact():
    model = small_model()
    with compress(model, Full(prefill=PrefixReuse()), store=KVStore(model, codec=Rounding())) as session:
        with pytest.raises(ValueError, match=r"holds chunks as Rounding\(\).*a store without a codec"):
            session.prefill(segments_of())


def test_a_prefill_that_the_session_is_not_open_for_is_refused():
    model = small_model()
    with compress(model, Full()) as session, pytest.raises(ValueError, match="not opened to reuse chunks"):
        session.prefill(segments_of(), how=CacheBlend().make_prefill())
