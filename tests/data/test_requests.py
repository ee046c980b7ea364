"""Continuations scored and texts completed through a compressed cache."""

import pytest
import torch
from helpers import thinned
from small_models import small_model

from kvcompress import compress
from kvcompress.data.lm_eval_requests import (
    Completion,
    Continuation,
    check_rolling,
    complete,
    cut,
    log_likelihoods,
    prompt_of,
    reaches,
)
from kvcompress.method import Method, Schedule
from kvcompress.methods import H2O, Random, SnapKV, StreamingLLM


@pytest.fixture(scope="module")
def model():
    return small_model("llama")


def ids(length, seed):
    return tuple(torch.randint(2, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def one_by_one(model, method, asked, held_back):
    """Prefill, then a decode step per token, with nothing shared between continuations."""
    prompt = asked.context[: max(1, len(asked.context) - held_back)]
    rest = [*asked.context[len(prompt) :], *asked.continuation]
    total, greedy = 0.0, True
    with compress(model, method) as session, torch.no_grad():
        logits = session.prefill(torch.tensor([prompt])).logits
        for place, token in enumerate(rest):
            if place >= len(rest) - len(asked.continuation):
                total += float(logits[0].double().log_softmax(-1)[token])
                greedy &= int(logits[0].argmax()) == token
            logits = session.step(torch.tensor([[token]]))
    return total, greedy


METHODS = [Method(), SnapKV(budget=8, window=3), StreamingLLM(budget=6, sinks=2), H2O(budget=8), Random(budget=5)]


@pytest.mark.parametrize(("method", "held_back"), thinned(METHODS, [0, 1, 4], every=3))
def test_a_likelihood_is_that_of_feeding_every_token_by_itself(model, method, held_back):
    first, second = ids(30, 0), ids(17, 1)
    asked = [
        Continuation(first, ids(5, 2)),
        Continuation(second, ids(1, 3)),
        Continuation(first, ids(9, 4)),
        Continuation(first, (*ids(5, 2)[:-1], 7)),  # the first of all, but for its last token
        Continuation(first[:1], ids(6, 5)),
        Continuation(second, ids(1, 6)),
    ]
    with compress(model, method) as session:
        found = log_likelihoods(session, asked, held_back)
    for one, (value, greedy) in zip(asked, found, strict=True):
        expected = one_by_one(model, method, one, held_back)
        assert value == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def test_a_context_is_prefilled_once_for_all_its_continuations(model):
    context, prefills, ends = ids(20, 0), [], []
    asked = [Continuation(context, (5, 6)), Continuation(context, (5, 9)), Continuation(context, (7,))]
    with compress(model, SnapKV(budget=6, window=2)) as session:
        log_likelihoods(
            session, asked, 1, lambda: prefills.append(session.cache.get_seq_length()), lambda: ends.append(1)
        )
    assert prefills == [19]
    assert len(ends) == 2  # those that differ in their last token alone are one run


def test_what_greedy_decoding_writes_is_greedy_and_a_changed_token_is_not(model):
    context = ids(25, 3)
    with compress(model, SnapKV(budget=6, window=2)) as session:
        session.prefill(torch.tensor([context]))
        written = tuple(session.generate(6).tokens[0])
        other = (*written[:-1], (written[-1] + 1) % 128)
        found = log_likelihoods(session, [Continuation(context, written), Continuation(context, other)], 0)
    assert [greedy for _, greedy in found] == [True, False]


def test_an_answer_of_one_token_sees_the_compression_only_where_a_token_is_held_back(model):
    asked, methods = [Continuation(ids(40, 0), (9,))], (Method(), Random(budget=1))
    values = {}
    for method in methods:
        for held_back in (0, 1):
            with compress(model, method) as session:
                values[type(method).__name__, held_back] = log_likelihoods(session, asked, held_back)[0][0]
    assert values["Method", 0] == pytest.approx(values["Random", 0], abs=1e-5)
    assert values["Method", 1] == pytest.approx(values["Method", 0], abs=1e-5)
    assert abs(values["Random", 1] - values["Method", 1]) > 0.01


def test_of_a_short_context_at_least_one_token_is_a_prompt():
    assert prompt_of(Continuation((5, 6, 7), (8,)), 1) == (5, 6)
    assert prompt_of(Continuation((5, 6, 7), (8,)), 9) == (5,)
    assert prompt_of(Completion((5, 6, 7), 4), 1) == (5, 6, 7)


def test_texts_from_one_token_on_are_refused_for_methods_that_would_not_act():
    with pytest.raises(ValueError, match="SnapKV compresses when a prompt ends.*schedule=interval"):
        check_rolling(SnapKV(budget=64))
    with pytest.raises(ValueError, match=r"budget=0.25 is a share"):
        check_rolling(H2O(budget=0.25))
    check_rolling(SnapKV(budget=1.0))
    check_rolling(SnapKV(budget=64, schedule=Schedule(every=16)))
    check_rolling(Method())


def test_generation_ends_after_the_token_that_completes_a_stop_string(model):
    tokenizer = Letters()
    with compress(model, Method()) as session:
        session.prefill(torch.tensor([ids(12, 0)]))
        free = session.generate(12).tokens[0]
        stop = tokenizer.decode(free[4:6])
        session.prefill(torch.tensor([ids(12, 0)]))
        written = complete(session, Completion(ids(12, 0), 12, (stop,)), (), tokenizer)
    met = next(n for n in range(1, 13) if stop in tokenizer.decode(free[:n]))
    assert written.tokens[0] == free[:met]
    assert written.finished == ["stop"]
    assert len(written.step_s) == met - 1


def test_a_row_of_a_batch_ends_at_its_own_stop_and_the_others_go_on(model):
    prompt = torch.tensor([ids(12, 0), ids(12, 5)])
    with compress(model, Method()) as session:
        session.prefill(prompt)
        free = session.generate(6).tokens
        session.prefill(prompt)
        halted = session.generate(6, until=lambda tokens: tokens == free[0][:2])
    assert halted.tokens == [free[0][:2], free[1]]
    assert halted.finished == ["stop", "length"]


def test_text_is_cut_before_the_first_stop_string_of_each():
    assert cut("a b\nc;d", ["\n", ";"]) == "a b"
    assert cut("a;b\nc", ["\n", ";"]) == "a"
    assert cut("abc", ["", "x"]) == "abc"
    assert reaches([""], Letters()) is None


class Letters:
    """One character per id."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) - 0x4E00 for letter in text]

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(0x4E00 + token) for token in tokens)
