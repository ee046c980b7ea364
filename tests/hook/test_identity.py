"""At budget 1.0, and for Full, a compressed session is the stock model."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import EVICTING, EXACT, REPRESENTATIVE, every_method, feed, grid, make, thinned
from reference import stock_logits
from small_models import ARCHITECTURES, LATENT, left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.methods import METHODS, Full, SnapKV, StreamingLLM

PROMPT, NEW = 10, 12
BATCHES = {"one": [PROMPT], "padded": [PROMPT, 4, 7]}
OTHERS = [name for name in EXACT if name not in REPRESENTATIVE]
OF_EACH = [*thinned(REPRESENTATIVE, list(BATCHES), every=2), *grid(OTHERS, BATCHES, short=lambda *_: False)]


def stock(architecture="llama"):
    """The model under the kernel a user would run: sdpa where the model has it, else eager."""
    model = small_model(architecture)
    return small_model(architecture, attn="sdpa") if getattr(model, "_supports_sdpa", False) else model


@cache
def expected_of(batch):
    """Tokens and logits of the stock model for a batch of `BATCHES`."""
    return stock_greedy(stock(), *left_padded(BATCHES[batch]), NEW)


def stock_greedy(model, ids, mask, steps):
    """Tokens `[B, steps]` and logits `[B, steps, V]` of plain transformers, greedy."""
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)


@pytest.mark.parametrize(
    ("name", "batch"), grid(EXACT, BATCHES, short=lambda name, batch: batch == "padded" or name in ("SnapKV", "H2O"))
)
def test_session_prefill_and_generate_equal_the_stock_model(name, batch):
    """Prompt logits and more greedy tokens than the prompt has are the stock model's."""
    model = stock()
    ids, mask = left_padded(BATCHES[batch])
    tokens, logits = expected_of(batch)
    with compress(model, METHODS[name](budget=1.0)) as session:
        prefilled = session.prefill(ids, attention_mask=mask)
        generated = session.generate(NEW)
    assert (prefilled.logits - logits[:, 0]).abs().max() <= 1e-5
    assert prefilled.seen.tolist() == BATCHES[batch]
    assert generated.tokens == tokens.tolist()
    assert generated.finished == ["length"] * len(ids)
    assert len(generated.step_s) in (NEW - 1, NEW)


@pytest.mark.parametrize(("name", "batch"), OF_EACH)
def test_forward_step_by_step_equals_the_stock_model(name, batch):
    """Logits of every decode step through `model(...)` are the stock model's."""
    model = stock()
    ids, mask = left_padded(BATCHES[batch])
    tokens = random_ids(len(ids), NEW, seed=7)
    whole, whole_mask = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens)], 1)
    expected = stock_logits(model, whole, whole_mask)[:, PROMPT:]
    with compress(model, METHODS[name](budget=1.0)) as session:
        session.prefill(ids, attention_mask=mask)
        got = [feed(model, session.cache, tokens[:, t : t + 1], whole_mask[:, : PROMPT + t + 1]) for t in range(NEW)]
    assert (torch.cat(got, 1) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "batch"), OF_EACH)
def test_model_generate_greedy_equals_the_stock_model(name, batch):
    """Tokens and logits of `model.generate` inside the block are those outside it."""
    model = stock()
    ids, mask = left_padded(BATCHES[batch])
    tokens, logits = expected_of(batch)
    with compress(model, METHODS[name](budget=1.0)) as session:
        got_tokens, got_logits = stock_greedy(model, ids, mask, NEW)
        assert session.cache.get_seq_length() == PROMPT + NEW - 1
    assert torch.equal(got_tokens, tokens)
    assert (got_logits - logits).abs().max() <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES + LATENT)
