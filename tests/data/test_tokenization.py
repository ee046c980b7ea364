"""Special tokens stand at the front of a prompt and nowhere else, whatever a tokenizer adds to a text."""

from __future__ import annotations

import json

import pytest
from tokenizers import processors

from kvcompress.common.tokenization import plain_ids, prefix_ids, prompt_ids, surrogate
from kvcompress.data import prompts
from kvcompress.models.loading import load_tokenizer
from kvcompress.tasks import TASKS

SHAPES = {"bos and eos": "{bos} $A {eos}", "eos": "$A {eos}", "two before": "{bos} {bos} $A {eos}", "none": "$A"}


def tokenizer_of(shape: str):
    """The byte tokenizer with another rule of what stands before and after a text."""
    tokenizer = load_tokenizer("random/llama")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    special = [(bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
    single = SHAPES[shape].format(bos=bos, eos=eos)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


@pytest.fixture(params=SHAPES)
def tokenizer(request):
    return tokenizer_of(request.param)


def clean(tokenizer, ids) -> bool:
    """True if ids begin with the tokenizer's prefix and hold no special token behind it."""
    first = prefix_ids(tokenizer)
    return tuple(ids[: len(first)]) == first and not set(ids[len(first) :]) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize(("shape", "count"), [("bos and eos", 1), ("eos", 0), ("two before", 2), ("none", 0)])
def test_the_prefix_is_what_a_tokenizer_puts_before_a_text(shape, count):
    tokenizer = tokenizer_of(shape)
    assert prefix_ids(tokenizer) == (tokenizer.bos_token_id,) * count


def test_a_prompt_never_ends_in_a_special_token(tokenizer):
    ids = prompt_ids(tokenizer, "What?")
    assert clean(tokenizer, ids) and tokenizer.decode(ids, skip_special_tokens=True) == "What?"


def test_a_prefix_that_the_text_spells_out_is_not_added_again():
    tokenizer = tokenizer_of("bos and eos")
    ids = prompt_ids(tokenizer, f"{tokenizer.bos_token}What?")
    assert ids == prompt_ids(tokenizer, "What?")


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize(("limit", "truncation"), [(None, "text"), (60, "text"), (60, "tokens")])
def test_prompts_of_benchmarks_hold_special_tokens_at_their_front_alone(tokenizer, hide, limit, truncation):
    text = "A line of hay. " * 10 + "Question: who? Answer:"
    made = prompts.build(tokenizer, text, "Question: who? Answer:", "none", limit, truncation, hide)
    assert clean(tokenizer, made.ids)
    assert not hide or tokenizer.decode(made.question).strip() == "Question: who? Answer:"


def test_a_cut_prompt_keeps_its_last_token():
    tokenizer = tokenizer_of("bos and eos")
    text, _ = prompts.cut_text(tokenizer, "0123456789" * 10, 20)
    assert text.endswith("0123456789")


ROWS = {
    "reasoning/gsm8k": ("path", {"question": "2+3?", "answer": "5"}),
    "passkey": ("source", {"input": "hay 77 hay", "target": "77"}),
    "longeval_lines": ("source", {"prompt": "line 1 is <7>\nNow the record is over. Tell me.", "expected_number": 7}),
    "kv_retrieval": ("source", {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "a", "value": "1"}),
    "longbench/qasper": (
        "source",
        {"input": "who?", "context": "A text.", "answers": ["me"], "all_classes": None, "length": 3},
    ),
    "babilong": ("source", {"input": "Mary is in the garden.", "question": "Where is Mary?", "target": "garden"}),
    "rag": ("source", {"passages": ["One text here.", "Two texts here."], "question": "who?", "answers": ["me"]}),
}
BUILT_IN = {
    "needle": {"lengths": (700,), "depths": (0.5,)},
    "multi_question": {"lengths": (900,), "n_samples": 1, "n_questions": 2, "turns": "session"},
    "ruler/niah_single_1": {"lengths": (1500,), "n_samples": 1},
    "fidelity": {"n_texts": 1, "prompt_tokens": 100, "continuation_tokens": 20},
}


def samples(name, tokenizer, folder):
    options = {} if name == "fidelity" else {"template": "none"}
    if name in ROWS:
        field, row = ROWS[name]
        path = folder / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        options[field] = str(path)
    return TASKS[name](**options, **BUILT_IN.get(name, {})).samples(tokenizer)


@pytest.mark.parametrize("name", [*ROWS, *BUILT_IN])
def test_every_task_holds_special_tokens_at_the_front_of_its_prompt_alone(name, tmp_path):
    tokenizer = tokenizer_of("bos and eos")
    sample = next(iter(samples(name, tokenizer, tmp_path)))
    assert clean(tokenizer, sample.prompt_ids())
    for turn in sample.turns[1:]:
        assert not set(turn.ids) & set(tokenizer.all_special_ids)


def test_contexts_of_lm_eval_do_not_end_in_an_end_token():
    pytest.importorskip("lm_eval")
    from kvcompress.data.lm_eval_encoding import Encoding

    tokenizer = tokenizer_of("bos and eos")
    encoding = Encoding(tokenizer, 200)
    asked = encoding.pair("Question: who?", " me")
    assert clean(tokenizer, asked.context) and tokenizer.decode(asked.continuation) == " me"
    assert clean(tokenizer, encoding.completion("Question: who?", {"until": ["\n"], "max_gen_toks": 9}).context)
    assert all(tokenizer.eos_token_id not in part.continuation for part in encoding.windows("a text " * 9))


@pytest.mark.parametrize("text", ["cut \ud83d", "\udc00 end"])
def test_half_of_a_surrogate_pair_is_named_with_its_place(text):
    at = surrogate(text)
    assert at is not None and surrogate("whole \U0001f600") is None
    with pytest.raises(ValueError, match=f"surrogate pair.*character {at + 1}"):
        plain_ids(load_tokenizer("random/llama"), text)
