"""Tasks read from JSON Lines: published prompts, answer lengths and scores, on rows made here and on published ones."""

from __future__ import annotations

import json

import pytest

from kvcompress.data import hub
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.tasks import TASKS

TOKENIZER = byte_tokenizer()
PAIRS = [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]]
LINES = "Remember.\nline a: REGISTER_CONTENT is <7>\n\nNow the record is over. Tell me the number in line a? "
ROWS = {
    "babilong": ("1k_qa1", {"input": "Mary went to the office.", "question": "Where is Mary? ", "target": "office"}),
    "kv_retrieval": ("kv-retrieval-75_keys", {"ordered_kv_records": PAIRS, "key": "k2", "value": "v2"}),
    "passkey": ("passkey_examples", {"input": "The pass key is 12345. Hay.", "target": "12345"}),
    "longeval_lines": ("200_lines", {"prompt": LINES, "expected_number": 7}),
    "longbench_v2": (
        "longbench_v2",
        {"_id": "x1", "difficulty": "easy", "length": "short", "question": " Why? ", "answer": "B", "context": " Long. "}
        | {f"choice_{letter}": f"reason {letter}" for letter in "ABCD"},
    ),
}  # fmt: skip
GOLD = {"babilong": "office", "kv_retrieval": "v2", "passkey": "12345", "longeval_lines": "<7>",
        "longbench_v2": "The correct answer is (B)."}  # fmt: skip


def write(folder, name, **changes):
    file, row = ROWS[name]
    path = folder / f"{file}.jsonl"
    path.write_text(json.dumps(row | changes) + "\n", encoding="utf-8")
    return path


def first(task):
    return next(iter(task.samples(TOKENIZER)))


def text_of(sample):
    return TOKENIZER.decode(sample.prompt_ids(), skip_special_tokens=True)


@pytest.fixture
def plain(tmp_path):
    """A sample of each task without a chat template."""

    def made(name, changes=None, **options):
        task = TASKS[name](source=str(write(tmp_path, name, **(changes or {}))), template="none", **options)
        return task, first(task)

    return made


@pytest.mark.parametrize("name", sorted(ROWS))
def test_gold_answers_score_one_and_empty_ones_nothing(plain, name):
    task, sample = plain(name)
    assert task.score(sample, {"text": [GOLD[name]]})["score"] == 1.0
    assert task.score(sample, {"text": [""]})["score"] == 0.0


@pytest.mark.parametrize("name", sorted(ROWS))
def test_hidden_and_seen_questions_give_the_same_token_ids(tmp_path, name):
    path = str(write(tmp_path, name))
    for template in ("none", "chat"):
        seen = first(TASKS[name](source=path, template=template))
        hidden = first(TASKS[name](source=path, template=template, question="hidden"))
        assert seen.prompt_ids() == hidden.prompt_ids()
        assert not seen.turns[0].ids and 0 < len(hidden.turns[0].ids) < len(hidden.prompt_ids())


def test_prompts_are_the_published_ones(plain):
    assert text_of(plain("kv_retrieval")[1]) == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        '{"k1": "v1",\n "k2": "v2",\n "k3": "v3"}\n\nKey: "k2"\nCorresponding value:'
    )
    assert text_of(plain("passkey")[1]) == "The pass key is 12345. Hay.What is the pass key? The pass key is "
    assert text_of(plain("longeval_lines")[1]) == LINES
    text = text_of(plain("babilong")[1])
    assert text.startswith("I will give you context with the facts about positions of different persons hidden")
    assert text.endswith(
        "Do not write anything else after that. \n<context>\nMary went to the office.\n</context>\nQuestion: Where is Mary?"
    )
    assert text_of(plain("longbench_v2")[1]) == (
        "Please read the following text and answer the question below.\n\n<text>\nLong.\n</text>\n\nWhat is the correct "
        "answer to this question: Why?\nChoices:\n(A) reason A\n(B) reason B\n(C) reason C\n(D) reason D\n\nFormat your "
        'response as follows: "The correct answer is (insert answer here)".'
    )


