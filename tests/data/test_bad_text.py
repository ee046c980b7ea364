"""Half of a surrogate pair, a number that is none and a list where a text is meant are refused with file, row and field."""

from __future__ import annotations

import json

import pytest

from kvcompress.data import jsonl
from kvcompress.tasks import TASKS

CUT = "cut \ud83d"
KV = {"ordered_kv_records": [["k", "v"]], "key": "k", "value": "v"}
V2 = {"_id": "a", "difficulty": "easy", "length": "short", "question": "who?", "context": "Text.", "answer": "B"}
V2 |= {f"choice_{letter}": letter for letter in "ABCD"}
ROWS = {  # task, option that names its file, a sound row
    "reasoning/gsm8k": ("path", {"question": "1+1?", "answer": "2"}),
    "reasoning/math500": ("path", {"problem": "1+1?", "answer": "2"}),
    "passkey": ("source", {"input": "hay 7", "target": "7"}),
    "babilong": ("source", {"input": "x", "question": "who?", "target": "garden"}),
    "longeval_lines": ("source", {"prompt": "x\nNow the record is over. y", "expected_number": "7"}),
    "kv_retrieval": ("source", KV),
    "longbench/qasper": ("source", {"input": "?", "context": "x", "answers": ["a"], "all_classes": None, "length": 1}),
    "longbench_v2": ("source", V2),
    "rag": ("source", {"passages": [{"title": "t", "text": "x"}], "question": "?", "answers": ["a"]}),
    "multi_question": ("source", {"context": "x", "questions": [{"question": "?", "answer": "a"}]}),
    "fidelity": ("texts", {"text": "x"}),
    "infinitebench/passkey": ("source", {"context": "x", "input": "?", "answer": "7"}),
    "infinitebench/longbook_qa_eng": ("source", {"context": "x", "input": "?", "answer": ["a"]}),
    "scbench/kv": ("source", {"context": "x", "multi_turns": [{"input": "?", "answer": "a"}]}),
}
CHANGES = [
    ("reasoning/gsm8k", "question", CUT),
    ("reasoning/gsm8k", "answer", CUT),
    ("reasoning/gsm8k", "answer", float("nan")),
    ("reasoning/gsm8k", "question", ["1+1?"]),
    ("reasoning/math500", "problem", CUT),
    ("passkey", "input", CUT + " 7"),
    ("passkey", "target", float("inf")),
    ("babilong", "question", CUT),
    ("babilong", "target", float("nan")),
    ("longeval_lines", "prompt", CUT + "\nNow the record is over."),
    ("longeval_lines", "expected_number", float("nan")),
    ("kv_retrieval", "ordered_kv_records", [["k", "v"], ["a", CUT]]),
    ("kv_retrieval", "ordered_kv_records", [["k", "v"], ["a", ["b"]]]),
    ("longbench/qasper", "context", CUT),
    ("longbench/qasper", "answers", ["a", CUT]),
    ("longbench/qasper", "answers", [float("nan")]),
    ("longbench_v2", "choice_C", CUT),
    ("longbench_v2", "context", ["x"]),
    ("rag", "passages", [{"title": CUT, "text": "x"}]),
    ("rag", "passages", [{"title": ["t"], "text": "x"}]),
    ("rag", "passages", ["x", CUT]),
    ("rag", "question", CUT),
    ("rag", "answers", [float("-inf")]),
    ("multi_question", "context", CUT),
    ("multi_question", "questions", [{"question": CUT, "answer": "a"}]),
    ("multi_question", "questions", [{"question": "?", "answers": ["a", CUT]}]),
    ("multi_question", "questions", [{"question": "?", "answer": float("nan")}]),
    ("fidelity", "text", CUT),
    ("infinitebench/passkey", "input", CUT),
    ("infinitebench/passkey", "answer", float("nan")),
    ("infinitebench/passkey", "context", ["x"]),
    ("infinitebench/longbook_qa_eng", "answer", ["a", CUT]),
    ("scbench/kv", "context", CUT),
    ("scbench/kv", "multi_turns", "Who?"),
]


def made(name, path):
    options = {"form": "rows"} if name == "multi_question" else {}
    return TASKS[name](**{ROWS[name][0]: str(path)}, **options)


@pytest.mark.parametrize("name", ROWS)
def test_a_sound_row_is_taken(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[name][1]) + "\n")
    made(name, path).fingerprint()


@pytest.mark.parametrize(("name", "field", "value"), CHANGES)
def test_a_bad_value_is_refused_with_file_row_and_field_before_a_model_is_loaded(name, field, value, tmp_path):
    path, sound = tmp_path / "rows.jsonl", ROWS[name][1]
    path.write_text("\n".join(json.dumps(row) for row in (sound, sound | {field: value})) + "\n")
    with pytest.raises(ValueError) as error:
        made(name, path).fingerprint()
    text = str(error.value)
    assert str(path) in text and "line 2" in text
    assert {"ordered_kv_records": "pair 2"}.get(field, field.rstrip("s")) in text, text


def test_questions_of_squad_are_checked_too(tmp_path):
    path = tmp_path / "squad.json"
    asked = {"question": CUT, "answers": [{"text": "a"}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "x", "qas": [asked]}]}]}))
    with pytest.raises(ValueError, match=r"squad\.json.*question 1: question holds half of a surrogate pair"):
        TASKS["ruler/qa_1"](source=str(path)).fingerprint()


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5_000, '{"a": '])
def test_json_that_python_cannot_read_is_named(text):
    with pytest.raises(ValueError, match="here: no JSON"):
        jsonl.loads(text, "here")


def test_a_file_that_changed_is_read_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    assert jsonl.read(path) == ({"a": 1},)
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert jsonl.read(path) == ({"a": 1}, {"a": 2})
