"""task=memory: peaks by moment, what is live beside them, and what fits, found and predicted."""

from __future__ import annotations

import io

import pytest
import torch
from composed import composed
from rich.console import Console
from small_models import random_ids, small_model

from kvcompress import compress, load
from kvcompress.measure import footprint, latency, machine
from kvcompress.measure.footprint import Line, Needs, fits, prompt_of, rows, search, weight_bytes
from kvcompress.measure.latency import Shape, batch_ids, prompt_ids
from kvcompress.measure.measuring import hardware
from kvcompress.methods import Full, SnapKV
from kvcompress.sweep.launcher.scheduler import Scheduler
from kvcompress.sweep.record import read_rows
from kvcompress.tasks import Memory

MEASURED = (
    "prefill_growth decode_growth prefill_peak decode_peak after_growth steady_growth prefill_rest decode_rest moments"
)
WIDE = {"heads": 8, "kv_heads": 4, "head_dim": 64, "layers": 2}


@pytest.fixture(scope="module")
def wide():
    return load("random/llama", device="cpu", **WIDE)


def measured(model, tokenizer, method, length=1500, batch=2):
    ids = batch_ids(prompt_ids(tokenizer, length), batch)
    with compress(model, method) as session:
        return footprint.footprint(session, ids, 4)[0]


@pytest.mark.parametrize("method", [pytest.param(Full(), marks=pytest.mark.long), SnapKV(budget=0.25)])
def test_two_identical_jobs_in_one_process_report_equal_peaks(wide, method):
    first, second = (measured(*wide, method) for _ in range(2))
    assert first.prefill_growth > 20 << 20, "large beside a page"
    assert second.prefill_growth == pytest.approx(first.prefill_growth, rel=0.02)
    assert second.after_growth == pytest.approx(first.after_growth, rel=0.02, abs=2 << 20)
    counted = [{k: v for k, v in one.as_dict().items() if k not in MEASURED.split()} for one in (first, second)]
    assert counted[0] == counted[1] and counted[0]["cache_end"] > counted[0]["held_after"] > 0


def test_what_is_left_after_the_compression_is_the_cache(wide):
    full, tenth = (measured(*wide, method) for method in (Full(), SnapKV(budget=0.1)))
    assert (
        full.weights == weight_bytes(wide[0]) == sum(t.numel() * 4 for t in (*wide[0].parameters(), *wide[0].buffers()))
    )
    assert full.after_growth == pytest.approx(full.held_after, rel=0.05)
    assert tenth.after_growth < 0.3 * full.after_growth and tenth.cache_full == full.cache_full
    assert tenth.held_after == pytest.approx(0.1 * full.held_after, rel=0.05)
    assert full.prefill_growth > full.after_growth and full.prefill_rest == full.prefill_growth - full.cache_after
    assert tenth.steady_growth <= tenth.decode_growth + (1 << 20) < full.decode_growth
    assert full.method in ("VmHWM", "sampled") and full.moments["after"]["rss"] > full.moments["start"]["rss"]


@torch.no_grad()
def test_rows_of_one_cache_decode_as_that_row_alone():
    model, token = small_model(), torch.tensor([[9]])
    with compress(model, SnapKV(budget=0.5, window=3)) as session:
        session.prefill(random_ids(1, 30))
        one, three = session.cache, rows(session.cache, 3)
        assert rows(one, 0) is None
        session.cache = one
        alone = session.step(token)
        session.cache = three
        assert (session.step(token.expand(3, 1)) - alone).abs().max() <= 1e-5
        assert len(three.real) == 3 and len(one.real) == 1


def test_a_line_goes_through_what_was_measured_and_says_what_fits():
    line = Line.through([(10, 120.0), (20, 220.0), (40, 420.0)])
    assert line.fixed == pytest.approx(20) and line.slope == pytest.approx(10)
    assert line.largest(520, 100) == 50 and line.largest(519, 100) == 49 and line.largest(10**6, 100) == 100
    assert line.largest(25, 100) == 0
    assert Line(5.0, 0.0).largest(4, 9) == 0 and Line(5.0, 0.0).largest(5, 9) == 9
    with pytest.raises(ValueError, match="measure two"):
        Line.through([(3, 1.0), (3, 2.0)])


