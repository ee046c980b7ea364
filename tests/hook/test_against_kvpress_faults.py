"""Faults measured in an earlier tool, each with the behaviour we hold instead."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import EVICTING, REPRESENTATIVE, all_held, every_method, feed, grid, grows, keep_positions, make
from reference import MaskedReference
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.method import Allocator, Chunked
from kvcompress.methods import Full, SnapKV

MODEL = small_model()
UNIFORM = {name for name in EVICTING if make(name, 0.5).parts().allocator.uniform}
DETERMINISTIC = [name for name in EVICTING if name != "Random"]


def means(name, cache):
    """Tokens held per row: the one count of all layers and heads, or their mean where an allocator makes them differ."""
    kept = cache.kept_tokens()
    assert name not in UNIFORM or all(len(kept[:, row].unique()) == 1 for row in range(kept.shape[1]))
    assert kept.min() >= 1
    return kept.double().mean((0, 2)).tolist()


@pytest.mark.parametrize("name", EVICTING)
def test_a_left_padded_row_keeps_no_pad(name):
    """64 pads and 64 tokens at budget 0.5: 32 tokens kept per head, none of them a pad."""
    ids, mask = left_padded([128, 64])
    with compress(MODEL, make(name, 0.5)) as session:
        assert session.prefill(ids, attention_mask=mask).seen.tolist() == [128, 64]
        assert means(name, session.cache) == [64, 32]
        for heads in all_held(session).values():
            assert all(0 <= p < 64 for kept in heads[1] for p in kept)


@pytest.mark.parametrize("name", every_method(DETERMINISTIC))
def test_a_left_padded_row_gives_what_it_gives_alone(name):
    """The padded row keeps the same tokens, generates the same tokens and the same logits as on its own."""
    ids, mask = left_padded([128, 64])
    with compress(MODEL, make(name, 0.5)) as session:
        padded_logits = session.prefill(ids, attention_mask=mask).logits[1]
        padded = {layer: heads[1] for layer, heads in all_held(session).items()}
        padded_tokens = session.generate(10).tokens[1]
    with compress(MODEL, make(name, 0.5)) as session:
        logits = session.prefill(ids[1:, 64:]).logits[0]
        assert padded == {layer: heads[0] for layer, heads in all_held(session).items()}
        assert padded_tokens == session.generate(10).tokens[0]
    assert (logits - padded_logits).abs().max() <= 1e-5


@pytest.mark.parametrize("name", EVICTING)
def test_a_second_turn_is_compressed_too(name):
    """100 + 100 tokens at 0.5 end at 100 kept, not 150; a third turn of 50 ends at 125."""
    with compress(MODEL, make(name, 0.5)) as session:
        first = session.prefill(random_ids(1, 100))
        assert means(name, session.cache) == [50]
        second = session.prefill(random_ids(1, 100, 1), cache=first.cache)
        assert second.cache is first.cache is session.cache
        assert means(name, session.cache) == [100]
        assert second.seen.tolist() == [200]
        MODEL(random_ids(1, 50, 2), cache=session.cache)
        assert means(name, session.cache) == [125]


@pytest.mark.parametrize(
    ("name", "chunk"),
    grid(
        EVICTING,
        [7, 25, 100, 1000],
        short=lambda name, chunk: chunk == (7 if name in REPRESENTATIVE else 25) or (name, chunk) == ("SnapKV", 1000),
    ),
)
def test_every_chunk_is_compressed(name, chunk):
    """A prompt in chunks ends at the cap of the whole, and never holds more than the cap plus one chunk.

    A head between two classes, which was cut in one chunk, cannot take back what a later one grants it.
    """
    method = make(name, 0.5, prefill=Chunked(chunk=chunk))
    with compress(MODEL, method) as session:
        session.prefill(random_ids(1, 100))
        assert means(name, session.cache) == [50] or (grows(method) and 49 <= means(name, session.cache)[0] < 50)
        assert max(moment["tokens_held"] for moment in session.report()["moments"]) <= 50 + chunk


def test_prefill_takes_segments():
    """A prompt given as a list of segments is the prompt in one piece."""
    ids = random_ids(2, 30)
    with compress(MODEL, make("SnapKV", 0.5)) as session:
        whole = session.prefill(ids).logits
        kept = all_held(session)
        parts = session.prefill([ids[:, :11], ids[:, 11:12], ids[:, 12:]]).logits
        assert all_held(session) == kept
    assert (whole - parts).abs().max() <= 1e-6


def test_layers_of_different_lengths_take_a_multi_token_question():
    """5, 10 and 15 tokens in layers 0 to 2, two left-padded rows, a question of 6 tokens on sdpa: as under the mask."""
    model, twin = small_model(attn="sdpa"), small_model()
    lengths, kept = [24, 18], {0: 5, 1: 10, 2: 15}
    ids, mask = left_padded(lengths)
    question = random_ids(2, 6, 9)
    keeps = {}
    for layer, count in kept.items():
        keeps[layer] = torch.zeros(2, 2, 24, dtype=torch.bool)
        for row, length in enumerate(lengths):
            for head in range(2):
                chosen = torch.randperm(length, generator=torch.Generator().manual_seed(10 * layer + head))[:count]
                keeps[layer][row, head, chosen] = True
    with compress(model, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        for layer, keep in keeps.items():
            keep_positions(session.cache, layer, keep)
        assert session.cache.kept_tokens().tolist() == [[[n, n], [n, n]] for n in (5, 10, 15)]
        got = feed(model, session.cache, question, torch.cat([mask, torch.ones_like(question)], 1))
    with MaskedReference(twin) as reference:
        reference.forward(ids, mask)
        for layer, keep in keeps.items():
            columns = torch.zeros_like(keep)
            columns[0], columns[1, :, 6:] = keep[0], keep[1, :, :18]
            reference.keep[layer] = columns
        expected = reference.forward(question)
    assert (got - expected).abs().max() <= 1e-5


@dataclass(frozen=True)
class Triangle(Allocator):
    """Layers get 1, 2 and 3 sixths of the whole, half as much again for the second head."""

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        layer = (total * layers_seen) // sum(range(1, n_layers + 1))
        return [torch.stack([layer * 2 // 5, layer - layer * 2 // 5], 1)]


def test_an_allocator_gives_layers_and_heads_different_lengths():
    """A test-only allocator's counts are what is kept, and a question and decode still work on it."""
    ids, mask = left_padded([60, 40])
    with compress(MODEL, SnapKV(budget=0.5, window=2, allocator=Triangle())) as session:
        session.prefill(ids, attention_mask=mask)
        total = [30 * 6, 20 * 6]
        for i, layer in enumerate(session.cache.kept_tokens()):
            for row in range(2):
                share = total[row] * (i + 1) // 6
                assert layer[row].tolist() == [share * 2 // 5, share - share * 2 // 5]
        assert session.append(random_ids(2, 6)).isfinite().all()
        generated = session.generate(4)
        assert [len(t) for t in generated.tokens] == [4, 4]


def test_two_models_do_not_disturb_each_other():
    """Interleaved sessions of two models give what each gives alone."""
    other = small_model(seed=5)
    ids, tokens = random_ids(1, 20), random_ids(1, 4, 3)

    def alone(model, method):
        with compress(model, method) as session:
            out = [session.prefill(ids).logits]
            for t in range(4):
                out.append(
                    feed(model, session.cache, tokens[:, t : t + 1], torch.ones(1, 21 + t, dtype=torch.long))[:, -1]
                )
            return torch.stack(out), all_held(session)

    first, first_kept = alone(MODEL, make("H2O", 0.5))
    second, second_kept = alone(other, make("SnapKV", 0.3))
    with compress(MODEL, make("H2O", 0.5)) as a, compress(other, make("SnapKV", 0.3)) as b:
        got_a, got_b = [a.prefill(ids).logits], [b.prefill(ids).logits]
        for t in range(4):
            mask = torch.ones(1, 21 + t, dtype=torch.long)
            got_a.append(feed(MODEL, a.cache, tokens[:, t : t + 1], mask)[:, -1])
            got_b.append(feed(other, b.cache, tokens[:, t : t + 1], mask)[:, -1])
        assert all_held(a) == first_kept and all_held(b) == second_kept
    assert torch.equal(torch.stack(got_a), first) and torch.equal(torch.stack(got_b), second)


@pytest.mark.parametrize("name", every_method(DETERMINISTIC))
def test_two_caches_of_one_session_do_not_disturb_each_other(name):
    """Two sequences decoded in turns give what each gives alone."""
    prompts, tokens = [random_ids(1, 20), random_ids(1, 13, 1)], random_ids(1, 5, 3)

    def decode(session, cache, prompt, t):
        mask = torch.ones(1, prompt.shape[1] + t + 1, dtype=torch.long)
        return feed(MODEL, cache, tokens[:, t : t + 1], mask)

    alone = []
    with compress(MODEL, make(name, 0.5)) as session:
        for prompt in prompts:
            cache = session.prefill(prompt).cache
            alone.append([decode(session, cache, prompt, t) for t in range(5)])
            alone[-1].append(all_held(session, cache))
    with compress(MODEL, make(name, 0.5)) as session:
        caches = [session.prefill(prompt).cache for prompt in prompts]
        assert caches[0] is not caches[1]
        both = [[], []]
        for t in range(5):
            for i in (0, 1):
                both[i].append(decode(session, caches[i], prompts[i], t))
        for i in (0, 1):
            assert all(torch.equal(x, y) for x, y in zip(both[i], alone[i][:5], strict=True))
            assert all_held(session, caches[i]) == alone[i][5]


@pytest.mark.parametrize("name", every_method())
def test_a_hidden_question_does_not_change_what_was_kept(name):
    """append() adds the question's tokens to what was kept of the context and takes nothing away."""
    context = random_ids(1, 40)
    with compress(MODEL, make(name, 0.25)) as session:
        session.prefill(context)
        kept = all_held(session)
        for n in (1, 6):
            session.prefill(context)
            assert all_held(session) == kept
            session.append(random_ids(1, n, n))
            question = list(range(40, 40 + n))
            assert all_held(session) == {
                layer: [[head + question for head in row] for row in rows] for layer, rows in kept.items()
            }


@pytest.mark.parametrize("name", every_method())
def test_kept_tokens_stay_in_positional_order(name):
    """Slots lie in the order of their positions after a prompt, a second turn and decoding."""
    ids, mask = left_padded([30, 12])
    with compress(MODEL, make(name, 0.4)) as session:
        session.prefill(ids, attention_mask=mask)
        session.generate(5)
        session.prefill(random_ids(2, 9, 4), cache=session.cache)
        session.generate(5)
        for rows in all_held(session).values():
            assert all(kept == sorted(set(kept)) for row in rows for kept in row)


def test_a_compressed_cache_keeps_the_true_positions_through_every_entry():
    """40 tokens, 12 kept, 6 more through forward without and with position ids, and through generate(all ids)."""
    model, twin = small_model(), small_model(twin=True)
    ids, more = random_ids(1, 40), random_ids(1, 6, 2)
    wanted = torch.zeros(1, 2, 40, dtype=torch.bool)
    wanted[:, :, torch.randperm(40, generator=torch.Generator().manual_seed(1))[:12]] = True
    with MaskedReference(twin) as reference:
        reference.forward(ids)
        reference.keep = dict.fromkeys(range(3), wanted)
        expected = reference.forward(more)[:, -1]
    with compress(model, Full()) as session:
        cache = session.prefill(ids).cache
        for layer in range(3):
            keep_positions(cache, layer, wanted)
        assert cache.get_seq_length() == 40
        without, with_ids, generated = cache.fork(), cache.fork(), cache.fork()
        a = model(more, cache=without).logits[:, -1]
        b = model(more, cache=with_ids, position_ids=torch.arange(40, 46)[None]).logits[:, -1]
        whole = torch.cat([ids, more], 1)
        c = model.generate(
            whole,
            attention_mask=torch.ones_like(whole),
            cache=generated,
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits[0]
        for got, used in ((a, without), (b, with_ids), (c, generated)):
            assert (got - expected).abs().max() <= 1e-5
            assert used.kept_tokens().unique().tolist() == [18]
            assert used.get_seq_length() == 46


@pytest.mark.parametrize("name", every_method())
def test_a_chat_through_generate_is_compressed_every_turn(name):
    """generate(all ids so far, cache=the last cache) equals the same turns through the session."""
    model = MODEL
    ids, turn = random_ids(1, 30), random_ids(1, 9, 4)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with compress(model, make(name, 0.5)) as session:
        first = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        cache = session.cache
        whole = torch.cat([first.sequences, turn], 1)
        second = model.generate(whole, attention_mask=torch.ones_like(whole), cache=cache, **options)
        assert session.cache is cache
        kept, tokens = all_held(session), second.sequences[0, whole.shape[1] :].tolist()
        session.prefill(ids)
        assert session.generate(5).tokens[0] == first.sequences[0, 30:].tolist()
        session.prefill(turn, cache=session.cache)
        assert session.generate(5).tokens[0] == tokens
        assert all_held(session) == kept


def test_embeddings_may_be_given_instead_of_ids():
    """inputs_embeds is compressed like ids."""
    ids = random_ids(1, 20)
    with compress(MODEL, make("H2O", 0.5)) as session:
        expected = session.prefill(ids).logits
        kept = all_held(session)
        got = MODEL(inputs_embeds=MODEL.get_input_embeddings()(ids)).logits[:, -1]
        assert all_held(session) == kept
    assert (got - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("name", every_method())
def test_every_sample_is_compressed_not_only_the_first(name):
    """Three samples in a row each end at their own cap."""
    with compress(MODEL, make(name, 0.5)) as session:
        for n in (40, 20, 30):
            session.prefill(random_ids(1, n, n))
            assert means(name, session.cache) == [n // 2]
            assert session.report()["active"] is True


def test_held_tensors_keep_the_kv_head_count():
    """What is held has the model's KV heads, never one copy per query head."""
    model = small_model(groups=4)
    for name in EVICTING:
        with compress(model, make(name, 0.5)) as session:
            session.prefill(random_ids(1, 20))
            assert session.cache.positions(0).shape[:2] == (1, 1)
            assert session.cache.keys_values(0)[0].shape[:2] == (1, 1)
