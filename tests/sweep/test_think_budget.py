"""A budget of thinking is the same rule however cells are run: alone, decoding together, or as rows of a batch."""

from __future__ import annotations

import json

import pytest
from sweeps import ALONE, TOGETHER, cells, sweep

from kvcompress.models import loading
from kvcompress.sweep import record

ASKED = ("task.answer_prefix=false", "think_tokens=3")
END = "\n</think>\n\n"


@pytest.fixture
def thinker(monkeypatch):
    """Random models whose chat template opens a thinking part, which they never close."""
    made = loading.byte_tokenizer

    def opened(*arguments):
        tokenizer = made(*arguments)
        tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
        return tokenizer

    monkeypatch.setattr(loading, "byte_tokenizer", opened)
    return opened()


def left(folder):
    """By method: the record, and tokens of every sample."""
    found = {}
    for path in (folder / "test").glob("*/record.json"):
        written = record.read_record(path)
        rows = [json.loads(line) for line in (path.parent / "samples.jsonl").read_text().splitlines()]
        found[written["method"]] = written, {row["id"]: row["out"]["tokens"] for row in rows}
    return found


def test_thoughts_end_by_force_after_their_budget_and_answers_have_their_full_length(thinker, tmp_path):
    ways = {"alone": (ALONE, ()), "together": (TOGETHER, ()), "batch": (ALONE, ("batch=2",))}
    found = {}
    for name, (options, more) in ways.items():
        outcomes, text = sweep(cells(tmp_path / name, "full,snapkv", "0.5", *ASKED, *more), options)
        assert all(outcome.status in ("ok", "same") for outcome in outcomes), text
        found[name] = left(tmp_path / name)
    closing = thinker(END, add_special_tokens=False)["input_ids"]
    for written, samples in found["alone"].values():
        assert all(one[3 : 3 + len(closing)] == closing and len(one) <= 7 + len(closing) for (one,) in samples.values())
        assert written["protocol.think_tokens"] == "3" and written["protocol.think_forced_share"] == 1.0
        assert written["protocol.unfinished_share"] == 0.0
    answers = [{method: samples for method, (_, samples) in way.items()} for way in found.values()]
    assert answers[0] == answers[1] == answers[2]


def test_without_a_budget_the_thought_takes_the_answers_place_and_is_unfinished(thinker, tmp_path):
    sweep(cells(tmp_path, "full", "1.0", ASKED[0]), ALONE)
    (written, _), *_ = left(tmp_path).values()
    assert written["protocol.unfinished_share"] == 1.0 and written["score"] == 0.0
    assert "protocol.think_forced_share" not in written
