"""Cases that once went wrong in silence: each compares with what the same row or model gives alone."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import EVICTING, REPRESENTATIVE, all_held, as_published, grid, make
from small_models import random_ids, small_model
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.cache.query_window import QueryWindow
from kvcompress.method import Chunked, Needs, Schedule
from kvcompress.methods import H2O, TOVA, Full, SnapKV, StreamingLLM
from kvcompress.methods.streaming_llm import RecencyScorer


@pytest.mark.parametrize("architecture", ["cohere2", "gemma3_text", "gpt_oss", "qwen3"])
@torch.no_grad()
def test_compact_positions_leave_windowed_layers_alone(architecture):
    """With nothing evicted, compact positions are the stock model's, also where other layers slide."""
    model, ids = small_model(architecture), random_ids(1, 40)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    expected = model(random_ids(1, 1, 5), cache=cache).logits
    with compress(model, StreamingLLM(budget=1000, sinks=2)) as session:
        session.prefill(ids)
        found = model(random_ids(1, 1, 5), cache=session.cache).logits
    assert (found - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_compact_equals_original_where_the_full_layers_do_not_rotate():
    """cohere2's full-attention layers have no RoPE, so re-indexing them changes nothing after eviction either."""
    model, ids, more, found = small_model("cohere2"), random_ids(1, 40), random_ids(1, 6, 5), []
    for positions in ("original", "compact"):
        with compress(model, StreamingLLM(budget=12, sinks=2, positions=positions)) as session:
            session.prefill(ids)
            found.append([model(more[:, t : t + 1], cache=session.cache).logits for t in range(6)])
    assert max((a - b).abs().max() for a, b in zip(*found, strict=True)) <= 1e-5


@torch.no_grad()
def test_the_ratio_counts_windowed_layers_on_both_sides():
    """kv.ratio of a hybrid model is what is held over what a DynamicCache holds, its sliding layers included."""
    model, ids = small_model("gemma3_text", sliding_window=512), random_ids(1, 200)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    full = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    with compress(model, SnapKV(budget=0.1, window=4)) as session:
        session.prefill(ids)
        report = session.report()
        kv, nbytes = report["kv"], report["nbytes"]
    assert kv["bytes_full"] == full
    assert kv["bytes_held"] == nbytes["valid"] + nbytes["other_layers"]
    assert 0.3 < kv["ratio"] < 1.0


def test_an_interrupted_forward_leaves_a_cache_that_says_so():
    """KeyboardInterrupt runs no hooks; the half-written cache is refused and the model works on."""
    model, ids = small_model(), random_ids(1, 24)
    with compress(model, H2O(budget=0.5)) as session:
        session.prefill(ids)
        before, cache = session.cache.fork(), session.cache

        def interrupt(*_):
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.generate(5)
        handle.remove()
        with pytest.raises(ValueError, match="half written"):
            session.append(ids)
        assert model.model(ids).cache is not cache and session.cache.get_seq_length() == 24
        session.cache = before
        assert len(session.generate(5).tokens[0]) == 5


@torch.no_grad()
def test_right_padded_rows_continue_after_their_last_real_token():
    """Prompt, chunked prompt and question padded on the right give what each row gives alone."""
    model, ids = small_model(), random_ids(2, 24)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    question = random_ids(2, 6, 3)
    asked = torch.ones_like(question)
    asked[0, 2:] = 0
    with compress(model, Full()) as session:
        for chunk in (None, 5):
            cache = session.cache = session.new_cache()
            logits = session.forward_prompt(ids, mask, chunk=chunk).logits
            with torch.no_grad():
                alone = model(ids[1:, :15]).logits[:, -1]
            assert (logits[1] - alone[0]).abs().max() <= 1e-5
        session.cache = cache
        session.append(question, attention_mask=asked)
        both = session.generate(6).tokens
        session.prefill(ids[:1])
        session.append(question[:1, :2])
        assert session.generate(6).tokens[0] == both[0]
        session.prefill(ids[1:, :15])
        session.append(question[1:])
        assert session.generate(6).tokens[0] == both[1]


@pytest.mark.parametrize("seed", grid(range(5), short=(0, 1).__contains__))
@torch.no_grad()
def test_pooling_does_not_see_empty_slots_between_tokens(seed):
    """A turn padded in front keeps what the row keeps alone: neighbours are neighbours among real tokens."""
    model, first, turn = small_model(), random_ids(1, 24, seed), random_ids(1, 7, seed + 50)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), turn], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 7, dtype=torch.long)], 1)
    kept = []
    with compress(model, SnapKV(budget=0.5, window=3)) as session:
        for ids, own in ((turn, None), (padded, mask)):
            session.prefill(first)
            session.prefill(ids, attention_mask=own, cache=session.cache)
            kept.append([[p for p in head if p >= 0] for head in session.cache.positions(1)[0].tolist()])
    assert kept[0] == kept[1]


