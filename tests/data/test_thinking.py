"""What stands behind a thinking part is judged, and nothing else, whoever opens the mark and however it is tokenised."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvcompress.data import thinking
from kvcompress.data.lm_eval_requests import Completion, answer_text, reaches
from kvcompress.models.loading import load_tokenizer
from kvcompress.sweep.launcher.sample import SampleResult, row
from kvcompress.tasks import TASKS

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
DECLARED = ("special", "ordinary", "several")  # how a tokenizer holds the marks


def tokenizer_of(declared="special", opens="", mark="<think>"):
    """The byte tokenizer with thinking marks, and a chat template that ends in `opens`."""
    tokenizer = load_tokenizer("random/llama")
    if declared != "several":
        tokenizer.add_tokens([mark, thinking.MARKS[mark]], special_tokens=declared == "special")
    tokenizer.chat_template = CHAT + opens
    return tokenizer


def judged(task, sample, tokenizer, texts, end="stop"):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    out = {"tokens": ids, "finished": [end] * len(ids)}
    spec = SimpleNamespace(task=task, source="x", config=SimpleNamespace(batch=1))
    return row(spec, tokenizer, sample, SampleResult(out))


ROWS = {
    "reasoning/gsm8k": ("path", {"question": "2+3?", "answer": "5"}, "Final answer: \\boxed{5}"),
    "longeval_lines": ("source", {"prompt": "line <7>\nNow the record is over. Tell.", "expected_number": 7}, "<7>"),
    "kv_retrieval": ("source", {"ordered_kv_records": [["a", "1x"]], "key": "a", "value": "1x"}, "1x"),
    "longbench/hotpotqa": (
        "source",
        {"input": "who?", "context": "Text.", "answers": ["Ann Lee"], "all_classes": None, "length": 3},
        "Ann Lee",
    ),
    "longbench_v2": (
        "source",
        {"_id": "a", "difficulty": "easy", "length": "short", "question": "who?", "context": "Text.", "answer": "B"}
        | {f"choice_{letter}": letter * 3 for letter in "ABCD"},
        "The correct answer is (B)",
    ),
    "babilong": ("source", {"input": "Mary is in the garden.", "question": "Where is Mary?", "target": "garden"}, None),
    "rag": ("source", {"passages": ["One text.", "Two texts."], "question": "who?", "answers": ["Ann Lee"]}, "Ann Lee"),
}
BUILT_IN = {
    "needle": {"lengths": (700,), "depths": (0.5,)},
    "multi_question": {"lengths": (900,), "n_samples": 1, "n_questions": 2, "turns": "session"},
    "ruler/niah_single_1": {"lengths": (1500,), "n_samples": 1},
}


def task_and_sample(name, tokenizer, folder):
    options = dict(BUILT_IN.get(name, {}))
    right = None
    if name in ROWS:
        field, about, right = ROWS[name]
        path = folder / "rows.jsonl"
        path.write_text(json.dumps(about) + "\n", encoding="utf-8")
        options[field] = str(path)
    if name.startswith("longbench/"):
        options["template"] = "chat"
    if name == "needle":
        options["answer_prefix"] = False
    if name.startswith(("ruler", "multi")):
        options["answer_prefix"] = False
    task = TASKS[name](**options)
    sample = next(iter(task.samples(tokenizer)))
    return task, sample, [right] if right else task.gold(sample)


WAYS = [
    *((name, opens, "special") for name in (*ROWS, *BUILT_IN) for opens in ("", "<think>\n")),
    *(("reasoning/gsm8k", opens, declared) for opens in ("", "<think>\n") for declared in DECLARED[1:]),
]


@pytest.mark.parametrize(("name", "opens", "declared"), WAYS)
def test_an_answer_behind_a_thought_scores_one_and_a_cut_off_thought_zero(name, opens, declared, tmp_path):
    tokenizer = tokenizer_of(declared, opens)
    task, sample, right = task_and_sample(name, tokenizer, tmp_path)
    own = "" if opens else "<think>\n"
    whole = judged(task, sample, tokenizer, [f"{own}Hm, 8 or 9?\n</think>\n\n{one}" for one in right])
    cut = judged(task, sample, tokenizer, [f"{own}It is {one}, but wait" for one in right], "length")
    assert (whole["score"], whole["unfinished"]) == (1.0, 0.0)
    assert (cut["score"], cut["unfinished"]) == (0.0, 1.0)
    assert "</think>" in whole["out"]["text"][0], "the record keeps the whole output"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages[1].content }}", "<think> says nothing"]
)
def test_a_template_that_takes_no_single_message_opens_nothing(template):
    tokenizer = tokenizer_of("ordinary")
    tokenizer.chat_template = template
    assert not thinking.template_opens(tokenizer) and not thinking.begins_thinking(tokenizer, "Question: who?")


@pytest.mark.parametrize("declared", DECLARED)
def test_a_text_without_thoughts_is_what_it_was(declared):
    tokenizer = tokenizer_of(declared)
    ids = [*tokenizer("It is 5.", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert thinking.decode(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True) == "It is 5."


def test_other_special_tokens_are_left_out_beside_the_marks():
    tokenizer = tokenizer_of("special")
    ids = tokenizer("<think>so</think>5", add_special_tokens=False)["input_ids"]
    assert thinking.decode(tokenizer, [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]) == "<think>so</think>5"


@pytest.mark.parametrize("mark", thinking.MARKS)
def test_every_known_pair_of_marks_is_found_as_a_special_token(mark):
    tokenizer = tokenizer_of("special", mark=mark)
    text = f"{mark}so{thinking.MARKS[mark]}5"
    output = thinking.Output(thinking.decode(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert output.text == text and output.answer == "5" and not output.unfinished


def test_an_answer_that_the_prompt_begins_stands_behind_an_empty_thought():
    tokenizer = tokenizer_of("special", "<think>\n")
    task = TASKS["needle"](lengths=(700,), depths=(0.5,))
    sample = next(iter(task.samples(tokenizer)))
    assert "<think>\n\n</think>\n\nThe special magic number" in tokenizer.decode(sample.prompt_ids())
    assert judged(task, sample, tokenizer, [f" {sample.turns[0].references[0]}."])["score"] == 1.0


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("opened", [False, True])
def test_a_stop_string_inside_a_thought_stops_nothing(declared, opened):
    tokenizer = tokenizer_of(declared)
    text = ("" if opened else "<think>\n") + "First.\n\nThen.</think>\n\nThe answer is 5.\n\nMore"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stops = reaches(["\n\n"], tokenizer, opened)
    length = next(n for n in range(1, len(ids) + 1) if stops(ids[:n]))
    assert tokenizer.decode(ids[:length]).endswith("is 5.\n\n")
    asked = Completion((1,), 99, ("\n\n",), thinking=opened)
    assert answer_text(asked, ids[:length], tokenizer) == "The answer is 5."


def test_a_thought_that_is_cut_off_leaves_lm_eval_no_answer():
    tokenizer = tokenizer_of("special")
    ids = tokenizer("<think>It is 5", add_special_tokens=False)["input_ids"]
    assert answer_text(Completion((1,), 9, ("\n",)), ids, tokenizer) == ""


class Merged:
    """A tokenizer whose tokens are given strings: the end of a mark and what follows it are one token."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def encode(self, text, add_special_tokens=False):
        return [0]

    def decode(self, ids):
        return "".join(self.tokens[token] for token in ids)


