"""Reasoning tasks: problems from files, answers sampled from copies of one prompt, shares in the record."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from composed import composed
from rich.console import Console

import kvcompress.conf
from kvcompress import compress, load
from kvcompress.commands.report import main as report
from kvcompress.common import hashing
from kvcompress.data import grading, hub, reasoning
from kvcompress.methods import RKV
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.report.decode import draw_speed
from kvcompress.report.run_index import gather
from kvcompress.sweep import cell_spec, components, config
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import AIME24, GSM8K, MATH500, TASKS
from kvcompress.tasks.fidelity import read_texts

FOLDER = Path(kvcompress.conf.__file__).resolve().parent
ROWS = [
    {"question": "What is 3 times 6?", "answer": "3*6=<<3*6=18>>18\n#### 18"},
    {"question": "And a thousand more?", "answer": "#### 1,018"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return path


@pytest.fixture
def cell(tmp_path):

    def make(*overrides):
        usual = (
            "model=random",
            "device=cpu",
            f"paths.results={tmp_path}/results",
            "sweep.name=test",
            "paths.data=null",
        )
        return composed(*usual, *overrides)

    return make


@pytest.fixture
def runner():
    return Scheduler(Console(file=io.StringIO()))


def test_a_prompt_states_the_problem_and_the_form_of_the_answer(file):
    tokenizer = byte_tokenizer()
    samples = list(GSM8K(path=str(file), template="none").samples(tokenizer))
    assert [sample.id for sample in samples] == ["reasoning/gsm8k-0", "reasoning/gsm8k-1"]
    text = tokenizer.decode(samples[0].prompt_ids(), skip_special_tokens=True)
    assert text.startswith("You are given a math problem.\n\nProblem: What is 3 times 6?\n\n You need")
    assert text.endswith("Final answer:  \\boxed{}")
    assert [sample.turns[0].references for sample in samples] == [("18",), ("1018",)]
    assert samples[0].protocol["sampling"] == "greedy" and samples[0].protocol["template"] == "none"
    chat = next(iter(GSM8K(path=str(file)).samples(tokenizer)))
    assert chat.protocol["template"] == "chat" and not chat.meta["thinking"]
    tokenizer.chat_template = tokenizer.chat_template + "<think>\n"
    assert next(iter(GSM8K(path=str(file)).samples(tokenizer))).meta["thinking"]


def test_fields_may_be_named_problem_and_answers_may_be_numbers(tmp_path):
    path = tmp_path / "amc.jsonl"
    path.write_text('{"problem": "How many?", "answer": 27.0}\n{"problem": "How much?", "answer": "\\\\frac{1}{2}"}\n')
    assert [(one.question, one.gold) for one in MATH500(path=str(path)).problems()] == [
        ("How many?", "27"),
        ("How much?", "\\frac{1}{2}"),
    ]


def test_a_record_ends_where_its_line_ends(tmp_path):
    """Not at separators that JSON allows inside a string, such as U+2028 or U+0085."""
    path, text = tmp_path / "odd.jsonl", "One.\u2028Two.\u0085How many?"
    path.write_text(json.dumps({"question": text, "text": text, "answer": "2"}, ensure_ascii=False), encoding="utf-8")
    assert [one.question for one in MATH500(path=str(path)).problems()] == [text]
    assert [found for _, found in read_texts(path, "text")] == [text]


def test_the_data_folder_is_taken_before_the_hub(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda source: asked.append(source) or hub.Rows(tuple(ROWS), "abc"))
    assert len(AIME24(data=str(tmp_path)).problems()) == 2
    assert asked == [hub.Source("HuggingFaceH4/aime_2024", None, "train", AIME24.revision)]
    assert AIME24(data=str(tmp_path)).provenance() == {
        "data": "hub:HuggingFaceH4/aime_2024:train@abc",
        "revision": "abc",
    }
    asked.clear()
    (tmp_path / "reasoning").mkdir()
    (tmp_path / "reasoning" / "aime24.jsonl").write_text('{"problem": "?", "answer": "007"}\n')
    assert [one.gold for one in AIME24(data=str(tmp_path)).problems()] == ["007"] and not asked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"question": "Why?"}\n', "line 1 has no answer; its fields: question"),
        ('{"question": "Why?", "answer": "1"}\n{"question": "Why?", "answer": ""}\n', "line 2 has no answer"),
        ('{"answer": "3"}\n', "has no question"),
        ('{"question": "Why?", "answer": ["3"]}\n', "line 1: answer must be text or a number, found list"),
        ('{"question": ["Why?"], "answer": "3"}\n', "line 1.* must be text, found list"),
        ("{broken\n", "line 1: no JSON"),
        ("[1]\n", "line 1: a JSON object is needed, found list"),
        ("\n", "holds no record"),
        (None, "cannot read"),
    ],
)
def test_bad_data_is_named_before_a_model_is_loaded(text, said, tmp_path, cell, runner, monkeypatch):
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        MATH500(path=str(path)).problems()
    outcome = runner(cell("task=reasoning/math500", f"task.path={path}"))
    assert outcome.status == "refused" and str(path) in outcome.note


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=rkv", "budget=8"], "budget=8 tokens is too small"),
        (["method=rkv", "budget=64", "method.interval=0"], "interval=0"),
        (["method=h2o", "budget=64", "schedule=interval", "schedule.every=0"], "every=0"),
        (["task.k=4", "task.temperature=0.0"], "greedy answers are all the same"),
        (["task.k=0"], "task.k=0"),
        (["task.top_p=0.0"], "task.top_p=0.0"),
        (["task.template=alpaca"], "task.template='alpaca'"),
        (["task.max_new_tokens=0"], "task.max_new_tokens=0"),
    ],
)
def test_bad_settings_are_named_before_a_model_is_loaded(overrides, said, file, cell, runner, monkeypatch):
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    outcome = runner(cell("task=reasoning/gsm8k", f"task.path={file}", *overrides))
    assert outcome.status in ("refused", "dropped") and said in outcome.note


def test_without_math_verify_the_task_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"kvcompress\[reasoning\]"):
        GSM8K()


def test_several_answers_are_sampled_and_one_is_greedy():
    assert (GSM8K().temperature, GSM8K().top_p) == (0.0, 1.0)
    assert (GSM8K(k=8).temperature, GSM8K(k=8).top_p) == (0.6, 0.95)
    assert (GSM8K(temperature=1.0).temperature, GSM8K(temperature=1.0).top_p) == (1.0, 0.95)


def answers_of(task, method=None):
    model, tokenizer = load("random/llama", dtype="float32", device="cpu")
    sample = next(iter(task.samples(tokenizer)))
    with compress(model, method or RKV(budget=64, interval=8)) as session:
        return task.run(session, sample)


def test_k_answers_come_from_one_prompt_and_the_same_seeds_give_the_same_again(file):
    task = GSM8K(path=str(file), k=3, max_new_tokens=20)
    out = answers_of(task)
    assert len(out["tokens"]) == len(out["finished"]) == 3 and len({tuple(row) for row in out["tokens"]}) == 3
    assert answers_of(task)["tokens"] == out["tokens"]
    assert answers_of(GSM8K(path=str(file), k=2, max_new_tokens=20))["tokens"] == out["tokens"][:2]
    assert answers_of(GSM8K(path=str(file), k=3, max_new_tokens=20, seed=1))["tokens"] != out["tokens"]
    assert len(out["held"]) == 1 + 3 * 19 and out["held"][1] > out["held"][0]
    assert out["end"]["active"] and out["end"]["kv"]["kept_tokens_max"] < 64 + 8


def test_answers_decoded_together_hold_what_one_alone_holds(file):
    """Two greedy-like rows of one batch: bytes are counted per answer."""
    one = answers_of(GSM8K(path=str(file), k=1, temperature=1e-6, max_new_tokens=20))
    two = answers_of(GSM8K(path=str(file), k=2, temperature=1e-6, max_new_tokens=20, batch=2))
    assert two["tokens"] == one["tokens"] * 2
    assert two["held"] == one["held"]


def test_the_score_is_the_mean_over_answers_with_shares_of_the_unfinished():
    task = MATH500(k=4)
    sample = reasoning.Sample("x", ((1,),), (reasoning.Turn((), 9, references=("18",)),), meta={"thinking": False})
    texts = ["\\boxed{18}", "\\boxed{17}", "it is 18 and", ""]
    out = {"text": texts, "finished": ["stop", "stop", "length", "stop"], "tokens": [[1] * 3, [1] * 5, [1] * 9, []]}
    scores = task.score(sample, out)
    assert scores == {"score": 0.25, "unfinished": 0.5, "hit_max": 0.25, "tokens": 4.25}
    summary = task.summarise([{"scores": scores}, {"scores": {**scores, "unfinished": 0.0, "tokens": 1.75}}])
    assert summary["unfinished_share"] == 0.25 and summary["hit_max_share"] == 0.25
    assert summary["tokens_mean"] == 3.0 and summary["tokens"] == [4.25, 1.75] and summary["answers_per_problem"] == 4


def test_a_sweep_over_methods_under_one_schedule_makes_records_and_figures(file, cell, runner, tmp_path, monkeypatch):
    common = ["task=reasoning/gsm8k", f"task.path={file}", "task.max_new_tokens=20", "budget=64"]
    for name in ("full", "rkv", "h2o"):
        outcome = runner(cell(*common, f"method={name}", "schedule=interval", "schedule.every=8"))
        assert outcome.status == "ok"
        record = outcome.record
        assert record["task"] == "reasoning/gsm8k" and record["metrics.tokens_mean"] <= 20
        assert record["metrics.hit_max_share"] == record["metrics.unfinished_share"] > 0
        assert record["protocol.sampling"] == "greedy"
        if name != "full":
            assert record["parts.schedule"] == "prompt+every8" and record["kv.kept_tokens_max"] == 71
            assert record["kv.bytes_held"] < record["kv.bytes_mean"] < record["kv.bytes_peak"]
    assert runner(cell(*common, "method=full")).status == "same", "what never evicts has no schedule"
    arguments = [str(tmp_path / "results"), "--png", str(tmp_path / "figures")]
    entries = gather([tmp_path / "results"]).entries
    assert not draw_speed(entries, "", tmp_path / "speed.png"), "twenty tokens have no speed along them"
    monkeypatch.setattr("kvcompress.report.decode.SHORTEST", 0)
    assert report(arguments) == 0 and len(list((tmp_path / "figures").glob("*-speed.png"))) == 1


def test_the_place_of_the_file_is_no_part_of_the_run_but_its_content_is(file, cell, tmp_path):
    def identity(path):
        made = cell_spec.with_dtype(cell("task=reasoning/gsm8k", f"task.path={path}"))
        return hashing.digest(cell_spec.identity(made, components.build_method(made), components.build_task(made)))

    other = tmp_path / "copy.jsonl"
    other.write_text(file.read_text())
    assert identity(file) == identity(other)
    other.write_text(other.read_text().replace("6?", "7?"))
    assert identity(file) != identity(other)


def test_a_newline_schedule_gets_its_ids_from_the_models_tokenizer(file, cell, runner):
    made = cell(
        *("task=reasoning/gsm8k", f"task.path={file}", "task.max_new_tokens=12", "method=rkv", "budget=64"),
        *("schedule=newline", "limit=1"),
    )
    outcome = runner(made)
    assert outcome.status == "ok" and outcome.record["parts.schedule"] == "prompt+newline"
    refused = runner(
        cell("task=reasoning/gsm8k", f"task.path={file}", "budget=64", "method=rkv", "limit=1", "schedule=thinking")
    )
    assert refused.status == "failed" and "must be one" in refused.note


def test_a_curve_is_thinned_to_its_length_with_its_peak():
    values = [float(x % 97) for x in range(5000)]
    values[1234] = 500.0
    thin = reasoning.thinned(values)
    assert len(thin) <= reasoning.CURVE and max(thin) == 500.0
    assert abs(sum(thin) / len(thin) - sum(values) / len(values)) < 5
    assert reasoning.thinned([3.0, 1.0]) == [3.0, 1.0]


def test_tasks_may_be_named_with_a_folder():
    assert {"reasoning/gsm8k", "reasoning/math500", "reasoning/aime24"} <= set(TASKS)
    assert {"reasoning/gsm8k", "needle"} <= set(config.options("task", FOLDER))
    with pytest.raises(ValueError, match="did you mean reasoning/gsm8k"):
        config.check_overrides(["task=reasoning/gsm8"], FOLDER)
