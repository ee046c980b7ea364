"""LongBench: published prompts, truncation and settings, from published records."""

from __future__ import annotations

import json
from functools import cache

import pytest
import yaml
from composed import composed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvcompress import load
from kvcompress.data import hub, prompts
from kvcompress.data.task import Sample
from kvcompress.sweep import components, config
from kvcompress.tasks import TASKS
from kvcompress.tasks.longbench import settings

SETS = sorted(settings())
CHAT = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@cache
def bpe(chat=None):
    """A small byte-level tokenizer with a beginning-of-sequence token, made here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the context and the question of the passage", "Question: Answer:"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=4096)
    made.chat_template = chat
    return made


def row(**changes):
    base = {"input": "Who?", "context": "Ann met Bob. " * 60, "answers": ["Ann"], "all_classes": None, "length": 120}
    return base | changes


def write(folder, name, *rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


class Remembering:
    """A tokenizer that tokenises the same text once: most of the time of the comparison below."""

    def __init__(self, tokenizer):
        self.tokenizer, self.text, self.ids = tokenizer, None, None

    def __call__(self, text, truncation=False):
        if text != self.text:
            self.text, self.ids = text, self.tokenizer(text, truncation=truncation)
        return self.ids

    def decode(self, ids, **options):
        return self.tokenizer.decode(ids, **options)


def official(tokenizer, text, limit):
    """LongBench's pred.py, written down once more."""
    ids = tokenizer(text, truncation=False)["input_ids"]
    if len(ids) > limit:
        half = int(limit / 2)
        return tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(
            ids[-half:], skip_special_tokens=True
        )
    return text


@pytest.mark.data
def test_settings_are_the_published_ones(data_folder):
    prompts_file = json.loads((data_folder / "longbench_v1/config/dataset2prompt.json").read_text())
    lengths = json.loads((data_folder / "longbench_v1/config/dataset2maxlen.json").read_text())
    stated = yaml.safe_load((data_folder / "longbench_prompts.yaml").read_text())["datasets"]
    assert set(SETS) == set(lengths)
    for name in SETS:
        about = settings()[name]
        assert about["template"] == prompts_file[name] and about["max_new_tokens"] == lengths[name]
        assert (about["metric"], about["chat"]) == (stated[name]["metric"], stated[name]["chat_template"])
        assert about["first_line"] == stated[name]["first_line_only"]
        assert f"longbench/{name}" in TASKS and TASKS[f"longbench/{name}"].metric == about["metric"]


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("which", ["smollm2", "gemma3-270m", "bpe"])
def test_prompts_and_truncation_are_the_official_ones_on_every_record(which, data_folder):
    """All records of all sets at three limits: byte for byte the template filled in, then the official cut."""
    if which == "bpe":
        tokenizer = bpe()
    else:
        try:
            tokenizer = load(which)[1]
        except OSError as error:
            pytest.skip(str(error))
    seen, tokenizer = 0, Remembering(tokenizer)
    for name in SETS:
        for record in map(json.loads, open(data_folder / "longbench_v1/mini" / f"{name}.jsonl", encoding="utf-8")):
            text = settings()[name]["template"].format(**record)
            for limit in (2000, 3500, 7500):
                assert prompts.cut_text(tokenizer, text, limit)[0] == official(tokenizer, text, limit)
            head, _, rest = settings()[name]["template"].partition("{context}")
            assert head + record["context"] + rest.format(input=record["input"]) == text
            seen += 1
    assert seen == 237


def first(task, tokenizer) -> Sample:
    return next(iter(task.samples(tokenizer)))


