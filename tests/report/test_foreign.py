"""Numbers of others keep their origin and source, come on the scale of scores, and never count among what was measured."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path

import pytest
import yaml
from test_curves import group
from test_report import make

import kvcompress.report
from kvcompress.commands.report import main
from kvcompress.report import curves
from kvcompress.report.external import PUBLISHED, belongs, external_points, load_foreign, load_published
from kvcompress.report.external_tables import print_external, relevant
from kvcompress.report.frame import documented

ROOT = Path(__file__).resolve().parents[2]


def published(path, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([PUBLISHED, *lines])
    return path


def kvpress(folder, metrics, answers=(), **config):
    """A folder as kvpress's evaluation writes it; `answers` are (task, compression ratio)."""
    folder.mkdir(parents=True)
    settings = {"dataset": "ruler", "data_dir": "4096", "model": "owner/Model", "press_name": "snapkv"}
    settings |= {"compression_ratio": 0.75, "fraction": 1.0, "query_aware": False, "model_kwargs": {}, "seed": 42}
    settings = {key: value for key, value in (settings | config).items() if value is not None}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.json").write_text(json.dumps(metrics))
    with (folder / "predictions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "compression_ratio", "predicted_answer"])
        writer.writerows([task, ratio, "an answer,\nwith a line"] for task, ratio in answers)
    return folder


def lm_eval(path, **more):
    """A results file as lm-eval 0.4.13 writes it, of one task in a group."""
    found = {
        "results": {
            "tiny": {
                "name": "tiny", "alias": "tiny", "sample_len": 4, "acc,none": 0.25, "acc_stderr,none": 0.25,
                "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A", "word_perplexity,none": 17.5,
            },
            "tinies": {"alias": "tinies", "name": "tinies", "acc,none": 0.25, "acc_stderr,none": 0.25},
        },
        "groups": {"tinies": {"alias": "tinies", "acc,none": 0.25}},
        "group_subtasks": {"tinies": ["tiny"], "tiny": []},
        "configs": {"tiny": {}},
        "versions": {"tiny": 1.5},
        "n-shot": {"tiny": 5},
        "higher_is_better": {"tiny": {"acc": True, "word_perplexity": False}},
        "n-samples": {"tiny": {"original": 9, "effective": 4}},
        "config": {"model": "hf", "model_args": "pretrained=owner/model,dtype=float16", "random_seed": 3},
        "lm_eval_version": "0.4.13",
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | more))
    return path


def test_published_numbers_become_rows_on_the_scale_of_scores(tmp_path):
    source = "a paper, table 1"
    file = published(
        tmp_path / "p.csv",
        (source, "Model", "LongBench", "SnapKV", "128", "qasper", "25.5", "Table 1"),
        (source, "Model", "LongBench", "FullKV", "full", "avg16", "41.0", ""),
        (source, "Model", "XSUM", "H2O", "819 (10%)", "rouge2", "0.11", ""),
        (source, "Model", "decode efficiency", "R-KV", "2 bit", "throughput_tok_per_s", "75.4", ""),
        (source, "Model", "LongBench", "CAKE", "3.2% KV", "gain_range_x", "2.2-3.3", "abstract"),
    )
    frame = load_published(file)
    assert set(frame.origin) == {"published"} and set(frame.source) == {source} and frame.attrs["skipped"] == []
    assert list(frame.task[:2]) == ["longbench/qasper", "longbench"] and list(frame.metric[:2]) == [
        "as published",
        "avg16",
    ]
    assert list(frame.score[:3]) == pytest.approx([0.255, 0.41, 0.11]) and frame.score[3:].isna().all()
    assert frame.budget[0] == 128 and isinstance(frame.budget[0], int) and frame.budget[1] == 1.0
    assert frame.budget[2] == 819 and math.isnan(frame.budget[3]) and frame.budget[4] == 0.032
    assert frame["metrics.value"][3] == 75.4 and "2.2-3.3" in " ".join(frame.notes[4])
    assert all(documented(column) for column in frame.columns)


def test_lines_of_a_published_csv_that_lack_something_are_listed(tmp_path):
    good = ("s", "m", "LongBench", "SnapKV", "128", "qasper", "25.5", "")
    frame = load_published(published(tmp_path / "p.csv", good, ("", *good[1:]), (*good, "more"), good[:5]))
    assert len(frame) == 1 and len(frame.attrs["skipped"]) == 3 and "line 3: no source" in frame.attrs["skipped"][0]
    (tmp_path / "q.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column source"):
        load_published(tmp_path / "q.csv")


