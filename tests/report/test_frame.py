"""The frame of records: documented columns, statistics of each table by itself, nothing mixed and nothing hidden."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from boards import run

import kvcompress.report
from kvcompress.report import averages, frame, stats


def test_every_column_is_documented_and_every_documented_column_is_there(tmp_path):
    run(tmp_path, "full", 1.0, [1.0, 0.5])
    run(tmp_path, "good", 0.5, [1.0, 0.0], **{"metrics.kl": 0.1})
    found = kvcompress.report.load(tmp_path)
    assert [column for column in found.columns if not frame.documented(column)] == []
    assert set(frame.COLUMNS) <= set(found.columns) and "metrics.kl" in found.columns


def test_a_row_says_what_its_samples_say(tmp_path):
    scores, base = [1.0, 0.0, 1.0, 0.5, 0.25, 0.0, 1.0], [1.0, 1.0, 1.0, 0.5, 0.75, 1.0, 0.5]
    run(tmp_path, "full", 1.0, base)
    run(tmp_path, "good", 0.5, scores)
    found = kvcompress.report.load(str(tmp_path))
    row = found[found.method == "good"].iloc[0]
    deltas = np.array(scores) - np.array(base)
    expected = stats.difference(deltas)
    assert (row.delta_full, row.delta_low, row.delta_high) == pytest.approx(
        (deltas.mean(), expected.low, expected.high)
    )
    assert row.p_value == expected.p == row.p_corrected and not row.significant and row.delta_n == 7
    interval = stats.score_interval(scores)
    assert (row.score_low, row.score_high) == pytest.approx((interval.low, interval.high))
    assert row.origin == "measured" and row.sweep == "board" and row.on_board and row.path.endswith(row.run_id)


def test_budgets_keep_their_kind(tmp_path):
    run(tmp_path, "good", 1, [1.0])
    run(tmp_path, "good", 1.0, [1.0])
    assert {type(budget) for budget in kvcompress.report.load(tmp_path).budget} == {int, float}


def test_p_values_are_corrected_within_a_table_and_over_no_others(tmp_path):
    worse = [0.0] * 8
    for pair in ("p", "q"):
        run(tmp_path, "full", 1.0, [1.0] * 8, pair=pair)
    for budget in (0.5, 0.25, 0.1):
        run(tmp_path, "bad", budget, worse, pair="p")
    run(tmp_path, "bad", 0.5, worse, pair="q")
    run(tmp_path, "idle", 0.5, [1.0] * 8, pair="q", status="inactive")
    found = kvcompress.report.load(tmp_path).set_index(["protocol.pair", "method", "budget"])
    assert found.p_corrected[("p", "bad", 0.5)] == pytest.approx(3 * 2 / 256)
    assert found.p_corrected[("q", "bad", 0.5)] == pytest.approx(2 / 256)
    assert found.significant[("p", "bad", 0.1)] and np.isnan(found.p_value[("q", "idle", 0.5)])


def test_twenty_identical_methods_get_no_mark(tmp_path):
    scores = [1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 1.0, 1.0, 0.25, 1.0]
    run(tmp_path, "full", 1.0, scores)
    for number in range(20):
        run(tmp_path, f"same{number}", 0.5, scores)
    found = kvcompress.report.load(tmp_path)
    assert (found.significant == True).sum() == 0 and (found.p_corrected.dropna() == 1.0).all()  # noqa: E712


def test_damaged_half_written_older_and_foreign_files_are_skipped_and_listed(tmp_path):
    run(tmp_path, "good", 0.5, [1.0])
    older = {
        "run_id": "old",
        "status": "ok",
        "model": "m",
        "task": "t",
        "method": "x",
        "budget": 0.5,
        "n_samples": 1,
        "score": 0.5,
    }
    for name, text in {
        "cut": '{"run_id": "x", "sta',
        "empty": "",
        "list": "[1, 2]",
        "foreign": json.dumps({"results": {"arc": {"acc": 0.5}}}),
        "nan": json.dumps(older | {"score": float("nan")}),
        "binary": "\x00\x01",
        "old": json.dumps(older),
    }.items():
        (tmp_path / "board" / name).mkdir()
        (tmp_path / "board" / name / "record.json").write_text(text)
    (tmp_path / "board" / "running").mkdir()
    found = kvcompress.report.load(tmp_path)
    assert sorted(found.method) == ["good", "x"] and len(found.attrs["skipped"]) == 6
    old = found[found.method == "x"].iloc[0]
    assert "stale" in old["flags"] and np.isnan(old.score_low)


def test_flags_say_what_must_be_known(tmp_path):
    more = {
        "protocol.truncated_share": 0.5,
        "protocol.hit_max_share": 0.2,
        "kv.storage": "simulated",
        "share_inactive": 0.25,
    }
    run(tmp_path, "good", 0.5, [1.0], **more)
    run(tmp_path, "big", 0.5, [], status="oom", score=None, n_samples=0)
    found = kvcompress.report.load(tmp_path).set_index("method")
    assert found.loc["good", "flags"] == ["simulated", "inactive on 25%", "truncated 50%", "hit-max 20%"]
    assert found.loc["big", "flags"] == ["oom"] and not found.loc["big", "on_board"]


def other(monkeypatch, rows):
    """A stand-in for the module that reads numbers of others."""
    module = ModuleType("kvcompress.report.external")
    module.load_published = module.load_foreign = lambda path: rows
    monkeypatch.setitem(sys.modules, "kvcompress.report.external", module)
    monkeypatch.setattr(frame, "find_spec", lambda name: object())


def test_numbers_of_others_are_rows_of_their_own_and_count_in_nothing(tmp_path, monkeypatch):
    run(tmp_path, "good", 0.5, [1.0], task="suite/a", pair="a")
    other(
        monkeypatch,
        [{"origin": "published", "model": "m", "task": "suite/a", "method": "good", "budget": 0.5, "score": 0.1}],
    )
    found = kvcompress.report.load(tmp_path, published="numbers.csv")
    assert list(found.origin) == ["measured", "published"] and not found.on_board.iloc[1]
    (table,) = averages.suites(frame.as_rows(found))
    assert [row["average"] for row in table["rows"]] == [1.0]


def test_a_number_of_others_cannot_pass_for_a_measured_one(tmp_path, monkeypatch):
    run(tmp_path, "good", 0.5, [1.0])
    other(monkeypatch, [{"origin": "measured", "score": 1.0}])
    with pytest.raises(ValueError, match="valid: published, kvpress, lm-eval"):
        kvcompress.report.load(tmp_path, foreign=["somewhere"])


def suite_rows(tmp_path, tasks, method="good", **more):
    for task, scores in tasks.items():
        run(tmp_path, method, 0.5, scores, task=f"longbench/{task}", pair=f"pair of {task}", **more)


def test_an_average_is_of_a_complete_set_of_tasks_only(tmp_path):
    suite_rows(tmp_path, {"qa": [1.0, 0.5], "sum": [0.25]})
    suite_rows(tmp_path, {"qa": [0.5]}, method="part")
    (table,) = averages.suites(frame.as_rows(kvcompress.report.load(tmp_path)))
    assert [task["task"] for task in table["tasks"]] == ["longbench/qa", "longbench/sum"]
    by_method = {row["method"]: row for row in table["rows"]}
    assert by_method["good"]["average"] == (0.75 + 0.25) / 2
    assert by_method["part"]["average"] is None and by_method["part"]["cells"][1] is None


def test_failed_and_inactive_runs_leave_a_hole(tmp_path):
    suite_rows(tmp_path, {"qa": [1.0], "sum": [0.5]})
    suite_rows(tmp_path, {"qa": [1.0]}, method="idle")
    suite_rows(tmp_path, {"sum": [1.0]}, method="idle", status="inactive")
    (table,) = averages.suites(frame.as_rows(kvcompress.report.load(tmp_path)))
    assert {row["method"]: row["average"] for row in table["rows"]} == {"good": 0.75, "idle": None}


@pytest.mark.parametrize("differs", [{"metric": "match/2"}, {"protocol.question": "hidden"}, {"seed": 1}])
def test_metrics_protocols_and_seeds_are_never_averaged_together(tmp_path, differs):
    suite_rows(tmp_path, {"qa": [1.0], "sum": [0.5]})
    run(tmp_path, "late", 0.5, [0.0], task="longbench/qa", pair="another", **differs)
    tables = averages.suites(frame.as_rows(kvcompress.report.load(tmp_path)))
    if "metric" in differs:  # one table, in which a task comes in two forms: no average at all
        assert tables[0]["mixed"] == ["longbench/qa"] and {row["average"] for row in tables[0]["rows"]} == {None}
    else:
        assert sorted(len(table["tasks"]) for table in tables) == [1, 2]


def test_ranks_are_of_equal_measured_bytes_and_say_where_they_are_interpolated(tmp_path):
    run(tmp_path, "full", 1.0, [1.0, 1.0])
    run(tmp_path, "exact", 0.25, [0.5, 0.5], **{"kv.ratio": 0.251})
    for budget, scores in ((0.5, [1.0, 1.0]), (0.1, [0.0, 0.5])):
        run(tmp_path, "around", budget, scores)
    run(tmp_path, "above", 0.5, [1.0, 1.0])
    # a method that asked for the same budget and holds twice the bytes does not count as equal
    run(tmp_path, "greedy", 0.25, [1.0, 1.0], **{"kv.ratio": 0.5})
    found = averages.rank(kvcompress.report.load(tmp_path), 0.25)
    assert list(found.method) == ["around", "exact", "above", "greedy"]
    assert found.score[0] == pytest.approx(0.25 + 0.75 * 0.15 / 0.4) and list(found.interpolated) == [
        True,
        False,
        False,
        False,
    ]
    assert list(found["rank"][:2]) == [1, 2] and found["rank"][2:].isna().all()


def test_ranks_refuse_rows_of_two_protocols(tmp_path):
    for pair in ("p", "q"):
        run(tmp_path, "good", 0.25, [1.0], pair=pair)
    with pytest.raises(ValueError, match="2 protocols"):
        averages.rank(kvcompress.report.load(tmp_path), 0.25)


def test_a_folder_without_a_record_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "board" / "cut").mkdir(parents=True)
    (tmp_path / "board" / "cut" / "record.json").write_text("{")
    with pytest.raises(ValueError, match=r"no records under .*kvcompress run(.|\n)*skipped .*cut"):
        kvcompress.report.load(tmp_path)
    with pytest.raises(ValueError, match=r"no records under .*nowhere(.|\n)*not there"):
        kvcompress.report.load(tmp_path / "nowhere")
