"""Cells that share their prefill leave the records they would have left alone."""

from __future__ import annotations

import pytest
from sweeps import ALONE, SHARED, TOGETHER, cell, cells, left, sweep

from kvcompress.sweep import record_schema
from kvcompress.sweep.launcher import executor

METHODS = "full,snapkv,pyramidkv,adakv,cake,h2o,tova,keydiff,random"
PROTOCOLS = {
    "seen": ("task.question=seen",),
    "hidden": ("task.question=hidden",),
    "classic": ("task.form=classic", "task.haystack=essay", "task.essays=builtin"),
}


@pytest.mark.parametrize(
    ("protocol", "methods", "budgets"),
    [
        ("seen", "full,snapkv,pyramidkv,h2o,tova,keydiff", "64"),
        ("hidden", "full,snapkv,adakv,h2o", "0.2"),
        ("classic", "full,snapkv,cake", "0.2"),
        *(pytest.param(name, METHODS, "0.5,0.2,64", marks=pytest.mark.long) for name in PROTOCOLS),
    ],
)
def test_scores_tokens_and_what_is_kept_equal_those_of_cells_run_alone(tmp_path, protocol, methods, budgets):
    for folder, options in (("alone", ALONE), ("shared", SHARED)):
        outcomes, text = sweep(cells(tmp_path / folder, methods, budgets, *PROTOCOLS[protocol]), options)
        assert {outcome.status for outcome in outcomes} <= {"ok", "same"}, text
    alone, shared = left(tmp_path / "alone"), left(tmp_path / "shared")
    assert len(alone) == methods.count(",") * (budgets.count(",") + 1) + 1
    assert alone == shared


def test_cells_of_scorers_over_another_share_and_equal_those_run_alone(tmp_path):
    for folder, options in (("alone", ALONE), ("shared", SHARED)):
        _, text = sweep(cells(tmp_path / folder, "chunkkv,criticalkv", "0.5", "task.question=seen"), options)
    assert "2 cells share each prefill" in text and "runs alone" not in text
    assert left(tmp_path / "alone") == left(tmp_path / "shared")


def test_each_sample_is_prefilled_once_for_all_cells_that_share(tmp_path, monkeypatch):
    made = []
    stock = executor.prefill_once
    monkeypatch.setattr(executor, "prefill_once", lambda *a: made.append(a[2]) or stock(*a))
    sweep(cells(tmp_path, "full,snapkv,tova", "0.5,0.2"))
    assert len(made) == 2 and made[0].window == 32 and not made[0].mass


def test_methods_that_sum_up_attention_mass_share_among_themselves(tmp_path, monkeypatch):
    made = []
    stock = executor.prefill_once
    monkeypatch.setattr(executor, "prefill_once", lambda *a: made.append(a[2].mass) or stock(*a))
    _, text = sweep(cells(tmp_path, "snapkv,h2o", "0.5,0.2"))
    assert sorted(made) == [False, False, True, True] and text.count("2 cells share each prefill") == 2
    made.clear()
    sweep(cells(tmp_path, "snapkv,h2o", "0.5,0.2", "kernel=blockwise"))
    assert made == [True, True]


def test_masses_that_fade_differently_are_summed_up_apart(tmp_path):
    outcomes, text = sweep(
        [
            *cells(tmp_path, "h2o", "0.5,0.2"),
            *cells(tmp_path, "h2o", "0.5,0.2", "method.decay=0.9"),
            *cells(tmp_path, "snapkv", "0.5,0.2"),
        ]
    )
    assert {outcome.status for outcome in outcomes} == {"ok"} and text.count("2 cells share each prefill") == 3


def test_times_and_peaks_of_shared_cells_are_null_and_those_of_cells_alone_are_not(tmp_path):
    outcomes, text = sweep([*cells(tmp_path, "snapkv,tova", "0.5"), cell(tmp_path, "method=snapkv", "prefill=chunked")])
    by_title = {(o.method, o.record["protocol.chunking"]): o.record for o in outcomes}
    timed = [key for key in record_schema.KEYS if key.startswith(("time.", "memory."))]
    for method in ("snapkv", "tova"):
        shared = by_title[method, "oneshot"]
        assert shared["protocol.shared"] is True and all(shared[key] is None for key in timed)
    alone = by_title["snapkv", "chunked"]
    assert alone["protocol.shared"] is False and all(alone[key] is not None for key in timed)
    assert "prefill=chunked is its own: snapkv 1.0 · needle runs alone" in text


