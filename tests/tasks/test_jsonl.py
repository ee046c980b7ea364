"""Questions of one's own, from a file to a score; what is wrong with the file is said with line and field."""

from __future__ import annotations

import io
import json

import pytest
from composed import composed
from rich.console import Console
from test_thinking import judged, tokenizer_of

from kvcompress.data import question_rows
from kvcompress.models.loading import load_tokenizer
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import JsonLines

TOKENIZER = load_tokenizer("random/llama")
ROWS = [
    {
        "context": "The code is 7342. Ann has the key.",
        "questions": ["Code?", "Who?"],
        "answers": [7342, ["Ann", "she"]],
    },
    {"context": "Late on Monday.", "question": "When?", "answer": "Monday", "id": "b"},
    {"context": "Five.", "questions": [{"question": "How many?", "answers": ["5", "five"]}]},
]


def file_of(folder, rows=ROWS, name="rows.jsonl"):
    path = folder / name
    path.write_text(rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def task_of(folder, rows=ROWS, name="rows.jsonl", **options):
    return JsonLines(file=str(file_of(folder, rows, name)), **options)


def test_rows_of_every_form_become_questions_with_their_answers(tmp_path):
    found = question_rows.read(file_of(tmp_path))
    assert [one.id for one in found] == ["0", "b", "2"]
    assert [[(q.question, q.answers) for q in one.asked] for one in found] == [
        [("Code?", ("7342",)), ("Who?", ("Ann", "she"))],
        [("When?", ("Monday",))],
        [("How many?", ("5", "five"))],
    ]


def test_a_csv_files_rows_with_one_context_are_questions_on_it(tmp_path):
    long = "word " * 40_000  # longer than Python's csv takes by itself
    text = f'\ufeffcontext,question,answer,answers\n{long},q1,a,\n{long},q2,,"[""b"", ""c""]"\n"x,\ny",q3,d,\n'
    found = question_rows.read(file_of(tmp_path, text, "rows.csv"))
    assert [(one.context == long, [q.answers for q in one.asked]) for one in found] == [
        (True, [("a",), ("b", "c")]),
        (False, [("d",)]),
    ]
    assert found[1].context == "x,\ny" and found[1].where.endswith("line 5")


BAD = [
    ({"question": "q", "answer": "a"}, "line 1: field 'context' is missing"),
    ({"context": "c", "question": "q"}, "line 1: field 'answer' is missing"),
    ({"context": "c", "question": ["q"], "answer": "a"}, "line 1: question must be text, found list"),
    ({"context": "c", "question": "q", "answer": ["a"]}, "line 1: answer is a list.*answers"),
    ({"context": "c", "question": "q", "answer": float("nan")}, "line 1: answer is nan, which is no number"),
    ({"context": "c", "question": "q", "answers": "a"}, "line 1: answers must be a list"),
    ({"context": "c", "questions": ["q", "r"], "answers": ["a"]}, r"answers must be a list as long as questions \(2\)"),
    ({"context": "c", "questions": [{"question": "q", "answer": ""}]}, "line 1, question 1: an answer is empty"),
    ({"context": "c\ud83d", "question": "q", "answer": "a"}, "line 1: context holds half of a surrogate pair"),
    ({"context": " ", "question": "q", "answer": "a"}, "line 1: context is empty"),
]


@pytest.mark.parametrize(("row", "says"), BAD)
def test_a_bad_row_is_named_with_line_and_field_before_a_model_is_loaded(row, says, tmp_path):
    with pytest.raises(ValueError, match=f"rows.jsonl.*{says}"):
        task_of(tmp_path, [row]).fingerprint()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("context,question\nc,q\n", "line 1: column answer or answers is missing; found: context, question"),
        ("context,question,answer\nc,q,NaN\n", "line 2: answer is NaN; give an answer"),
        ("context,question,answer\nc,q\n", "line 2: 2 cells under 3 columns"),
        ("context,question,answers\nc,q,a\n", "line 2: answers must be a JSON list"),
        ("context,question,answer\n", "holds no record"),
    ],
)
def test_a_bad_csv_file_is_named_with_line_and_column(text, says, tmp_path):
    with pytest.raises(ValueError, match=f"rows.csv.*{says}"):
        task_of(tmp_path, text, "rows.csv").fingerprint()


def test_an_answer_longer_than_the_limit_is_refused_with_its_row(tmp_path):
    with pytest.raises(ValueError, match=r"line 1, question 1: answer has 4 tokens, but task.max_new_tokens=3"):
        list(task_of(tmp_path, max_new_tokens=3).samples(TOKENIZER))