def test_full_equals_the_stock_model_of_every_architecture(architecture):
    """Full is the stock model in prompt, in a second multi-token turn and in decode, left-padded."""
    model = stock(architecture)
    ids, mask = left_padded([20, 13, 17])
    expected = stock_logits(model, ids, mask)
    with compress(model, Full()) as session:
        first = session.prefill(ids[:, :12], attention_mask=mask[:, :12])
        chunk = feed(model, session.cache, ids[:, 12:16], mask[:, :16])
        steps = [feed(model, session.cache, ids[:, t : t + 1], mask[:, : t + 1]) for t in range(16, 20)]
    assert (first.logits - expected[:, 11]).abs().max() <= 1e-5
    assert (torch.cat([chunk, *steps], 1) - expected[:, 12:]).abs().max() <= 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compact_positions_that_drop_nothing_are_the_stock_model(architecture):
    """Un-rotating and rotating keys again changes nothing but rounding, whatever way an architecture rotates."""
    model = stock(architecture)
    ids, mask = left_padded([20, 13])
    expected = stock_logits(model, ids, mask)
    with compress(model, StreamingLLM(budget=64, positions="compact")) as session:
        first = session.prefill(ids[:, :12], attention_mask=mask[:, :12])
        chunk = feed(model, session.cache, ids[:, 12:16], mask[:, :16])
        steps = [feed(model, session.cache, ids[:, t : t + 1], mask[:, : t + 1]) for t in range(16, 20)]
    assert (first.logits - expected[:, 11]).abs().max() <= 2e-5
    assert (torch.cat([chunk, *steps], 1) - expected[:, 12:]).abs().max() <= 2e-5


@pytest.mark.parametrize("name", every_method())
def test_sampling_with_a_seed_equals_the_stock_model(name):
    """The same seed draws the same tokens."""
    model = stock()
    ids, mask = left_padded([PROMPT, 4])

    def draw():
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=True, temperature=1.5, top_k=0)

    expected = draw()
    with compress(model, make(name, 1.0)):
        assert torch.equal(draw(), expected)


def test_session_sampling_is_reproducible():
    """session.generate draws the same tokens for the same seed, others for another, and leaves the global seed."""
    model = stock()
    ids = random_ids(1, PROMPT)

    def draw(seed):
        with compress(model, Full()) as session:
            session.prefill(ids)
            return session.generate(16, temperature=2.0, seed=seed).tokens

    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = draw(1), draw(1), draw(2)
    assert first == second != other
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize("method", [Full(), SnapKV(budget=1.0, window=3)])
def test_beams_equal_the_stock_model_or_are_refused_clearly(method):
    """Beam search either gives the stock model's sequences or raises an error that says beams."""
    model = stock()
    ids, mask = left_padded([PROMPT, 4])
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **options)
    with compress(model, method):
        try:
            got = model.generate(ids, attention_mask=mask, **options)
        except (ValueError, NotImplementedError) as error:
            assert "beam" in str(error).lower()
        else:
            assert torch.equal(got, expected)


