"""LooGLE, ZeroSCROLLS, LongMemEval and AIME 2025: published prompts, cuts and scores, on rows in the published formats."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from functools import cache
from pathlib import Path

import published_rows as made
import pytest
from composed import composed
from rich.console import Console

from kvcompress import metrics
from kvcompress.commands.report import main as report
from kvcompress.data import hub
from kvcompress.metrics import scrolls
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.report import submission
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.record import FINISHED, RunFolder
from kvcompress.tasks import TASKS
from kvcompress.tasks.aime25 import boxed
from kvcompress.tasks.longmemeval import judged as judged_of
from kvcompress.tasks.loogle import settings as loogle_settings
from kvcompress.tasks.zero_scrolls import settings as scrolls_settings

TOKENIZER = byte_tokenizer()
LOOGLE, SCROLLS = (
    [f"loogle/{name}" for name in loogle_settings()],
    [f"zero_scrolls/{name}" for name in scrolls_settings()],
)
NAMES = [*LOOGLE, *SCROLLS, "longmemeval", "reasoning/aime25"]


def rows_of(name):
    suite, _, one = name.partition("/")
    known = {"loogle": made.loogle, "zero_scrolls": made.zero_scrolls}
    return known[suite](one) if suite in known else made.longmemeval() if suite == "longmemeval" else made.aime25()


def task_of(name, folder, rows=None, **options):
    path = folder / f"rows.json{'' if name == 'longmemeval' else 'l'}"
    made.write(path, rows_of(name) if rows is None else rows)
    return TASKS[name](**{"path" if name.startswith("reasoning") else "source": str(path)}, **options)


def text_of(sample):
    return TOKENIZER.decode(sample.prompt_ids(), skip_special_tokens=True)


@cache
def official(name):
    return json.loads((Path(__file__).parent / "official" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_published_format_goes_through_prompt_cut_answer_and_score(name, tmp_path):
    task = task_of(name, tmp_path, template="none")
    samples = list(task.samples(TOKENIZER))
    documents = len(rows_of(name))
    judged = sum(map(judged_of, rows_of(name))) if name == "longmemeval" else None
    more = 8 if name in LOOGLE and name != "loogle/longdep_summarization" else 0  # second questions
    assert len(samples) == (judged or documents + more) >= 20
    assert len({sample.id for sample in samples}) == len(samples)
    found = sanity.check(task, samples[:8])
    assert (found.gold, found.empty) == (1.0, 1.0), "right answers score 1 and empty ones 0"
    whole = [len(sample.prompt_ids()) for sample in samples]
    if not name.startswith("reasoning"):
        assert all(sample.meta["truncated_tokens"] == 0 for sample in samples)
        short = task_of(name, tmp_path, template="none", max_length=300)
        cut = list(short.samples(TOKENIZER))
        spare = 800 if name == "longmemeval" else 0  # of which only the history is cut
        assert all(
            len(sample.prompt_ids()) <= 302 + spare < length + spare for sample, length in zip(cut, whole, strict=True)
        )
        assert all(sample.meta["truncated_tokens"] > 0 for sample in cut)
        assert all(text_of(a)[-9:] == text_of(b)[-9:] for a, b in zip(cut, samples, strict=True)), "the question stays"


def test_loogle_fills_in_the_published_prompts(tmp_path):
    rows = rows_of("loogle/longdep_qa")
    samples = list(task_of("loogle/longdep_qa", tmp_path, rows, template="none").samples(TOKENIZER))
    assert text_of(samples[3]) == (
        f"Please answer the question based on the long texts below. \n{rows[1]['input']}\nQuestion: Who wrote letter 1?\nAnswer: "
    )
    assert samples[3].id == "1-1" and samples[3].turns[0].max_new_tokens == 500
    cloze = next(iter(task_of("loogle/shortdep_cloze", tmp_path, template="none").samples(TOKENIZER)))
    assert "for example: {'<mask-0>': 'Bob', '<mask-1>'" in text_of(cloze) and cloze.turns[0].max_new_tokens == 50
    assert text_of(cloze).endswith(", letter 0. What are the masked entities? \nAnswer:")


def test_loogle_takes_questions_as_the_hub_has_them_now(tmp_path, monkeypatch):
    row = {"id": "x", "doc_id": "d", "task": "shortdep_cloze", "context": "Anna.", "question": "<mask-0>?",
           "answer": "{'<mask-0>': 'Anna'}", "evidence": "", "title": "t"}  # fmt: skip
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda source: asked.append(source) or hub.Rows((row,), "c" * 40))
    task = TASKS["loogle/shortdep_cloze"](data=str(tmp_path), template="none")
    assert task.provenance()["revision"] == "c" * 40 and str(asked[0]) == "bigai-nlco/LooGLE:data/shortdep_cloze.jsonl"
    (sample,) = task.samples(TOKENIZER)
    assert sample.turns[0].references == ("{'<mask-0>': 'Anna'}",)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("limit", [None, 300])
@pytest.mark.parametrize("name", ["quality", "gov_report"])
def test_zero_scrolls_prompts_and_cuts_are_the_published_ones(name, limit, chat, tmp_path):
    """experiments/api/openai_api.py, written down once more, with this tokenizer."""
    row = made.zero_scrolls(name)[5]
    text, summary = row["input"], name == "gov_report"
    moved, start = 0, row["query_start_index"]
    if chat:
        if not summary:
            at = text.find("\n\n")
            text, moved = (
                f"{text[:at].strip()} Do not provide any explanation.{text[at:]}",
                len(" Do not provide any explanation."),
            )
        text = text[: row["query_end_index"] + moved]
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    expected = text
    if limit is not None:
        behind = row["truncation_seperator"] + text[start + moved :]
        kept = limit - len(TOKENIZER.encode(behind, add_special_tokens=False)) - 1 - (9 if chat else 0)
        expected = TOKENIZER.decode(ids[:kept]) + behind
    options = {"template": "chat" if chat else "none", "max_length": limit}
    sample = list(task_of(f"zero_scrolls/{name}", tmp_path, [row], **options).samples(TOKENIZER))[0]
    got = text_of(sample)
    assert got == expected if not chat else expected.strip() in got
    assert sample.id == row["id"] and sample.turns[0].max_new_tokens == (1024 if summary else 10)


def test_rows_of_one_id_are_one_sample_with_several_answers(tmp_path):
    row = made.zero_scrolls("qasper")[0]
    task = task_of(
        "zero_scrolls/qasper", tmp_path, [row | {"output": "Anna"}, row | {"output": "Bob"}], template="none"
    )
    (sample,) = task.samples(TOKENIZER)
    assert sample.turns[0].references == ("Anna", "Bob")
    with pytest.raises(ValueError, match=r"line 2: id 'qasper_0' is that of .* line 1, which has another input"):
        task_of("zero_scrolls/qasper", tmp_path, [row, row | {"input": row["input"] + "!"}]).fingerprint()


# prompts of the published prepare_prompt (xiaowu0162/LongMemEval 9e0b455, src/generation/run_generation.py) for these rows
PROMPTS = {
    ("con", "json"): "d849cdc60414fbbb004f2ddc1e284dbdd91e448e8ba16053fe372de8f7bc7d93",
    ("con", "nl"): "c133f9d97019fb79da17c61f51eb58c476443e4679d187c73d382cd47e66f8bc",
    ("direct", "json"): "82fe08cf3f7c3e8275c93b88150c357674544bc81debc098a5825796ff46fec0",
    ("direct", "nl"): "b343e99840eec4c1edca65a364aa62eab1a4ebdf8dc5e16bd882d5779e12febe",
}


@pytest.mark.parametrize(("reading", "history"), PROMPTS)
def test_longmemeval_prompts_are_those_of_the_published_program(reading, history, tmp_path):
    task = task_of("longmemeval", tmp_path, template="none", reading=reading, history=history, questions="all")
    texts = [text_of(sample) for sample in task.samples(TOKENIZER)]
    assert len(texts) == made.N and '"has_answer"' not in texts[0]
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest() == PROMPTS[reading, history]


def test_longmemeval_judges_by_containment_and_leaves_rubrics_to_the_published_judge(tmp_path):
    task = task_of("longmemeval", tmp_path)
    samples = list(task.samples(TOKENIZER))
    assert not any(s.meta["kind"] == "single-session-preference" or "_abs" in s.id for s in samples)
    number = next(s for s in samples if s.turns[0].references[0].isdigit())
    (right,) = number.turns[0].references
    assert task.score(number, {"text": [f"It was {right}, I think."]}) == {"score": 1.0}
    assert task.score(number, {"text": [f"It was {right}0."]}) == {"score": 0.0}
    every = list(task_of("longmemeval", tmp_path, questions="all").samples(TOKENIZER))
    assert len(every) == made.N and all(not s.turns[0].references for s in every)
    assert task.score(every[0], {"text": ["x"]}) == {"score": None}


def test_loogle_scores_are_the_official_ones():
    task, cloze = TASKS["loogle/shortdep_qa"](), TASKS["loogle/shortdep_cloze"]()
    sample = sample_of(task)
    for answer, reference, rouges, bleus in official("loogle")["texts"]:
        found = task.score(sample(reference), {"text": [answer]})
        expected = rouges or [0.0, 0.0, 0.0]  # where the official program stops
        assert [found[f"rouge{n}_recall"] for n in "12L"] == pytest.approx(expected, abs=1e-12), (answer, reference)
        assert [found["bleu1"], found["bleu4"]] == pytest.approx(bleus, abs=1e-12), (answer, reference)
    rows = []
    for answer, reference, exact, partial, count in official("loogle")["masks"]:
        found = cloze.score(sample(repr(reference)), {"text": [answer]})
        assert (found["exact"], found["partial"], found["masks"]) == (exact, partial, count), (answer, reference)
        rows.append({"scores": found})
    total = cloze.summarise(rows)
    masks = official("loogle")["masks"]
    assert round(total["exact_match"], 4) == round(sum(m[2] for m in masks) / sum(m[4] for m in masks), 4)
    assert len(rows) == len(official("loogle")["texts"]) == 200


def sample_of(task):
    from kvcompress.data.task import Sample, Turn

    return lambda *references: Sample("s", ((1,),), (Turn((), 4, references=references),))


@pytest.mark.parametrize("metric", ["f1_ascii", "letter_accuracy", "exp_similarity", "concordance"])
@pytest.mark.parametrize("ascii", [True, False])
def test_zero_scrolls_scores_are_the_official_ones(metric, ascii):
    pairs = official("zero_scrolls")[metric]
    assert len(pairs) == 200 and len({round(value, 6) for *_, value in pairs}) > 1
    if not ascii:
        pytest.importorskip("unidecode")
    for answer, references, value in pairs:
        if (answer + "".join(references)).isascii() is ascii:
            assert metrics.score(metric, answer, references) == pytest.approx(value, abs=1e-12), (answer, references)


def test_zero_scrolls_summaries_get_the_official_score_of_a_whole_set():
    task, pairs = TASKS["zero_scrolls/gov_report"](), official("zero_scrolls")["summaries"]
    rows = []
    for answer, references, *values in pairs:
        found = task.score(sample_of(task)(*references), {"text": [answer]})
        assert [found[name] for name in scrolls.ROUGES] == pytest.approx(values, abs=1e-12)
        rows.append({"scores": found})
    means = [sum(column) / len(pairs) for column in list(zip(*pairs, strict=True))[2:]]
    assert task.summarise(rows)["zero_scrolls_score"] == pytest.approx((means[0] * means[1] * means[2]) ** (1 / 3))
    assert len(rows) == 200


def test_aime25_scores_by_kvpress_s_rule_are_kvpress_s():
    pairs = official("aime25")["answers"]
    assert len(pairs) == 200
    assert [boxed(answer, gold) for answer, gold, *_ in pairs] == [bool(kvpress) for *_, kvpress, _ in pairs]


def test_what_lm_eval_takes_in_a_box_math_verify_takes_too(tmp_path):
    task = task_of("reasoning/aime25", tmp_path)
    for answer, gold, _, lm_eval in official("aime25")["answers"][:25]:
        found = task.score(sample_of(task)(gold), {"text": [answer], "finished": ["stop"], "tokens": [[1]]})
        assert found["score"] >= lm_eval or "boxed" not in answer, (answer, gold)


CUT = "cut \ud83d"
LONG = "word " * 2000
BAD = [
    ("loogle/shortdep_qa", {"input": CUT}, r"line 2, question 1 of qa_pairs: input holds half of a surrogate pair"),
    ("loogle/shortdep_qa", {"qa_pairs": "[{'Q': 'a'"}, r"line 2: qa_pairs must be a list of questions"),
    ("loogle/shortdep_qa", {"qa_pairs": [{"Q": "a", "A": ["b"]}]}, r"question 1 of qa_pairs: A \(the answer\) must be text, found list"),
    ("loogle/shortdep_qa", {"qa_pairs": [{"Q": "a"}]}, r"question 1 of qa_pairs: field 'A' is missing"),
    ("loogle/shortdep_qa", {"qa_pairs": [{"Q": "a", "A": float("nan")}]}, r"A \(the answer\) must be text, found float nan"),
    ("loogle/shortdep_cloze", {"qa_pairs": [{"Q": "a", "A": {"<mask-0>": ["b"]}}]}, r"A, <mask-0>, must be text, found list"),
    ("loogle/shortdep_cloze", {"qa_pairs": [{"Q": "a", "A": {}}]}, r"must be a dictionary of masks"),
    ("loogle/longdep_summarization", {"output": 3}, r"line 2: A \(the answer\) must be text, found int 3"),
    ("zero_scrolls/qasper", {"output": ["a"]}, r"line 2: output must be text, found list"),
    ("zero_scrolls/qasper", {"output": float("nan")}, r"line 2: output must be text, found float nan"),
    ("zero_scrolls/qasper", {"input": CUT}, r"line 2: input holds half of a surrogate pair"),
    ("zero_scrolls/qasper", {"query_end_index": 10**6}, r"line 2: query_end_index is 1000000, and input has"),
    ("zero_scrolls/qasper", {"document_end_index": "9"}, r"line 2: document_end_index, .* must be rising numbers"),
    ("zero_scrolls/quality", {"output": "E"}, r"line 2: output: the expected answer 'E' names none of A, B, C, D"),
    ("zero_scrolls/space_digest", {"output": "40"}, r"line 2: output: the expected answer '40' holds no percentage"),
    ("zero_scrolls/book_sum_sort", {"output": "1, 3"}, r"line 2: output: .* no order of the numbers 1 to n"),
    ("longmemeval", {"answer": float("nan")}, r"record 2: answer is nan, which is no number"),
    ("longmemeval", {"answer": ["a"]}, r"record 2: answer must be text or a number, found list"),
    ("longmemeval", {"question": CUT}, r"record 2: question holds half of a surrogate pair"),
    ("longmemeval", {"question_type": "two_hop"}, r"record 2: question_type='two_hop'; valid: single-session-user"),
    ("longmemeval", {"haystack_dates": []}, r"record 2: haystack_dates and haystack_sessions must be lists of one length"),
    ("longmemeval", {"haystack_sessions": [[{"role": "user"}]] * 3}, r"record 2, haystack_sessions 1: field 'content' is missing"),
    ("longmemeval", {"question_id": "q000"}, r"record 2: question_id 'q000' is another record's too"),
    ("reasoning/aime25", {"answer": "1000"}, r"line 2: answer must be a whole number from 0 to 999, found '1000'"),
    ("reasoning/aime25", {"answer": float("nan")}, r"line 2: answer is nan"),
    ("reasoning/aime25", {"problem": CUT}, r"line 2: question \(or problem\) holds half"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "said"), BAD)
def test_a_bad_value_is_refused_with_file_row_and_field(name, changes, said, tmp_path):
    rows = rows_of(name)[:3]
    rows[1] = rows[1] | changes
    with pytest.raises(ValueError, match=rf"rows\.json.*{said}"):
        task_of(name, tmp_path, rows).fingerprint()


@pytest.mark.parametrize("name", ["loogle/shortdep_qa", "zero_scrolls/qasper", "longmemeval"])
def test_a_missing_column_is_named_with_its_row(name, tmp_path):
    rows = rows_of(name)[:3]
    gone = {
        "loogle/shortdep_qa": "input",
        "zero_scrolls/qasper": "truncation_seperator",
        "longmemeval": "haystack_dates",
    }[name]
    rows[1] = {key: value for key, value in rows[1].items() if key != gone}
    with pytest.raises(ValueError, match=rf"rows\.json.*(line|record) 2.*field '{gone}' is missing"):
        task_of(name, tmp_path, rows).fingerprint()


@pytest.mark.parametrize(
    ("name", "changes", "options", "said"),
    [
        (
            "zero_scrolls/quality",
            {"output": "A " + LONG},
            {},
            r"line 1: the expected answer .* takes \d+ tokens, .* may have 10",
        ),
        ("longmemeval", {"answer": LONG}, {}, r"record 1: the expected answer .* takes \d+ tokens, .* may have 800"),
        (
            "longmemeval",
            {"question": LONG},
            {},
            r"record 1: question and instruction take \d+ tokens, and 1000 are left",
        ),
        (
            "zero_scrolls/qasper",
            {},
            {"max_length": 40},
            r"line 1: what follows the document in input takes .* may have 40",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_its_row_before_a_model_is_loaded(name, changes, options, said, tmp_path):
    row = rows_of(name)[0] | changes
    with pytest.raises(ValueError, match=rf"rows\.json.*{said}"):
        list(task_of(name, tmp_path, [row], template="none", **options).samples(TOKENIZER))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zero_scrolls/qasper", {"split": "train"}),
        ("longmemeval", {"subset": "l"}),
        ("longmemeval", {"questions": "some"}),
    ],
)
def test_illegal_settings_are_refused(name, options):
    with pytest.raises(ValueError, match="valid: "):
        TASKS[name](**options)


def test_files_of_the_hub_are_read_from_their_zip_at_a_commit(tmp_path, monkeypatch):
    import zipfile

    import huggingface_hub

    place = tmp_path / "snapshots" / ("d" * 40) / "qasper.zip"
    place.parent.mkdir(parents=True)
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr(
            "qasper/validation.jsonl", "".join(json.dumps(row) + "\n" for row in made.zero_scrolls("qasper"))
        )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(place))
    hub._read.cache_clear()
    task = TASKS["zero_scrolls/qasper"]()
    assert task.fingerprint() == {
        "data": f"hub:tau/zero_scrolls:qasper.zip:qasper/validation.jsonl@{'d' * 40}", "records": made.N
    }  # fmt: skip
    hub._read.cache_clear()
    with pytest.raises(ValueError, match=r"test\.jsonl: not in the zip file, which holds qasper/validation\.jsonl"):
        TASKS["zero_scrolls/qasper"](split="test").fingerprint()
    hub._read.cache_clear()
    hub._failed.clear()


# ---------------------------------------------------------------------- runs


def run(folder, *overrides):
    usual = ["model=random", "device=cpu", "paths.data=null", f"paths.results={folder}/out", "sweep.name=test"]
    return Scheduler(Console(file=io.StringIO()))(composed(*usual, *overrides))


def test_hidden_answers_leave_a_run_unscored_and_the_submission_file_is_written(tmp_path, capsys):
    path = made.write(tmp_path / "quality" / "test.jsonl", made.zero_scrolls("quality", hidden=True)[:2])
    outcome = run(
        tmp_path, "task=zero_scrolls/quality", "task.split=test", f"task.source={tmp_path}", "task.template=none"
    )
    assert path.exists() and outcome.status == "unscored" and outcome.record["score"] is None and not outcome.failed
    stored = RunFolder(tmp_path / "out", "test", outcome.run_id)
    assert outcome.record["status"] in FINISHED and stored.fault(outcome.record) is None, "it is not made again"
    assert report([str(tmp_path / "out"), "--submission", str(tmp_path / "sent")]) == 0
    (file,) = (tmp_path / "sent").iterdir()
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"), newline="")))
    assert [(row["Task"], row["ID"]) for row in rows] == [("quality", "quality_0"), ("quality", "quality_1")]
    kept = list(stored.rows().values())
    assert [row["Prediction"] for row in rows] == [row["out"]["text"][0] for row in kept]
    assert all(row["score"] is None for row in kept)
    assert "missing: gov_report, summ_screen_fd" in capsys.readouterr().err


def test_the_leaderboard_wants_the_sets_that_are_tasks():
    assert set(submission.SETS) == set(scrolls_settings())


def test_answers_are_submitted_without_their_thinking_parts():
    rows = {
        "a": {"meta": {"prompt_last": "<think>\n"}, "out": {"text": ["hm</think>\n\nB"]}},
        "b": {"meta": {"prompt_last": "?"}, "out": {"text": ['He said "A",\nand left']}},
    }
    answers = submission.predictions(rows)
    assert answers == {"a": "\n\nB", "b": 'He said "A",\nand left'}
    table = list(csv.reader(io.StringIO(submission.scrolls_csv({"quality": answers}), newline="")))
    assert table == [
        ["Task", "ID", "Prediction"],
        ["quality", "a", "\n\nB"],
        ["quality", "b", 'He said "A",\nand left'],
    ]
    assert [json.loads(line) for line in submission.memory_lines(answers).splitlines()] == [
        {"question_id": "a", "hypothesis": "B"},
        {"question_id": "b", "hypothesis": 'He said "A",\nand left'},
    ]


def test_a_sample_with_more_positions_than_the_model_has_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    path = made.write(tmp_path / "aime25.jsonl", made.aime25()[:2])
    outcome = run(tmp_path, "task=reasoning/aime25", f"task.path={path}", "task.max_new_tokens=2000000")
    assert outcome.status == "failed"
    assert "sample reasoning/aime25-" in outcome.note and "positions, answer included; the model has" in outcome.note