def test_answers_are_as_long_as_published(plain):
    lengths = {name: plain(name)[1].turns[0].max_new_tokens for name in ROWS}
    assert lengths == {
        "babilong": 20, "kv_retrieval": 100, "passkey": 5, "longeval_lines": 100, "longbench_v2": 128
    }  # fmt: skip
    assert plain("passkey", max_new_tokens=9)[1].turns[0].max_new_tokens == 9


def test_the_wanted_pair_can_be_moved_and_named_before_the_data(plain):
    task, sample = plain("kv_retrieval", gold_index=0, query_aware=True)
    assert 'Key: "k2"\n\nJSON data:\n{"k2": "v2",\n "k1": "v1",' in text_of(sample)
    assert sample.meta["gold_index"] == 0 and plain("kv_retrieval")[1].meta["gold_index"] == 1
    with pytest.raises(ValueError, match="gold_index=3"):
        plain("kv_retrieval", gold_index=3)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The most recent location of Mary is office. Or the garden.", 1.0),  # the first sentence counts
        ("office or garden", 0.0),
        ("OFFICE<example> garden", 1.0),
        ("garden", 0.0),
    ],
)
def test_babilong_wants_the_target_and_no_other_label(plain, answer, score):
    task, sample = plain("babilong")
    assert task.score(sample, {"text": [answer]})["score"] == score


def test_babilong_passes_over_labels_of_the_question(plain):
    task, sample = plain("babilong", {"question": "Where was it before the garden?"})
    assert task.score(sample, {"text": ["Before the garden it was in the office"]})["score"] == 1.0


def test_the_last_number_counts_in_lines(plain):
    task, sample = plain("longeval_lines")
    assert task.score(sample, {"text": ["line 3 is <07>"]})["score"] == 1.0
    assert task.score(sample, {"text": ["<7> in line 3"]})["score"] == 0.0


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_missing_field_is_named_with_its_line(tmp_path, name):
    path = write(tmp_path, name)
    row = json.loads(path.read_text())
    gone = TASKS[name].fields[-1]
    path.write_text(json.dumps(row) + "\n" + json.dumps({k: v for k, v in row.items() if k != gone}) + "\n")
    with pytest.raises(ValueError, match=rf"line 2: field '{gone}' is missing"):
        TASKS[name](source=str(path)).fingerprint()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("kv_retrieval", {"value": "v9"}, "does not hold its key"),
        ("passkey", {"target": "999"}, "does not hold its target"),
        ("longeval_lines", {"prompt": "no mark"}, "has no"),
        ("longbench_v2", {"answer": "E"}, "valid: A, B, C, D"),
        ("longbench_v2", {"choice_A": 3}, "must be text"),
    ],
)
def test_rows_that_make_no_sense_are_refused_before_a_model_is_loaded(tmp_path, name, changes, message):
    path = write(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=message):
        TASKS[name](source=str(path)).fingerprint()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_no_data_says_where_it_looked(tmp_path, monkeypatch, name):
    def unreachable(*args):
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "fetch", unreachable)
    with pytest.raises(ValueError, match=rf"{ROWS[name][0]}\.jsonl.*{tmp_path.name}/{TASKS[name].folder}"):
        TASKS[name](data=str(tmp_path)).fingerprint()
    with pytest.raises(ValueError, match="no file and no folder"):
        TASKS[name](source=str(tmp_path)).fingerprint()


def test_files_are_found_under_the_data_folder_also_cut_ones(tmp_path):
    folder = tmp_path / "babilong"
    folder.mkdir()
    write(folder, "babilong").rename(folder / "1k_qa1_first25.jsonl")
    task = TASKS["babilong"](data=str(tmp_path))
    assert (
        task.fingerprint()["records"] == 1 and task.fingerprint() == TASKS["babilong"](source=str(folder)).fingerprint()
    )
    assert "source" not in task.settings()