def test_a_token_that_holds_the_end_of_a_mark_and_blank_space_stops_nothing():
    tokenizer = Merged("<think>", "so", "</think", ">\n\n", "It is 5.", "\n\n")
    stops = reaches(["\n\n"], tokenizer)
    assert [stops(list(range(n))) for n in range(1, 7)] == [False] * 5 + [True]


def test_lm_evals_model_class_scores_the_answer_behind_a_thought(monkeypatch):
    instances = pytest.importorskip("lm_eval.api.instance")
    import torch

    from kvcompress import load
    from kvcompress.hook import generation
    from kvcompress.lm_eval import CompressedLM

    model, tokenizer = load("random/llama")
    text = "<think>\nFirst.\n\nThen.</think>\n\nIt is 5."
    script = iter([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    monkeypatch.setattr(generation, "pick", lambda *_: torch.tensor([next(script)]))
    lm = CompressedLM(model, tokenizer=tokenizer, think_end_token="</think>")
    asked = instances.Instance("generate_until", {}, ("2+3?", {"until": ["\n\n"], "max_gen_toks": 60}), 0)
    assert lm.generate_until([asked]) == ["It is 5."]
    with pytest.raises(ValueError, match=r"think_end_token=65 is .*; valid: ids of </think>"):
        CompressedLM(model, tokenizer=tokenizer, think_end_token="65")
    with pytest.raises(ValueError, match=r"think_end_token='</so>'; valid: </think>"):
        CompressedLM("no/such-model", think_end_token="</so>")
