"""Records and rows that are damaged, by a seeded fuzzer and by hand: nothing wrong is counted, and nothing falls over."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import random
import shutil

import pytest
from rich.console import Console
from sweeps import cells, left, sweep

from kvcompress.common import strict_json
from kvcompress.report import page_data
from kvcompress.report.command import Commands
from kvcompress.report.frame import measured
from kvcompress.report.run_index import gather
from kvcompress.report.table import leaderboard, leaderboard_markdown
from kvcompress.sweep import record
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.launcher.status import cells_of
from kvcompress.sweep.record_schema import check_record, check_row
from kvcompress.tracking import content

METHODS = "full,snapkv"
ODD = (7.0, -1, True, False, None, "x", "", [], {}, [1], {"a": 1}, [[1]], 10**30, 1e300, -0.5, "\ud800", "\x1b[31m")
RAW = (b"NaN", b"-Infinity", b"1" * 400, b"1e999", b"[" * 2000, b'"\\ud800"', b"", b"{}", b"tru")


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A finished sweep of two cells with two samples each."""
    folder = tmp_path_factory.mktemp("calm")
    sweep(cells(folder, METHODS, "0.5"))
    return folder


@pytest.fixture(autouse=True)
def every_time_anew():
    """What is said once in a process is said once in a test."""
    record.warn_once.cache_clear()