@pytest.mark.parametrize(
    "overrides, says",
    [
        (("method=streamingllm", "method.positions=compact"), "compact positions"),
        (("method=full", "seed=1"), "no other cell has the same prefill"),
        (("method=tova", "task.lengths=[460]"), "no other cell has the same prefill"),
    ],
)
def test_a_cell_that_runs_alone_says_why(tmp_path, overrides, says):
    _, text = sweep([*cells(tmp_path, "snapkv,tova", "0.5"), cell(tmp_path, *overrides, "budget=0.5")])
    assert says in text and text.count("runs alone") == 1


def test_a_task_that_measures_its_prefill_runs_alone(tmp_path, monkeypatch):
    configs = cells(tmp_path, "snapkv,tova", "0.5")
    from kvcompress.tasks import Needle

    monkeypatch.setattr(Needle, "shares_prefill", False)
    outcomes, text = sweep(configs)
    assert "measures the prefill itself" in text
    assert all(outcome.record["protocol.shared"] is False for outcome in outcomes)


def test_a_prefill_that_fails_leaves_its_cells_to_their_own(tmp_path, monkeypatch):
    def broken(*_):
        raise MemoryError("full")

    monkeypatch.setattr(executor, "prefill_once", broken)
    outcomes, text = sweep(cells(tmp_path / "broken", "snapkv,tova", "0.5"))
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"] and "no shared prefill (MemoryError: full)" in text
    monkeypatch.undo()
    sweep(cells(tmp_path / "whole", "snapkv,tova", "0.5"))
    assert left(tmp_path / "broken") == left(tmp_path / "whole")


def test_one_cell_more_of_a_finished_sweep_runs_as_it_would_have_among_the_others(tmp_path):
    sweep(cells(tmp_path, "snapkv", "0.5,0.2"))
    outcomes, _ = sweep(cells(tmp_path, "snapkv", "0.5,0.2,0.1"))
    assert [outcome.status for outcome in outcomes] == ["done", "done", "ok"]
    assert outcomes[-1].record["protocol.shared"] is True


def test_cells_with_codecs_share_a_plain_prefill_and_encode_after_the_fork(tmp_path, monkeypatch):
    """Records equal those of cells run alone, but for how they decoded."""
    made = []
    stock = executor.prefill_once
    monkeypatch.setattr(executor, "prefill_once", lambda *a: made.append(a) or stock(*a))
    runs, coded = {}, ("codec=kivi", "codec.group=16", "codec.residual=16")
    for folder, options in (("alone", ALONE), ("together", TOGETHER)):
        configs = [
            *cells(tmp_path / folder, "full,kivi,int8,turboquant", "0.5", "limit=1"),
            *cells(tmp_path / folder, "snapkv,adakv", "0.25", "limit=1", *coded),
            *cells(tmp_path / folder, "snapkv", "0.25", "limit=1"),
        ]
        for config in configs[1:2]:
            config.method.group = 16
        outcomes, text = sweep(configs, options)
        assert {o.status for o in outcomes} == {"ok"}, text
        runs[folder] = {(o.method, o.record["parts.codec"]): o.record for o in outcomes}
    assert len(made) == 1  # of the one sample
    for name, record_alone in runs["alone"].items():
        shared = runs["together"][name]
        assert shared["protocol.shared"] is True and record_alone["protocol.shared"] is False
        for key in (
            "score",
            "kv.bytes_held",
            "kv.ratio",
            "kv.kept_tokens_mean",
            "kv.read_bytes_per_token",
            "share_inactive",
        ):
            assert shared[key] == record_alone[key], (name, key)
        assert shared["protocol.decoding"] == "together"
        if name[1] != "plain":
            assert shared["kv.ratio"] < (0.6 if name[0] in ("kivi", "int8", "turboquant") else 0.25)


def test_a_schedule_that_a_codec_cannot_follow_drops_the_cell_and_names_the_way_out(tmp_path):
    outcomes, _ = sweep(cells(tmp_path, "h2o,snapkv", "0.25", "codec=kivi", "codec.group=16", "codec.residual=16"))
    by_method = {o.method: o for o in outcomes}
    assert by_method["h2o"].status == "dropped" and "schedule=prompt" in by_method["h2o"].note
    assert by_method["snapkv"].status == "ok"