def test_a_stop_token_ends_its_row_and_only_its_row():
    """A row ends at its stop token, which is not returned; the other row goes on as if nothing had happened."""
    model = stock()
    ids, mask = left_padded([PROMPT, 6])
    tokens, _ = stock_greedy(model, ids, mask, 20)
    first, second = tokens.tolist()
    stop = next(t for t in first if t not in second)
    at = first.index(stop)
    with compress(model, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        generated = session.generate(20, stop=(stop,))
        assert generated.tokens == [first[:at], second]
        assert generated.finished == ["stop", "length"]
        # what the finished row goes on producing is held nowhere; the last token of the other is not fed yet
        assert session.cache.kept_tokens()[:, 0].unique().tolist() == [PROMPT + at]
        assert session.cache.kept_tokens()[:, 1].unique().tolist() == [6 + 19]


@pytest.mark.parametrize("name", every_method(name for name in EVICTING if name != "Random"))
def test_a_finished_row_does_not_disturb_the_others(name):
    """Rows that stop at different steps generate what they generate alone, evictions in decode included."""
    model = stock()
    ids, mask = left_padded([PROMPT, 6, 9])
    with compress(model, make(name, 0.5)) as session:
        session.prefill(ids, attention_mask=mask)
        tokens = session.generate(14).tokens
        stops = {tokens[0][4], tokens[1][9]}
        session.prefill(ids, attention_mask=mask)
        together = session.generate(14, stop=stops)
        kept = session.cache.kept_tokens()
        for row, length in enumerate((PROMPT, 6, 9)):
            session.prefill(ids[row : row + 1, PROMPT - length :])
            alone = session.generate(14, stop=stops)
            assert alone.tokens[0] == together.tokens[row] and alone.finished[0] == together.finished[row]
            assert torch.equal(session.cache.kept_tokens()[:, 0], kept[:, row])


@pytest.mark.parametrize("name", ["Full", "H2O"])
def test_generating_twice_equals_generating_once(name):
    """A second call goes on where the first ended: no token is repeated, none is lost."""
    model = stock()
    ids, mask = left_padded([PROMPT, 6])
    with compress(model, make(name, 0.5)) as session:
        session.prefill(ids, attention_mask=mask)
        once = session.generate(9).tokens
        session.prefill(ids, attention_mask=mask)
        first, second = session.generate(4).tokens, session.generate(5).tokens
    assert [a + b for a, b in zip(first, second, strict=True)] == once


def test_a_turn_after_a_generation_sees_every_generated_token():
    """The last generated token is part of what a later prompt attends to."""
    model = stock()
    ids, turn = random_ids(1, PROMPT), random_ids(1, 4, 8)
    with compress(model, Full()) as session:
        session.prefill(ids)
        answer = session.generate(5).tokens
        got = session.prefill(turn, cache=session.cache).logits
        session.prefill(ids)
        assert session.generate(5).tokens == answer
        appended = session.append(turn)
    expected = stock_logits(model, torch.cat([ids, torch.tensor(answer), turn], 1))[:, -1]
    assert (got - expected).abs().max() <= 1e-5
    assert (appended - expected).abs().max() <= 1e-5


def test_a_turn_after_rows_stopped_at_different_steps_sees_each_rows_own_answer():
    """A row that stopped early has its tokens and its stop token in the sequence, and nothing of what came after."""
    model = stock()
    ids, mask = left_padded([PROMPT, 6])
    turn = random_ids(2, 4, 8)
    with compress(model, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        free = session.generate(9).tokens
        stop = next(t for t in free[0] if t not in free[1] and t != free[0][0])
        session.prefill(ids, attention_mask=mask)
        answer = session.generate(9, stop=(stop,))
        assert answer.finished == ["stop", "length"]
        got = session.append(turn)
        for row, length in enumerate((PROMPT, 6)):
            said = answer.tokens[row] + [stop] * (answer.finished[row] == "stop")
            whole = torch.cat([ids[row, PROMPT - length :], torch.tensor(said), turn[row]])[None]
            assert session.cache.kept_tokens()[0, row, 0] == whole.shape[1]
            expected = stock_logits(small_model(), whole)[0, -1]
            assert (got[row] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["Full", "SnapKV", "H2O"])
def test_questions_over_forks_of_one_context_do_not_disturb_each_other(name):
    """Each question asked of a fork of the same compressed context gets the answer it gets alone, in any order."""
    model = stock()
    context, questions = random_ids(1, 20), [random_ids(1, n, n) for n in (3, 1, 5)]

    def ask(session, cache, question):
        session.cache = cache
        logits = session.append(question)
        return logits, session.generate(5).tokens, session.cache.kept_tokens().tolist()

    alone = []
    for question in questions:
        with compress(model, make(name, 0.5)) as session:
            alone.append(ask(session, session.prefill(context).cache, question))
    with compress(model, make(name, 0.5)) as session:
        cache = session.prefill(context).cache
        for i in (2, 0, 1, 2):
            logits, tokens, kept = ask(session, cache.fork(), questions[i])
            assert torch.equal(logits, alone[i][0])
            assert (tokens, kept) == alone[i][1:]


def test_generation_continues_the_cache_in_use():
    """After `model(..., cache=)`, or with another cache put in use, generate continues that one or refuses."""
    model = stock()
    ids, more = random_ids(1, PROMPT), random_ids(1, 3, 8)
    whole = torch.cat([ids, more], 1)
    expected, _ = stock_greedy(model, whole, torch.ones_like(whole), 6)
    with compress(model, Full()) as session:
        session.prefill(ids)
        model(more, cache=session.cache)
        try:
            assert session.generate(6).tokens == expected.tolist()
        except ValueError as error:
            assert "logits" in str(error) or "prefill" in str(error)
        first = session.prefill(whole).cache
        session.prefill(ids)
        session.cache = first.fork()
        try:
            assert session.generate(6).tokens == expected.tolist()
        except ValueError as error:
            assert "logits" in str(error) or "prefill" in str(error)


@pytest.mark.parametrize("name", ["Full", "SnapKV", "H2O"])
def test_prefill_in_chunks_by_generate_equals_the_stock_model(name):
    """`model.generate(prefill_chunk_size=)` at budget 1.0 is the stock model."""
    model = stock()
    ids, mask = left_padded([PROMPT, 7])
    tokens, _ = stock_greedy(model, ids, mask, 8)
    with compress(model, make(name, 1.0)):
        got = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, prefill_chunk_size=4, pad_token_id=0
        )
    assert torch.equal(got[:, PROMPT:], tokens)


@pytest.mark.parametrize("name", every_method(name for name in EVICTING if name != "Random"))
def test_beams_over_an_evicted_cache_are_independent_per_prompt(name):
    """Beam search with eviction gives each prompt of a batch what it gives it alone, or is refused clearly."""
    model = stock()
    ids = random_ids(2, 4 * PROMPT)
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    # a chunk whose next chunk is one token repeated is decided by rounding: chunks are longer here
    fields = {"lag": 8} if "lag" in METHODS[name].__dataclass_fields__ else {}
    with compress(model, make(name, 0.5, **fields)):
        try:
            together = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        except (ValueError, NotImplementedError) as error:
            assert "beam" in str(error).lower()
            return
        for row in range(2):
            alone = model.generate(ids[row : row + 1], attention_mask=torch.ones_like(ids[:1]), **options)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_bfloat16_works(name):
    """Half-precision models compress, decode and stay finite, with the same counts."""
    model = small_model(num_hidden_layers=2, dtype=torch.bfloat16)
    ids, mask = left_padded([16, 9])
    with compress(model, make(name, 0.5)) as session:
        assert session.prefill(ids, attention_mask=mask).logits.isfinite().all()
        kept = 8 if name in EVICTING else 16
        assert session.cache.kept_tokens()[:, 0].double().mean() == kept
        session.generate(3)
        assert session.append(random_ids(2, 3)).isfinite().all()
        assert session.cache.keys_values(0)[0].dtype == torch.bfloat16


def test_generation_ends_when_every_row_has_stopped():
    """No forward is spent once all rows are finished."""
    model = stock()
    ids = random_ids(1, PROMPT)
    tokens, _ = stock_greedy(model, ids, torch.ones_like(ids), 20)
    stop = tokens[0, 5].item()
    at = tokens[0].tolist().index(stop)
    with compress(model, Full()) as session:
        session.prefill(ids)
        generated = session.generate(20, stop=(stop,))
        assert generated.tokens == [tokens[0, :at].tolist()]
        assert len(generated.step_s) <= at + 1
        assert session.cache.get_seq_length() <= PROMPT + at + 1


@pytest.mark.parametrize("name", every_method(METHODS))
@torch.no_grad()
def test_every_method_can_run_on_the_kernel_that_mass_needs(name):
    """kernel="blockwise" is used throughout, and changes logits by rounding alone."""
    model, ids = stock(), random_ids(2, PROMPT)
    expected = model(ids).logits[:, -1]
    with compress(model, make(name, 1.0), kernel="blockwise") as session:
        assert (session.prefill(ids).logits - expected).abs().max() <= 1e-5
        once = session.generate(5).tokens
        assert session.report()["kernel"] == "blockwise"
    with compress(model, make(name, 1.0)) as session:
        session.prefill(ids)
        assert session.generate(5).tokens == once
    with pytest.raises(ValueError, match="kernel='flash'; valid: auto, blockwise"):
        compress(model, make(name, 1.0), kernel="flash")
