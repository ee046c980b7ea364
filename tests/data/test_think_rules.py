"""Thinking has a budget that is forced, can be switched off, and can be dropped from a conversation."""

from __future__ import annotations

import pytest
import torch
from composed import composed
from small_models import random_ids
from test_thinking import DECLARED, tokenizer_of

from kvcompress import compress, load
from kvcompress.data import think_rules, thinking
from kvcompress.data.task import Sample, Task, Turn
from kvcompress.data.think_rules import ThinkRules, prepared, without_thinking
from kvcompress.hook import generation
from kvcompress.method import Method
from kvcompress.method.budget import NotTogether
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.tasks import MultiQuestion, Needle

QWEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def write(monkeypatch, script, rules, stop=()):
    """Decode a model that writes `script` and then its last token over and over, under these rules."""
    count = iter(range(10**6))
    monkeypatch.setattr(generation, "pick", lambda *_: torch.tensor([script[min(next(count), len(script) - 1)]]))
    guide = rules.guide()
    return generation.generate(
        lambda *_: torch.zeros(1, 4), torch.zeros(1, 4), rules.most, stop, guides=[] if guide is None else [guide]
    )


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_that_uses_up_its_budget_is_closed_and_an_answer_of_full_length_follows(
    declared, opened, monkeypatch
):
    tokenizer = tokenizer_of(declared)
    script = ([] if opened else ids_of(tokenizer, "<think>")) + ids_of(tokenizer, "x")
    made = write(monkeypatch, script, ThinkRules(tokenizer, 4, budget=6, inside=opened))
    text = tokenizer.decode(made.tokens[0], skip_special_tokens=False)
    # the token that completes the model's own mark is the first of its thought
    assert text == ("" if opened else "<think>") + "x" * (6 if opened else 5) + "\n</think>\n\nxxxx"
    assert (made.finished, made.forced) == (["length"], [True])
    assert thinking.Output(thinking.decode(tokenizer, made.tokens[0]), opened).answer.strip() == "xxxx"


def test_a_thought_within_its_budget_is_left_alone(monkeypatch):
    tokenizer = tokenizer_of("special")
    script = [*ids_of(tokenizer, "<think>so</think>5"), tokenizer.eos_token_id]
    made = write(monkeypatch, script, ThinkRules(tokenizer, 4, budget=6), stop=(tokenizer.eos_token_id,))
    assert made.tokens[0] == script[:-1] and (made.finished, made.forced) == (["stop"], [False])


def test_an_answer_without_a_thought_is_as_long_as_without_a_budget(monkeypatch):
    tokenizer = tokenizer_of("several")
    made = write(monkeypatch, ids_of(tokenizer, "<tx"), ThinkRules(tokenizer, 5, budget=100))
    assert tokenizer.decode(made.tokens[0]).startswith("<tx") and 5 <= len(made.tokens[0]) <= 7


@pytest.mark.parametrize("declared", DECLARED)
def test_a_tasks_stop_token_sleeps_inside_a_thought_and_before_the_answer(declared, monkeypatch):
    tokenizer = tokenizer_of(declared)
    newline = ids_of(tokenizer, "\n")[0]
    script = ids_of(tokenizer, "<think>\na\nb</think>\n\nfive\nmore")
    rules = ThinkRules(tokenizer, 99, asleep=frozenset([newline]))
    made = write(monkeypatch, script, rules, stop=(newline,))
    assert thinking.decode(tokenizer, made.tokens[0]) == "<think>\na\nb</think>\n\nfive" and made.finished == ["stop"]


def test_rules_that_say_nothing_leave_a_sample_as_it_is():
    tokenizer = tokenizer_of("special")
    sample = next(iter(Needle(lengths=(700,), depths=(0.5,)).samples(tokenizer)))
    assert prepared(sample, tokenizer) == sample and prepared(sample, tokenizer).turns[0].guides() == []


def test_a_budget_adds_to_the_positions_that_a_sample_needs():
    tokenizer = tokenizer_of("special", "<think>\n")
    sample = next(iter(Needle(lengths=(700,), depths=(0.5,), answer_prefix=False).samples(tokenizer)))
    ruled = prepared(sample, tokenizer, budget=50)
    assert 50 < ruled.total_tokens() - sample.total_tokens() < 100 and ruled.protocol["think_tokens"] == 50
    assert ruled.turns[0].rules.inside


