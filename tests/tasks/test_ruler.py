"""RULER: lengths, needles, published wording and scoring, files of questions."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvcompress.data import ruler
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep import config
from kvcompress.tasks import TASKS
from kvcompress.tasks.needle import Needle
from kvcompress.tasks.ruler import settings

TOKENIZER = byte_tokenizer()
NAMES = sorted(settings())
GENERATED = [name for name in NAMES if not name.startswith("qa")]
LENGTH = 3000


def samples(name, count=2, **options):
    options = {"lengths": (LENGTH,), "n_samples": count, "words": "builtin", "template": "none"} | options
    return list(TASKS[f"ruler/{name}"](**options).samples(TOKENIZER))


def text_of(sample):
    return TOKENIZER.decode(sample.prompt_ids(), skip_special_tokens=True)


def total(sample):
    return len(sample.prompt_ids()) + sample.turns[0].max_new_tokens


def squad(folder, **changes):
    """A file of two articles with three paragraphs each, and a question that has no answer."""

    def paragraph(i):
        text = f"Passage {i} says that the colour of house {i} is shade{i}. " + "It is a quiet street. " * 3
        asked = {"question": f"What colour is house {i}?", "answers": [{"text": f"shade{i}"}, {"text": f"hue{i}"}]}
        return {"context": text, "qas": [asked | {"is_impossible": False}]}

    data = {"data": [{"paragraphs": [paragraph(3 * a + p) for p in range(3)]} for a in range(8)]}
    data["data"][0]["paragraphs"][0]["qas"].append({"question": "Nothing?", "answers": [], "is_impossible": True})
    path = folder / "squad.json"
    path.write_text(json.dumps(data | changes))
    return path


def hotpot(folder):
    rows = [
        {"question": f"Q{i}?", "answer": f"A{i}", "context": [[f"T{i}.{j}", ["One. ", f"A{i}."]] for j in range(2)]}
        for i in range(30)
    ]
    path = folder / "hotpotqa.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", GENERATED)
def test_a_prompt_and_its_answer_fill_the_length_to_the_last_unit_of_hay(name):
    for sample in samples(name):
        assert total(sample) <= LENGTH
        # a line of noise or a needle is long in bytes: what is left is less than one
        discrete = settings()[name].get("haystack") in ("noise", "needle") or name == "vt"
        assert total(sample) >= (LENGTH - 150 if discrete else 0.95 * LENGTH)


@given(length=st.integers(2400, 6000), name=st.sampled_from(GENERATED), chat=st.booleans(), seed=st.integers(0, 9))
@examples(max_examples=25, deadline=None)
def test_lengths_hold_for_any_length_task_and_template(length, name, chat, seed):
    if name == "cwe":  # longer ones hold hundreds of common words: too many for a tokenizer of bytes
        length = min(length, ruler.SHORT - 1)
    (sample,) = samples(name, 1, lengths=(length,), template="chat" if chat else "none", seed=seed)
    assert 0.93 * length <= total(sample) <= length
    assert sample.protocol["template"] == ("chat" if chat else "none")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("niah")])
def test_every_needle_stands_verbatim_once(name):
    about = settings()[name]
    for sample in samples(name):
        text = text_of(sample)
        needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", text)
        hay = sample.meta["units"] if about["haystack"] == "needle" else 0
        n_keys, n_values = about.get("n_keys", 1), about.get("n_values", 1)
        assert len(needles) == n_keys * n_values + hay
        assert len({value for _, value in needles}) == len(needles)
        question = text[text.rindex("\nWhat ") :]
        keys = Counter(key for key, _ in needles)
        asked = [key for key in keys if f" {key} " in question or f" {key}," in question]
        assert len(asked) == about.get("n_queries", 1) and all(keys[key] == n_values for key in asked)
        assert sorted(value for key, value in needles if key in asked) == sorted(sample.turns[0].references)
        pattern = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}[about["values"]]
        assert all(re.fullmatch(pattern, value) for _, value in needles)


def test_wording_is_that_of_the_needle_task_where_both_ask_the_same():
    (ours,) = samples("niah_single_1", 1)
    (theirs,) = Needle(lengths=(LENGTH,), depths=(0.5,), template="none").samples(TOKENIZER)

    def frame(sample):
        text = text_of(sample)
        key = re.search(r"magic number for (\S+) mentioned", text)[1]
        return text[: text.index("\n") + 1], text[text.rindex("\nWhat") :].replace(key, "KEY")

    assert frame(ours) == frame(theirs)


@pytest.mark.parametrize("name", GENERATED)
def test_samples_are_the_same_for_the_same_seed_and_others_for_another(name):
    first, again, other = (samples(name, 2, seed=seed) for seed in (3, 3, 4))
    assert [s.prompt_ids() for s in first] == [s.prompt_ids() for s in again]
    assert len({tuple(s.prompt_ids()) for s in (*first, *other)}) == 4
    assert first[0].turns[0].references != other[0].turns[0].references


@pytest.mark.parametrize("name", GENERATED)
def test_hidden_and_seen_questions_give_the_same_token_ids(name):
    (seen,), (hidden,) = samples(name, 1), samples(name, 1, question="hidden")
    assert seen.prompt_ids() == hidden.prompt_ids() and not seen.turns[0].ids
    question = TOKENIZER.decode(hidden.turns[0].ids)
    assert question.startswith(("What ", "Question:")) and question == text_of(seen)[-len(question) :]


def test_a_chain_of_variables_can_be_followed():
    (sample,) = samples("vt", 1)
    before, _, own = text_of(sample).rpartition("Memorize and track")
    assert before.count("Memorize and track") == 1 and before.endswith("\n\n")  # one worked example
    value = re.search(r"assigned the value (\d+) in", own)[1]
    statements = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", own)
    found, names = [], {value}
    for name, of in statements:
        if of in names:
            names.add(name)
            found.append(name)
    assert tuple(found) == sample.turns[0].references and len(found) == 5
    assert own.endswith(f"5 variables are assigned the value {value}, they are: ")


@pytest.mark.parametrize(("length", "common", "rare"), [(3000, 6, 1), (9000, 30, 3)])
def test_common_words_come_as_often_as_published_and_rare_ones_less(length, common, rare):
    (sample,) = samples("cwe", 1, lengths=(length,))
    own = text_of(sample).rpartition("Below is")[2]
    context = own[own.index("1. ") : own.index("\nQuestion")]
    counts = Counter(re.findall(r"\d+\. ([^\d]+?)(?= \d|$)", context))
    answer = sample.turns[0].references
    assert len(answer) == 10 and {counts[word] for word in answer} == {common}
    assert {n for word, n in counts.items() if word not in answer} <= {rare}
    assert len(counts) == sample.meta["units"]


def test_the_three_most_frequent_coded_words_are_the_answer_at_every_length():
    about = settings()["fwe"]
    writer = ruler.FrequentWords(about, 40)
    for units in (*range(writer.least, writer.least + 60), 500):
        text = writer.write(0, random.Random(units), units)
        context = text.text[text.text.index("coded words. ") + 13 : text.text.index("\nQuestion")]
        counts = Counter(context.split())
        del counts["..."]
        (_, third), (_, fourth) = counts.most_common(4)[2:]
        assert {word for word, _ in counts.most_common(3)} == set(text.references) and third > fourth
    assert sum(counts.values()) > 150


def test_questions_come_with_their_documents_in_prompts_that_fit(tmp_path):
    squad(tmp_path)
    for sample in samples("qa_1", 3, source=str(tmp_path / "squad.json"), lengths=(1600,)):
        text = text_of(sample)
        number = re.search(r"What colour is house (\d+)\?", text)[1]
        assert text.count(f"house {number} is shade{number}.") == 1
        assert sample.turns[0].references == (f"shade{number}", f"hue{number}")
        assert re.findall(r"Document (\d+):", text) == [str(i + 1) for i in range(sample.meta["units"])]
        assert total(sample) <= 1600 and text.endswith("? Answer:")
    hotpot(tmp_path)
    (sample,) = samples("qa_2", 1, source=str(tmp_path / "hotpotqa.json"), lengths=(900,))
    assert sample.turns[0].references == ("A0",) and all(f"T0.{j}\nOne. A0." in text_of(sample) for j in range(2))


def test_scores_are_shares_of_references_and_any_reference_for_questions(tmp_path):
    (sample,) = samples("niah_multivalue", 1)
    task, found = TASKS["ruler/niah_multivalue"](), sample.turns[0].references
    assert task.score(sample, {"text": [f"{found[0]} and {found[2]}\x00"]})["score"] == 0.5
    assert task.score(sample, {"text": [" ".join(found)]})["score"] == 1.0
    path = str(squad(tmp_path))
    (sample,) = samples("qa_1", 1, source=path, lengths=(1600,))
    task = TASKS["ruler/qa_1"](source=path)
    assert task.score(sample, {"text": ["It is HUE0."]})["score"] == 1.0
    assert task.score(sample, {"text": ["no idea"]})["score"] == 0.0
    words = samples("vt", 1)[0]
    assert TASKS["ruler/vt"]().score(words, {"text": [words.turns[0].references[0].lower()]})["score"] == 0.2


def test_no_questions_says_where_it_looked_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"ruler/qa_1: looked for .*squad\.json.*dev-v2"):
        TASKS["ruler/qa_1"](data=str(tmp_path)).fingerprint()
    with pytest.raises(ValueError, match=r"paths\.data \(not set\)"):
        TASKS["ruler/qa_2"]().fingerprint()


@pytest.mark.parametrize("content", ["{", "[1]", '{"data": [{"paragraphs": [{}]}]}', '{"data": []}'])
def test_a_broken_file_of_questions_is_refused_by_name(tmp_path, content):
    path = tmp_path / "squad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"squad\.json"):
        TASKS["ruler/qa_1"](source=str(path)).fingerprint()


def test_lengths_that_hold_no_prompt_are_refused():
    with pytest.raises(ValueError, match="ruler/vt: task.lengths 300"):
        samples("vt", 1, lengths=(300,))


@pytest.mark.parametrize(
    "options",
    [{"question": "gone"}, {"template": "xml"}, {"essays": "x"}, {"words": "x"}, {"n_samples": 0}, {"lengths": ()},
     {"lengths": (9, 9)}, {"source": "file.json"}],
)  # fmt: skip
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match="valid|at least|reads? a file"):
        TASKS["ruler/vt"](**options)


@given(
    start=st.integers(0, 50), slope=st.integers(1, 90), limit=st.integers(60, 9000), guess=st.integers(0, 3000),
    wobble=st.integers(0, 20),
)  # fmt: skip
def test_the_search_finds_the_largest_number_that_fits(start, slope, limit, guess, wobble):
    def size(n):
        return start + slope * n + (n * n * wobble) // 100

    if size(1) > limit:
        with pytest.raises(ValueError, match="take"):
            ruler.largest(size, limit, 1, guess)
        return
    found = ruler.largest(size, limit, 1, guess)
    assert size(found) <= limit < size(found + 1)


def test_the_suite_is_the_thirteen_published_tasks():
    import kvcompress.conf

    folder = Path(str(kvcompress.conf.__file__)).parent
    expanded = config.expand_suites(["task=ruler"], folder)
    assert sorted(expanded[1].removeprefix("task=").split(",")) == [f"ruler/{name}" for name in NAMES]
    assert len(NAMES) == 13


def test_published_multikey_prompts_have_our_wording(data_folder):
    line = (data_folder / "ruler" / "niah_multikey_3_4096_first40.jsonl").read_text(encoding="utf-8").split("\n")[0]
    theirs = json.loads(line)["input"]
    (sample,) = samples("niah_multikey_3", 1)

    def blank(text):
        return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "UUID", text).strip()

    ours = blank(text_of(sample)).split("\n")
    assert set(ours) == set(blank(theirs).split("\n"))
    assert (ours[0], ours[-1]) == (blank(theirs).split("\n")[0], blank(theirs).split("\n")[-1])
