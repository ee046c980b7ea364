"""task=latency: a grid of requests, timed to the last token, beside the full cache in the same run."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from composed import composed
from rich.console import Console
from slow_device import SlowDevice
from small_models import small_model

from kvcompress import compress
from kvcompress.measure import latency, roofline, timing
from kvcompress.measure.latency import Shape, again, batch_ids, grid, last_good, prompt_ids, request
from kvcompress.method import Method
from kvcompress.methods import H2O, Full, SnapKV
from kvcompress.models.random_models import byte_tokenizer
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.tasks import Latency

TINY = ["task.lengths=[24,48]", "task.batches=[1,2]", "task.outputs=[5]", "task.rounds=2", "task.floor=false"]


def slow_session(device, prefill=0.1, step=0.05):
    """What `request` asks of a session, on a device that works later."""

    def run(seconds, batch):
        device.launch(seconds)
        return torch.zeros(batch, 7)

    return SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")),
        prefill=lambda ids: SimpleNamespace(logits=run(prefill, len(ids))),
        step=lambda ids: run(step, len(ids)),
        prepare=lambda tokens: None,
        compressor=SimpleNamespace(stats=SimpleNamespace(seconds=0.0)),
    )


def test_a_request_is_timed_to_the_end_of_the_devices_work(monkeypatch):
    device = SlowDevice(monkeypatch)
    found = request(slow_session(device), torch.zeros(2, 9, dtype=torch.long), output=4)
    assert len(found.steps_s) == 3 and len(device.took) == 4
    for seconds, took in zip(
        [found.ttft_s, *found.steps_s, found.total_s], [*device.took, sum(device.took)], strict=True
    ):
        assert 0.95 * took <= seconds <= 2 * took  # a call that does not wait takes a thousandth
    assert found.tpot_s == pytest.approx(found.decode_s / 3)


def test_no_token_ends_an_output_and_tokens_are_those_of_generate():
    model, ids = small_model(), torch.arange(5, 35)[None]
    with compress(model, SnapKV(budget=0.5, window=3)) as session:
        found = request(session, ids, 12, looks=True)
        assert found.compressed["kv"]["kept_tokens_mean"] == 15 and found.end["kv"]["kept_tokens_mean"] == 26
    with compress(model, SnapKV(budget=0.5, window=3)) as session:
        session.prefill(ids)
        assert found.tokens == session.generate(12).tokens[0]
    assert found.ttft_s > found.compress_s > 0 and found.prefill_s == found.ttft_s - found.compress_s


def test_a_request_with_fixed_steps_gives_the_same_tokens_and_both_sides_take_them():
    model, ids, found = small_model(), torch.arange(5, 35)[None], []
    for decode in ("eager", "static"):
        unopened = compress(model, SnapKV(budget=0.5, window=3), decode=decode)
        for full in (False, True):
            with again(unopened, full) as session:
                found.append(request(session, ids, 12, looks=True))
    assert [one.end["step"]["how"] for one in found] == ["eager", "eager", "static", "static"]
    assert [one.tokens for one in found[:2]] == [one.tokens for one in found[2:]]


def test_an_unopened_session_gives_others_of_its_method_and_of_none():
    session = compress(small_model(), H2O(budget=0.5), "blockwise", byte_tokenizer())
    same, full = again(session), again(session, full=True)
    assert same.method == session.method and full.method == Method()
    assert same.compressor.blockwise and full.compressor.blockwise and full.tokenizer is session.tokenizer
    with full:
        pass
    with same:
        pass


def test_the_grid_runs_from_small_to_large_without_repeats():
    shapes = grid([8, 4], [1, 2, 1], [3, 2])
    assert [shape.name for shape in shapes[:4]] == ["L4-B1-N2", "L4-B1-N3", "L4-B2-N2", "L4-B2-N3"]
    assert len(shapes) == 8 and shapes[-1] == Shape(8, 2, 3)


@pytest.mark.parametrize("source", ["random", "text"])
@pytest.mark.parametrize("length", [1, 700])
def test_prompts_are_exact_in_length_follow_from_the_seed_and_hold_no_special_token(source, length):
    tokenizer = byte_tokenizer()
    ids = prompt_ids(tokenizer, length, source, seed=3)
    assert len(ids) == length and ids == prompt_ids(tokenizer, length, source, seed=3)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert length == 1 or ids != prompt_ids(tokenizer, length, source, seed=4)


def test_rows_of_a_batch_are_different_prompts_of_the_same_tokens():
    rows = batch_ids(range(10), 3).tolist()
    assert rows[0] == list(range(10)) and len({tuple(row) for row in rows}) == 3
    assert all(sorted(row) == rows[0] for row in rows)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lengths": ()}, "task.lengths"),
        ({"batches": (0,)}, "task.batches"),
        ({"outputs": (1,)}, "task.outputs=.*at least 2"),
        ({"source": "book"}, "valid: random, text"),
        ({"rounds": 0}, "task.rounds=0"),
    ],
)
def test_settings_that_measure_nothing_are_refused_by_name(settings, says):
    with pytest.raises(ValueError, match=says):
        Latency(**settings)


def test_on_the_way_down_the_batch_is_halved_before_the_prompt():
    tried = []

    def works(shape):
        tried.append((shape.prompt, shape.batch))
        return shape.prompt * shape.batch <= 40

    assert last_good(works, Shape(100, 4, 8)) == Shape(25, 1, 8)
    assert tried == [(100, 2), (100, 1), (50, 1), (25, 1)]
    assert last_good(lambda shape: False, Shape(4, 2, 8)) is None


# ---------------------------------------------------------------------------------------------- through the runner


@pytest.fixture
def cell(tmp_path):

    def make_cell(*overrides):
        fixed = ["model=random", "task=latency", *TINY, "device=cpu", f"paths.results={tmp_path}", "sweep.name=test"]
        return composed(*fixed, "paths.data=null", *overrides)

    return make_cell


@pytest.fixture
def runner():
    return Scheduler(Console(file=io.StringIO()))


def rows_of(outcome):
    from kvcompress.sweep.record import read_rows

    return list(read_rows(outcome.folder / "samples.jsonl"))


def test_each_cell_of_the_grid_is_a_sample_with_the_full_cache_beside_it(cell, runner, monkeypatch):
    order = []
    stock = latency.request

    def watched(session, ids, output, looks=False):
        order.append((session.method.limited, tuple(ids.shape)))
        return stock(session, ids, output, looks)

    monkeypatch.setattr(latency, "request", watched)
    found = runner(cell("method=snapkv", "method.window=4", "budget=0.5"))
    assert found.status == "ok", found.record.get("error")
    ours, full = (True, (1, 24)), (False, (1, 24))
    assert order[:9] == [full, ours, full, ours, full, full, full, full, ours], "a warm-up, then two rounds"
    rows = rows_of(found)
    assert [row["id"].partition("-random")[0] for row in rows] == ["L24-B1-N5", "L24-B2-N5", "L48-B1-N5", "L48-B2-N5"]
    for row in rows:
        details = row["out"]["latency"]
        assert len(row["out"]["tokens"][0]) == 5 and row["out"]["finished"] == ["fixed"]
        assert len(row["out"]["ttft_s"]) == len(row["out"]["tpot_s"]) == 2
        assert details["ratios"]["ttft"]["n"] == details["ratios"]["aa_tpot"]["n"] == 2
        ours, rounds = details["method"], row["out"]["ttft_s"]
        assert ours["ttft_s"]["median"] == pytest.approx(sum(rounds) / 2) and len(ours["tpot_quarters_s"]) == 4
        total = ours["ttft_s"]["median"] + 4 * ours["tpot_s"]["median"]
        batch = row["out"]["shape"]["batch"]
        assert ours["tokens_per_s"]["median"] == pytest.approx(batch * 5 / total, rel=0.5)
        assert details["machine"]["before"]["threads"] == torch.get_num_threads()
    record = found.record
    assert record["time.ttft_s"] > record["time.compress_s"] > 0 and record["time.tpot_s"] > 0
    assert record["metrics.L48-B2-N5.tpot_s"] == rows[3]["out"]["latency"]["method"]["tpot_s"]["median"]
    assert record["metrics.L48-B2-N5.full.tpot_s"] == rows[3]["out"]["latency"]["full"]["tpot_s"]["median"]
    assert record["metrics.ratio_ttft"] > 0 and record["protocol.hit_max_share"] == 0.0 and record["score"] == 1.0
    assert record["kv.ratio"] < 0.7 and record["versions.load"] is not None


def test_prefills_are_never_shared(cell, runner):
    found = runner.sweep(
        [cell("method=snapkv", f"budget={b}", "task.lengths=[24]", "task.batches=[1]") for b in (0.5, 0.3)]
    )
    assert [one.status for one in found] == ["ok", "ok"]
    assert all(one.record["protocol.shared"] is False and one.record["time.ttft_s"] > 0 for one in found)


@pytest.fixture
def little_memory(monkeypatch):
    """Requests of more than 60 tokens in all run out of memory, with the full cache of more than 40."""
    stock = latency.request

    def limited(session, ids, output, looks=False):
        if ids.numel() > (60 if session.method.limited else 40):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return stock(session, ids, output, looks)

    monkeypatch.setattr(latency, "request", limited)
    for module in (latency, timing):  # collecting garbage after each takes long
        monkeypatch.setattr(module, "release", lambda: None)


def test_a_cell_without_memory_is_recorded_with_the_last_good_size_and_the_grid_goes_on(cell, runner, little_memory):
    found = runner(cell("method=snapkv", "method.window=4", "budget=0.5", "task.lengths=[24,48,96]"))
    assert found.status == "ok", found.record.get("error")
    rows = {row["id"].partition("-random")[0]: row["out"] for row in rows_of(found)}
    assert len(rows) == 6 and found.record["n_samples"] == 6 and found.record["score"] == pytest.approx(3 / 6)
    assert rows["L24-B1-N5"]["latency"]["ratios"]["tpot"] and "oom" not in rows["L24-B1-N5"]
    alone = rows["L48-B1-N5"]["latency"]  # only the method fits
    assert alone["method"] and "full" not in alone and alone["ratios"]["tpot"] is None
    assert alone["full_oom"]["last_good"] == {"prompt": 24, "batch": 1, "output": 5}
    oom = rows["L96-B2-N5"]["oom"]
    assert oom["last_good"] == {"prompt": 48, "batch": 1, "output": 5}
    assert oom["error"] == "CUDA out of memory. Tried to allocate 2 GiB" and rows["L96-B2-N5"]["end"] is None
    assert found.record["metrics.L96-B2-N5.method_oom"] == oom["last_good"]
    assert found.record["time.tpot_s"] > 0


def test_a_grid_that_fits_nowhere_is_oom(cell, runner, little_memory):
    found = runner(cell("method=snapkv", "budget=0.5", "task.lengths=[96]"))
    assert found.status == "oom" and found.record["time.tpot_s"] is None and found.record["score"] == 0.0
    again = runner(cell("method=snapkv", "budget=0.5", "task.lengths=[96]"))
    assert again.status in ("oom", "same")


def test_a_length_beyond_the_model_is_refused_before_any_work(cell, runner, monkeypatch):
    monkeypatch.setattr(latency, "request", lambda *a, **k: pytest.fail("nothing may run"))
    found = runner(cell("method=full", "task.lengths=[24,8190]"))
    assert found.status == "failed" and "8195 positions" in found.note and "the model has 8192" in found.note


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_task_without_cuda_is_refused_by_name(cell, runner):
    found = runner(cell("method=full", "device=cuda"))
    assert found.status == "refused" and "device='cuda' is not there" in found.note and "device=auto" in found.note


def test_the_full_cache_against_itself_is_about_one(cell, runner):
    found = runner(cell("method=full", "task.lengths=[24]", "task.batches=[1]"))
    assert found.status == "ok" and Full().budget == 1.0
    assert 0.2 < found.record["metrics.ratio_tpot"] < 5.0 and found.record["kv.ratio"] >= 1.0


def test_a_run_that_can_hardly_save_anything_says_so_beside_its_floor(cell, runner, monkeypatch):
    monkeypatch.setattr(roofline, "rates", lambda device, dtype: roofline.Rates(1e9, 1e9, 1e15))
    small = runner(cell("method=snapkv", "method.window=4", "budget=0.5", "task.floor=true", "task.batches=[1]"))
    assert small.status == "ok", small.record.get("error")
    details = rows_of(small)[0]["out"]["latency"]["roofline"]
    assert details["of_floor"] == small.record["metrics.L24-B1-N5.of_floor"] > 1
    assert 0 < details["predicted_saving"] < 0.05 and details["step_cache"] < details["full_step_cache"]
    assert any("faster than with the full cache" in note for note in small.record["notes"])
    full = runner(cell("method=full", "task.floor=true", "task.batches=[1]"))
    assert full.record["notes"] == [], "what is compared with itself saves nothing and need not say so"