def test_the_published_numbers_that_ship_are_all_read_and_have_a_source():
    frame = load_published(ROOT / "results" / "published.csv")
    assert len(frame) == 1736 and frame.attrs["skipped"] == [] and frame.source.str.len().min() > 3
    assert frame.score.notna().sum() == 1668 and frame.score.between(0, 1).sum() == 1668
    table = frame[(frame.task == "longbench/qasper") & (frame.method == "FullKV")]
    row = table[(table.model == "Meta-Llama-3-8B-Instruct") & table.source.str.startswith("PyramidKV")].iloc[0]
    assert row.score == pytest.approx(0.2975) and row.budget == 1.0


@pytest.mark.data
def test_the_published_numbers_that_ship_are_those_of_the_collection(data_folder):
    """But for a model called "same" there, and a system that compresses nothing."""
    with (data_folder / "published_results.csv").open(newline="") as file:
        theirs = [line for line in csv.DictReader(file) if line["method"] != "DistServe"]
    with (ROOT / "results" / "published.csv").open(newline="") as file:
        ours = list(csv.DictReader(file))
    for line, other in zip(ours, theirs, strict=True):
        assert {**line, "model": None} == {**other, "model": None}
        assert line["model"] == other["model"] or other["model"] == "same"


def test_an_evaluation_of_kvpress_becomes_a_row_per_task(tmp_path):
    answers = [("niah_single_1", 0.75)] * 3 + [("qa_1", 0.75)]
    metrics = {"niah_single_1": {"string_match": 66.67}, "qa_1": {"string_match": 100.0}}
    kvpress(tmp_path / "a", metrics, answers, press_init_command="SnapKVPress()")
    frame = load_foreign(tmp_path).set_index("task")
    assert list(frame.index) == ["ruler/niah_single_1", "ruler/qa_1"] and set(frame.origin) == {"kvpress"}
    assert list(frame.score) == [0.6667, 1.0] and list(frame.n_samples) == [3, 1]
    assert set(frame.budget) == {0.25} and set(frame["protocol.question"]) == {"hidden"}
    assert set(frame["protocol.length"]) == {4096} and str(tmp_path / "a") in frame.source.iloc[0]
    assert frame.notes.iloc[0] == ["SnapKVPress()"]


@pytest.mark.parametrize(
    "metrics, config, expected",
    [
        (23.5, {"dataset": "longbench", "data_dir": "qasper"}, [("longbench/qasper", 0.235, 2)]),
        (0.5, {"dataset": "infinitebench", "data_dir": "passkey"}, [("infinitebench/passkey", 0.5, 2)]),
        (
            {"average": 0.5, "easy": 1.0},
            {"dataset": "longbench-v2", "data_dir": None},
            [("longbench_v2", 0.5, 2), ("longbench_v2/easy", 1.0, None)],
        ),
        (
            {"correct": 1, "answered": 2, "accuracy": 0.25, "total": 4},
            {"dataset": "aime25", "data_dir": None},
            [("aime25", 0.25, 4)],
        ),
        (
            [{"rouge-1": {"f": 0.0}, "rouge-l": {"f": 0.25}}, {"rouge-l": {"f": 0.75}}],
            {"dataset": "needle_in_haystack", "data_dir": None},
            [("needle_in_haystack", 0.5, 2)],
        ),
    ],
)
def test_every_form_of_metrics_that_kvpress_writes_is_read(tmp_path, metrics, config, expected):
    kvpress(tmp_path / "a", metrics, [("x", 0.75)] * 2, **config)
    frame = load_foreign(tmp_path)
    found = [(r.task, r.score, None if r.n_samples != r.n_samples else r.n_samples) for r in frame.itertuples()]
    assert found == expected


@pytest.mark.parametrize(
    "config, budget, note",
    [
        ({"compression_ratio": 0.0, "press_name": "no_press"}, 1.0, ""),
        ({"compression_ratio": None, "threshold": -6.0}, 0.4, "threshold"),
        ({"compression_ratio": None, "head_compression_ratio": 0.5}, None, "share of heads"),
        ({"target_size": 512, "press_init_command": "DecodingPress(KnormPress())"}, 512, "decode"),
        ({"fraction": 0.1}, 0.25, "fraction 0.1"),
    ],
)
def test_budgets_of_kvpress_are_what_is_kept_and_nothing_is_made_up(tmp_path, config, budget, note):
    kvpress(tmp_path / "a", {"qa_1": {"string_match": 50.0}}, [("qa_1", 0.5), ("qa_1", 0.7)], **config)
    row = load_foreign(tmp_path).iloc[0]
    assert (row.budget == budget and type(row.budget) is type(budget)) or (budget is None and math.isnan(row.budget))
    assert note in " ".join(row.notes)