def test_two_rows_of_one_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match="line 2: id 'b' is that of .*line 1 too"):
        task_of(tmp_path, [ROWS[1], ROWS[1]]).fingerprint()


def test_a_context_beyond_the_models_positions_is_refused_with_its_row_before_weights_are_read(tmp_path, monkeypatch):
    from kvcompress.models import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("weights were read"))
    path = file_of(tmp_path, [{"context": "word " * 27_000, "question": "q", "answer": "a"}])
    config = composed(
        "model=random",
        "task=jsonl",
        f"task.file={path}",
        "sweep.name=s",
        f"paths.results={tmp_path}",
        "paths.data=null",
    )
    out = io.StringIO()
    found = Scheduler(Console(file=out, width=500)).sweep([config])
    assert found[0].status == "failed" and "rows.jsonl line 1: sample 0 needs" in found[0].note


def test_hidden_and_seen_are_the_same_prompt_and_a_seen_question_is_a_sample_of_its_own(tmp_path):
    hidden = list(task_of(tmp_path).samples(TOKENIZER))
    seen = list(task_of(tmp_path, question="seen").samples(TOKENIZER))
    assert [one.id for one in seen] == ["0.1", "0.2", "b", "2"]
    assert hidden[0].prompt_ids() == seen[0].prompt_ids() and len(hidden[0].turns) == 2
    assert [*hidden[0].segments[0], *hidden[0].turns[1].ids] == seen[1].prompt_ids()


def test_right_answers_of_a_conversation_stand_between_its_questions(tmp_path):
    sample = next(iter(task_of(tmp_path, turns="gold").samples(TOKENIZER)))
    text = TOKENIZER.decode(sample.turns[1].ids, skip_special_tokens=False)
    assert text.startswith("7342") and "\n\nWho?" in text and sample.order == "gold"


@pytest.mark.parametrize("metric", ["string_match_part", "qa_f1", "exact_match"])
def test_right_answers_score_one_and_empty_ones_nothing(metric, tmp_path):
    task = task_of(tmp_path, metric=metric)
    assert sanity.check(task, list(task.samples(TOKENIZER))) == sanity.Sanity(1.0, 1.0)


@pytest.mark.parametrize("opens", ["", "<think>\n"])
@pytest.mark.parametrize("metric", ["string_match_part", "math"])
def test_an_answer_behind_a_thought_scores_one_and_a_cut_off_thought_zero(metric, opens, tmp_path):
    if metric == "math":
        pytest.importorskip("math_verify")
    tokenizer, own = tokenizer_of("special", opens), "" if opens else "<think>\n"
    task = task_of(tmp_path, [{"context": "2 and 3", "question": "The sum?", "answer": 5}], metric=metric)
    sample = next(iter(task.samples(tokenizer)))
    whole = judged(task, sample, tokenizer, [f"{own}8 or 5?\n</think>\n\n\\boxed{{5}}"])
    cut = judged(task, sample, tokenizer, [f"{own}It is \\boxed{{5}}, but wait"], "length")
    assert (whole["score"], cut["score"], cut["unfinished"]) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    "options", [{"metric": "bleu"}, {"turns": "twice"}, {"wording": "{question}"}, {"max_new_tokens": 0}]
)
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"task.{next(iter(options))}"):
        JsonLines(file="x.jsonl", **options)


def test_an_open_quote_and_a_column_that_is_there_twice_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('context,question,answer,id\nc 1,q,7,"1\nc 2,q,8,2\n')
    with pytest.raises(ValueError, match="no csv"):
        question_rows.read(path)
    path.write_text("context,question,answer,answer\nc,q,1,2\n")
    with pytest.raises(ValueError, match="column answer is there twice"):
        question_rows.read(path)


def test_an_id_of_zero_is_an_id_and_space_around_an_answer_is_none_of_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"context": "a", "question": "q", "answer": "Ann ", "id": 1}\n{"context": "b", "question": "q", "answer": "9", "id": 0}\n'
    )
    first, second = question_rows.read(path)
    assert (first.id, second.id) == ("1", "0") and first.asked[0].answers == ("Ann",)


def test_a_seen_question_whose_name_is_another_rows_id_is_refused(tmp_path):
    rows = [
        {"context": "c", "questions": ["q", "r"], "answers": ["x", "y"], "id": "a"},
        {"context": "d", "question": "q", "answer": "z", "id": "a.1"},
    ]
    path = file_of(tmp_path, rows)
    assert len(JsonLines(file=str(path), question="hidden").rows()) == 2
    with pytest.raises(ValueError, match="line 2: question 'a.1' has the name of another row"):
        JsonLines(file=str(path), question="seen").rows()