# ---------------------------------------------------------------------- switched off


@pytest.mark.parametrize(
    ("template", "end"),
    [(QWEN, "<think>\n\n</think>\n\n"), (QWEN.partition("{%- if")[0] + "<think>\n", "<think>\n\n</think>\n\n")],
    ids=["a switch", "always opened"],
)
def test_thinking_is_switched_off_by_the_templates_switch_or_an_empty_part(template, end):
    tokenizer = tokenizer_of("special")
    tokenizer.chat_template = template
    quiet = without_thinking(tokenizer)
    chat = [{"role": "user", "content": "2+3?"}]
    text = quiet.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith(end) and not thinking.template_opens(quiet)
    assert tokenizer.chat_template == template, "the tokenizer itself is as it was"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }} keep thinking {{ messages[0]['thinking'] }}"])
def test_thinking_that_cannot_be_switched_off_is_refused(template):
    tokenizer = tokenizer_of("special")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="think=off.*use think=keep"):
        without_thinking(tokenizer)


def test_switches_are_found_in_the_code_of_a_template_alone():
    assert think_rules.switches("thinking {% if enable_thinking %}{{ 'thinking' }}{% endif %}{{ m.thinking }}") == [
        "enable_thinking"
    ]


# ---------------------------------------------------------------------- dropped


@pytest.mark.parametrize(("opened", "kept"), [(False, "five"), (True, "\n</think>\n\nfive")])
def test_what_stays_of_an_answer_is_what_stands_behind_its_thought(opened, kept):
    tokenizer = tokenizer_of("special")
    own = "" if opened else "<think>"
    rules = ThinkRules(tokenizer, 9, inside=opened)
    assert tokenizer.decode(rules.kept(ids_of(tokenizer, f"{own}so</think>five"))) == kept
    assert tokenizer.decode(rules.kept(ids_of(tokenizer, f"{own}so, but wait"))) == kept.removesuffix("five")
    assert ThinkRules(tokenizer, 9).kept(ids_of(tokenizer, "five")) == ids_of(tokenizer, "five")


def test_a_conversation_without_thoughts_goes_on_as_if_the_answer_alone_had_been_written(monkeypatch):
    model, tokenizer = load("random/llama")
    thought, answer = (ids_of(tokenizer, text) for text in ("<think>so</think>", "five"))
    stop = tokenizer.eos_token_id
    context, first, second = (tuple(random_ids(1, n, n)[0].tolist()) for n in (30, 5, 6))
    turns = tuple(Turn(ids, 40, (stop,)) for ids in (first, second))
    sample = Sample("s", (context,), turns, {"question": "hidden", "turns": "session"}, {"prompt_last": "who?"})
    script = iter([*thought, *answer, stop, *answer, stop])
    monkeypatch.setattr(generation, "pick", lambda *_: torch.tensor([next(script)]))
    with compress(model, Method()) as session:
        Task.run(MultiQuestion(turns="session"), session, prepared(sample, tokenizer, "drop"))
        held = session.cache.positions(0)
        got = session.cache.keys_values(1)[0]
    with compress(model, Method()) as session:
        session.prefill(torch.tensor([[*context, *first, *answer, *second, *answer]]))
        assert torch.equal(held, session.cache.positions(0))
        torch.testing.assert_close(got, session.cache.keys_values(1)[0], atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- as settings of a cell


def spec(*overrides):
    return CellSpec.from_config(composed("model=random", "paths.data=null", *overrides))


def test_rules_of_thinking_are_part_of_a_runs_id_only_where_they_are_set():
    plain, budget = spec("task=needle"), spec("task=needle", "think_tokens=64")
    assert {"think", "think_tokens"}.isdisjoint(plain.identity) and plain.run_id != budget.run_id


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("task=needle", "think=drop"), "task=needle stays for a later one"),
        (("task=fidelity", "think_tokens=9"), "task=fidelity grades no answer"),
        (("task=needle", "think=off", "think_tokens=9"), "think_tokens=9 could limit"),
        (("task=needle", "think=maybe"), "think='maybe'; valid: keep, drop, off"),
        (("task=needle", "think_tokens=-1"), "think_tokens=-1; at least 0"),
    ],
)
def test_rules_that_say_nothing_of_a_task_are_refused(overrides, says):
    with pytest.raises((NotTogether, ValueError), match=says):
        spec(*overrides)