def test_results_of_lm_eval_become_a_row_per_task_and_metric_and_groups_are_left_out(tmp_path):
    lm_eval(tmp_path / "owner__model" / "results_2026-01-01.json")
    frame = load_foreign(tmp_path).set_index("metric")
    assert set(frame.task) == {"tiny"} and list(frame.index) == ["acc", "exact_match (strict)", "word_perplexity"]
    assert frame.score["acc"] == 0.25 and frame.score_stderr["acc"] == 0.25
    assert math.isnan(frame.score_stderr["exact_match (strict)"]) and math.isnan(frame.score["word_perplexity"])
    assert frame["metrics.value"]["word_perplexity"] == 17.5
    assert set(frame.model) == {"owner/model"} and set(frame.n_samples) == {4} and set(frame.seed) == {3}
    assert frame.budget.isna().all() and frame.method.isna().all(), "what it does not say is not made up"
    assert "0.4.13" in frame.source.iloc[0]


def damaged(folder):
    """Files that cannot be read, each in its own way, beside two that can."""
    kvpress(folder / "good", {"qa_1": {"string_match": 50.0}})
    lm_eval(folder / "good" / "results_1.json")
    for name, text in {
        "cut": '{"qa_1": {"string_m',
        "empty": "",
        "none": "{}",
        "binary": "\x00\x01",
        "text": '"no metrics"',
        "odd": '[{"rouge-1": 3}]',
    }.items():
        kvpress(folder / name, {})
        (folder / name / "metrics.json").write_text(text)
    kvpress(folder / "foreign", {"qa_1": 1.0}, dataset=None)
    kvpress(folder / "yaml", {"qa_1": 1.0})
    (folder / "yaml" / "config.yaml").write_text("a: [1, ")
    kvpress(folder / "alone", {"qa_1": 1.0})
    (folder / "alone" / "config.yaml").unlink()
    lm_eval(folder / "results_none.json", results={"tiny": {"alias": "tiny"}})
    lm_eval(folder / "results_list.json", **{"n-samples": ["tiny"]})
    (folder / "results_cut.json").write_text('{"results": {"tiny"')
    (folder / "else.json").write_text('{"some": "thing"}')
    return 12