@pytest.mark.parametrize("chat", [None, CHAT])
@pytest.mark.parametrize("question", ["seen", "hidden"])
@pytest.mark.parametrize("truncation", ["text", "tokens"])
@pytest.mark.parametrize("max_length", [600, 2000])
def test_a_sample_is_the_wrapped_prompt_and_its_question_can_be_held_back(
    tmp_path, chat, question, truncation, max_length
):
    """The ids do not depend on whether the question is hidden; exact truncation is exact and keeps the wrapper."""
    path, tokenizer = write(tmp_path, "qasper", row()), bpe(chat)
    options = {"source": str(path), "truncation": truncation, "max_length": max_length}
    sample = first(TASKS["longbench/qasper"](question=question, **options), tokenizer)
    whole = first(TASKS["longbench/qasper"](question="seen", **options), tokenizer)
    assert sample.prompt_ids() == whole.prompt_ids()
    text = tokenizer.decode(sample.prompt_ids(), skip_special_tokens=True)
    assert text.endswith("Question: Who?\n\nAnswer:" + ("</u><a>" if chat else ""))
    assert text.startswith("<u>You are" if chat else "You are")
    if max_length == 2000:
        expected = settings()["qasper"]["template"].format(**row())
        assert text == (f"<u>{expected}</u><a>" if chat else expected)
        assert sample.meta["truncated_tokens"] == 0
    else:
        assert sample.meta["truncated_tokens"] > 0
        if truncation == "tokens":
            assert len(sample.prompt_ids()) == max_length
    if question == "hidden":
        hidden = tokenizer.decode(sample.turns[0].ids, skip_special_tokens=True)
        assert "Answer the question based on the above article" in hidden
        assert hidden.endswith("Answer:" + ("</u><a>" if chat else ""))
    assert sample.protocol["template"] == ("chat" if chat else "none")


@pytest.mark.parametrize("truncation", ["text", "tokens"])
def test_a_question_that_was_cut_cannot_be_held_back(tmp_path, truncation):
    path = write(tmp_path, "qasper", row())
    task = TASKS["longbench/qasper"](source=str(path), question="hidden", max_length=200, truncation=truncation)
    with pytest.raises(ValueError, match="question=hidden.*raise max_length"):
        first(task, bpe())


def test_sets_without_a_chat_template_stay_without_one_unless_asked(tmp_path):
    write(tmp_path, "trec", row(all_classes=["Ann", "Bob"]))
    for template, expected in (("official", "none"), ("auto", "chat"), ("chat", "chat"), ("none", "none")):
        task = TASKS["longbench/trec"](source=str(tmp_path), template=template)
        assert first(task, bpe(CHAT)).protocol["template"] == expected
    with pytest.raises(ValueError, match="no chat template"):
        first(TASKS["longbench/trec"](source=str(tmp_path), template="chat"), bpe())


def test_samsum_ends_at_a_line_break_but_not_at_once(tmp_path):
    task = TASKS["longbench/samsum"](source=str(write(tmp_path, "samsum", row())))
    turn = first(task, bpe()).turns[0]
    assert turn.stop == tuple(bpe().encode("\n", add_special_tokens=False)[-1:]) and turn.min_new_tokens == 1
    assert first(TASKS["longbench/qmsum"](source=str(write(tmp_path, "qmsum", row()))), bpe()).turns[0].stop == ()


def test_gold_answers_score_one_and_empty_ones_nothing(tmp_path):
    gold = {"retrieval": "Paragraph 3", "retrieval_zh": "段落3", "count": "3"}
    for name in SETS:
        answer = gold.get(settings()[name]["metric"], "return a value")
        path = write(tmp_path, name, row(answers=[answer], all_classes=[answer, "other"]))
        task = TASKS[f"longbench/{name}"](source=str(path))
        sample = first(task, bpe())
        assert task.score(sample, {"text": [answer]})["score"] == pytest.approx(1.0, abs=1e-6)
        assert task.score(sample, {"text": [""]})["score"] == 0.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "a"}\n', "line 1: field 'context' is missing"),
        (json.dumps(row()) + "\n{broken\n", "line 2: no JSON"),
        ("[1]\n", "a JSON object is needed"),
        ("", "holds no record"),
    ],
)
def test_a_broken_file_is_named_with_its_line_before_a_model_is_loaded(tmp_path, content, message):
    path = tmp_path / "qasper.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        TASKS["longbench/qasper"](source=str(path)).fingerprint()