@torch.no_grad()
def test_the_window_of_a_decode_schedule_holds_appended_queries():
    """The last queries a scorer sees are the last there were, whichever phase they came in."""
    model = small_model()
    with compress(model, SnapKV(budget=20, window=4, schedule=Schedule(every=4))) as session:
        session.prefill(random_ids(1, 24))
        session.append(random_ids(1, 10, 1))
        session.step(random_ids(1, 1, 2))
        assert session.cache.layers[1].queries.positions.tolist() == [[31, 32, 33, 34]]


def test_remembered_queries_are_the_last_real_ones_on_whatever_side_padding_lies():
    at = torch.tensor([[0, 1, 2, -1, -1], [-1, 0, 1, 2, 3]])
    forward = SimpleNamespace(on=lambda name, device: at, real=at >= 0)
    window = QueryWindow.of(None, at.view(2, 1, 5, 1).float(), forward, 3)
    assert window.positions.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert window.queries.flatten().tolist() == [0, 1, 2, 1, 2, 3]


def test_a_row_that_paused_for_a_step_keeps_what_it_keeps_without_a_pause():
    """The gap that it leaves among the most recent slots is none of the tokens that are protected."""
    model, ids, tokens = small_model(), random_ids(2, 20), random_ids(2, 9, 1)
    with compress(model, H2O(budget=8)) as session:
        session.prefill(ids)
        for t in range(9):
            session.step(tokens[:, t : t + 1], real=torch.tensor([True, t != 2]))
        paused = all_held(session)
    with compress(model, H2O(budget=8)) as session:
        session.prefill(ids[1:])
        for t in (0, 1, *range(3, 9)):
            session.step(tokens[1:, t : t + 1])
        assert {layer: rows[1] for layer, rows in paused.items()} == {
            i: rows[0] for i, rows in all_held(session).items()
        }


@torch.no_grad()
def test_queries_are_kept_only_as_long_as_a_scorer_may_ask_for_them():
    """A method that compresses prompts alone holds no queries while it decodes."""
    model = small_model()
    with compress(model, SnapKV(budget=0.5, window=4)) as session:
        session.prefill(random_ids(1, 24))
        assert session.cache.nbytes()["scores"] == 0


@torch.no_grad()
def test_a_decode_schedule_works_without_compressing_the_prompt():
    """Schedule(prompt=False, every=1) keeps the prompt whole and holds decoding to the budget."""
    model = small_model()
    with compress(model, TOVA(budget=10, schedule=Schedule(prompt=False, every=1))) as session:
        session.prefill(random_ids(1, 24))
        assert session.cache.kept_tokens().unique().tolist() == [24]
        session.generate(4)
        assert session.cache.kept_tokens().unique().tolist() == [10]
        session.prefill(random_ids(2, 24))
        session.step(random_ids(2, 1), real=torch.tensor([True, False]))
        assert session.cache.kept_tokens()[0, :, 0].tolist() == [10, 24], "a row that gets no token is not looked at"


@torch.no_grad()
def test_a_model_that_slides_in_every_layer_runs_and_reports():
    """Full works and says what is held; a method that would evict is refused by name."""
    model, ids = small_model("mistral", sliding_window=8), random_ids(1, 30)
    with compress(model, Full()) as session:
        session.prefill(ids)
        session.generate(3)
        kv = session.report()["kv"]
    assert kv["ratio"] == 1.0 and kv["kept_tokens_mean"] == 32 and kv["bytes_held"] > 0
    with pytest.raises(ValueError, match="'mistral' has no full-attention layer to compress"):
        compress(model, SnapKV(budget=0.5))


@pytest.mark.parametrize("name", ["H2O", "SnapKV", "TOVA"])
@torch.no_grad()
def test_large_logits_do_not_leave_float16(name):
    """Queries and keys whose product overflows float16 before scaling are scored as finite as SDPA handles them."""
    model = small_model(head_dim=64, dtype=torch.float16, fresh=True)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 8
        layer.self_attn.k_proj.weight *= 8
    ids = random_ids(1, 24)
    assert model(ids).logits.isfinite().all()
    with compress(model, make(name, 0.5)) as session:
        assert session.prefill(ids).logits.isfinite().all()
        session.generate(3)


@torch.no_grad()
def test_a_deep_copy_of_a_cache_is_a_fork():
    """transformers' recipe for prefix reuse works; pickling says why it does not."""
    model, ids = small_model(), random_ids(1, 24)
    with compress(model, H2O(budget=0.5)) as session:
        session.prefill(ids)
        other = copy.deepcopy(session.cache)
        expected = session.generate(6).tokens
        session.cache = other
        assert session.generate(6).tokens == expected
        with pytest.raises(TypeError, match="fork"):
            pickle.dumps(other)


