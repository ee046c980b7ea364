"""The pipeline answers as the phases of a session do, and is registered without importing anything by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import pipeline

from kvcompress import compress, load
from kvcompress.common.prose import Encoder
from kvcompress.data.haystack import prompt_template
from kvcompress.hook import generation
from kvcompress.methods import KeyDiff

CONTEXT = "On day one the sea was calm. On day two the code of the gate was 7342. " * 3
QUESTIONS = ["What is the code?", "When was it calm?"]


@pytest.fixture(scope="module")
def pipe():
    model, tokenizer = load("random/llama")
    return pipeline("kv-compressed-text-generation", model=model, tokenizer=tokenizer, device="cpu")


def by_phases(model, tokenizer, question, method):
    frame = prompt_template(tokenizer, Encoder(tokenizer), CONTEXT, question, "", "auto")
    with compress(model, method) as session:
        session.prefill(torch.tensor([frame.head]))
        session.append(torch.tensor([frame.tail]))
        return tokenizer.decode(session.generate(6).tokens[0], skip_special_tokens=True)


def test_answers_are_those_of_prefill_append_and_generate(pipe):
    method = KeyDiff(budget=0.5)
    wanted = [by_phases(pipe.model, pipe.tokenizer, question, method) for question in QUESTIONS]
    assert pipe(CONTEXT, questions=QUESTIONS, method=method, max_new_tokens=6) == {"answers": wanted}
    assert pipe(CONTEXT, question=QUESTIONS[1], method="keydiff", budget=0.5, max_new_tokens=6) == {"answer": wanted[1]}


def test_several_contexts_and_arguments_for_all_calls(pipe):
    model, tokenizer = pipe.model, pipe.tokenizer
    same = pipeline(
        "kv-compressed-text-generation", model=model, tokenizer=tokenizer, device="cpu", method="keydiff", budget=0.5
    )
    found = same([CONTEXT, CONTEXT], question="Who?", max_new_tokens=3)
    assert found[0] == found[1] == pipe(CONTEXT, question="Who?", method=KeyDiff(budget=0.5), max_new_tokens=3)


def test_what_is_answered_stands_behind_the_thought(pipe, monkeypatch):
    script = iter(pipe.tokenizer("<think>9?</think>\n\n5", add_special_tokens=False)["input_ids"])
    monkeypatch.setattr(generation, "pick", lambda *_: torch.tensor([next(script)]))
    assert pipe(CONTEXT, question="2+3?", max_new_tokens=20) == {"answer": "5"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"press": 1}, "method=SnapKV"),
        ({"question": "a", "questions": ["b"]}, "one of them is enough"),
        ({"questions": "a"}, "questions a list of texts"),
        ({"method": "snapvk"}, "'snapvk' is unknown; valid"),
        ({"think": "drop"}, "valid: off, keep"),
        ({"max_new_tokens": 0}, "at least 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(pipe, arguments, says):
    with pytest.raises(ValueError, match=says):
        pipe(CONTEXT, **arguments)


def test_a_context_that_is_too_long_is_refused_or_cut_where_asked(pipe):
    long = "word " * (pipe.model.config.max_position_embeddings // 4)
    with pytest.raises(ValueError, match="positions: shorten it, or .* max_context_length"):
        pipe(long, question="Who?")
    with pytest.warns(UserWarning, match="is cut to max_context_length=50"):
        assert set(pipe(long, question="Who?", max_context_length=50, max_new_tokens=1)) == {"answer"}


def test_importing_the_package_imports_no_transformers_and_its_pipelines_know_the_task():
    code = (
        "import sys, kvcompress; assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from transformers import pipelines; assert 'kv-compressed-text-generation' in pipelines.PIPELINE_REGISTRY.supported_tasks\n"
        "assert pipelines.__spec__.loader is pipelines.__loader__ and 'kvcompress.methods' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