def test_no_data_says_where_it_looked(tmp_path, monkeypatch):
    def unreachable(*args):
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "fetch", unreachable)
    with pytest.raises(ValueError, match=r"qasper\.jsonl.*longbench_v1.*Hub"):
        TASKS["longbench/qasper"](data=str(tmp_path)).fingerprint()
    with pytest.raises(ValueError, match="no file and no folder"):
        TASKS["longbench/qasper"](source=str(tmp_path)).fingerprint()


@pytest.mark.parametrize(
    "options", [{"truncation": "left"}, {"template": "xml"}, {"question": "gone"}, {"max_length": 3}]
)
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match="valid|at least"):
        TASKS["longbench/qasper"](**options)


def test_extended_sets_are_those_of_longbench_e():
    with pytest.raises(ValueError, match="LongBench-E has no narrativeqa"):
        TASKS["longbench/narrativeqa"](extended=True)
    assert sum(about["extended"] for about in settings().values()) == 13


def test_scores_of_longbench_e_are_told_by_length_beside_the_mean(tmp_path):
    """The published borders: 3,999 words are 0-4k, 4,000 are 4-8k and 8,000 are 8k+; a bucket may be empty."""
    path = write(tmp_path, "qasper_e", *(row(length=length) for length in (0, 3999, 4000, 7999, 8000, 20000)))
    task = TASKS["longbench/qasper"](source=str(path), extended=True)
    samples = list(task.samples(bpe()))
    rows = [{"score": score, "meta": s.meta} for s, score in zip(samples, (1.0, 0.0, 0.0, 0.0, 0.5, 1.0), strict=True)]
    buckets = {"n_0-4k": 2, "n_4-8k": 2, "n_8k+": 2, "score_0-4k": 0.5, "score_4-8k": 0.0, "score_8k+": 0.75}
    assert task.summarise(rows) == buckets
    assert task.summarise(rows[:2]) == buckets | {"n_4-8k": 0, "n_8k+": 0, "score_4-8k": None, "score_8k+": None}
    assert TASKS["longbench/qasper"]().summarise(rows) == {}


def test_a_length_that_is_none_is_refused_where_scores_are_told_by_it(tmp_path):
    path = write(tmp_path, "qasper_e", row(), row(length="long"))
    with pytest.raises(ValueError, match="qasper_e.jsonl line 2: length must be a whole number of words, found 'long'"):
        TASKS["longbench/qasper"](source=str(path), extended=True).fingerprint()


def test_longbench_e_is_a_suite_of_the_sets_that_have_it():
    folder = config_folder()
    names = {path.stem for path in (folder / "task" / "longbench_e").glob("*.yaml")}
    assert names == {name for name, about in settings().items() if about["extended"]}
    task = components.build_task(composed("task=longbench_e/qasper", "method=full"))
    assert task == TASKS["longbench/qasper"](extended=True, data=task.data)


def test_a_suite_is_all_its_data_sets():
    folder = config_folder()
    expanded = config.expand_suites(["task=longbench,needle", "method=full"], folder)
    assert expanded[0] == "-m" and expanded[1].count("longbench/") == 21 and expanded[1].endswith(",needle")
    assert config.expand_suites(["task=needle", "method=full"], folder) == ["task=needle", "method=full"]


def test_settings_of_a_swept_group_belong_to_its_cells():
    """Hydra composes what is common with the group's default first, which may not have the setting."""
    folder = config_folder()
    common = ["-m", "task=longbench/qasper,longbench/trec", "task.max_length=2000", "budget=0.5", "model=random/llama"]
    expected = ["-m", "task=longbench/qasper,longbench/trec", "task.max_length=choice(2000)", "budget=0.5"]
    assert config.expand_suites(common, folder) == [*expected, "model=random/llama"]
    one = ["task=longbench/qasper", "task.max_length=2000", "method.window=16"]
    assert config.expand_suites(one, folder) == one
    lists = config.expand_suites(
        ["-m", "task=needle,ruler/vt", "task.lengths=[100,200]", "task.question=seen,hidden"], folder
    )
    assert lists[2:] == ["task.lengths=choice([100,200])", "task.question=seen,hidden"]


def config_folder():
    from pathlib import Path

    import kvcompress.conf

    return Path(str(kvcompress.conf.__file__)).parent
