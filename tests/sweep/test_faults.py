"""A night-long sweep survives what happens to it: faults, interrupts, kills, a second process."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import time
import weakref

import pytest
import torch
from helpers import examples
from rich.console import Console
from sweeps import SHARED, cell, cell_run, cells, forked, left, sweep

from kvcompress.commands.run import summary
from kvcompress.measure.machine import resident
from kvcompress.methods import TOVA, KeyDiff, SnapKV
from kvcompress.models import loading
from kvcompress.sweep import record, sanity
from kvcompress.sweep.launcher import executor
from kvcompress.sweep.launcher.lock import Lock, holder
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.sanity import Sanity
from kvcompress.tasks import Needle


def break_scorer(monkeypatch, cls, fault):
    """Have every score of a method raise."""

    def score(*_):
        raise fault

    scorer = type(cls(budget=0.5).make_scorer())
    monkeypatch.setattr(scorer, "score", score)


@pytest.mark.parametrize(
    "fault, status",
    [
        (ZeroDivisionError("by zero"), "failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom"),
    ],
)
def test_a_fault_ends_its_own_cells_and_the_others_of_the_group_finish(tmp_path, monkeypatch, fault, status, capsys):
    break_scorer(monkeypatch, TOVA, fault)
    outcomes, text = sweep(cells(tmp_path, "full,tova,snapkv", "0.5,0.2"))
    by_method = {method: {o.status for o in outcomes if o.method == method} for method in ("full", "tova", "snapkv")}
    assert by_method == {"full": {"ok", "same"}, "tova": {status}, "snapkv": {"ok"}}
    assert text.count(f"{status} ") >= 2
    assert summary(outcomes, Console(stderr=True, width=200)) == 1
    printed = capsys.readouterr().err
    assert printed.count(f"{status}: tova budget") == 2 and type(fault).__name__ in printed


def run_out_of_memory(folder, results):
    """What a forked process does: its address space ends a little above what it has, and one method wants more."""
    have = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + (1 << 30), resource.RLIM_INFINITY))
    scorer = type(TOVA(budget=0.5).make_scorer())
    stock = scorer.score

    def greedy(self, *arguments):
        torch.zeros(1 << 29)  # 2 GiB
        return stock(self, *arguments)

    scorer.score = greedy
    outcomes, _ = sweep(cells(folder, "full,tova,snapkv", "0.5,0.2", "limit=1"), Options())
    code = summary(outcomes, Console(file=io.StringIO()))
    results.write_text(json.dumps([code, [[o.method, o.status, o.note] for o in outcomes]]))


def test_a_cell_that_runs_out_of_memory_for_real_is_marked_and_the_others_finish(tmp_path):
    process = forked(run_out_of_memory, tmp_path, tmp_path / "results")
    process.join()
    code, outcomes = json.loads((tmp_path / "results").read_text())
    found = {method: {status for name, status, _ in outcomes if name == method} for method, *_ in outcomes}
    assert code == 1 and found == {"full": {"ok", "same"}, "tova": {"oom"}, "snapkv": {"ok"}}
    assert all("memory" in note for name, _, note in outcomes if name == "tova")


def test_a_method_that_has_no_data_for_the_model_ends_alone(tmp_path, monkeypatch):
    """It says so when a session opens, which is before any row decodes."""

    def bind(self, model):
        raise ValueError("no filters for this model")

    monkeypatch.setattr(KeyDiff, "bind", bind)
    outcomes, _ = sweep(cells(tmp_path, "snapkv,keydiff,knorm", "0.5"), Options())
    assert {o.method: o.status for o in outcomes} == {"snapkv": "ok", "knorm": "ok", "keydiff": "failed"}
    assert "no filters for this model" in next(o.note for o in outcomes if o.failed)
    assert {o.record["protocol.decoding"] for o in outcomes if not o.failed} == {"together"}


def once(stock, fault):
    """`stock`, but its second call raises."""
    calls = []

    def function(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise fault
        return stock(*arguments)

    return function


@pytest.mark.parametrize(
    "where, fault",
    [
        ("score", ZeroDivisionError("by zero")),
        ("score", SystemExit("enough")),
        ("summarise", ZeroDivisionError("by zero")),
    ],
)
def test_a_task_that_raises_over_one_cell_ends_that_one(tmp_path, monkeypatch, where, fault):
    monkeypatch.setattr(sanity, "check", lambda *_: Sanity())  # which scores right answers, unless it did so before
    monkeypatch.setattr(Needle, where, once(getattr(Needle, where), fault))
    outcomes, _ = sweep(cells(tmp_path, "snapkv,knorm,random", "0.5", "limit=1"), Options())
    assert sorted(o.status for o in outcomes) == ["failed", "ok", "ok"]
    assert type(fault).__name__ in next(o.note for o in outcomes if o.failed)
    assert sorted(status for status, *_ in left(tmp_path).values()) == ["failed", "ok", "ok"]


def test_a_cell_whose_folder_is_taken_away_fails_and_the_others_finish(tmp_path, monkeypatch):
    append = record.RunFolder.append
    gone = cell_run(cells(tmp_path, "knorm", "0.5")[0]).folder.path

    def taken_away(folder, row):
        if folder.path == gone:
            shutil.rmtree(gone)
        append(folder, row)

    monkeypatch.setattr(record.RunFolder, "append", taken_away)
    outcomes, _ = sweep(cells(tmp_path, "snapkv,knorm,random", "0.5"))
    assert {o.method: o.status for o in outcomes} == {"snapkv": "ok", "knorm": "failed", "random": "ok"}
    assert "no record could be written" in next(o.note for o in outcomes if o.failed)
    assert summary(outcomes, Console(file=io.StringIO())) == 1 and not gone.exists()


def test_a_task_without_its_data_is_refused_and_the_other_task_runs(tmp_path, monkeypatch):
    configs = cells(tmp_path, "snapkv,knorm", "0.5", "limit=1")
    monkeypatch.setattr(Needle, "fingerprint", once(Needle.fingerprint, OSError("the disk is gone")))
    outcomes, _ = sweep(configs)
    assert sorted(o.status for o in outcomes) == ["ok", "refused"] and "the disk is gone" in outcomes[0].note


def test_the_prefill_of_a_sample_is_freed_before_the_next_is_made(tmp_path, monkeypatch):
    made, stock = [], executor.prefill_once

    def watched(*arguments):
        assert all(one() is None for one in made)
        found = stock(*arguments)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(executor, "prefill_once", watched)
    outcomes, text = sweep(cells(tmp_path, "snapkv,knorm,tova", "0.5"), Options())
    assert len(made) == 2 and {o.status for o in outcomes} == {"ok"} and "no shared prefill" not in text


def test_cells_that_failed_are_run_again_and_nothing_else_is(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        break_scorer(patch, TOVA, ZeroDivisionError())
        sweep(cells(tmp_path, "tova,snapkv", "0.5,0.2"))
    outcomes, _ = sweep(cells(tmp_path, "tova,snapkv", "0.5,0.2"))
    assert sorted((o.method, o.status) for o in outcomes) == [("snapkv", "done")] * 2 + [("tova", "ok")] * 2


def test_a_model_that_cannot_be_loaded_fails_its_cells_and_the_next_model_runs(tmp_path):
    missing = cells(tmp_path, "snapkv,tova", "0.5", f"model.name={tmp_path / 'nowhere'}")
    outcomes, _ = sweep([*missing, *cells(tmp_path, "snapkv,tova", "0.5")])
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "ok", "ok"]
    assert all("nowhere" in outcome.note for outcome in outcomes[:2])


def test_models_are_loaded_once_and_freed_for_the_next(tmp_path, monkeypatch):
    loaded, stock = [], loading.load
    monkeypatch.setattr(loading, "load", lambda name, *a, **k: loaded.append(name) or stock(name, *a, **k))
    mixed = [
        cell(tmp_path, f"method={method}", f"model={model}", "budget=0.5")
        for method in ("snapkv", "tova", "h2o")
        for model in ("random", "random/qwen2")
    ]
    sweep(mixed)
    assert len(loaded) == 2


def test_an_interrupt_leaves_partial_records_and_the_same_command_goes_on(tmp_path, monkeypatch):
    sweep(cells(tmp_path / "calm", "full,snapkv,tova", "0.5,0.2"))
    written, append = [], record.RunFolder.append

    def interrupted(folder, row):
        append(folder, row)
        written.append((folder.run_id, row["id"]))
        if len(written) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(record.RunFolder, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(cells(tmp_path / "cut", "full,snapkv,tova", "0.5,0.2"))
    statuses = [status for status, *_ in left(tmp_path / "cut").values()]
    assert statuses == ["partial"] * 5
    assert not list((tmp_path / "cut").rglob("lock"))
    sweep(cells(tmp_path / "cut", "full,snapkv,tova", "0.5,0.2"))
    assert len(written) == len(set(written)) == 10
    assert left(tmp_path / "cut") == left(tmp_path / "calm")


def run_quietly(folder, log, *overrides):
    """What a forked process does: the whole sweep, each finished sample noted in `log`."""
    append = record.RunFolder.append

    def noted(run_folder, row):
        append(run_folder, row)
        with log.open("a") as file:
            file.write(json.dumps([os.getpid(), run_folder.run_id, row["id"]]) + "\n")

    record.RunFolder.append = noted
    made = [cells(folder, "full,snapkv,h2o", "0.5,0.2", f"seed={seed}") for seed in range(examples(1, 2))]
    outcomes = [outcome for configs in made for outcome in sweep(configs)[0]]
    os._exit(int(any(outcome.failed for outcome in outcomes)))


@pytest.mark.slow
def test_killed_at_any_moment_a_sweep_ends_with_what_an_undisturbed_one_leaves(tmp_path):
    cells(tmp_path, "full,snapkv,h2o", "0.5", "seed=0")  # composed here once, which every copy has then
    calm = forked(run_quietly, tmp_path / "calm", tmp_path / "calm.log")
    start = time.monotonic()
    calm.join()
    whole, moments = time.monotonic() - start, random.Random(0)
    assert calm.exitcode == 0
    kills = 0
    while kills < examples(4, 20):
        process = forked(run_quietly, tmp_path / "cut", tmp_path / "cut.log")
        process.join(moments.uniform(0.02, 0.35) * whole)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        else:  # all is done: take a finished cell away, so that there is something to kill
            done = sorted((tmp_path / "cut" / "test").glob("*/record.json"))
            moments.choice(done).unlink()
    last = forked(run_quietly, tmp_path / "cut", tmp_path / "cut.log")
    last.join()
    assert last.exitcode == 0
    assert left(tmp_path / "cut") == left(tmp_path / "calm")
    assert sorted(p.name for p in (tmp_path / "cut" / "test").rglob("*") if p.is_file()) == sorted(
        p.name for p in (tmp_path / "calm" / "test").rglob("*") if p.is_file()
    )


def test_what_a_killed_process_was_about_to_write_is_taken_away(tmp_path):
    sweep(cells(tmp_path, "snapkv", "0.5", "limit=1"))
    (done,) = (tmp_path / "test").glob("*/record.json")
    halves = [tmp_path / "test" / ".sweep.json.17.tmp", done.with_name(".record.json.17.tmp")]
    for half in halves:
        half.write_text('{"layout"')
    (outcome,) = sweep(cells(tmp_path, "snapkv", "0.5", "limit=1"))[0]
    assert outcome.status == "done" and not any(half.exists() for half in halves)


@pytest.mark.slow
def test_two_processes_share_a_sweep_without_doing_a_cell_twice(tmp_path):
    log = tmp_path / "log"
    cells(tmp_path, "full,snapkv", "0.5", "seed=0")  # composed here once
    both = [forked(run_groups, tmp_path / "both", log) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    noted = [json.loads(line) for line in log.read_text().splitlines()]
    samples = [(run_id, sample) for _, run_id, sample in noted]
    assert len(samples) == len(set(samples)) == 3 * 3 * 2
    assert len({pid for pid, *_ in noted}) == 2, "both had something to do"
    found = left(tmp_path / "both")
    assert len(found) == 9 and {status for status, *_ in found.values()} == {"ok"}


def run_groups(folder, log):
    append = record.RunFolder.append

    def noted(run_folder, row):
        append(run_folder, row)
        with log.open("a") as file:
            file.write(json.dumps([os.getpid(), run_folder.run_id, row["id"]]) + "\n")

    record.RunFolder.append = noted
    configs = [c for seed in range(3) for c in cells(folder, "full,snapkv", "0.5,0.2", f"seed={seed}")]
    outcomes, _ = sweep(configs, SHARED)
    os._exit(int(any(outcome.failed for outcome in outcomes)))


def hold(path, ready):
    assert Lock(path).acquire()
    ready.touch()
    time.sleep(60)


def test_a_lock_is_held_by_one_process_and_free_once_that_is_killed(tmp_path):
    path, ready = tmp_path / "sweep" / "run" / "lock", tmp_path / "ready"
    path.parent.mkdir(parents=True)
    process = forked(hold, path, ready)
    while not ready.exists():
        time.sleep(0.01)
    mine = Lock(path)
    assert not mine.acquire() and holder(path)["pid"] == process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert path.exists() and holder(path) is None
    assert mine.acquire() and holder(path)["pid"] == os.getpid()
    mine.release()
    assert not path.exists()


def test_a_cell_that_another_process_has_is_left_to_it(tmp_path):
    configs = cells(tmp_path, "snapkv,tova", "0.5")
    theirs = cell_run(configs[0])
    assert theirs.acquire() is None
    outcomes, text = sweep(configs)
    assert {o.method: o.status for o in outcomes} == {"snapkv": "running", "tova": "ok"}
    assert "another process has it" in text
    theirs.release()
    assert sorted(o.status for o in sweep(configs)[0]) == ["done", "ok"]


def test_a_cell_that_failed_in_another_process_meanwhile_is_not_tried_twice(tmp_path, monkeypatch):
    configs = cells(tmp_path, "snapkv,tova", "0.5")
    waiting = [cell_run(config) for config in configs]
    with monkeypatch.context() as patch:
        break_scorer(patch, SnapKV, ZeroDivisionError())
        sweep(configs)
    assert [cell.acquire().status for cell in waiting] == ["failed", "done"]


def test_an_unwritable_results_folder_is_said_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("in the way")
    outcomes, text = sweep(cells(tmp_path / "file", "snapkv,tova", "0.5"))
    assert [o.status for o in outcomes] == ["refused"] * 2 and "cannot write to paths.results" in text


def test_a_results_folder_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "sweep.json").write_text('{"layout": 99, "cells": {}}')
    outcomes, text = sweep(cells(tmp_path, "snapkv", "0.5"))
    assert outcomes[0].status == "refused" and "layout 99" in text and "choose another sweep.name" in text


def test_memory_does_not_grow_with_the_number_of_cells(tmp_path):
    runner = Scheduler(Console(file=io.StringIO()))
    configs = cells(tmp_path, "snapkv,tova,random,keydiff,h2o", "0.5,0.1", "limit=1")
    runner.sweep(configs[:3])
    after_3 = resident()
    runner.sweep(configs[3:])
    assert resident() < 1.05 * after_3