def test_damaged_evaluations_are_skipped_and_listed_and_the_others_are_read(tmp_path):
    bad = damaged(tmp_path)
    frame = load_foreign(tmp_path)
    assert set(frame.origin) == {"kvpress", "lm-eval"} and len(frame) == 1 + 3
    assert len(frame.attrs["skipped"]) == bad, "\n".join(frame.attrs["skipped"])
    assert any("no config.yaml" in text for text in frame.attrs["skipped"])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="neither"):
        load_foreign(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        load_foreign(tmp_path / "nowhere")


def test_unreadable_predictions_cost_the_count_alone(tmp_path):
    kvpress(tmp_path / "a", {"qa_1": {"string_match": 50.0}})
    (tmp_path / "a" / "predictions.csv").write_bytes(os.urandom(64) + b"\x00\n\x00")
    row = load_foreign(tmp_path).iloc[0]
    assert row.score == 0.5 and math.isnan(row.n_samples)


def test_tables_show_them_apart_with_their_source_and_csv_says_whose_they_are(tmp_path, capsys):
    make(tmp_path / "r", "full", 1.0, 1.0, scorer="none", model="owner/Model", task="ruler/qa_1")
    make(tmp_path / "r", "good", 0.5, 0.5, model="owner/Model", task="ruler/qa_1")
    kvpress(tmp_path / "k", {"qa_1": {"string_match": 12.3}})
    damaged(tmp_path / "bad")
    file = published(
        tmp_path / "p.csv",
        ("here", "Model", "ruler", "H2O", "0", "qa_1", "45.6", ""),
        ("elsewhere", "Other", "ruler", "H2O", "128", "qa_1", "78.9", ""),
    )
    arguments = [str(tmp_path / "r"), "--published", str(file), "--foreign", str(tmp_path / "k"), str(tmp_path / "bad")]
    assert main([*arguments, "--csv", str(tmp_path / "all.csv")]) == 0
    shown = capsys.readouterr()
    table = shown.out[shown.out.index("numbers of others") :]
    assert "0.123" in table and "0.456" in table and "0.789" not in shown.out and "kvpress" in table
    assert "1 of 7 numbers of others" in shown.err and shown.err.count("skipped") == 12
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert [row["origin"] for row in rows] == ["measured"] * 2 + ["published"] * 2 + ["kvpress"] * 2 + ["lm-eval"] * 3
    assert all(row["source"] for row in rows[2:]) and "stale" not in "".join(row["flags"] for row in rows)
    assert main([*arguments, "--markdown", "-"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text[text.index("### Numbers of others") :].splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + 1 + 2 + 3


def test_without_a_measured_record_imported_rows_are_still_shown(tmp_path, capsys):
    kvpress(tmp_path / "k", {"qa_1": {"string_match": 12.3}})
    assert main([str(tmp_path / "nothing"), "--foreign", str(tmp_path / "k")]) == 0
    assert "0.123" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing"), "--foreign", str(tmp_path / "nowhere")]) == 1


def test_a_frame_takes_them_as_rows_of_their_own(tmp_path):
    make(tmp_path / "r", "full", 1.0, 1.0, scorer="none")
    make(tmp_path / "r", "good", 0.5, 0.0)
    before = kvcompress.report.load(tmp_path / "r")
    damaged(tmp_path / "bad")
    frame = kvcompress.report.load(tmp_path / "r", foreign=[tmp_path / "bad"])
    assert list(frame.origin) == ["measured"] * 2 + ["kvpress"] + ["lm-eval"] * 3 and len(frame.attrs["skipped"]) == 12
    both = frame[frame.origin == "measured"]
    assert list(both.score) == list(before.score) and list(both.delta_full) == list(before.delta_full)
    assert not frame.on_board[2:].any()


def test_a_published_row_belongs_to_the_same_model_and_task_however_the_model_is_hosted():
    row = {"origin": "published", "model": "Model-7B", "task": "a/b", "metric": "as published"}
    record = {"model": "owner/model-7b", "task": "a/b", "metric": "f1/1", "protocol.question": "seen"}
    assert belongs(row, record) and relevant([row], [record]) == [row]
    assert not belongs(row, record | {"task": "a/c"}) and not belongs(row | {"model": "Model"}, record)
    imported = row | {"origin": "kvpress", "metric": "string_match", "protocol.question": "hidden"}
    assert not belongs(imported, record | {"metric": "string_match_all/1"})
    assert belongs(imported, record | {"metric": "string_match_all/1", "protocol.question": "hidden"})
    assert not belongs(imported, record | {"protocol.question": "hidden"})


def test_grey_points_lie_at_the_share_asked_for_and_change_no_line(tmp_path):
    records = group()
    records[0]["kv.kept_tokens_mean"] = 1000
    common = {"origin": "published", "model": "model", "task": "needle", "metric": "as published", "method": "X"}
    rows = [
        common | {"budget": 0.5, "score": 0.7},
        common | {"budget": 250, "score": 0.6},
        common | {"budget": None, "score": 0.5},
        common | {"budget": 0.5, "score": None},
        common | {"budget": 0.5, "score": 0.9, "task": "other"},
    ]
    assert [(x, y) for x, y, _ in external_points(records, rows)] == [(0.5, 0.7), (0.25, 0.6)]
    with_others, without = curves.by_budget(records, rows), curves.by_budget(records)
    drawn = curves._figure([with_others], "t").axes
    for axes, plain in zip(drawn, curves._figure([without], "t").axes, strict=True):
        grey = [line for line in axes.lines if line.get_color() == curves.OTHERS and len(line.get_xdata())]
        assert [list(zip(*line.get_data(), strict=True)) for line in grey] == [[(0.5, 0.7), (0.25, 0.6)]]
        lines = [tuple(line.get_xdata()) for line in axes.lines if line.get_color() != curves.OTHERS]
        assert lines == [tuple(line.get_xdata()) for line in plain.lines if line.get_color() != curves.OTHERS]
        assert {text.get_text() for text in axes.texts if text.get_color() == curves.OTHERS} == {"X"}
    assert "grey" in with_others.x_label and "grey" not in without.x_label
    assert curves.by_budget(group("fidelity"), rows).others == [], "a divergence is no score"


def test_without_a_full_run_tokens_are_no_share():
    row = {"model": "model", "task": "needle", "metric": "as published", "budget": 250, "score": 0.6}
    assert (
        external_points([record for record in group() if record["method"] != "full" and record["budget"] != 1.0], [row])
        == []
    )
    assert external_points([], [row]) == []


def test_a_table_of_others_is_wide_where_nothing_is_a_terminal():
    from rich.console import Console

    out = io.StringIO()
    print_external([], Console(file=out))
    assert out.getvalue() == ""
