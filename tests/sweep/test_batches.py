"""Samples as rows of one batch get what each gets alone: tokens, kept positions, bytes, scores, in the same order."""

from __future__ import annotations

import io
import json

import pytest
import torch
from composed import composed
from helpers import all_held, every_method, make, thinned
from rich.console import Console
from small_models import VOCAB, random_ids, small_model

from kvcompress import compress
from kvcompress.data.task import Sample, Turn
from kvcompress.method import Chunked, Method
from kvcompress.sweep import batches, record
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import LongBenchV2, MultiQuestion, Needle, Passkey

STOP = tuple(range(2, VOCAB, 7))


def ids(n, seed):
    return tuple(random_ids(1, n, seed)[0].tolist())


def sample(number, n, questions=((), ()), turns="independent"):
    asked = tuple(Turn(one, 5, STOP) for one in questions)
    return Sample(f"s{number}", (ids(n, number),), asked, {"question": "hidden", "turns": turns})


UNEVEN = [sample(0, 31, (ids(4, 7), ids(3, 8))), sample(1, 18, (ids(2, 9), ids(6, 10))),
          sample(2, 24, (ids(5, 11), ids(3, 12)))]  # fmt: skip
EVEN = [sample(n, length, (ids(4, 20 + n),)) for n, length in enumerate((31, 18, 24))]
SEEN = [sample(n, length, ((),)) for n, length in enumerate((31, 18, 24))]


def alone(model, method, one):
    with compress(model, method) as session:
        out = MultiQuestion().run(session, one)
        return out, all_held(session)


def same(out, other):
    """Equal in all but times and what depends on how buffers were filled.

    Positions that are the same for all heads are stored once, or once per head: 4 bytes beside a token's 128 and more.
    """
    assert out["tokens"] == other["tokens"] and out["finished"] == other["finished"]
    for moment in ("compressed", "end"):
        a, b = ({**one[moment], "kv": dict(one[moment]["kv"])} for one in (out, other))
        for report in (a, b):
            for name in ("time", "moments", "kernel", "nbytes"):
                report.pop(name)
            for name in ("bytes_allocated", "bytes_scores"):
                report["kv"].pop(name)
        for name in ("bytes_held", "ratio", "read_bytes_per_token"):
            assert a["kv"].pop(name) == pytest.approx(b["kv"].pop(name), rel=0.05)
        assert a == b


@pytest.mark.parametrize("name", every_method())
def test_rows_of_a_batch_are_what_each_sample_is_alone(name):
    model, method = small_model(), make(name, 0.4)
    with compress(model, method) as session:
        outs = batches.run(session, UNEVEN)
        kept = [{layer: session.cache.row(row).positions(layer) for layer in session.full_layers} for row in range(3)]
    for number, one in enumerate(UNEVEN):
        out, held = alone(model, method, one)
        same(out, outs[number])
        for layer, positions in kept[number].items():
            assert [[[p for p in head if p >= 0] for head in row] for row in positions.tolist()] == held[layer]


@pytest.mark.parametrize(("architecture", "samples"), thinned(["gemma3_text", "gpt_oss"], [EVEN, SEEN], every=2))
def test_windows_and_soft_caps_do_not_see_the_padding(architecture, samples):
    model = small_model(architecture)
    for method in (make("SnapKV", 0.4), Method()):
        with compress(model, method) as session:
            outs = batches.run(session, samples)
        for one, out in zip(samples, outs, strict=True):
            same(alone(model, method, one)[0], out)


# ---------------------------------------------------------------------- which go together


def lengths(planned):
    return [[len(one.segments[0]) for one in batch] for batch in planned]


def test_samples_of_similar_length_go_together_the_longest_first():
    samples = [sample(n, length, ((),)) for n, length in enumerate((10, 90, 30, 80, 20))]
    assert lengths(batches.plan(samples, 2, None, 1)) == [[90, 80], [30, 20], [10]]
    assert lengths(batches.plan(samples, 9, None, 1)) == [[90, 80, 30, 20, 10]]
    assert lengths(batches.plan(samples, 1, None, 1)) == [[90], [80], [30], [20], [10]]


def test_a_batch_stays_within_the_memory_that_its_padded_rows_take():
    samples = [sample(n, length, ((),)) for n, length in enumerate((95, 85, 25, 20, 15))]  # and 5 new tokens each
    planned = batches.plan(samples, 9, memory=1200, token_bytes=10)
    assert lengths(planned) == [[95], [85], [25, 20, 15]]
    for batch in planned:
        need = len(batch) * max(one.total_tokens() for one in batch) * 10
        assert need <= 1200 or len(batch) == 1
    assert lengths(batches.plan(samples, 9, 1, 10)) == [[95], [85], [25], [20], [15]]  # what does not fit is alone


def test_only_questions_that_end_alike_go_together():
    one, two = sample(0, 9, ((),)), sample(1, 9, (ids(3, 1),))
    longer = Sample("s2", one.segments, (Turn((), 6, STOP),), one.protocol)
    asked = sample(3, 9, (ids(4, 1),))
    said = sample(4, 9, (ids(3, 1), ids(3, 2)), "session")
    again = sample(5, 9, (ids(3, 1), ids(3, 2)), "session")
    planned = batches.plan([one, two, longer, asked, said, again], 9, None, 1)
    assert [[s.id for s in batch] for batch in planned] == [["s0"], ["s1", "s3"], ["s2"], ["s4"], ["s5"]]
    planned = batches.plan([two, asked], 9, None, 1, same_lengths=True)
    assert [[s.id for s in batch] for batch in planned] == [["s1"], ["s3"]]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "starcoder2"])