@pytest.mark.parametrize(
    ("name", "options"),
    [("babilong", {"subset": "qa6"}), ("passkey", {"max_new_tokens": 0}), ("passkey", {"question": "gone"}),
     ("longeval_lines", {"template": "xml"}), ("longbench_v2", {"max_length": 3})],
)  # fmt: skip
def test_illegal_settings_are_refused(name, options):
    with pytest.raises(ValueError, match="valid|at least"):
        TASKS[name](**options)


def test_long_prompts_are_cut_in_the_middle_only_where_asked(plain):
    changes = {"context": "Ann met Bob. " * 100}
    _, whole = plain("longbench_v2", changes)
    _, cut = plain("longbench_v2", changes, max_length=400)
    assert whole.meta["truncated_tokens"] == 0 and abs(len(cut.prompt_ids()) - 400) <= 2
    assert text_of(cut).startswith("Please read") and text_of(cut).endswith('here)".')


@pytest.mark.parametrize(
    ("name", "options", "records"),
    [
        ("babilong", {"subset": "qa5", "length": "2k"}, 20),
        ("kv_retrieval", {"keys": 140}, 20),
        ("passkey", {}, 5),
        ("longeval_lines", {"lines": 400}, 10),
    ],
)
def test_published_files_are_read_and_their_targets_are_in_the_prompts(data_folder, name, options, records):
    task = TASKS[name](data=str(data_folder), template="none", **options)
    made = list(task.samples(TOKENIZER))
    assert len(made) == records == task.fingerprint()["records"]
    assert all(sample.turns[0].references[0] in text_of(sample) for sample in made)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("babilong", {"target": ["office"]}, "line 1: target must be text or a number, found list"),
        ("babilong", {"question": None}, "line 1: question must be text, found NoneType"),
        ("babilong", {"input": 7}, "line 1: input must be text, found int 7"),
        (
            "kv_retrieval",
            {"value": True, "ordered_kv_records": [["k2", True]]},
            "line 1: value must be text or a number",
        ),
        ("kv_retrieval", {"ordered_kv_records": [["k2", "v2"], ["k3"]]}, "line 1: .* must be a list of pairs"),
        ("kv_retrieval", {"ordered_kv_records": {"k2": "v2"}}, "does not hold its key and value"),
        ("passkey", {"target": {"number": 1}}, "line 1: target must be text or a number, found dict"),
        ("passkey", {"input": ["The pass key is 12345."]}, "line 1: input must be text, found list"),
        ("longeval_lines", {"expected_number": "seven"}, "line 1: expected_number must be a number, found 'seven'"),
        ("longeval_lines", {"prompt": 3}, "line 1: prompt must be text, found int 3"),
        ("longbench_v2", {"answer": ["B"]}, r"answer=\['B'\]; valid: A, B, C, D"),
    ],
)
def test_answers_and_texts_of_another_type_are_refused_before_a_model_is_loaded(tmp_path, name, changes, said):
    with pytest.raises(ValueError, match=said):
        TASKS[name](source=str(write(tmp_path, name, **changes))).fingerprint()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answers": "Ann"}, "line 1: answers must be a list of at least one answer, found str 'Ann'"),
        ({"answers": []}, "line 1: answers must be a list of at least one answer"),
        ({"answers": ["Ann", None]}, "line 1: answers must be text or a number, found NoneType"),
        ({"context": None}, "line 1: context must be text"),
        ({"input": 3}, "line 1: input must be text"),
        ({"all_classes": None}, "line 1: all_classes must be a list"),
    ],
)
def test_rows_of_longbench_of_another_type_are_refused_before_a_model_is_loaded(tmp_path, changes, said):
    row = {"input": "?", "context": "x", "answers": ["Ann"], "all_classes": ["Ann"], "length": 1}
    (tmp_path / "trec.jsonl").write_text(json.dumps(row | changes) + "\n")
    with pytest.raises(ValueError, match=said):
        TASKS["longbench/trec"](source=str(tmp_path)).fingerprint()
