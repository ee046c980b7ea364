"""LongBench v2: the letter of an answer, reasoning first, and what a record says of kinds of questions."""

from __future__ import annotations

import json

import pytest
import torch

from kvcompress import compress, load
from kvcompress.methods import METHODS
from kvcompress.tasks import TASKS
from kvcompress.tasks.longbench_v2 import extract

ROW = {
    "_id": "x",
    "difficulty": "easy",
    "length": "short",
    "question": "Why?",
    "answer": "B",
    "context": "Rain. " * 60,
} | {f"choice_{letter}": f"reason {letter}" for letter in "ABCD"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "longbench_v2.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is (C).", "C"),
        ("**The correct answer is D**", "D"),
        ("The correct answer is A, not what some say: The correct answer is (B)", "B"),  # brackets go first
        ("the correct answer is (C)", None),
        ("C", None),
        ("The correct answer is (E)", None),
    ],
)
def test_the_letter_is_taken_from_the_published_words_alone(text, letter):
    assert extract(text) == letter


def test_accuracy_is_also_said_by_difficulty_and_length():
    rows = [
        {"scores": {"score": s, "answered": a}, "meta": {"difficulty": d, "length": n}}
        for s, a, d, n in [(1.0, 1.0, "easy", "short"), (0.0, 1.0, "easy", "long"), (0.0, 0.0, "hard", "long")]
    ]
    found = TASKS["longbench_v2"]().summarise(rows)
    assert found["accuracy_easy"] == 0.5 and found["accuracy_hard"] == 0.0 and found["accuracy_short"] == 1.0
    assert (found["n_easy"], found["n_long"]) == (2, 2) and found["unanswered_share"] == pytest.approx(1 / 3)


def test_reasoning_is_followed_by_a_prompt_that_holds_it_and_not_the_text(file):
    model, tokenizer = load("random/llama")
    task = TASKS["longbench_v2"](source=file, cot=True, template="none", max_length=600)
    (sample,) = task.samples(tokenizer)
    assert [turn.max_new_tokens for turn in sample.turns] == [1024, 128]
    assert tokenizer.decode(sample.prompt_ids()).endswith("think step by step:")
    short = [type(turn)(turn.ids, n, turn.stop, turn.references) for turn, n in zip(sample.turns, (6, 3), strict=True)]
    sample = type(sample)(sample.id, sample.segments, tuple(short), sample.protocol, sample.meta)
    results = {}
    for name in ("Full", "SnapKV"):
        method = METHODS[name]() if name == "Full" else METHODS[name](budget=64)
        with compress(model, method, tokenizer=tokenizer) as session:
            out = task.run(session, sample)
            reasoning, letter = out["tokens"]
            at = sample.meta["reasoning_at"]
            ids = [*sample.turns[1].ids[:at], *reasoning, *sample.turns[1].ids[at:]]
            # all of the second prompt is held: it is never compressed
            assert session.cache.get_seq_length() == len(ids) + len(letter) - 1
            assert session.report()["active"] is False
        assert out["compressed"]["active"] is (name == "SnapKV") and len(out["finished"]) == 2
        text = tokenizer.decode(ids)
        assert "Rain." not in text and "too long and omitted" in text and tokenizer.decode(reasoning) in text
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        results[name] = (int(logits.argmax()), letter[0])
    assert all(expected == got for expected, got in results.values())


def test_only_plain_questions_share_a_prefill(file):
    assert TASKS["longbench_v2"](source=file).shares_prefill
    assert not TASKS["longbench_v2"](source=file, cot=True).shares_prefill
