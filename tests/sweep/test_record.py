"""Run ids, run folders and records."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.common import hashing
from kvcompress.sweep import record
from kvcompress.sweep.aggregate import aggregate
from kvcompress.sweep.baseline import fill_deltas


def row(key, score=1.0, source="s", active=True, finished="stop"):
    kv = {
        "bytes_held": 50,
        "bytes_allocated": 60,
        "bytes_full": 100,
        "ratio": 0.5,
        "bytes_host": 0,
        "kept_tokens_mean": 5.0,
        "kept_tokens_max": 6,
        "read_bytes_per_token": 40,
        "moved_bytes_per_token": 0,
        "storage": "real",
    }
    report = {"kv": kv, "active": active, "clamped": False, "kernel": "sdpa", "time": {}}
    out = {
        "compressed": report,
        "end": report,
        "finished": [finished],
        "ttft_s": 1.0 + score,
        "tpot_s": [0.1, 0.2, 0.3],
        "prefill_s": 0.9,
        "compress_s": 0.1,
        "prefill_peak": 1000,
        "decode_peak": None,
        "text": ["x"],
    }
    return {"id": key, "source": source, "score": score, "protocol": {"question": "seen"}, "meta": {}, "out": out}


def test_digest_rounds_floats_ignores_key_order_and_tells_one_token_from_the_whole():
    assert hashing.digest({"a": 0.1 + 0.2, "b": 1}) == hashing.digest({"b": 1, "a": 0.3})
    assert hashing.digest({"budget": 1}) != hashing.digest({"budget": 1.0})
    assert hashing.digest([0.25]) != hashing.digest([0.250001])


@given(
    st.dictionaries(st.text(max_size=4), st.integers() | st.booleans() | st.text(max_size=4), min_size=1, max_size=5),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_changing_any_value_changes_the_digest(cell, data):
    key = data.draw(st.sampled_from(sorted(cell)))
    assert hashing.digest(cell) != hashing.digest(cell | {key: [cell[key]]})


def test_a_half_written_last_line_is_left_out_and_the_rest_kept(tmp_path):
    folder = record.RunFolder(tmp_path, "sweep", "run")
    folder.open("a: 1\n")
    for key in "ab":
        folder.append(row(key))
    with (folder.path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(row("c"))[:40])
    assert list(folder.rows()) == ["a", "b"]
    folder.start(folder.rows().values())
    folder.append(row("c"))
    assert list(folder.rows()) == ["a", "b", "c"]


def test_rows_made_with_other_sources_are_told_apart(tmp_path):
    folder = record.RunFolder(tmp_path, "sweep", "run")
    folder.open("")
    folder.append(row("a", source="old"))
    folder.append(row("b", source="new"))
    assert list(folder.rows("new")) == ["b"] and list(folder.rows()) == ["a", "b"]


def test_a_damaged_record_reads_as_none_and_says_why(tmp_path):
    folder = record.RunFolder(tmp_path, "sweep", "run")
    folder.open("")
    assert folder.record() is None
    for damaged in ("", "{", "[]", '{"run_id": "x", "status": "fine"}'):
        (folder.path / "record.json").write_text(damaged)
        assert folder.record() is None
        with pytest.raises(ValueError, match="record.json"):
            record.read_record(folder.path / "record.json")


def whole(run_id, **more):
    """The least a record holds."""
    least = {"run_id": run_id, "status": "ok", "model": "m", "task": "t", "method": "full", "budget": 1.0}
    return least | {"n_samples": 1, "score": 0.5} | more


def test_a_record_is_replaced_whole_and_leaves_no_temporary_file(tmp_path):
    folder = record.RunFolder(tmp_path, "sweep", "run")
    folder.open("")
    folder.finish(whole("run"))
    folder.finish(whole("run", status="inactive"))
    assert folder.record()["status"] == "inactive"
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "record.json"]


def test_aggregate_gives_means_medians_and_quartiles():
    found = aggregate([row("a", 1.0), row("b", 0.0, finished="length", active=False), row("c", 1.0), row("d", 1.0)])
    assert found["score"] == 0.75 and found["score_stderr"] == pytest.approx(0.25)
    assert found["share_inactive"] == 0.25 and found["protocol.hit_max_share"] == 0.25
    assert found["kv.ratio"] == 0.5 and found["kv.kept_tokens_max"] == 6
    assert found["time.ttft_s"] == 2.0 and found["time.ttft_s.q1"] == 1.75 and found["time.ttft_s.q3"] == 2.0
    assert found["time.tpot_s"] == pytest.approx(0.2)
    assert found["memory.prefill_peak"] == 1000 and found["memory.decode_peak"] is None
    assert found["protocol.question"] == "seen" and found["protocol.kernel"] == "sdpa"
    assert aggregate([row("a")])["score_stderr"] is None


def test_all_that_differs_between_samples_is_said_whichever_came_first():
    first, second = row("a"), row("b")
    first["out"]["end"] |= {"kernel": "sdpa", "kv": {"storage": "real"}, "step": {"how": "eager", "why": "it evicts"}}
    second["out"]["end"] |= {
        "kernel": "blockwise",
        "kv": {"storage": "simulated"},
        "step": {"how": "graph", "why": None},
    }
    for rows in ([first, second], [second, first], [first, second, first]):
        found = aggregate(rows)
        assert (found["protocol.kernel"], found["kv.storage"]) == ("blockwise,sdpa", "real,simulated")
        assert (found["protocol.step"], found["protocol.step_why"]) == ("eager+graph", "it evicts")


def test_deltas_are_paired_on_common_samples_and_filled_when_the_baseline_arrives(tmp_path):
    def write(run_id, scorer, rows, **more):
        folder = record.RunFolder(tmp_path, "sweep", run_id)
        folder.open("")
        for item in rows:
            folder.append(item)
        parts = {"parts.scorer": scorer, "parts.codec": "plain", "parts.reader": "all", "parts.prefill": "oneshot"}
        folder.finish(whole(run_id, **{"protocol.pair": "p"}, **parts) | more)
        return folder

    some = write("some", "MyScorer", [row("a", 0.0), row("b", 1.0), row("z", 0.0)])
    other = write("other", "MyScorer", [row("a", 0.0)], **{"protocol.pair": "q"})
    fill_deltas(tmp_path / "sweep")
    assert some.record().get("delta_full") is None
    base = write("base", "none", [row("a", 1.0), row("b", 1.0)])
    fill_deltas(tmp_path / "sweep")
    assert some.record()["delta_full"] == -0.5 and some.record()["baseline"] == "base"
    assert base.record()["delta_full"] == 0.0
    assert other.record().get("delta_full") is None


def test_source_hash_covers_library_methods_and_tasks():
    assert len(hashing.source_hash()) == 16 and record.versions()["versions.source"] == hashing.source_hash()


@pytest.mark.parametrize(
    "change",
    [{"budget": "b"}, {"score": None}, {"run_id": ["a"]}, {"n_samples": "many"}, {"method": None}, {"budget": True}],
)
def test_a_foreign_record_is_named_and_not_believed(change, tmp_path):
    """A record whose values are of the wrong kind is refused with the key, so that boards can skip it."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps(whole("a")))
    assert record.read_record(path)["score"] == 0.5
    path.write_text(json.dumps(whole("a") | change))
    with pytest.raises(ValueError, match=f"not a record .*{next(iter(change))}"):
        record.read_record(path)