@pytest.mark.parametrize("true", [0, 1, 2, 7, 8, 63, 64])
@pytest.mark.parametrize("predicted", [0, 1, 7, 30, 64])
def test_the_search_finds_the_largest_that_fits_whatever_was_predicted(true, predicted):
    tried = []

    def need(n):
        tried.append(n)
        return None if n > true + 3 else 10 * n if n <= true else 10**6

    found = search(need, 1000, predicted, most=64, tries=20)
    assert found.found == true and found.exact and found.runs == len(tried) <= 13
    assert found.bytes == (10 * true if true else None) and all(1 <= n <= 64 for n in tried)
    assert len(set(tried)) == len(tried), "nothing is run twice"


def test_a_right_prediction_takes_two_runs_and_a_search_ends_with_its_runs():
    assert search(lambda n: n, 40, 40, most=100, tries=20).runs <= 5
    cut = search(lambda n: n, 40, 1, most=10**6, tries=3)
    assert cut.runs == 3 and not cut.exact and 1 <= cut.found <= 40
    coarse = search(lambda n: n, 4000, 3900, most=8000, tries=20, grain=64)
    assert 4000 - 64 <= coarse.found <= 4000 and coarse.exact


def test_fits_are_found_beside_what_the_lines_predict(monkeypatch):
    """Against a need that is known: 50 and 3 a token, 100 and 40 a row, beside weights."""
    session = compress(small_model(), Full())
    weights = weight_bytes(session.model)
    monkeypatch.setattr(Needs, "together", lambda self, n, b: weights + 50 + 3 * n * b)
    monkeypatch.setattr(Needs, "apart", lambda self, n, b: weights + 100 + 40 * b)
    found = fits(session, list(range(10)), Shape(20, 2, 8), weights + 1000, most=64, longest=5000, tries=20)
    for kind, largest in (("batch_together", 950 // 60), ("batch_apart", 900 // 40), ("context", 950 // 6)):
        fit = found[kind]
        assert fit["predicted"] == largest and largest - 39 * (kind == "context") <= fit["found"] <= largest, kind
    assert found["model"]["token"] == pytest.approx({"fixed": 50.0, "slope": 3.0})


def test_what_fits_really_fits_and_is_near_what_was_predicted(wide):
    model, tokenizer = wide
    ids, room = prompt_ids(tokenizer, 200), weight_bytes(model) + (30 << 20)
    found = fits(compress(model, SnapKV(budget=0.1)), ids, Shape(200, 1, 8), room, most=64, longest=2000, tries=4)
    for kind in ("batch_together", "context"):
        fit = found[kind]
        assert fit["bytes"] <= room and fit["found"] == pytest.approx(fit["predicted"], rel=0.3), kind
    assert found["batch_apart"]["found"] >= found["batch_together"]["found"], "compressed rows are small"


def test_where_memory_runs_out_a_need_is_none(monkeypatch):
    need = Needs(compress(small_model(), Full()), list(range(10)))
    assert need.together(10, 1) > need.weights and need.apart(10, 2) > need.weights
    monkeypatch.setattr(Needs, "_decode", staticmethod(lambda *_: (_ for _ in ()).throw(MemoryError())))
    assert need.together(10, 1) is None and need.runs == 3
    monkeypatch.setattr(Needs, "_decode", staticmethod(lambda *_: (_ for _ in ()).throw(KeyError("a bug"))))
    with pytest.raises(KeyError):
        need.together(10, 1)


def test_prompts_are_repeated_to_the_length_asked_for():
    assert prompt_of([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1] and prompt_of([1, 2, 3], 2) == [1, 2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"memory": 0.0}, "task.memory=0.0"), ({"tries": 0}, "at least 1"), ({"source": "x"}, "random, text")],
)
def test_settings_that_measure_nothing_are_refused_by_name(settings, says):
    with pytest.raises(ValueError, match=says):
        Memory(**settings)


# ---------------------------------------------------------------------------------------------- through the runner


