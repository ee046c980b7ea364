"""Reports come from records alone; what must not be trusted is flagged, damaged records are skipped and listed."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from kvcompress.commands.report import main
from kvcompress.common import hashing
from kvcompress.report import figure, heatmap
from kvcompress.report.heatmap import grid
from kvcompress.report.run_index import gather as load
from kvcompress.report.run_index import label
from kvcompress.report.table import COLUMNS, leaderboard, leaderboard_markdown, terminal
from kvcompress.sweep import record, record_schema


def make(folder, method, budget, score, *, scorer="S", status="ok", lengths=(1000,), **more):
    """A finished run of two depths per length: the first found with `score`, the second always."""
    run_id = hashing.digest([method, budget])
    run = record.RunFolder(folder, "board", run_id)
    run.open("")
    for length in lengths:
        for depth, value in ((0.0, score), (1.0, 1.0)):
            run.append({"id": f"{length}-{depth}", "score": value, "meta": {"length": length, "depth": depth}})
    made = dict.fromkeys(record_schema.KEYS) | {
        "run_id": run_id,
        "status": status,
        "model": "tiny",
        "task": "needle",
        "method": method,
        "budget": budget,
        "seed": 0,
        "n_samples": 2 * len(lengths),
        "score": (score + 1) / 2,
        "score_stderr": 0.25,
        "parts.scorer": scorer,
        "parts.codec": "plain",
        "parts.reader": "all",
        "parts.prefill": "oneshot",
        "kv.ratio": budget + 0.002,
        "kv.kept_tokens_mean": 1000 * budget,
        "time.ttft_s": 1.5,
        "time.tpot_s": 0.05,
        "protocol.pair": "p",
        "versions.source": hashing.source_hash(),
    }
    run.finish(made | more)
    return run


@pytest.fixture
def results(tmp_path):
    make(tmp_path, "full", 1.0, 1.0, scorer="none")
    make(tmp_path, "good", 0.5, 1.0)
    make(tmp_path, "bad", 0.25, 0.0, **{"versions.source": "old"})
    make(tmp_path, "idle", 0.9, 1.0, status="inactive")
    make(tmp_path, "broken", 0.5, 0.0, status="failed", error="Traceback\nValueError: no")
    for name, text in (("cut", '{"run_id": "x", "sta'), ("odd", '{"status": "ok"}')):
        (tmp_path / "board" / name).mkdir()
        (tmp_path / "board" / name / "record.json").write_text(text)
    return tmp_path


def test_damaged_records_are_skipped_and_listed(results):
    found = load([results, results / "nowhere"])
    assert len(found.entries) == 5 and len(found.damaged) == 3
    assert any("cut" in text for text in found.damaged) and any("nowhere" in text for text in found.damaged)


def test_board_starts_with_the_baseline_and_puts_what_does_not_count_last(results):
    out = io.StringIO()
    leaderboard([entry.record for entry in load([results]).entries], Console(file=out, width=120))
    lines = [line.split() for line in out.getvalue().splitlines()]
    methods = [line[0] for line in lines if line and line[0] in ("full", "good", "bad", "idle", "broken")]
    assert methods[0] == "full" and methods[1:3] == ["bad", "good"] and set(methods[3:]) == {"idle", "broken"}
    by_name = {line[0]: " ".join(line) for line in lines if line}
    assert "baseline" in by_name["full"] and "-0.500" in by_name["bad"] and "+0.000" in by_name["good"]
    assert (
        "stale" in by_name["bad"]
        and "25.2%" in by_name["bad"]
        and "1.50 s" in by_name["bad"]
        and "50 ms" in by_name["bad"]
    )
    assert "inactive" in by_name["idle"] and "0.9" in by_name["idle"] and "1.000" not in by_name["idle"]
    assert "failed" in by_name["broken"]


def test_no_number_is_cut_in_80_columns(results):
    out = io.StringIO()
    records = [entry.record for entry in load([results]).entries if entry.record["status"] == "ok"]
    records[0]["method"] = "streamingllm"
    leaderboard([r | {"versions.source": hashing.source_hash()} for r in records], Console(file=out, width=80))
    assert "…" not in out.getvalue()


def test_markdown_and_csv_hold_every_record(results, capsys):
    assert main([str(results), "--markdown", str(results / "board.md"), "--csv", str(results / "all.csv")]) == 0
    lines = (results / "board.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 5
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines if line.startswith("|"))
    rows = list(csv.DictReader((results / "all.csv").open()))
    assert len(rows) == 5 and {row["status"] for row in rows} == {"ok", "inactive", "failed"}
    assert next(row for row in rows if row["method"] == "broken")["error"] == "ValueError: no"
    assert "skipped" in capsys.readouterr().err


def test_heat_maps_are_written_for_one_length_and_for_a_grid(results, tmp_path):
    assert main([str(results), "--png", str(tmp_path / "png")]) == 0
    (one,) = [path for path in (tmp_path / "png").glob("*.png") if "pareto" not in path.name]
    assert one.with_suffix(".svg").exists() and one.read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "several"
    make(other, "full", 1.0, 1.0, scorer="none", lengths=(500, 1000, 2000))
    make(other, "good", 0.5, 0.0, lengths=(500, 1000, 2000))
    assert main([str(other), "--png", str(other)]) == 0 and list(other.glob("*.png"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"method": "full", "budget": 1.0, "parts.scorer": "none"}, "full"),
        ({"method": "int8", "budget": 1.0, "parts.scorer": "none", "parts.codec": "int8"}, "int8"),
        ({"method": "kivi", "budget": 1.0, "parts.scorer": "none", "variant": "bits=2"}, "kivi bits=2"),
        ({"method": "full", "budget": 1.0, "parts.scorer": None, "variant": "codec=kivi"}, "full codec=kivi"),
        ({"method": "snapkv", "budget": 1.0, "parts.scorer": "SnapKVScorer"}, "snapkv · 1"),
        ({"method": "snapkv", "budget": 0.25, "parts.scorer": "SnapKVScorer"}, "snapkv · 0.25"),
        ({"method": "quest", "budget": 64, "parts.scorer": "none"}, "quest · 64 tok"),
        ({"method": "lowrank", "budget": 0.5, "parts.scorer": "none", "variant": "bits=4"}, "lowrank bits=4 · 0.5"),
    ],
)
def test_a_figure_says_method_settings_and_a_budget_where_one_was_asked_for(more, said):
    assert label(more) == said


def test_columns_of_one_method_in_two_settings_are_apart_and_a_long_title_is_in_the_picture(tmp_path):
    make(tmp_path, "full", 1.0, 1.0, scorer="none")
    make(tmp_path, "good", 0.5, 1.0, variant="codec=kivi codec.bits=2", **{"parts.codec": "kivi"})
    make(tmp_path, "good", 0.25, 0.0)
    seen, stock = [], figure.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heatmap, "save", lambda drawn, stem: seen.append(drawn) or stock(drawn, stem))
        assert heatmap.draw_heatmap(load([tmp_path]).entries, "a title of many words " * 12, tmp_path / "heat.png")
    (drawn,) = seen
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert "good codec=kivi codec.bits=2" in texts and "good" in texts
    title = drawn._suptitle.get_window_extent()
    assert 0 <= title.x0 and title.x1 <= drawn.bbox.width and "\n" in drawn._suptitle.get_text()


def test_grid_is_the_mean_per_length_and_depth():
    rows = [{"score": s, "meta": {"length": 10, "depth": d}} for s, d in ((1, 0.0), (0, 0.0), (1, 1.0))]
    assert grid([*rows, {"score": 1, "meta": {}}]) == {(10, 0.0): 0.5, (10, 1.0): 1.0}


def test_no_record_at_all_exits_1_and_says_how_to_make_one(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "kvcompress run" in capsys.readouterr().err


def test_a_table_shows_scores_by_length_where_a_task_tells_them_and_a_dash_for_an_empty_bucket(tmp_path):
    buckets = {"metrics.score_0-4k": 0.5, "metrics.score_4-8k": 0.25, "metrics.score_8k+": None}
    make(tmp_path, "full", 1.0, 0.4, scorer="none", **buckets)
    make(tmp_path, "older", 0.5, 0.4)
    found = load([tmp_path])
    text = leaderboard_markdown(found.groups())
    assert "| 0–4k ↑ | 4–8k ↑ |" in text and "| 8k+ ↑ |" not in text and "(LongBench-E)" in text
    assert "| 0.500 | 0.250 |" in text and "| – | – |" in text
    others = [entry.record for entry in found.entries if entry.record["method"] == "older"]
    assert "0–4k" not in leaderboard_markdown([others])


def test_a_table_shows_divergence_where_it_was_measured_and_no_times_where_there_are_none(tmp_path):
    untimed = {"time.ttft_s": None, "time.tpot_s": None}
    make(tmp_path, "full", 1.0, 1.0, scorer="none", **untimed, **{"metrics.kl": 0.0, "metrics.perplexity_ratio": 1.0})
    make(tmp_path, "good", 0.5, 1.0, **untimed, **{"metrics.kl": 0.01234, "metrics.perplexity_ratio": 1.234})
    make(tmp_path, "older", 0.25, 1.0, **untimed)
    found = load([tmp_path])
    out = io.StringIO()
    leaderboard([entry.record for entry in found.entries], Console(file=out, width=120))
    lines = {line.split()[0]: line.split() for line in out.getvalue().splitlines() if line.split()}
    assert lines["method"][3:7] == ["Δ", "full↑", "KL↓", "perplexity↓"] and "TTFT" not in lines["method"]
    assert lines["good"][-4:-2] == ["0.0123", "1.23"] and lines["older"][-4:-2] == ["–", "–"]
    text = leaderboard_markdown(found.groups())
    assert "| KL ↓ | perplexity ↓ |" in text and "in nats" in text
    assert "KL" not in leaderboard_markdown(
        [[entry.record for entry in found.entries if entry.record["method"] == "older"]]
    )


def test_a_record_with_a_value_of_the_wrong_kind_is_skipped_and_listed(tmp_path):
    bad = {"kv.ratio": "x", "time.ttft_s": "x", "parts.codec": [], "share_clamped": {}}
    for number, (key, value) in enumerate(bad.items()):
        make(tmp_path, f"m{number}", 0.5, 1.0, **{key: value})
    (tmp_path / "board" / "deep").mkdir()
    (tmp_path / "board" / "deep" / "record.json").write_text("[" * 100_000)
    found = load([tmp_path])
    assert not found.entries and len(found.damaged) == len(bad) + 1
    assert all(any(key in text for text in found.damaged) for key in bad)


def test_rows_whose_parts_are_of_the_wrong_kind_are_left_out(tmp_path):
    rows = [
        {"id": "a", "score": 1.0, "out": {"compressed": {}}},
        {"id": "b", "score": float("nan")},
        {"id": "c", "score": 1, "out": "x"},
        {"id": "d", "score": 1, "out": {"end": "x"}},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["id"] for row in record.read_rows(tmp_path / "samples.jsonl")] == ["a"]


def test_sweeps_of_one_name_in_two_folders_are_kept_apart(tmp_path):
    for place, score in (("a", 0.0), ("b", 1.0)):
        make(tmp_path / place, "full", 1.0, score, scorer="none")
    make(tmp_path / "a", "good", 0.5, 0.0)
    found = load([tmp_path])
    assert {entry.sweep for entry in found.entries} == {"a/board", "b/board"} and len(found.groups()) == 2
    assert [entry.record["delta_full"] for entry in found.entries if entry.record["method"] == "good"] == [0.0]
    assert {entry.sweep for entry in load([tmp_path / "a"]).entries} == {"board"}


def test_figures_beside_the_full_caches_are_columns_where_a_task_has_them(results):
    records = [entry.record for entry in load([results]).entries]
    with_ratios = [record | {"metrics.ratio_tpot": 0.514, "metrics.ratio_prefill_growth": None} for record in records]
    text = leaderboard_markdown([with_ratios])
    assert (
        "| TPOT × ↓ |" in text and "| 0.51 |" in text and "peak ×" not in text and "multiple of the full cache" in text
    )
    assert "TPOT ×" not in leaderboard_markdown([records]) and "multiple of the full cache" not in leaderboard_markdown(
        [records]
    )


def test_the_full_cache_against_itself_is_a_column_where_it_was_measured(results):
    records = [entry.record for entry in load([results]).entries]
    again = {"metrics.ratio_ttft": 0.97, "metrics.ratio_aa_ttft": 1.012, "metrics.ratio_aa_tpot": 0.991}
    text = leaderboard_markdown([[record | again for record in records]])
    assert "| TTFT × ↓ | A/A |" in text and "| 0.97 | 1.01, 0.99 |" in text and "full cache against itself" in text
    assert "A/A" not in leaderboard_markdown([[record | {"metrics.ratio_ttft": 0.97} for record in records]])


def test_a_table_that_is_redirected_has_a_line_per_row_whatever_the_width(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    make(tmp_path, "full", 1.0, 1.0, scorer="none")
    make(tmp_path, "m" * 120, 0.5, 1.0)
    leaderboard([entry.record for entry in load([tmp_path]).entries], terminal())
    assert any("m" * 120 in line and "%" in line for line in capsys.readouterr().out.splitlines())
