"""Before a model is loaded: right answers score 1, empty ones 0; what records say of every sample's prompt and end."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from composed import composed
from rich.console import Console
from test_rows import ROWS, write

from kvcompress.data.task import Sample, Turn
from kvcompress.data.thinking import unfinished
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import TASKS, Needle

TOKENIZER = byte_tokenizer()


def sample_of(*references, meta=None, name="s"):
    return Sample(name, ((1,),), tuple(Turn((), 4, references=one) for one in references), meta=meta or {})


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("options", [{}, {"cot": True}])
def test_right_answers_of_every_task_of_rows_score_one(tmp_path, name, options):
    if options and name != "longbench_v2":
        return
    task = TASKS[name](source=str(write(tmp_path, name)), template="none", **options)
    assert sanity.check(task, list(task.samples(TOKENIZER))) == sanity.Sanity(1.0, 1.0)


@pytest.mark.parametrize("name", ["ruler/vt", "ruler/cwe", "ruler/niah_multivalue", "needle", "multi_question"])
def test_right_answers_of_tasks_made_here_score_one(name):
    task = TASKS[name](lengths=(2000,), n_samples=1) if name != "needle" else Needle(form="classic", depths=(0.5,))
    made = list(task.samples(TOKENIZER))
    assert sanity.check(task, made) == sanity.Sanity(1.0, 1.0)


def test_problems_have_their_answer_in_a_box_after_any_thinking(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"problem": "?", "answer": "\\\\frac{1}{2}"}\n')
    task = TASKS["reasoning/math500"](path=str(path), k=3)
    made = next(iter(task.samples(TOKENIZER)))
    for one in (made, replace(made, meta={**made.meta, "thinking": True})):
        assert sanity.check(task, [one]) == sanity.Sanity(1.0, 1.0)
        assert len(task.gold(one)) == 3


def test_a_row_whose_answer_cannot_be_right_is_named():
    task = TASKS["longbench/passage_retrieval_en"]()
    with pytest.raises(ValueError, match=r"passage_retrieval_en, sample x: the right answer 'Part 3' cannot be scored"):
        sanity.check(task, [sample_of(("Part 3",), name="x")])
    with pytest.raises(ValueError, match=r"sample x: the empty answer '' scores 1 by string_match_all where 0 is due"):
        sanity.check(Needle(), [sample_of(("",), name="x")])
    with pytest.raises(ValueError, match="gives no sample"):
        sanity.check(Needle(), [])


@pytest.mark.parametrize(
    ("name", "reference", "which"),
    [("lcc", "x = 1  # one", "right"), ("qasper", "The", "right"), ("gov_report", "...", "right"),
     ("lcc", "", "empty")],
)  # fmt: skip
def test_what_a_published_metric_is_known_to_miss_is_a_note(name, reference, which):
    task = TASKS[f"longbench/{name}"]()
    good = sample_of(("return 7",), name="good")
    found = sanity.check(task, [good, sample_of((reference,), name="odd")])
    assert (found.gold if which == "right" else found.empty) == 0.5
    assert f"{which} answers of 1 of 2 samples" in found.notes[0] and "(odd)" in found.notes[0]


def test_where_every_right_answer_misses_it_is_no_edge_case():
    many = [sample_of(("the",), name=f"s{i}") for i in range(sanity.ENOUGH)]
    with pytest.raises(ValueError, match="sample s4: the right answer 'the' scores 0 by qa_f1"):
        sanity.check(TASKS["longbench/qasper"](), many)


def test_tasks_without_right_answers_are_left_alone():
    assert sanity.check(TASKS["fidelity"](), [Sample("s", ((1,),), (Turn((), 4),))]) == sanity.Sanity()


def test_published_rows_pass(data_folder):
    """Also the files themselves: every answer that is there can be reached."""
    for name in ("longbench/qasper", "longbench/lcc", "longbench/trec", "babilong", "kv_retrieval", "passkey",
                 "longeval_lines"):  # fmt: skip
        task = TASKS[name](data=str(data_folder), **({"max_length": 500} if "longbench" in name else {}))
        found = sanity.check(task, list(task.samples(TOKENIZER)))
        assert found.empty == 1.0 and found.gold >= 0.8 and bool(found.notes) == (found.gold < 1), (name, found)


# ---------------------------------------------------------------------- runs


@pytest.fixture
def cell(tmp_path):
    usual = ["model=random", "device=cpu", "paths.data=null", f"paths.results={tmp_path}/out", "sweep.name=test"]

    def make(*overrides):
        return composed(*usual, *overrides)

    return make


def runner():
    return Scheduler(Console(file=io.StringIO()))


def test_a_cell_with_impossible_answers_fails_before_its_model_is_loaded(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    row = {"input": "", "context": "x", "answers": ["Part 3"], "all_classes": None, "length": 1}
    (tmp_path / "passage_retrieval_en.jsonl").write_text(json.dumps(row) + "\n")
    outcome = runner()(cell("task=longbench/passage_retrieval_en", f"task.source={tmp_path}"))
    assert outcome.status == "failed" and "sample 0: the right answer 'Part 3'" in outcome.note


@pytest.mark.parametrize(
    "task", ["needle", "ruler/vt", "multi_question", "fidelity", "reasoning/gsm8k", "longbench/qasper"]
)
def test_a_chat_template_that_is_not_there_is_said_before_a_model_is_loaded(cell, tmp_path, monkeypatch, task):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr(ModelPool, "tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    row = {"input": "Who?", "context": "x", "answers": ["Ann"], "all_classes": None, "length": 1, "question": "?",
           "answer": "#### 3"}  # fmt: skip
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n")
    more = {"fidelity": ["task.source=generation"], "longbench/qasper": [f"task.source={tmp_path}"],
            "reasoning/gsm8k": [f"task.path={tmp_path}/qasper.jsonl"]}.get(task, [])  # fmt: skip
    outcome = runner()(cell(f"task={task}", "task.template=chat", *more))
    assert outcome.status == "failed" and "no chat template; use template=auto or none" in outcome.note


def test_records_and_samples_say_what_was_checked_and_how_prompts_begin_and_end(cell, tmp_path):
    row = {"input": "Who?", "context": "x " * 300, "answers": ["Ann"], "all_classes": None, "length": 1}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "answers": ["the"]}) + "\n")
    short = ["task.template=chat"]
    tasks = {
        "longbench/qasper": [f"task.source={tmp_path}", "task.max_length=300", *short],
        "fidelity": ["task.n_texts=1", "task.prompt_tokens=60", "task.continuation_tokens=4"],
        "needle": ["task.lengths=[450]", "task.depths=[0.5]", "task.max_new_tokens=2"],
    }
    for task, settings in tasks.items():
        outcome = runner()(cell(f"task={task}", "limit=2", *settings))
        found = outcome.record
        assert outcome.status == "ok", outcome.note
        shares = ("truncated", "hit_max", "unfinished")
        assert all(0 <= found[f"protocol.{share}_share"] <= 1 for share in shares)
        for line in (outcome.folder / "samples.jsonl").read_text().splitlines():
            meta = json.loads(line)["meta"]
            assert len(meta["prompt_hash"]) == 16 and 0 < len(meta["prompt_first"]) <= 200 and meta["prompt_last"]
        if task == "longbench/qasper":
            assert found["sanity.gold"] == 0.5 and found["sanity.empty"] == 1.0
            assert any("right answers of 1 of 2 samples" in note for note in found["notes"])
            assert found["protocol.truncated_share"] == 1.0 and found["protocol.data"].startswith("file:")
        else:
            assert found["sanity.gold"] == (None if task == "fidelity" else 1.0)


def test_a_thinking_part_that_does_not_end_is_counted(cell, monkeypatch):
    assert unfinished("<think> so") and not unfinished("<think> so </think> 7")
    assert unfinished("so", thinking=True) and not unfinished("so </think> 7", thinking=True)
    stock = ModelPool.load

    def opened(*args):
        model, tokenizer = stock(*args)
        tokenizer.chat_template = tokenizer.chat_template + "<think>\n"
        return model, tokenizer

    def tokenizer(*args):
        return opened(*args)[1]

    monkeypatch.setattr(ModelPool, "load", opened)
    monkeypatch.setattr(ModelPool, "tokenizer", tokenizer)
    asked = ["task.lengths=[500]", "task.depths=[0.5]", "task.max_new_tokens=2", "task.answer_prefix=false"]
    assert runner()(cell(*asked)).record["protocol.unfinished_share"] == 1.0