@pytest.fixture
def run(tmp_path):
    tiny = ["task.lengths=[24,48]", "task.outputs=[5]"]

    def go(*overrides):
        fixed = ["model=random", "task=memory", *tiny, "device=cpu", f"paths.results={tmp_path}", "sweep.name=test"]
        return Scheduler(Console(file=io.StringIO()))(composed(*fixed, "paths.data=null", *overrides))

    return go


def test_a_record_has_the_moments_of_each_cell_beside_the_full_caches(run):
    found = run("method=snapkv", "method.window=4", "budget=0.25", "task.memory=0.01", "task.tries=2", "task.most=4")
    assert found.status == "ok", found.record.get("error")
    rows = list(read_rows(found.folder / "samples.jsonl"))
    assert [row["out"]["shape"]["prompt"] for row in rows] == [24, 48]
    details = rows[1]["out"]["memory"]
    record = found.record
    assert record["metrics.L48-B1-N5.cache_after"] == details["method"]["cache_after"] < details["full"]["cache_after"]
    assert record["metrics.ratio_cache_after"] < 0.5
    assert record["metrics.L48-B1-N5.ratio_cache_after"] < 0.5 and record["metrics.weights"] > 0
    assert record["metrics.L48-B1-N5.fits_batch_apart"] == details["fits"]["batch_apart"]["found"]
    assert record["memory.prefill_peak"] > 0 and record["memory.decode_peak"] > 0 and record["time.tpot_s"] is None
    assert record["kv.ratio"] < 0.5 and record["protocol.hit_max_share"] == 0.0


def test_less_memory_than_the_weights_is_refused_before_any_run(run, monkeypatch):
    monkeypatch.setattr(footprint, "footprint", lambda *a: pytest.fail("nothing may run"))
    found = run("method=full", "task.memory=0.0001")
    assert found.status == "failed" and "the weights alone take" in found.note


def test_a_cell_without_memory_is_recorded_with_the_last_good_size(run, monkeypatch):
    stock = footprint.footprint

    def limited(session, ids, output):
        if ids.numel() > 30 and session.method.limited:
            raise MemoryError
        return stock(session, ids, output)

    monkeypatch.setattr(footprint, "footprint", limited)
    monkeypatch.setattr(latency, "works", lambda session, ids, shape, full: shape.prompt <= 30)
    found = run("method=snapkv", "method.window=4", "budget=0.25")
    assert found.status == "ok", found.record.get("error")
    first, second = (row["out"] for row in read_rows(found.folder / "samples.jsonl"))
    assert "oom" not in first and second["oom"] == {
        "shape": {"prompt": 48, "batch": 1, "output": 5},
        "error": "MemoryError",
        "last_good": {"prompt": 24, "batch": 1, "output": 5},
    }
    assert second["memory"]["full"]["cache_after"] > 0 and found.record["score"] == 0.5


# ---------------------------------------------------------------------------------------------- the machine


def test_the_machine_says_its_load_clocks_and_libraries():
    now, facts = machine.load(), hardware()
    assert now["threads"] == torch.get_num_threads() and now["load"] >= 0 and facts["load"] >= 0
    assert facts["accelerate"] and "flash_attn" in facts and "cudnn" in facts
    assert machine.memory_now()["rss"] > 10 << 20 and machine.gpu_facts("cpu") == {}


def test_what_nvidia_smi_prints_is_read_by_name():
    found = machine.parse_facts("570.86.15, 1980, 2619, 1980, 700.00, [N/A]\n")
    assert found == {
        "driver": "570.86.15",
        "clock_sm_mhz": 1980.0,
        "clock_memory_mhz": 2619.0,
        "clock_sm_max_mhz": 1980.0,
        "power_limit_w": 700.0,
        "utilization_percent": None,
    }


def test_the_heap_is_put_back_after_an_exact_measurement():
    with machine.exact_heap():
        before = machine.resident()
        tensor = torch.ones(64 << 18)
        assert machine.resident() - before > 60 << 20
        del tensor
        assert machine.resident() - before < 4 << 20, "given back at once"