@torch.no_grad()
def test_a_refused_call_leaves_the_sequence_as_it_was():
    """Bad sampling settings or a bad mask cost nothing: what could go on before still can."""
    model, ids = small_model(), random_ids(1, 24)
    with compress(model, Full()) as session:
        session.prefill(ids)
        expected = session.cache.fork()
        session.generate(3)
        cache = session.cache
        for call in (
            lambda: session.generate(0),
            lambda: session.generate(4, temperature=-1.0),
            lambda: session.prefill(ids, attention_mask=torch.ones(1, 5)),
        ):
            with pytest.raises(ValueError):
                call()
        assert session.cache is cache
        rest = session.generate(3).tokens[0]
        session.cache = expected
        assert session.generate(6).tokens[0][3:] == rest


@torch.no_grad()
def test_segments_and_a_mask_may_follow_a_generation():
    """The pending token goes before all segments, and the mask still speaks of the new ids."""
    model, ids, a, b = small_model(), random_ids(1, 24), random_ids(1, 3, 1), random_ids(1, 4, 2)
    found = []
    with compress(model, Full()) as session:
        for new, mask in (([a, b], torch.ones(1, 7)), (torch.cat([a, b], 1), None)):
            session.prefill(ids)
            session.generate(3)
            found.append(session.prefill(new, attention_mask=mask, cache=session.cache).logits)
    assert torch.equal(found[0], found[1])


def test_a_models_own_generate_comes_back():
    """An instance attribute the user set is there again afterwards."""
    model = small_model(fresh=True)
    model.generate = own = lambda *_, **__: "mine"
    with compress(model, Full()):
        pass
    assert model.generate is own


@torch.no_grad()
def test_a_cache_stays_with_its_model():
    """An equal method on another model does not adopt it, nor do two sessions share a model's base."""
    one, two, ids = small_model(), small_model(seed=1), random_ids(1, 24)
    with compress(one, Full()) as a, compress(two, Full()):
        a.prefill(ids)
        with pytest.raises(ValueError, match="another model"):
            two(ids[:, :1], cache=a.cache)
        with pytest.raises(ValueError, match="already being compressed"), compress(one.model, Full()):
            pass


@torch.no_grad()
def test_generate_in_chunks_takes_left_padded_rows():
    """A first chunk that is all padding for a short row is no error; the row gets what it gets alone."""
    model, ids = small_model(), random_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :22] = 0
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "prefill_chunk_size": 8,
    }
    expected = model.generate(ids, attention_mask=mask, **options)
    with compress(model, Full()):
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)
    with compress(model, SnapKV(budget=0.5, window=3)) as session:
        model.generate(ids, attention_mask=mask, **options)
        assert session.report()["active"]
        with pytest.raises(ValueError, match="no real token"):
            model.generate(ids, attention_mask=torch.zeros_like(ids), **options)


@pytest.mark.parametrize(
    ("name", "chunk"), grid(EVICTING, [3, 16], short=lambda name, chunk: chunk == (3 if name in REPRESENTATIVE else 16))
)
def test_queries_that_lost_all_they_saw_say_nothing(name, chunk):
    """Chunks shorter than the window, at a small share: scores stay numbers when a query's every key is gone."""
    method = as_published(name, 0.1).replace(prefill=Chunked(chunk), schedule=Schedule(every=5))
    with compress(small_model(), method) as session:
        session.prefill(random_ids(1, 32))
        session.generate(8)
        assert session.cache.kept_tokens().double().mean() < 12


@torch.no_grad()
def test_the_attention_of_a_query_that_lost_all_it_saw_is_zero():
    """Such a query gives every slot 0, as one with an attention sink does; the others keep their softmax."""
    seen = []

    class Looking(RecencyScorer):
        needs = Needs(window=8)

        def score(self, view, observed, state):
            attention, valid = observed.window(8)
            assert valid.all()
            seen.append(attention.sum(-1))
            return super().score(view, observed, state)

    @dataclass(frozen=True, kw_only=True)
    class Looks(StreamingLLM):
        def make_scorer(self):
            return Looking(0)

    method = Looks(budget=0.1, positions="original", decode=False, prefill=Chunked(8))
    with compress(small_model(), method) as session:
        session.prefill(
            random_ids(1, 9)
        )  # of the first 8 only the last is left, which the queries before it did not see
    for sums in seen[-3:]:
        assert torch.allclose(sums, torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 1]).expand_as(sums))