def test_the_bytes_of_a_token_are_those_a_cache_holds(architecture):
    model = small_model(architecture)
    with torch.no_grad():
        cache = model(random_ids(1, 10)).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 10 * batches.bytes_per_token(model) == held


# ---------------------------------------------------------------------- runs


@pytest.fixture
def cell(tmp_path):
    usual = ["model=random", "device=cpu", "paths.data=null", f"paths.results={tmp_path}", "task.lengths=[450,480]",
             "task.depths=[0.0,1.0]", "task.max_new_tokens=4"]  # fmt: skip

    def make(*overrides, short=True):
        return composed(*(usual if short else usual[:4]), *overrides)

    return make


def runner():
    return Scheduler(Console(file=io.StringIO(), width=200))


def rows_of(outcome):
    return [json.loads(line) for line in (outcome.folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("question", "method"), thinned(["seen", "hidden"], [["method=full"], ["method=snapkv", "budget=0.3"]], every=2)
)
def test_a_batched_cell_leaves_the_samples_of_one_that_is_not(cell, question, method):
    one, many = (
        runner()(cell(*method, f"task.question={question}", f"batch={size}", f"sweep.name=b{size}")) for size in (1, 4)
    )
    assert (one.status, many.status) == ("ok", "ok"), (one.note, many.note)
    assert one.run_id == many.run_id
    for a, b in zip(rows_of(one), rows_of(many), strict=True):
        assert (a["id"], a["scores"], a["meta"]) == (b["id"], b["scores"], b["meta"])
        same(a["out"], b["out"])
        assert a["rows"] == 1 and b["rows"] == 4
    assert (one.record["protocol.batch"], many.record["protocol.batch"]) == ("1", "4")
    assert one.record["time.tpot_s"] > 0 and many.record["time.tpot_s"] is many.record["memory.decode_peak"] is None
    assert one.record["kv.ratio"] == many.record["kv.ratio"]


def test_interrupted_between_batches_a_cell_goes_on_with_the_samples_that_are_left(cell, monkeypatch):
    append, done = record.RunFolder.append, []

    def counting(folder, row):
        append(folder, row)
        done.append(row["id"])
        if len(done) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(record.RunFolder, "append", counting)
    made = cell("method=snapkv", "budget=0.3", "batch=2")
    with pytest.raises(KeyboardInterrupt):
        runner()(made)
    first, done[:] = list(done), ["not counted"] * 3
    outcome = runner()(made)
    assert outcome.status == "ok" and outcome.record["n_samples"] == 4
    assert len(done[3:]) == 1 and len({*done[3:], *first}) == 4
    expected = rows_of(runner()(cell("method=snapkv", "budget=0.3", "sweep.name=alone")))
    assert [row["id"] for row in rows_of(outcome)] == [row["id"] for row in expected]
    assert [row["out"]["tokens"] for row in rows_of(outcome)] == [row["out"]["tokens"] for row in expected]


def test_a_batch_that_memory_does_not_do_for_is_halved(cell, monkeypatch):
    run, sizes = batches.run, []

    def small(session, samples):
        sizes.append(len(samples))
        if len(samples) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(session, samples)

    monkeypatch.setattr(batches, "run", small)
    outcome = runner()(cell("method=full", "batch=6"))
    assert outcome.status == "ok" and sizes == [4, 2, 2]
    assert len(rows_of(outcome)) == 4
    monkeypatch.setattr(batches, "run", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    assert runner()(cell("method=full", "batch=6", "sweep.name=none")).status == "oom"


def test_the_limit_in_bytes_keeps_batches_small(cell):
    outcome = runner()(cell("method=full", "batch=6", "batch_memory=1"))
    assert {row["rows"] for row in rows_of(outcome)} == {1} and outcome.record["time.tpot_s"] is None


@pytest.mark.parametrize(
    ("overrides", "status", "said"),
    [
        (["task=fidelity"], "dropped", "task=fidelity runs its samples in a way of its own"),
        (["task=multi_question", "task.turns=session"], "dropped", "task.turns=session leaves answers"),
        (["prefill=chunked", "method=snapkv", "budget=0.3"], "dropped", "prefill=chunked parts a padded row"),
        (["batch=0"], "refused", "batch=0; at least 1"),
        (["batch_memory=0"], "refused", "batch_memory=0; at least 1 byte"),
    ],
)
def test_what_cannot_be_batched_is_said_before_a_model_is_loaded(cell, monkeypatch, overrides, status, said):
    monkeypatch.setattr(ModelPool, "load", lambda *_: pytest.fail("the model was loaded"))
    outcome = runner()(cell("batch=4", *overrides, short=False))
    assert (outcome.status, said in outcome.note) == (status, True), outcome.note


def test_tasks_that_run_as_usual_can_be_batched():
    assert batches.cannot_batch(Needle(), Method()) is batches.cannot_batch(Passkey(), Method()) is None
    assert batches.cannot_batch(MultiQuestion(), Method()) is None
    assert batches.cannot_batch(LongBenchV2(), Method()) is None
    assert "of its own" in str(batches.cannot_batch(LongBenchV2(cot=True), Method()))
    assert "chunked" in str(batches.cannot_batch(Needle(), Method(prefill=Chunked(chunk=8))))


def test_batched_cells_of_a_sweep_run_alone_and_it_is_said(cell):
    here = runner()
    outcomes = here.sweep([cell("method=full", "batch=3"), cell("method=snapkv", "budget=0.3", "batch=3")])
    assert [one.status for one in outcomes] == ["ok", "ok"] and not any(o.record["protocol.shared"] for o in outcomes)
    assert "batch=3 puts samples together, not cells: " in here.console.file.getvalue()
