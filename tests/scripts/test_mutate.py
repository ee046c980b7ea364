"""The script that puts faults into the core draws mutants that are faults, and counts none that its tests do not find."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return load_script("mutate")


@pytest.fixture(scope="module")
def mutants(script):
    return script.drawn(6)


def test_thirty_mutants_are_drawn_and_a_seed_draws_the_same(script, mutants):
    assert len(mutants) == 30 and script.drawn(6) == mutants != script.drawn(7)
    assert len({(mutant.topic.name, mutant.path, mutant.line) for mutant in mutants}) == 30
    assert len({mutant.rule for mutant in mutants}) >= 8


def test_a_mutant_is_one_changed_expression_of_a_file_that_still_parses(mutants):
    for mutant in mutants:
        source = (ROOT / mutant.path).read_bytes()
        before, after = ast.parse(source), ast.parse(mutant.applied(source))
        assert ast.dump(before) != ast.dump(after), mutant.key
        changed = mutant.applied(source).splitlines()
        assert abs(len(changed) - len(source.splitlines())) <= 8, "a line, or one expression over several"


def test_tests_and_modules_that_are_named_are_there(script):
    assert [test for topic in script.TOPICS for test in topic.tests if not (ROOT / test).exists()] == []
    topic = script.TOPICS[0]
    with pytest.raises(ValueError, match="kvcompress/gone.py of topic 'selection' is no file"):
        list(script.candidates(replace(topic, modules=("kvcompress/gone.py",))))
    with pytest.raises(ValueError, match="has no nothing"):
        list(script.candidates(replace(topic, modules=("kvcompress/method/budget.py::nothing",))))


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("a < b", ["(a <= b)"]),
        ("x == 1", ["(x != 1)", "(x == 2)"]),
        ("a + 1", ["(a - 1)", "(a)", "(a + 2)"]),
        ("x.clamp(min=1)", ["(x)"]),
        ("x.amax(1)", ["(x.amin(1))"]),
        ("max(a, b)", ["(min(a, b))"]),
        ("a and b", ["(a or b)", "(a)"]),
        ("~held", ["(held)"]),
        ("torch.where(a, b, c)", ["(torch.where(a, c, b))"]),
        ("x[1:n]", ["(x[1 + 1:n])", "(x[1:n + 1])"]),
        ("x.sort(descending=True)", ["(x.sort(descending=False))"]),
        ("f(x, 3)", []),
    ],
)
def test_each_rule_changes_what_it_says(script, source, texts):
    node = ast.parse(source, mode="eval").body
    assert [f"({ast.unparse(ast.fix_missing_locations(change))})" for _, change in script.changes(node)] == texts


def test_refusals_and_messages_are_left_alone(script):
    text = "def f(a):\n    assert a > 1\n    if a < 2:\n        raise ValueError(f'{a + 1}')\n    return a >= 3\n"
    ((_, function),) = script.functions(ast.parse(text), "")
    assert [ast.unparse(node) for node in script.expressions(function) if list(script.changes(node))] == ["a >= 3"]


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (("failed", "tests/x.py::test_y", 3.0), "killed by tests/x.py::test_y (3 s)"),
        (("time limit", "", 9.0), "killed by the time limit (9 s)"),
        (("passed", "", 5.0), "survived (5 s)"),
    ],
)
def test_a_mutant_is_there_while_its_tests_run_and_gone_after_them(script, mutants, outcome, said, tmp_path):
    mutant, seen = mutants[0], []
    file = tmp_path / mutant.path
    file.parent.mkdir(parents=True)
    source = (ROOT / mutant.path).read_bytes()
    file.write_bytes(source)

    class Tree:
        folder = tmp_path

        def run(self, tests, limit):
            seen.append((tests, file.read_bytes()))
            return outcome

    assert script.tried(Tree(), mutant, 10.0) == said
    assert seen == [(mutant.topic.tests, mutant.applied(source))] and file.read_bytes() == source