def places(value, path=()):
    """Every key of nested mappings and lists, of long lists the first."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def damaged(draw, value):
    """A copy of a JSON object with one value replaced, taken away, or added."""
    value = copy.deepcopy(value)
    *path, last = draw.choice(list(places(value)))
    inner = value
    for key in path:
        inner = inner[key]
    if draw.random() < 0.15:
        del inner[last]
    else:
        inner[last] = draw.choice(ODD)
    return json.dumps(value).encode()


def mangled(draw, text):
    """The same bytes with some cut, replaced or put in."""
    at = draw.randrange(len(text))
    kind = draw.randrange(4)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + draw.choice(RAW) + text[at:]
    start = draw.randrange(at + 1)
    return text[:start] + text[at:]


def damage(draw, folder):
    """Damage one record or one row in `folder`; the file."""
    name = draw.choice(("record.json", "samples.jsonl", "samples.jsonl"))
    path = draw.choice(sorted((folder / "test").glob(f"*/{name}")))
    how = damaged if draw.random() < 0.8 else mangled
    if name == "record.json":
        text = path.read_bytes()
        path.write_bytes(how(draw, json.loads(text) if how is damaged else text))
        return path
    lines = path.read_bytes().splitlines()
    number = draw.randrange(len(lines))
    lines[number] = how(draw, json.loads(lines[number]) if how is damaged else lines[number])
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def show_everything(folder):
    """Status, board, page and what a tracker is told: the entries that are on the board."""
    cells_of(folder / "test")
    found = gather([folder])
    measured(found)
    records = [entry.record for entry in found.entries]
    leaderboard(records, Console(file=io.StringIO(), width=200))
    leaderboard_markdown([records])
    page_data.build(gather([folder]), [], folder / "board.html", Commands())
    for path in (folder / "test").glob("*/record.json"):
        try:
            content.read(path.parent)
        except ValueError as error:
            assert str(path) in str(error)
    return found


def essence(folder):
    """Of each run what its record says, times aside."""
    return {run_id: found[:3] for run_id, found in left(folder).items()}


def survives(calm, folder, seed):
    """One damaged file: shown, told, and made again by the same command."""
    shutil.copytree(calm, folder)
    path = damage(random.Random(seed), folder)
    right = {run_id: (found[0], found[1], found[2]["score"]) for run_id, found in left(calm).items()}
    found = show_everything(folder)
    for entry in found.entries:
        run_id = entry.path.parent.name
        assert (entry.record["n_samples"], entry.record["score"]) == right[run_id][1:], (seed, path)
    if len(found.entries) < len(right):
        assert found.damaged, (seed, path)
    outcomes, text = sweep(cells(folder, METHODS, "0.5"))
    assert {o.status for o in outcomes} <= {"ok", "done", "stale"} and "Traceback" not in text, (seed, path, text)
    if all(o.status != "stale" for o in outcomes):
        assert essence(folder) == essence(calm), (seed, path)
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_is_told_and_made_again(calm, tmp_path, seed):
    survives(calm, tmp_path / "damaged", seed)


@pytest.mark.long
@pytest.mark.parametrize("start", range(1000, 2000, 50))
def test_a_thousand_damaged_files_are_told_and_made_again(calm, tmp_path, start):
    for seed in range(start, start + 50):
        survives(calm, tmp_path / "damaged", seed)


def begun(calm, folder):
    """A copy of a sweep of which no cell is finished."""
    shutil.copytree(calm, folder)
    for path in (folder / "test").glob("*/record.json"):
        path.unlink()
    return folder


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_a_sweep_that_goes_on_counts_no_damaged_row(calm, tmp_path, start):
    for seed in range(start, start + 50):
        folder = begun(calm, tmp_path / "begun")
        draw = random.Random(seed)
        path = draw.choice(sorted((folder / "test").glob("*/samples.jsonl")))
        lines = path.read_bytes().splitlines()
        lines[0] = damaged(draw, json.loads(lines[0])) if seed % 2 else mangled(draw, lines[0])
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        outcomes, _ = sweep(cells(folder, METHODS, "0.5"))
        assert {o.status for o in outcomes} == {"ok"}, seed
        scores = {k: (v[0], v[1], v[2]["score"]) for k, v in left(folder).items()}
        assert scores == {k: (v[0], v[1], v[2]["score"]) for k, v in left(calm).items()}, seed
        shutil.rmtree(folder)


WRONG = [
    ({"score": 7.0}, "score"),
    ({"score": True}, "score"),
    ({"score": 0.75}, "score"),  # what the row's own scores do not say
    ({"id": "no-such-sample"}, "no-such-sample"),
    ({"meta": [1]}, "meta"),
    ({"meta": {"truncated_tokens": "x"}}, "meta.truncated_tokens"),
    ({"out": {}}, "out.end"),
    ({"out.end": {}}, "out.end.kv"),
    ({"out.end.kv": [1]}, "out.end.kv"),
    ({"out.compressed": None}, "out"),
    ({"out.tpot_s": "x"}, "out.tpot_s"),
    ({"out.tokens": [["x"]]}, "out.tokens"),
    ({"unfinished": float("nan")}, "NaN"),
    ({"out.end.kv.bytes_held": 10**400}, "64 bits"),
    ({"out.end.active": None}, "out.end.active"),
    ({"protocol": {"question": {"a": {"b": 1}}}}, "protocol.question"),
]


@pytest.mark.parametrize("start", range(0, len(WRONG), 4))
def test_rows_of_wrong_values_are_dropped_told_and_computed_again(calm, tmp_path, caplog, start):
    """Four at a time: both rows of both cells."""
    folder = begun(calm, tmp_path / "begun")
    paths = sorted((folder / "test").glob("*/samples.jsonl"))
    for path, changes in zip(paths, (WRONG[start : start + 2], WRONG[start + 2 : start + 4]), strict=True):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, (change, _) in zip(rows, changes, strict=True):
            for key, value in change.items():
                *parts, last = key.split(".")
                inner = row
                for part in parts:
                    inner = inner[part]
                inner[last] = value
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes, _ = sweep(cells(folder, METHODS, "0.5"))
    assert {o.status for o in outcomes} == {"ok"} and essence(folder) == essence(calm)
    for number, (_, field) in enumerate(WRONG[start : start + 4]):
        told = [text for text in caplog.messages if str(paths[number // 2]) in text and field in text]
        assert told and "\n" not in told[0], (field, caplog.messages)


def test_a_row_that_a_task_cannot_summarise_is_computed_again(calm, tmp_path, monkeypatch, caplog):
    """Fields of one task alone are known to that task."""
    folder = begun(calm, tmp_path / "begun")
    path = sorted((folder / "test").glob("*/samples.jsonl"))[0]
    bad = json.loads(path.read_text().splitlines()[0])["id"]
    stock = type(CellSpec.from_config(cells(folder, "full", "0.5")[0]).task)
    said = []

    def summarise(self, rows):
        if len(rows) == 1 and rows[0]["id"] == bad and not said:
            said.append(1)
            raise KeyError("positions")
        return {}

    monkeypatch.setattr(stock, "summarise", summarise)
    outcomes, _ = sweep(cells(folder, METHODS, "0.5"))
    assert {o.status for o in outcomes} == {"ok"} and essence(folder) == essence(calm)
    assert any(bad in text and "KeyError" in text for text in caplog.messages)


@pytest.mark.parametrize("key, value", [("score", 0.875), ("n_samples", 1), ("kv.ratio", 7.0), ("budget", 0.25)])
def test_a_record_that_says_otherwise_than_its_samples_is_made_again(calm, tmp_path, key, value):
    shutil.copytree(calm, tmp_path / "copy")
    path = sorted((tmp_path / "copy" / "test").glob("*/record.json"))[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    outcomes, _ = sweep(cells(tmp_path / "copy", METHODS, "0.5"))
    assert sorted(o.status for o in outcomes) == ["done", "ok"] and essence(tmp_path / "copy") == essence(calm)


def test_status_says_what_is_wrong_with_a_record(calm, tmp_path):
    shutil.copytree(calm, tmp_path / "copy")
    first, second = sorted((tmp_path / "copy" / "test").glob("*/record.json"))
    first.write_text(json.dumps(json.loads(first.read_text()) | {"kv.ratio": "x"}))
    second.write_text(json.dumps(json.loads(second.read_text()) | {"score": 0.875}))
    notes = {cell["run_id"]: (cell["status"], cell["note"]) for cell in cells_of(tmp_path / "copy" / "test")}
    assert notes[first.parent.name][0] == "missing" and "kv.ratio" in notes[first.parent.name][1]
    assert notes[second.parent.name][0] == "missing" and "score is 0.875" in notes[second.parent.name][1]


def test_a_file_that_is_no_file_is_not_waited_for(calm, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(calm, folder)
    first, second = sorted((folder / "test").glob("*/record.json"))
    for path in (first, second.parent / "samples.jsonl", second.parent / "config.yaml"):
        path.unlink()
        os.mkfifo(path)
    found = show_everything(folder)
    assert len(found.entries) == 1 and any("plain file" in text for text in found.damaged)


def test_a_cell_noted_with_a_wrong_value_is_named(calm, tmp_path):
    shutil.copytree(calm, tmp_path / "copy")
    path = tmp_path / "copy" / "test" / "sweep.json"
    noted = json.loads(path.read_text())
    for wrong in ({"../../x": {}}, {"a": {"method": [1]}}, {"a": {"budget": True}}):
        path.write_text(json.dumps(noted | {"cells": wrong}))
        with pytest.raises(ValueError, match="no table of cells"):
            cells_of(tmp_path / "copy" / "test")
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        cells_of(tmp_path / "copy" / "test")


def test_a_number_that_is_none_is_no_part_of_a_record(calm):
    path = sorted((calm / "test").glob("*/record.json"))[0]
    written = record.readable_record(record.read_record(path) | {"metrics.kl": math.nan, "metrics.l": [1.0, math.inf]})
    assert written["metrics.kl"] is None and written["metrics.l"] == [1.0, None]
    with pytest.raises(ValueError, match="metrics.kl"):
        record.readable_record(written | {"metrics.kl": "much"})
    row = json.loads((path.parent / "samples.jsonl").read_text().splitlines()[0])
    with pytest.raises(ValueError, match=f"sample {row['id']}: NaN"):
        record.readable_row(row | {"more": math.nan})


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", "1" * 400, "[" * 100_000, b"\xff", "{"])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        strict_json.loads(text)


def test_plain_json_stays_what_it_is():
    value = {"a": [1, 1.0, -3, 2**62, 1e-300, 123456789012345678, "\ud800", None, True], "b": {}}
    again = strict_json.loads(json.dumps(value))
    assert again == value and list(map(type, again["a"])) == list(map(type, value["a"]))
    assert strict_json.encodable({"a": "\ud800"}) == {"a": "?"}


def test_a_whole_number_is_no_truth_and_a_share_is_no_count():
    least = {"run_id": "r", "status": "ok", "model": "m", "task": "t", "method": "x", "n_samples": 1, "score": 1}
    for budget in (1, 64, 1.0, 0.25):
        check_record(least | {"budget": budget})
    for budget in (0, 0.0, 1.5, -1, True, "x", None, math.nan):
        with pytest.raises(ValueError, match="budget"):
            check_record(least | {"budget": budget})
    check_row({"id": "a", "score": 1})
    with pytest.raises(ValueError, match="score"):
        check_row({"id": "a", "score": True})
