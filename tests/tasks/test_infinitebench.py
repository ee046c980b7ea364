"""InfiniteBench: published prompts, cut, answers and scores, on rows made here in the published form."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path

import pytest
from composed import composed
from rich.console import Console

from kvcompress import metrics
from kvcompress.models import loading
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import TASKS
from kvcompress.tasks.infinitebench import settings

SETS = sorted(settings())
TOKENIZER = byte_tokenizer(400_000)
SCORED = json.loads((Path(__file__).parent / "data" / "infinitebench_scores.json").read_text(encoding="utf-8"))["pairs"]
BOOK = "Ann met Bob at the gate. The boats went out. "
OPTIONS = ["load_config", "parse_args", "Ann", "Bob's sister"]


def row(name, at=0):
    """A row as it is published; the answer lies in the context where the set has it there."""
    rng = random.Random(f"{name}:{at}")
    key, other = (str(rng.randrange(10**4, 10**5)) for _ in range(2))
    numbers = [rng.randrange(100) for _ in range(6)]
    about = {
        "passkey": (f"The pass key is {key}. " + BOOK, "What is the pass key?", [key]),
        "number_string": (
            f"The sequence of digits is {key}{other}. ",
            "What is the sequence of digits?",
            f"{key}{other}",
        ),
        "kv_retrieval": (f'{{"{other}": "v{key}"}}', f'\nKey: "{other}"\nThe value is: ', f"v{key}"),
        "longbook_sum_eng": (BOOK * 3, "", [f"Ann met {key}.\nBoats went out.", "Boats."]),
        "longbook_qa_eng": (BOOK, "Whom did Ann meet?", ["Bob", "her brother"]),
        "longbook_choice_eng": (BOOK, "Who met Bob?", [OPTIONS[at % 4]]),
        "longbook_qa_chn": ("商老太在山东。" * 3, "谁在山东？", ["商老太", "田归农"]),
        "longdialogue_qa_eng": ("ACE: Where?\n$$MASK$$: There.\n", "", ["ACE", "ACE ROTHSTEIN"]),
        "math_find": (str(numbers), "The largest number of the list is: ", [max(numbers)]),
        "math_calc": (" + ".join(map(str, numbers)), "", numbers),
        "code_run": (f"def func_{at}(x):\n    return x + {at}\n", f"What is func_{at}(-3)?", [at - 3]),
        "code_debug": ("def parse_args(: pass\n", "", [OPTIONS[at % 4]]),
    }
    context, asked, answer = about[name]
    choice = settings()[name]["answer"] == "choice"
    return {"id": at, "context": context, "input": asked, "answer": answer, "options": OPTIONS if choice else []}


def write(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def made(folder, name, rows, **options):
    return TASKS[f"infinitebench/{name}"](source=str(write(folder, name, rows)), **options)


def text_of(sample):
    return TOKENIZER.decode(sample.prompt_ids(), skip_special_tokens=True)


def filled(name, one, prompt="yarn-mistral"):
    """The published prompt of a row, written down once more."""
    values = {**one, "question": one["input"]} | dict(
        zip(map("OPTION_{}".format, "ABCD"), one["options"], strict=False)
    )
    if name == "math_find":
        values["prefix"] = "What is the largest number in the following list?"
    if name == "code_run":
        values |= {"func": f"func_{one['id']}", "func_call": f"func_{one['id']}(-3)"}
    return settings()[name]["prompts"][prompt].format(**values)


@pytest.mark.parametrize("name", SETS)
def test_twenty_rows_as_published_go_through_prompt_answer_and_score(name, tmp_path):
    rows = [row(name, at) for at in range(20)]
    task = made(tmp_path, name, rows)
    samples = list(task.samples(TOKENIZER))
    assert task.fingerprint()["records"] == len(samples) == 20 and [s.id for s in samples] == [
        str(i) for i in range(20)
    ]
    for sample, one in zip(samples, rows, strict=True):
        assert text_of(sample) == filled(name, one) and sample.turns[0].ids == ()
        assert sample.turns[0].max_new_tokens == settings()[name]["max_new_tokens"]
        assert sample.meta["row"] == f"{name}.jsonl line {one['id'] + 1}" and sample.protocol["template"] == "none"
        assert task.score(sample, {"text": task.gold(sample)})["score"] == pytest.approx(1.0)
        assert task.score(sample, {"text": ["No idea"]})["score"] == 0.0
    assert sanity.check(task, samples).gold == sanity.check(task, samples).empty == 1.0


@cache
def references(name, label):
    """References of a published label, as the task reads them from a row."""
    value, about = json.loads(label), settings()[name]
    options = []
    if about["answer"] == "choice":
        options = [value[0] if letter == value[1] else f"no {letter}" for letter in "ABCD"]
        value = value[:1]
    asked = {"math_find": "The largest number of it", "code_run": "func_1(2)"}.get(name, "?")
    one = {"context": "x", "input": asked, "answer": value, "options": options}
    return TASKS[f"infinitebench/{name}"]().row_prompt(one, "here").references


@pytest.mark.parametrize(
    ("name", "pairs"), [(name, pairs) for names, pairs in SCORED.items() for name in names.split()]
)
def test_scores_are_those_of_the_published_scorer(name, pairs):
    assert len(pairs) == 200
    metric = settings()[name]["metric"]
    found = [metrics.score(metric, text, references(name, json.dumps(label))) for text, label, _ in pairs]
    assert found == pytest.approx([value for *_, value in pairs], abs=1e-12)


def test_every_set_has_published_scores():
    assert sorted(name for names in SCORED for name in names.split()) == SETS


def test_decimals_where_the_published_scorer_stops_with_an_error_are_wrong():
    assert metrics.score("list_number", "88.5", ["88"]) == 0.0 and metrics.score("list_number", "88", ["88"]) == 1.0


def test_long_prompts_are_cut_in_the_middle_and_both_halves_decoded_as_one(tmp_path):
    one = row("passkey") | {"context": "é" * 300}
    sample = next(iter(made(tmp_path, "passkey", [one], max_length=201).samples(TOKENIZER)))
    ids = [*TOKENIZER.encode(filled("passkey", one))]
    assert text_of(sample) == TOKENIZER.decode(ids[:100] + ids[-100:], skip_special_tokens=True)
    assert sample.meta["truncated_tokens"] == len(ids) - 200
    assert made(tmp_path, "passkey", [one]).limit(byte_tokenizer(1 << 19)) == 131_072
    assert made(tmp_path, "passkey", [one]).limit(byte_tokenizer(4096)) == 4096 - 6 - 64


def test_gpt4s_wording_is_wrapped_in_a_chat_and_the_question_can_be_held_back(tmp_path):
    sample = next(
        iter(
            made(tmp_path, "longbook_qa_eng", [row("longbook_qa_eng")], prompt="gpt4", question="hidden").samples(
                TOKENIZER
            )
        )
    )
    assert sample.protocol["template"] == "chat" and sample.protocol["question"] == "hidden"
    context, asked = (
        TOKENIZER.decode(ids, skip_special_tokens=True) for ids in (sample.segments[0], sample.turns[0].ids)
    )
    assert context.rstrip().endswith(BOOK.strip()) and "Whom" not in context and "Question: Whom did Ann meet?" in asked


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("passkey", {"prompt": "kimi"}, "valid: yarn-mistral, gpt4"),
        ("math_calc", {"prompt": "gpt4"}, "conversation of several messages"),
        ("math_find", {"question": "hidden"}, "asks before the context"),
        ("longbook_sum_eng", {"question": "hidden", "prompt": "gpt4"}, "valid: seen"),
        ("passkey", {"max_new_tokens": 0}, "at least 1"),
    ],
)
def test_illegal_settings_are_refused_with_the_valid_ones(name, options, said):
    with pytest.raises(ValueError, match=said):
        TASKS[f"infinitebench/{name}"](**options)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("passkey", {"answer": ["1", "2"]}, "answer must be one answer, or a list of one"),
        ("passkey", {"answer": 71432}, "answer must be text, found int"),
        ("passkey", {"context": "cut \ud83d"}, "context holds half of a surrogate pair"),
        ("kv_retrieval", {"answer": None}, "answer must be text"),
        ("longbook_qa_eng", {"answer": "Bob"}, "answer must be a list of at least one text"),
        ("longbook_qa_eng", {"answer": ["Bob", float("nan")]}, "answer must be text, found float nan"),
        ("longbook_choice_eng", {"options": OPTIONS[:3]}, "options must be a list of four texts"),
        ("longbook_choice_eng", {"answer": ["Carl"]}, "'Carl' is none of the options"),
        ("math_find", {"answer": float("nan")}, "answer is nan, which is no number"),
        ("math_find", {"answer": "88"}, "answer must be a number"),
        ("math_find", {"input": "Which?"}, "input must say 'The … of'"),
        ("math_calc", {"answer": [1, 2.5]}, "answer must be a whole number, found 2.5"),
        ("code_run", {"input": "What?"}, r"input must name a call like func_12\(3\)"),
    ],
)
def test_a_bad_value_is_refused_with_file_row_and_field_before_a_model_is_loaded(name, changes, said, tmp_path):
    with pytest.raises(ValueError, match=rf"{name}\.jsonl line 2.*{said}"):
        made(tmp_path, name, [row(name), row(name, 1) | changes]).fingerprint()


def test_a_missing_column_and_an_answer_longer_than_answers_may_be_are_named_with_their_row(tmp_path):
    with pytest.raises(ValueError, match=r"passkey\.jsonl line 2: field 'input' is missing; found: .*context"):
        made(tmp_path, "passkey", [row("passkey"), {"context": "x", "answer": "1"}]).fingerprint()
    task = made(tmp_path, "passkey", [row("passkey"), row("passkey") | {"answer": "1234567"}])
    with pytest.raises(
        ValueError, match="line 2: answer '1234567' takes 7 tokens, and an answer may have 6: set task.max_new"
    ):
        list(task.samples(TOKENIZER))


def cell(tmp_path, *overrides):
    usual = ["model=random", "device=cpu", "paths.data=null", f"paths.results={tmp_path}", "sweep.name=test"]
    return composed(*usual, *overrides)


def test_a_run_of_a_file_is_scored_and_one_that_needs_more_positions_is_refused_before_weights_are_read(
    tmp_path, monkeypatch
):
    path = write(tmp_path, "code_debug", [row("code_debug", at) for at in range(20)])
    run = cell(
        tmp_path, "task=infinitebench/code_debug", f"task.source={path}", "method=snapkv", "budget=0.5", "limit=1"
    )
    outcome = Scheduler(Console(file=io.StringIO()))(run)
    assert outcome.status == "ok" and outcome.record["n_samples"] == 1, outcome.note

    def unread(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load", unread)
    write(tmp_path, "code_debug", [row("code_debug"), row("code_debug") | {"context": "x = 1\n" * 2_000}])
    long = cell(
        tmp_path, "task=infinitebench/code_debug", f"task.source={path}", "task.max_length=12000", "method=full"
    )
    outcome = Scheduler(Console(file=io.StringIO()))(long)
    assert outcome.status == "failed" and "code_debug.jsonl line 2: sample 1 needs" in outcome.note, outcome.note
    assert "positions, answer included; the model has" in outcome.note


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused():
    task = TASKS["infinitebench/passkey"](max_new_tokens=8120)
    with pytest.raises(
        ValueError, match="takes 8192 tokens; an answer of 8120 and 64 to spare leave 8 for the prompt, of at least 16"
    ):
        task.limit(byte_tokenizer(8192))
