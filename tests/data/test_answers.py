"""Final answers are found where they are given, and judged equal when they are."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from kvcompress.data.grading import as_number, equal, final_answer, grade, last_box

GOLDS = [
    r"\left( 3, \frac{\pi}{2} \right)",
    r"\frac{14}{3}",
    "p - q",
    r"\text{Evelyn}",
    r"3\sqrt{13}",
    r"6 - 5i",
    r"[-2,7]",
    r"(-\infty, 2) \cup (3, \infty)",
    r"90^\circ",
    r"\$32,348",
    r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
    "2516_8",
    r"x^3 + 3x - 6",
    r"11\sqrt2",
    "1,-2",
    r"\text{(C)}",
    "10\\%",
    "-125",
    "5.4 \\text{ cents}",
    "70000",
]
FORMS = [
    "We multiply.\n\nFinal answer:  \\boxed{%s}",
    "We multiply.\n$%s$",
    "We multiply.\n%s",
    "Final Answer: The final answer is $%s$. I hope it is correct.",
    "**Final answer:** $%s$.",
    "so that\n\\[%s\\]",
    "Then $x = \\boxed{%s}$, since it is positive.",
    "<think>\nIs it \\boxed{0}? No.\n</think>\nThe answer is $%s$",
]


@pytest.mark.parametrize("gold", GOLDS)
def test_the_expected_answer_is_right_however_it_is_given(gold):
    assert [form for form in FORMS if not grade(gold, form % gold).right] == []


@pytest.mark.parametrize("gold", GOLDS)
def test_another_answer_is_wrong(gold):
    for other in GOLDS:
        assert other == gold or not grade(gold, f"\\boxed{{{other}}}").right
    number = re.search(r"\d+(?=\D*$)", gold)
    if number is not None and "5.4" not in gold:
        changed = gold[: number.start()] + str(int(number.group()) + 1) + gold[number.end() :]
        assert not grade(gold, f"\\boxed{{{changed}}}").right


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\dfrac12"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\frac{14}{3}", r"x = \frac{14}{3}"),
        (r"\text{Evelyn}", "Evelyn"),
        ("(3, 4)", r"\left(3,\,4\right)"),
        ("25", "025"),
        ("2000000", "2 million"),
        ("1500000", "\\$1.5 million dollars"),
        ("even", "Even"),
    ],
)
def test_equal_is_not_the_same_text(gold, answer):
    assert equal(gold, answer)


@pytest.mark.parametrize(
    "answer",
    ["1200", "1,200", "$1,200", "1200.00", "1200 dollars", "1,200 miles per hour", "\\$1{,}200", "1200\\text{ km}"]
    + ["+1200", "1200 dollars.", "x = 1200", "3 \\times 400 = 1200", "1200 m", "**1200**"],
)
def test_numbers_are_equal_with_commas_signs_decimals_and_units(answer):
    """In the forms that grade-school answers take, behind `####`, in a box, and after "the answer is"."""
    for form in ("So.\n#### %s", "\\boxed{%s}", "So the answer is %s", "It adds up.\n%s"):
        assert grade("1200", form % answer).right
        assert not grade("1201", form % answer).right
        assert not grade("-1200", form % answer).right


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("18", "18.5"), ("18", "(18, 3)"), ("18", "18x"), ("2", "2\\pi"), ("2", "2 pi"), ("12", "12 or 13"), ("3", "3^2")]
    + [("3", "\\frac{3}{2}"), ("-5", "5"), ("5", "-5 degrees"), ("1.5", "15"), ("18", "eighteen"), ("18", "1,8")]
    + [("2", "2 million"), ("12", "1 2"), ("5", "x = 4, y = 5"), ("5", "x = 4 or x = 5"), ("5", "not 5")],
)
def test_a_number_that_is_part_of_something_else_is_not_the_answer(gold, answer):
    for form in ("#### %s", "\\boxed{%s}", "The answer is %s."):
        assert not grade(gold, form % answer).right


def test_negative_and_decimal_numbers_are_read():
    assert as_number("- 5 degrees") == -5 and as_number("2.50 dollars") == 2.5 and as_number("1,234,567") == 1234567
    assert as_number("") is None and as_number("dollars") is None and as_number("1 2") is None


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("   \n", {}),
        ("so we have 18 and then", {"finished": False}),
        ("The answer is 18", {"finished": False}),  # may go on: 18 or 180
        ("<think>\n\\boxed{18}", {}),
        ("\\boxed{18}", {"thinking": True}),
        ("18 </think>", {"thinking": True}),
        ("</think> The answer is \\boxed{18", {}),
        ("\\boxed{18} but then \\boxed{\\frac{1", {"finished": False}),
        ("\\boxed{}", {}),
        ("<think>Hm.</think> Wait. <think>\\boxed{18}", {}),
        ("Hm.</think> Wait. <think>\\boxed{18}", {"thinking": True}),
    ],
)
def test_what_is_unfinished_or_empty_has_no_answer(text, options):
    verdict = grade("18", text, **options)
    assert not verdict.right and verdict.answer is None


def test_an_answer_that_was_given_before_the_limit_counts():
    assert grade("18", "Final answer: \\boxed{18}\nLet me check that: 3 times", finished=False).right
    assert grade("18", "#### 18\nLet me", finished=False).right
    assert grade("18", "hm </think> \\boxed{18}", finished=False, thinking=True).right


def test_the_last_box_with_its_braces_matched():
    assert last_box(r"\boxed{1} and \boxed{\frac{a}{b_{2}}}.") == r"\frac{a}{b_{2}}"
    assert last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_box(r"$\boxed 7$") == "7" and last_box(r"\fbox{x}") == "x"
    assert last_box("none") is None and last_box(r"\boxed{1") == ""
    assert final_answer("The answer is 3.\nFinal answer: 4.") == "4"


@pytest.mark.parametrize(
    "reason", [", since 2 + 2 = 4", " because 2 + 2 = 4", ", so she has 1 left.", ", which is odd"]
)
def test_what_follows_an_answer_as_its_reason_is_no_part_of_it(reason):
    assert grade("3", "The answer is 3" + reason).right
    assert not grade("4", "The answer is 3" + reason).right
    assert not grade("1", "Final answer: $3$" + reason).right


@pytest.mark.parametrize("form", ["%s", "\\boxed{%s}", "#### %s", "The answer is %s", "x = %s"])
@pytest.mark.parametrize(
    "text", ["1" * 6000, "0." + "3" * 6000, "{" * 6000 + "18" + "}" * 6000, "9!" * 6000, "18 " * 6000]
)
def test_an_output_that_repeats_itself_without_end_is_wrong_and_no_fault(form, text):
    """Python converts 4,300 digits at most, and a parser takes its whole time limit over deep nesting."""
    assert not grade("18", form % text).right and not grade("\\frac{1}{3}", form % text).right


def test_comparisons_work_outside_the_main_thread():
    """math-verify's time limit is a signal, which only the main thread may set."""
    found = []
    thread = threading.Thread(target=lambda: found.append(equal(r"\frac{3}{7}", r"\frac{6}{14}")))
    thread.start()
    thread.join()
    assert found == [True]


