"""SCBench: published prompts, cut, answers and scores in both modes, on rows made here in the published form."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from composed import composed
from helpers import make
from rich.console import Console
from small_models import small_model

from kvcompress import compress, metrics
from kvcompress.method import Method
from kvcompress.metrics import code_retrieval
from kvcompress.models import loading
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep import sanity
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import TASKS
from kvcompress.tasks.scbench import settings, settings_of

SETS = sorted(settings())
TOKENIZER = byte_tokenizer(131_072)
SCORED = json.loads((Path(__file__).parent / "data" / "scbench_scores.json").read_text(encoding="utf-8"))["pairs"]
BOOK = "Ann met Bob at the gate. The boats went out. "
OPTIONS = ["Ann Lee", "Bob", "Carl", "Dora"]
MODES = ("independent", "gold", "session")


def function(at):
    return f"def merge_{at}(rows, limit):\n    kept = [row for row in rows if row.size > {at}]\n    return kept[:limit]"


def turn(kind, at, number):
    """A question as it is published."""
    key = random.Random(f"{kind}:{at}:{number}").randrange(10**4, 10**5)
    return {
        "kv": {"input": f'\nKey: "k{key}"\nThe value is: ', "answer": f"v{key}"},
        "prefix_suffix": {"input": f"Which begins with p{number}?", "answer": f"p{number}x{key}"},
        "vt": {"input": f"Which variables hold {key}?", "answer": [f"VAR{number}", "OTHER"]},
        "repoqa": {"input": "It keeps rows.", "answer": function(3 * at + number), "name": f"merge_{3 * at + number}"},
        "qa_eng": {"input": "Whom did Ann meet?", "answer": "Bob"},
        "qa_chn": {"input": "谁在山东？", "answer": "商老太"},
        "choice_eng": {"input": "Who met Bob?", "answer": OPTIONS[number % 4], "options": OPTIONS},
        "many_shot": {"input": "Pick (A) or (B).", "answer": "AB"[number % 2]},
        "mf": {
            "input": f"The {['largest', 'smallest', 'median'][number % 3]} number of the list is",
            "answer": key % 100,
        },
        "summary": {"input": "Summarise the paper.", "answer": f"It is about {key}.\nBoats go out."},
        "passkey": {"input": "What is the pass key?", "answer": str(key)},
    }[kind]


def row(name, at=0, count=3):
    kinds = settings()[name].get("mixes") or [name]
    asked = [(kinds[n % len(kinds)], turn(kinds[n % len(kinds)], at, n)) for n in range(count)]
    turns = [one | ({"task": f"scbench_{kind}"} if len(kinds) > 1 else {}) for kind, one in asked]
    context = [at, 5, 17] if name == "mf" else "商老太在山东。" if name == "qa_chn" else BOOK * 3
    about = {"lang": "python", "repo": f"owner/{at % 2}"} if "repoqa" in name else {}
    return {"id": at, "context": context, "multi_turns": turns, **about}


def write(folder, name, rows):
    path = folder / f"scbench_{name}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def made(folder, name, rows, **options):
    return TASKS[f"scbench/{name}"](source=str(write(folder, name, rows)), **options)


def decoded(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("turns", MODES)
@pytest.mark.parametrize("name", SETS)
def test_twenty_rows_as_published_go_through_prompts_answers_and_scores(name, turns, tmp_path):
    """Each set in each mode; right answers score 1 and others 0, in every place."""
    rows = [row(name, at) for at in range(20)]
    task = made(tmp_path, name, rows, turns=turns)
    samples = list(task.samples(TOKENIZER))
    assert task.fingerprint()["records"] == len(samples) == 20
    for sample, one in zip(samples, rows, strict=True):
        assert len(sample.turns) == 3 and sample.order == turns and sample.protocol["question"] == "hidden"
        kinds = settings()[name].get("mixes") or [name]
        new = settings()[name]["max_new_tokens"]
        assert [t.max_new_tokens for t in sample.turns] == [
            new[kinds[n % 2]] if len(kinds) > 1 else new for n in range(3)
        ]
        assert str(one["context"]) in decoded(sample.segments[0])
        for asked, given in zip(one["multi_turns"], sample.turns, strict=True):
            assert asked["input"].strip() in decoded(given.ids)
            if name != "mf":  # whose context begins with a question, as published
                assert asked["input"] not in decoded(sample.segments[0])
    right, wrong = (task.score(samples[0], {"text": texts}) for texts in (task.gold(samples[0]), ["–"] * 3))
    assert right == pytest.approx({"score": 1.0, "turn_1": 1.0, "turn_2": 1.0, "turn_3": 1.0}) and wrong["score"] == 0.0
    found = sanity.check(task, samples[:2])
    assert found.gold == found.empty == 1.0


# ---------------------------------------------------------------------- wording

QUERY = "Question: {}\nAnswer:"


@pytest.mark.parametrize("template", ["none", "chat"])
def test_questions_asked_apart_follow_the_context_as_published(template, tmp_path):
    one = row("qa_eng") | {"multi_turns": [{"input": q, "answer": "Bob"} for q in ("Who?", "Where?")]}
    (sample,) = made(tmp_path, "qa_eng", [one], template=template).samples(TOKENIZER)
    head = "Read the book and answer the question. Be very concise in your answer.\n\n" + one["context"]
    for asked, question in zip(sample.turns, ("Who?", "Where?"), strict=True):
        text = head + QUERY.format(question)
        if template == "chat":
            text = TOKENIZER.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        assert list(sample.segments[0] + asked.ids) == TOKENIZER.encode(text, add_special_tokens=template == "none")


@pytest.mark.parametrize(("turns", "said"), [("gold", "Bob"), ("session", "")])
def test_a_conversation_is_the_published_one(turns, said, tmp_path):
    """Without a template texts alone; with one, the template of the whole conversation with right answers in it."""
    one = row("qa_eng") | {"multi_turns": [{"input": q, "answer": "Bob"} for q in ("Who?", "Where?")]}
    first = "Read the book and answer the question. Be very concise in your answer.\n\n" + one["context"]
    first += "\n\n" + QUERY.format("Who?")
    (plain,) = made(tmp_path, "qa_eng", [one], template="none", turns=turns).samples(TOKENIZER)
    assert decoded(plain.prompt_ids()) == first and decoded(plain.turns[1].ids) == f"{said}\n\n{QUERY.format('Where?')}"
    (chat,) = made(tmp_path, "qa_eng", [one], template="chat", turns=turns).samples(TOKENIZER)
    talk = [{"role": "user", "content": first}, {"role": "assistant", "content": "Bob"}]
    talk.append({"role": "user", "content": QUERY.format("Where?")})
    whole = TOKENIZER.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    answer = () if said else tuple(TOKENIZER.encode("Bob", add_special_tokens=False))
    assert [*chat.prompt_ids(), *answer, *chat.turns[1].ids] == list(whole)


def test_later_answers_of_summaries_are_begun_and_later_questions_of_mf_introduced_by_the_last_one(tmp_path):
    (sample,) = made(tmp_path, "summary", [row("summary")], template="chat", turns="gold").samples(TOKENIZER)
    assert [decoded(t.ids).endswith("This paper") for t in sample.turns] == [False, True, True]
    for template, prefixes in (("chat", ["median"] * 2), ("none", ["smallest", "median"])):
        (sample,) = made(tmp_path, "mf", [row("mf")], template=template, turns="gold").samples(TOKENIZER)
        for asked, prefix in zip(sample.turns[1:], prefixes, strict=True):
            assert f"What is the {prefix} number of the list?" in decoded(asked.ids)
    (sample,) = made(tmp_path, "mf", [row("mf")], template="none").samples(TOKENIZER)
    assert decoded(sample.segments[0]) == "The largest number of the list is\n\n[0, 5, 17]"
    assert (
        decoded(sample.turns[0].ids) == "What is the largest number of the list?\n\nThe largest number of the list is"
    )


@pytest.mark.parametrize("turns", MODES)
def test_a_long_context_is_cut_in_the_middle_to_what_answers_leave(turns, tmp_path):
    one = row("kv") | {"context": BOOK * 200}
    (whole,) = made(tmp_path, "kv", [one], turns=turns).samples(TOKENIZER)
    assert whole.meta["truncated_tokens"] == 0
    apart = 1000 if turns == "independent" else 0
    assert whole.protocol["max_length"] == 131_072 - 3 * 150 - apart
    (cut,) = made(tmp_path, "kv", [one], turns=turns).samples(byte_tokenizer(4096))
    limit = 4096 - 3 * 150 - apart
    ids = cut.segments[0] + (() if apart else cut.turns[0].ids)
    full = whole.segments[0] + (() if apart else whole.turns[0].ids)
    assert ids == full[: limit // 2] + full[-limit // 2 :]
    (mixed,) = made(tmp_path, "repoqa_and_kv", [row("repoqa_and_kv")], turns=turns).samples(TOKENIZER)
    assert mixed.protocol["max_length"] == 131_072 - (1024 + 80) * 3 // 2 - apart
    with pytest.raises(ValueError, match="3 answers take 450.*set task.max_length"):
        list(made(tmp_path, "kv", [one], turns=turns).samples(byte_tokenizer(400)))


def test_questions_are_cut_only_where_the_first_row_has_too_many(tmp_path):
    def counts(first, second):
        task = made(tmp_path, "kv", [row("kv", count=first), row("kv", 1, count=second)])
        return [len(sample.turns) for sample in task.samples(TOKENIZER)]

    assert counts(7, 6) == [5, 5] and counts(4, 6) == [4, 6]


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize(("kind", "pairs"), [(k, pairs) for kinds, pairs in SCORED.items() for k in kinds.split()])
def test_scores_are_those_of_the_published_scorer(kind, pairs):
    assert len(pairs) == 200
    found = []
    for text, label, _ in pairs:
        if kind == "repoqa":
            name, language, functions = label
            found.append(code_retrieval.function_found(text, name, functions, language))
            continue
        references = tuple(label) if isinstance(label, (list, str)) else (str(label),)  # a text counts by characters
        form = settings_of(kind)["answer"]
        references = (label,) if isinstance(label, str) and form != "characters" else references
        found.append(metrics.score(settings_of(kind)["metric"], text, references))
    assert found == pytest.approx([value for *_, value in pairs], abs=1e-12)


def test_every_kind_of_question_has_published_scores():
    kinds = {kind for name in SETS for kind in settings()[name].get("mixes") or [name]}
    assert {kind for kinds_ in SCORED for kind in kinds_.split()} == kinds


def test_answers_that_the_published_scorer_takes_apart_can_be_read_as_one(tmp_path):
    task = made(tmp_path, "qa_chn", [row("qa_chn")])
    whole = made(tmp_path, "qa_chn", [row("qa_chn")], scoring="whole")
    (apart,), (one,) = task.samples(TOKENIZER), whole.samples(TOKENIZER)
    assert apart.turns[0].references == ("商", "老", "太") and one.turns[0].references == ("商老太",)
    assert task.score(apart, {"text": ["商老太"] * 3})["score"] == pytest.approx(0.5)
    assert whole.score(one, {"text": ["商老太"] * 3})["score"] == 1.0


def test_functions_are_told_apart_from_all_that_are_asked_of_their_repository(tmp_path):
    """Rows 0 and 2 are of one repository, row 1 of another."""
    rows = [row("repoqa_and_kv", at) for at in range(3)]
    rows[1]["multi_turns"][0] |= {"answer": rows[0]["multi_turns"][0]["answer"], "name": "elsewhere"}
    rows[2]["multi_turns"][0] |= {"answer": rows[0]["multi_turns"][0]["answer"], "name": "twin"}
    task = made(tmp_path, "repoqa_and_kv", rows)
    first, other, third = task.samples(TOKENIZER)
    code = f"```python\n{rows[0]['multi_turns'][0]['answer']}\n```"
    assert [task.score(s, {"text": [code, "", ""]})["turn_1"] for s in (first, other, third)] == [1.0, 1.0, 0.0]


def test_records_tell_places_questions_and_kinds_apart(tmp_path):
    task = made(tmp_path, "repoqa_and_kv", [row("repoqa_and_kv")])
    scores = [{"score": 0.5, "turn_1": 1.0, "turn_2": 0.5, "turn_3": 0.0}]
    rows = [{"scores": one, "meta": {"kinds": ["repoqa", "kv", "repoqa"]}} for one in scores]
    assert task.summarise(rows) == {
        "score_by_turn": [1.0, 0.5, 0.0], "n_by_turn": [1, 1, 1], "score_by_question": 0.5, "score_kv": 0.5,
        "score_repoqa": 0.5,
    }  # fmt: skip


# ---------------------------------------------------------------------- sessions


def small(sample):
    """The sample in the vocabulary of a small model, with short answers."""
    low = [tuple(token % 90 + 2 for token in ids) for ids in (sample.segments[0], *(t.ids for t in sample.turns))]
    turns = tuple(replace(t, ids=ids, max_new_tokens=5) for t, ids in zip(sample.turns, low[1:], strict=True))
    return replace(sample, segments=(low[0],), turns=turns)


@pytest.fixture
def asked(tmp_path):
    def make_sample(turns):
        task = made(tmp_path, "qa_eng", [row("qa_eng")], template="none", turns=turns)
        return task, small(next(task.samples(TOKENIZER)))

    return make_sample


def test_multi_request_with_the_full_cache_equals_separate_sessions_token_for_token(asked):
    task, sample = asked("independent")
    model = small_model()
    with compress(model, Method()) as session:
        together = task.run(session, sample)["tokens"]
    for turn_, tokens in zip(sample.turns, together, strict=True):
        with compress(model, Method()) as session:  # context and question as one prompt
            session.prefill(torch.tensor([[*sample.segments[0], *turn_.ids]]))
            assert list(session.generate(5).tokens[0]) == tokens


@pytest.mark.parametrize("turns", MODES)
def test_a_compressed_context_is_compressed_once_and_questions_never(turns, asked, monkeypatch):
    task, sample = asked(turns)
    with compress(small_model(), make("SnapKV", 20)) as session:
        prompts, prefill = [], type(session).prefill
        monkeypatch.setattr(type(session), "prefill", lambda *a, **o: prompts.append(1) or prefill(*a, **o))
        out = task.run(session, sample)
    assert len(prompts) == 1 and out["compressed"]["kv"]["kept_tokens_mean"] == 20
    assert out["end"]["evicted"] == out["compressed"]["evicted"]
    stays = {
        "independent": len(sample.turns[-1].ids),
        "gold": sum(len(t.ids) for t in sample.turns),
        "session": sum(len(t.ids) + 5 for t in sample.turns[:-1]) + len(sample.turns[-1].ids),
    }[turns]
    assert out["end"]["kv"]["kept_tokens_mean"] == 20 + stays + 5 - 1  # the last token picked is not fed


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("kv", {"multi_turns": []}, "line 2: multi_turns must be a list of at least one question"),
        ("kv", {"context": ["x"]}, "line 2: context must be text, found list"),
        ("kv", {"multi_turns": ["Who?"]}, "line 2, question 1: a JSON object is needed, found str"),
        ("kv", {"multi_turns": [{"input": "?"}]}, "line 2, question 1: field 'answer' is missing; found: input"),
        ("kv", {"multi_turns": [{"input": "?", "answer": ["v"]}]}, "question 1: answer must be text, found list"),
        ("kv", {"multi_turns": [{"input": "?", "answer": ""}]}, "question 1: answer is empty"),
        ("kv", {"multi_turns": [{"input": "cut \ud83d", "answer": "v"}]}, "question 1: input holds half of a surrogate pair"),
        ("vt", {"multi_turns": [{"input": "?", "answer": "VAR"}]}, "answer must be a list of at least one answer"),
        ("mf", {"context": [1, 2.5]}, "line 2: context must be a list of whole numbers, found 2.5"),
        ("mf", {"multi_turns": [{"input": "The x is", "answer": float("nan")}]}, "answer is nan, which is no number"),
        ("mf", {"multi_turns": [{"input": "Which?", "answer": 3}]}, "question 1: input must say 'The … is'"),
        ("choice_eng", {"multi_turns": [{"input": "?", "answer": "Eve", "options": OPTIONS}]}, "'Eve' is none of the options"),
        ("repoqa", {"lang": "perl"}, "line 2: lang='perl'; valid: python, java"),
        ("repoqa", {"repo": None}, "line 2: repo must be text"),
        ("repoqa_and_kv", {"multi_turns": [{"input": "?", "answer": "v", "task": "kv2"}]}, "valid: scbench_repoqa, scbench_kv"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_file_row_and_question_before_a_model_is_loaded(name, changes, said, tmp_path):
    with pytest.raises(ValueError, match=rf"scbench_{name}\.jsonl {said}|scbench_{name}\.jsonl line 2.*{said}"):
        made(tmp_path, name, [row(name), row(name, 1) | changes]).fingerprint()


def test_a_missing_column_and_an_answer_longer_than_answers_may_be_are_named_with_their_row(tmp_path):
    with pytest.raises(ValueError, match="line 2: field 'multi_turns' is missing; found: context"):
        made(tmp_path, "kv", [row("kv"), {"context": "x"}]).fingerprint()
    long = row("kv") | {"multi_turns": [{"input": "?", "answer": "v" * 151}]}
    with pytest.raises(
        ValueError, match="line 2, question 1: answer 'v+.* takes 151 tokens, and an answer may have 150"
    ):
        list(made(tmp_path, "kv", [row("kv"), long]).samples(TOKENIZER))


@pytest.mark.parametrize("options", [{"turns": "both"}, {"scoring": "loose"}, {"question": "seen"}, {"max_turns": 0}])
def test_illegal_settings_are_refused_with_the_valid_ones(options):
    with pytest.raises(ValueError, match="valid|at least"):
        TASKS["scbench/kv"](**options)


def test_a_run_is_recorded_and_questions_beyond_the_models_positions_are_refused_before_weights_are_read(
    tmp_path, monkeypatch
):
    def run(*overrides):
        usual = ["model=random", "device=cpu", "task=scbench/many_shot", f"task.source={path}", "paths.data=null"]
        return Scheduler(Console(file=io.StringIO()))(
            composed(*usual, f"paths.results={tmp_path}", "sweep.name=test", "task.turns=gold", *overrides)
        )

    path = write(tmp_path, "many_shot", [row("many_shot", at) for at in range(20)])
    outcome = run("method=snapkv", "budget=0.5", "limit=1")
    assert outcome.status == "ok" and outcome.record["n_samples"] == 1, outcome.note
    assert outcome.record["protocol.turns"] == "gold" and outcome.record["protocol.questions"] == "3"
    assert len(outcome.record["metrics.score_by_turn"]) == 3

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("weights were read"))
    late = {"input": "Pick (A) or (B). " * 600, "answer": "A"}
    write(
        tmp_path, "many_shot", [row("many_shot"), row("many_shot") | {"multi_turns": [turn("many_shot", 1, 0), late]}]
    )
    outcome = run("method=full")
    assert outcome.status == "failed" and "scbench_many_shot.jsonl line 2: sample 1 needs" in outcome.note, outcome.note
    assert "2 questions and answers included; the model has" in outcome.note
