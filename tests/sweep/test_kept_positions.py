"""Which tokens a cell keeps does not depend on how it is run: alone, from a shared prefill, as a row of a batch."""

from __future__ import annotations

import json

import pytest
from helpers import LONG
from sweeps import ALONE, SHARED, TOGETHER, cells, left, sweep

from kvcompress.hook.session import Session
from kvcompress.sweep import record
from kvcompress.tasks.longbench import LongBench

# a method for each way to evict; with --long also those that differ in what they score
EVICTING = ("snapkv", "adakv", "h2o", "streamingllm", *(("pyramidkv", "knorm") if LONG else ()))
TOGETHER_IS_POSSIBLE = {"snapkv", "adakv", "pyramidkv", "knorm"}
BUDGETS = ("0.2", "64") if LONG else ("0.2",)


@pytest.fixture
def with_positions(monkeypatch):
    """Reports, which go into a sample's line, also say the positions each layer and head holds."""
    stock = Session.report

    def report(session, *args, **asked):
        return stock(session, *args, **asked) | {
            "positions": [session.cache.positions(i).tolist() for i in session.full_layers]
        }

    monkeypatch.setattr(Session, "report", report)


def few_shot(folder):
    """A LongBench file of one sample, a few hundred tokens long."""
    path = folder / "trec.jsonl"
    lines = [f"Question: Who wrote book {i} of {i * 7}?\nType: Individual {i}" for i in range(40)]
    row = {"input": "Question: Where is it?\nType:", "context": "\n".join(lines), "answers": ["Other location"]}
    path.write_text(json.dumps(row | {"all_classes": ["Other location", "Individual"], "length": 300}))
    return path


@pytest.mark.parametrize("task, question", [("needle", "hidden"), ("longbench/trec", "seen")])
def test_positions_bytes_tokens_and_scores_of_a_cell_are_those_it_has_alone(
    tmp_path, with_positions, task, question, monkeypatch
):
    methods = ",".join(("full", *EVICTING))
    settings = [f"task.question={question}", "limit=1"]
    monkeypatch.setattr(LongBench, "new_tokens", lambda *_: 4)
    if task != "needle":
        short = ("model=random", f"task={task}", f"task.source={few_shot(tmp_path)}", "task.max_length=250")
        monkeypatch.setattr("sweeps.SHORT", (*short, "device=cpu", "paths.data=null", "sweep.name=test"))
    for folder, options in (("alone", ALONE), ("shared", SHARED), ("together", TOGETHER)):
        outcomes, text = sweep(cells(tmp_path / folder, methods, ",".join(BUDGETS), *settings), options)
        assert {outcome.status for outcome in outcomes} <= {"ok", "same"}, text
    alone = left(tmp_path / "alone")
    assert len(alone) == len(EVICTING) * len(BUDGETS) + 1
    for status, _, written, (row,) in alone.values():
        held = row["out"]["compressed"]["positions"]
        assert status == "ok" and written["kv.bytes_held"] and len(held) > 1
        assert sum(p >= 0 for layer in held for head in layer[0] for p in head) > 0
    assert left(tmp_path / "shared") == alone
    assert left(tmp_path / "together") == alone
    said = [record.read_record(p)["protocol.decoding"] for p in tmp_path.glob("together/test/*/record.json")]
    assert said.count("together") >= len(TOGETHER_IS_POSSIBLE.intersection(EVICTING)) * len(BUDGETS)