def _rows(name):
    folder = os.environ.get("KVCOMPRESS_DATA")
    path = Path(folder) / "reasoning" / name if folder else None
    if path is None or not path.is_file():
        pytest.skip(f"KVCOMPRESS_DATA has no reasoning/{name}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _data(name):
    return [row["answer"] for row in _rows(name)]


@pytest.mark.data
def test_all_expected_answers_of_math500_are_right_and_their_neighbours_wrong():
    golds = _data("math500.jsonl")
    assert len(golds) == 500
    for form in FORMS:
        assert [gold for gold in golds if not grade(gold, form % gold).right] == []
    others = [(gold, golds[(i + 7) % 500]) for i, gold in enumerate(golds) if gold != golds[(i + 7) % 500]]
    assert len(others) > 480
    assert [pair for pair in others if grade(pair[0], f"\\boxed{{{pair[1]}}}").right] == []
    assert not any(grade(gold, FORMS[1] % gold, finished=False).right for gold in golds)


@pytest.mark.data
def test_all_expected_answers_of_gsm8k_are_right():
    golds = [answer.rpartition("####")[2].strip() for answer in _data("gsm8k_test.jsonl")]
    assert len(golds) == 1319
    for form in ("#### %s", "The answer is $%s.", "\\boxed{%s \\text{ miles}}", "She pays %s dollars.", "= %s.0"):
        assert [gold for gold in golds if not grade(gold.replace(",", ""), "Well.\n" + form % gold).right] == []


@pytest.mark.data
def test_published_solutions_of_models_are_judged_as_their_publishers_judged_them():
    """240 solutions to the first problems of GSM8K, a third of them right, with what they were found to be."""
    rows = _rows("gsm8k_example_model_solutions_first60.jsonl")
    judged = [
        (row["ground_truth"].rpartition("A:")[2].strip().replace(",", ""), solution)
        for row in rows
        for solution in row.values()
        if isinstance(solution, dict)
    ]
    assert len(judged) == 240 and sum(solution["is_correct"] for _, solution in judged) == 84
    assert [s for gold, s in judged if grade(gold, s["solution"]).right != s["is_correct"]] == []
