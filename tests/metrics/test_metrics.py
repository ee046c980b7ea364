"""Metrics give the scores that were published with their predictions."""

from __future__ import annotations

import csv
import json

import evaluate
import pytest

from kvcompress import metrics
from kvcompress.metrics import words
from kvcompress.tasks import TASKS


@pytest.mark.data
@pytest.mark.slow
def test_published_predictions_get_their_published_scores(data_folder):
    """21 data sets, to the second decimal, through the tasks' own post-processing."""
    checked = 0
    with open(data_folder / "longbench_preds" / "expected_scores.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["code_sim_backend"] not in ("-", "difflib"):
                continue
            task = TASKS[f"longbench/{row['dataset']}"]()
            lines = [json.loads(line) for line in open(data_folder / row["file"], encoding="utf-8")]
            classes = lines[-1]["all_classes"] or ()
            total = 0.0
            for line in lines:
                text = task.clean(line["pred"])
                total += metrics.score(task.metric, text, line["answers"], classes)
            assert round(100 * total / len(lines), 2) == float(row["expected_score"]), row["dataset"]
            checked += 1
    assert checked == 21


CASES = [
    ("qa_f1", "The cat, sat!", ["a cat sat"], 1.0),
    ("qa_f1", "cat sat down", ["cat"], 0.5),
    ("qa_f1", "", ["cat"], 0.0),
    ("qa_f1_zh", "我爱北京。", ["我 爱 北京"], 1.0),
    ("rouge_l", "The cat sat. On the mat today.", ["A cat sat on the mat. Today it rained."], 0.5),
    ("rouge_l", "...", ["a"], 0.0),
    ("count", "There are 5 or 6.", ["5"], 0.5),
    ("retrieval", "Paragraph 12", ["Paragraph 12"], 1.0),
    ("retrieval", "Paragraph 1", ["Paragraph 12"], 0.0),
    ("retrieval_zh", "段落3", ["段落3"], 1.0),
    ("code_sim", "\n# a remark\nreturn x\n", ["return x"], 1.0),
    ("code_sim", "", ["return x"], 0.0),
    ("exact_match", "The  Cat.", ["cat"], 1.0),
    ("rouge1", "running cats", ["the cat runs"], 0.8),
    ("string_match_all", "7 and 8", ["7", "9"], 0.5),
    ("string_match_part", "7 and 8", ["7", "9"], 1.0),
    ("string_match_part", "none", ["7", "9"], 0.0),
]


@pytest.mark.parametrize(("name", "prediction", "references", "expected"), CASES)
def test_hand_made_answers_get_what_the_rule_says(name, prediction, references, expected):
    assert metrics.score(name, prediction, references) == pytest.approx(expected, abs=1e-6)


def test_classification_takes_names_within_the_gold_out_and_divides_by_the_rest():
    classes = ["Food", "Food plant", "Animal"]
    assert metrics.score("classification", "Food plant", ["Food plant"], classes) == 1.0
    assert metrics.score("classification", "Food, Animal", ["Food"], classes) == 0.5
    assert metrics.score("classification", "nothing", ["Food"], classes) == 0.0


def test_every_metric_is_an_evaluate_module_that_computes_and_combines():
    golds = {
        "retrieval": "Paragraph 5", "retrieval_zh": "段落5", "count": "5", "letter_accuracy": "(B)", "exp_similarity": "50%",
        "concordance": "2, 1, 3", "masks_exact": "{'<mask-0>': 'Anna'}",
    }  # fmt: skip
    for name in metrics.VERSIONS:
        gold = (
            "Paragraph 5" if name == "retrieval" else "段落5" if name == "retrieval_zh" else golds.get(name, "5 cats")
        )
        gold = "5" if name in ("count", "whole_word") or "number" in name else "CATS" if name == "speaker" else gold
        references = ["a cat", "A"] if name == "choice_of_code" else [gold]  # text and letter
        gold = "A." if name == "choice_of_code" else gold
        options = {"classes": [gold]} if name == "classification" else {}
        found = metrics.load(name).compute(predictions=[gold, "none"], references=[references] * 2, **options)
        assert found == {name: pytest.approx(0.5, abs=0.25)}
    both = evaluate.combine([metrics.load("qa_f1"), metrics.load("exact_match")])
    assert both.compute(predictions=["a cat"], references=[["cat"]]) == {"qa_f1": 1.0, "exact_match": 1.0}


def test_unknown_metrics_and_missing_references_are_named():
    with pytest.raises(ValueError, match="qa_f1"):
        metrics.load("qa_f2")
    with pytest.raises(ValueError, match="unknown"):
        metrics.score("qa_f2", "a", ["a"])
    with pytest.raises(ValueError, match="reference"):
        metrics.score("qa_f1", "a", [])


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(words.importlib, "import_module", absent)
    with pytest.raises(ValueError, match=r"rouge.*kvcompress\[metrics\]"):
        metrics.score("rouge_l", "a", ["a"])
