"""Several questions on one compressed context: asked apart they are as asked alone, in a session as in plain turns."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from composed import composed
from helpers import every_method, make
from rich.console import Console
from small_models import VOCAB, random_ids, small_model

from kvcompress import compress, load
from kvcompress.commands.report import main as report
from kvcompress.common.prose import Encoder
from kvcompress.data.haystack import follow_up, prompt_template
from kvcompress.data.task import Sample, Task, Turn
from kvcompress.method import Method
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.report.table import title
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import MultiQuestion

TOKENIZER = byte_tokenizer()
STOP = tuple(range(2, 12))
ROWS = [
    {"id": "a", "context": "Ann lives in Rome.", "questions": [{"question": "Who?", "answers": ["Ann", "she"]},
                                                              {"question": "Where?", "answer": "Rome"}]},
    {"context": "Five and six.", "multi_turns": [{"input": "How many?", "answer": 2}]},
]  # fmt: skip


def run(method, sample, model=None):
    with compress(model or small_model(), method) as session:
        return MultiQuestion().run(session, sample)


def ids(n, seed=0):
    return tuple(random_ids(1, n, seed)[0].tolist())


def sample(turns, stop=STOP):
    questions = tuple(Turn(ids(n, seed), 4, stop) for seed, n in enumerate((4, 7, 5), 1))
    return Sample("s", (ids(40),), questions, {"question": "hidden", "turns": turns})


@pytest.mark.parametrize("name", every_method())
def test_questions_asked_apart_get_the_answers_of_questions_asked_alone(name):
    asked, method = sample("independent"), make(name, 0.4)
    together = run(method, asked)
    alone = [run(method, replace(asked, turns=(turn,))) for turn in asked.turns]
    assert together["tokens"] == [out["tokens"][0] for out in alone]
    assert together["finished"] == [out["finished"][0] for out in alone]
    for report_of in (together, *alone):
        for name in ("time", "kernel"):  # those of all questions
            report_of["end"].pop(name)
        report_of["end"]["kv"].pop("kept_tokens_max")
    assert together["end"] == alone[-1]["end"]


def plain_turns(model, asked, gold=False):
    """The same conversation by transformers alone, everything fed again for every token."""
    said, answers = list(asked.segments[0]), []
    for turn in asked.turns:
        said += turn.ids
        answer: list[int] = []
        while len(answer) < turn.max_new_tokens:
            with torch.no_grad():
                token = int(model(torch.tensor([said + answer])).logits[0, -1].argmax())
            if token in turn.stop:
                break
            answer.append(token)
        answers.append(answer)
        said += [] if gold else answer
    return answers


@pytest.mark.parametrize("stop", [STOP, tuple(range(2, VOCAB, 2)), ()])
@pytest.mark.parametrize(("turns", "gold"), [("session", False), ("gold", True)])
def test_a_session_of_turns_at_full_budget_is_a_plain_conversation(turns, gold, stop):
    asked = sample(turns, stop)
    model = small_model()
    expected = plain_turns(model, asked, gold)
    for method in (Method(), make("SnapKV", 1.0), make("H2O", 1.0)):
        assert run(method, asked, model)["tokens"] == expected


def test_answers_that_stay_in_the_cache_change_later_ones_and_those_rolled_back_do_not():
    model = small_model()
    outs = {turns: run(Method(), sample(turns, ()), model)["tokens"] for turns in ("independent", "session", "gold")}
    assert outs["independent"][0] == outs["session"][0] == outs["gold"][0]
    assert len({json.dumps(tokens[1:]) for tokens in outs.values()}) == 3


def test_the_context_is_compressed_once_and_no_question_is():
    """What is evicted is evicted from the context; the questions are held whole."""
    asked = sample("session", ())
    out = run(make("SnapKV", 20), asked)
    assert out["compressed"]["kv"]["kept_tokens_mean"] == 20
    held = 20 + sum(len(turn.ids) + 4 for turn in asked.turns) - 1  # the last token picked is not fed
    assert out["end"]["kv"]["kept_tokens_mean"] == held
    assert out["end"]["evicted"] == out["compressed"]["evicted"]


# ---------------------------------------------------------------------- samples


def task(**options):
    return MultiQuestion(**{"lengths": (900,), "n_samples": 2, "n_questions": 3, **options})


def text_of(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("template", ["none", "chat"])
def test_every_needle_is_in_the_context_once_and_asked_for_in_one_question(template):
    for made in task(template=template).samples(TOKENIZER):
        context = text_of(made.segments[0])
        assert len(made.turns) == 3 and made.protocol["question"] == "hidden"
        for turn in made.turns:
            (number,) = turn.references
            assert context.count(number) == 1 and number not in text_of(turn.ids)
            assert len(made.segments[0]) + len(turn.ids) <= 900
        assert len(set(made.turns)) == 3 and made.order == "independent"


def test_the_context_and_the_first_question_do_not_depend_on_how_the_others_follow():
    first = [next(iter(task(turns=turns).samples(TOKENIZER))) for turns in ("independent", "session", "gold")]
    assert len({(one.segments, one.turns[0]) for one in first}) == 1
    assert [one.id for one in first] == [first[0].id] * 3
    gold = text_of(first[2].turns[1].ids)
    assert gold.startswith(" " + first[2].turns[0].references[0])
    assert gold.endswith(text_of(first[1].turns[1].ids))


def test_a_later_question_is_a_message_of_its_own():
    """Context, answer and next question make the text that the chat template makes of the conversation."""
    encode = Encoder(TOKENIZER)
    first = prompt_template(TOKENIZER, encode, "A story.", " Who?", "", "chat")
    later = follow_up(TOKENIZER, encode, "Where?", "", "chat")
    chat = [{"role": "user", "content": "A story. Who?"}, {"role": "assistant", "content": "Ann"}]
    chat.append({"role": "user", "content": "Where?"})
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert [*first.head, *first.tail, *encode("Ann"), *later] == list(ids)
    assert text_of(follow_up(TOKENIZER, encode, "\nWhere?", " In", "none")) == "\nWhere? In"


def test_keys_of_an_object_are_asked_for_one_after_another(tmp_path):
    pairs = [[f"k{i}", f"v{i}"] for i in range(9)]
    path = tmp_path / "kv-retrieval-75_keys.jsonl"
    path.write_text(json.dumps({"ordered_kv_records": pairs, "key": "k3", "value": "v3"}) + "\n")
    (made,) = task(form="kv_retrieval", source=str(path), template="none", n_questions=4).samples(TOKENIZER)
    assert text_of(made.segments[0]).endswith('"k8": "v8"}')
    assert made.turns[0].references == ("v3",) and len({turn.references for turn in made.turns}) == 4
    for turn in made.turns:
        assert text_of(turn.ids) == f'\n\nKey: "k{turn.references[0][1:]}"\nCorresponding value:'
    with pytest.raises(ValueError, match="n_questions=10.*9 keys"):
        task(form="kv_retrieval", source=str(path), n_questions=10).fingerprint()


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_rows_may_be_ours_or_those_of_scbench(rows):
    made = list(task(form="rows", source=str(rows), template="none").samples(TOKENIZER))
    assert [(one.id, len(one.turns)) for one in made] == [("a", 2), ("1", 1)]
    assert text_of(made[0].segments[0]) == "Ann lives in Rome."
    assert text_of(made[0].turns[1].ids) == "\n\nQuestion: Where?\nAnswer:"
    assert made[0].turns[0].references == ("Ann", "she") and made[1].turns[0].references == ("2",)
    assert made[1].order == "independent"
    gold = list(task(form="rows", source=str(rows), template="none", turns="gold").samples(TOKENIZER))
    assert text_of(gold[0].turns[1].ids) == " Ann\n\nQuestion: Where?\nAnswer:"
    cut = list(task(form="rows", source=str(rows), template="none", max_length=16).samples(TOKENIZER))
    assert len(cut[0].segments[0]) == 16 and cut[0].meta["truncated_tokens"] > 0


def test_scores_are_kept_by_turn(rows):
    made = task(form="rows", source=str(rows), template="none")
    first, second = made.samples(TOKENIZER)
    one = made.score(first, {"text": ["Ann", "Paris"]})
    two = made.score(second, {"text": ["2"]})
    assert one == {"score": 0.5, "turn_1": 1.0, "turn_2": 0.0} and two == {"score": 1.0, "turn_1": 1.0}
    assert made.summarise([{"scores": one}, {"scores": two}]) == {"score_by_turn": [1.0, 0.0], "n_by_turn": [2, 1]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"questions": []}', "line 1: field 'context' is missing"),
        ('{"context": "x", "questions": []}', "line 1: questions .* at least one"),
        ('{"context": 3, "questions": [{}]}', "line 1: context must be text, found int 3"),
        ('{"context": "x", "questions": ["Who?"]}', "line 1, question 1: a JSON object is needed, found str"),
        ('{"context": "x", "questions": [{"answer": "y"}]}', "question 1: question .* must be text, found None"),
        ('{"context": "x", "questions": [{"input": "Who?"}]}', "question 1: answers .* found None"),
        (
            '{"context": "x", "questions": [{"input": "Who?", "answer": {"a": 1}}]}',
            "answers .* must be text or a number",
        ),
        ("{broken", "line 1: no JSON"),
    ],
)
def test_bad_rows_are_named_before_a_model_is_loaded(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=said):
        task(form="rows", source=str(path)).fingerprint()


@pytest.mark.parametrize(
    "options",
    [{"turns": "both"}, {"form": "sum"}, {"n_questions": 0}, {"wording": "{question} {context}"}, {"scorer": "f1"},
     {"form": "rows"}, {"lengths": ()}, {"max_length": 3}],
)  # fmt: skip
def test_illegal_settings_are_refused_with_the_valid_ones(options):
    with pytest.raises(ValueError, match="valid|at least|needs"):
        MultiQuestion(**options)


# ---------------------------------------------------------------------- runs


@pytest.fixture
def cells(tmp_path):
    usual = ["model=random", "device=cpu", "task=multi_question", "task.lengths=[900]", "task.n_samples=1",
             "task.n_questions=3", "task.max_new_tokens=4", "paths.data=null", f"paths.results={tmp_path}",
             "sweep.name=test"]  # fmt: skip

    def make(*overrides):
        return [composed(*usual, *one) for one in overrides]

    return make


def runner():
    return Scheduler(Console(file=io.StringIO()))


def test_records_say_how_the_questions_were_asked_and_boards_keep_them_apart(cells, tmp_path, capsys):
    made = cells(*([f"task.turns={turns}", *method] for turns in ("independent", "session") for method in (
        ["method=full"], ["method=snapkv", "budget=0.5"])))  # fmt: skip
    outcomes = [runner()(one) for one in made]
    assert [one.status for one in outcomes] == ["ok"] * 4, [one.note for one in outcomes]
    for number, outcome in enumerate(outcomes):
        assert outcome.record["protocol.turns"] == ("independent", "session")[number // 2]
        assert outcome.record["protocol.questions"] == "3" and outcome.record["protocol.question"] == "hidden"
        assert len(outcome.record["metrics.score_by_turn"]) == 3
        assert outcome.record["baseline"] == outcomes[number // 2 * 2].run_id
    assert len({outcome.record["protocol.pair"] for outcome in outcomes}) == 2
    report([str(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("3 questions, independent") == shown.count("3 questions, session") == 1


def test_lengths_are_stated_only_where_contexts_are_made_to_have_them(tmp_path):
    assert MultiQuestion(lengths=(900, 1800)).stated_lengths() == (900, 1800)
    assert MultiQuestion(form="rows", source="rows.jsonl").stated_lengths() == ()
    assert MultiQuestion(form="kv_retrieval").stated_lengths() == ()


def test_the_heading_of_rows_of_a_file_states_no_length(cells, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"context": "Ann is 7.", "questions": [{"question": "Who?", "answer": "Ann"}]}) + "\n")
    (one,) = cells(["task.form=rows", f"task.source={path}", "method=full"])
    outcome = runner()(one)
    assert outcome.status == "ok" and outcome.record["protocol.lengths"] is None, outcome.note
    assert "tokens" not in title(dict(outcome.record))


@pytest.mark.parametrize("turns", ["independent", "session", "gold"])
def test_cells_that_share_a_prefill_and_decode_together_answer_as_alone(cells, turns):
    overrides = [["method=full"], ["method=snapkv", "budget=0.5"], ["method=snapkv", "budget=0.3"]]
    made = cells(*([f"task.turns={turns}", *one] for one in overrides))
    shared = runner().sweep(made)
    assert all(one.status == "ok" and one.record["protocol.shared"] for one in shared), [one.note for one in shared]
    assert "separate" not in {one.record["protocol.decoding"] for one in shared}
    apart = cells(*([f"task.turns={turns}", "sweep.name=alone", *one] for one in overrides))
    for one, other in zip(apart, shared, strict=True):
        alone = runner()(one)
        rows = [[json.loads(line) for line in (o.folder / "samples.jsonl").read_text().splitlines()]
                for o in (alone, other)]  # fmt: skip
        assert [row["out"]["tokens"] for row in rows[0]] == [row["out"]["tokens"] for row in rows[1]]
        assert [row["scores"] for row in rows[0]] == [row["scores"] for row in rows[1]]


def test_a_task_of_one_question_says_so(cells):
    (one,) = cells(["task=multi_question", "task.n_questions=1", "method=full"])
    assert runner()(one).record["protocol.questions"] == "1"
    model, tokenizer = load("random/llama")
    made = next(iter(MultiQuestion(n_questions=1, lengths=(900,)).samples(tokenizer)))
    assert replace(made, protocol={}).order == "single" and Task.run is MultiQuestion.run
