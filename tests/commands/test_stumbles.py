"""Everyday stumbles: each ends where its user wanted to go, or in a line that says how to."""

from __future__ import annotations

import io
import shutil
import warnings
from dataclasses import replace

import pytest
from small_models import random_ids, small_model
from sweeps import SHORT, TOGETHER, cells, sweep
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.bench.overhead import Row, table
from kvcompress.commands import memo
from kvcompress.commands.report import main as report
from kvcompress.commands.run import main
from kvcompress.commands.status import main as status
from kvcompress.common.budget_text import kept_of
from kvcompress.common.text import PlainConsole
from kvcompress.measure.measuring import Ratios
from kvcompress.methods import KIVI, Full, SnapKV
from kvcompress.sweep import record
from kvcompress.tasks import Serving


@pytest.fixture(autouse=True)
def clean_hydra():
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["compression_ratio=0.75"], "budget is what is kept: budget=0.25"),
        (["method.compression_ratio=0.5"], "budget=0.5"),
        (["+compression_ratio=half"], "budget=0.25"),
    ],
)
def test_a_compression_ratio_leads_to_the_budget_that_keeps_the_rest(asked, says, tmp_path, capfd):
    assert main(["-m", *SHORT, f"paths.results={tmp_path}", "method=snapkv", *asked]) in (1, 2)
    printed = capfd.readouterr().err.strip()
    assert says in " ".join(printed.split()) and printed.count("\n") <= 1, "a narrow terminal wraps it once"


def test_a_compression_ratio_in_python_leads_there_too():
    with pytest.raises(TypeError, match=r"SnapKV: compression_ratio=0.9 says what is removed.*budget=0\.1"):
        SnapKV(compression_ratio=0.9)
    assert kept_of(0).endswith("budget=1.0") and kept_of(1).endswith("budget=0.25")


@pytest.mark.parametrize(("budget", "says"), [(1.5, "write 0.015"), (25.0, "for 25% write 0.25"), (1.5, "the int 2")])
def test_a_budget_above_one_leads_to_tokens_and_to_a_share(budget, says):
    with pytest.raises(ValueError, match=says):
        SnapKV(budget=budget)


def test_a_callers_own_empty_cache_is_filled():
    """By the model and by generate; it is then the session's, and a later session of another method refuses it."""
    model, ids, mine = small_model(), random_ids(1, 12), DynamicCache()
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        model(ids, cache=mine)
        assert session.cache is mine and mine.get_seq_length() == 12 and mine.nbytes()["valid"] > 0
        model(random_ids(1, 1), cache=mine)
        assert mine.get_seq_length() == 13 and mine.kept_tokens().unique().tolist() == [7]
        other = DynamicCache()
        model.generate(ids, cache=other, max_new_tokens=3)
        assert session.cache is other and other.get_seq_length() == 14
    with compress(model, SnapKV(budget=0.25, window=2)), pytest.raises(ValueError, match="another method"):
        model(ids, cache=mine)


def test_a_method_without_a_budget_warns_that_it_keeps_everything():
    with pytest.warns(UserWarning, match=r"SnapKV\(budget=1.0\), the default, keeps every token"):
        compress(small_model(), SnapKV())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(small_model(), SnapKV(budget=0.5))
        compress(small_model(), Full())
        compress(small_model(), KIVI(group=4))


@pytest.mark.parametrize("when", ["at a sample", "at the record"])
def test_results_that_are_deleted_in_mid_sweep_end_it_in_one_line(tmp_path, monkeypatch, capfd, when):
    target = "append" if when == "at a sample" else "arrange"
    real = getattr(record.RunFolder, target)

    def gone(folder, what):
        shutil.rmtree(tmp_path / "test", ignore_errors=True)
        return real(folder, what)

    monkeypatch.setattr(record.RunFolder, target, gone)
    command = ["-m", *SHORT, f"paths.results={tmp_path}", "limit=1", "method=full,snapkv", "budget=0.5"]
    assert main([*command, "hydra/launcher=basic"]) == 1
    printed = capfd.readouterr().err.strip().splitlines()
    assert "is gone: it was deleted or moved while the sweep ran" in printed[-1]
    assert not any("Traceback" in line for line in printed) and sum("is gone" in line for line in printed) == 1
    monkeypatch.setattr(record.RunFolder, target, real)
    assert main(command) == 0, "the same command goes on"


def test_a_sweep_is_found_by_its_name_under_the_results(tmp_path, monkeypatch, capsys):
    sweep(cells(tmp_path / "elsewhere", "snapkv", "0.5", "limit=1"), TOGETHER)
    assert main(["status=test", f"paths.results={tmp_path / 'elsewhere'}"]) == 0
    assert status(["test", "--results", str(tmp_path / "elsewhere")]) == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").rename("results")
    assert main(["status=test"]) == 0 and status([]) == 0
    assert capsys.readouterr().out.count("1 ok") == 4
    assert main(["status=tset"]) == 2 and "a sweep's name under paths.results" in capsys.readouterr().err


def test_a_dry_run_of_a_finished_sweep_says_so_also_without_a_memo(tmp_path, monkeypatch, capfd):
    command = ["-m", *SHORT, f"paths.results={tmp_path}", "limit=1", "method=full,snapkv", "budget=0.5"]
    assert main(command) == 0
    monkeypatch.setattr(memo, "finished_runs", lambda arguments: None)
    capfd.readouterr()
    assert main([*command, "dry=true"]) == 0
    printed = capfd.readouterr().err
    assert "nothing to do: all 2 cells are finished" in printed and "prefills" not in printed


def test_a_heading_gives_no_lengths_where_requests_come_from_a_file():
    assert Serving().stated_lengths() == ()


def test_a_log_keeps_paths_whole(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    path = "results/" + "/".join(f"folder{i}" for i in range(30))
    PlainConsole(file=out, width=40).print(f"wrote {path}")
    assert out.getvalue() == f"wrote {path}\n"


def test_what_columns_mean_is_said_once_however_many_sweeps_there_are(tmp_path, capsys):
    for name in ("one", "two"):
        sweep(cells(tmp_path, "snapkv", "0.5", "limit=1", f"sweep.name={name}"), TOGETHER)
    assert report([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("score: mean and its 95% interval") == 1


def test_every_row_of_a_benchmark_names_its_method():
    ratios = Ratios(1.0, (1.0, 1.0), 2, 0.1, 0.1, 1.0)
    one = Row("decode", "snapkv:0.1, decode", "SnapKV(budget=0.1)", 96, "time", None, ratios, "snapkv:0.1")
    rows = [
        one,
        replace(one, role="snapkv:0.1:window=8"),
        replace(one, role="evicting"),
        replace(one, method="Full(budget=1.0)", role="full"),
    ]
    names = list(table(rows).columns[1].cells)
    assert names == ["snapkv:0.1", "snapkv:0.1:window=8", "SnapKV 0.1", "full"]
