"""Traces as requests: each form, read lazily, with errors that name the line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from kvcompress.measure.serving import traces
from kvcompress.measure.serving.requests import Request, first, next_uses, scaled

GOOD = {"timestamp": 1000, "input_length": 900, "output_length": 5, "hash_ids": [0, 1]}


def wrote(tmp_path, *rows, name="t.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def all_of(path: Path) -> list[Request]:
    return list(traces.read(path))


def test_mooncake_times_are_milliseconds_from_the_first_request(tmp_path):
    one, other = all_of(wrote(tmp_path, GOOD, GOOD | {"timestamp": 2500, "hash_ids": [0, 2]}))
    assert (one.at, other.at, one.blocks, one.block_size, other.line) == (0.0, 1.5, (0, 1), 512, 2)
    assert one.whole_blocks == 1, "the second block holds 388 tokens"


def test_lines_are_read_one_by_one(tmp_path):
    reading = traces.read(wrote(tmp_path, GOOD, "broken"))
    assert next(reading).input == 900
    with pytest.raises(ValueError, match=r"t.jsonl line 2: no JSON"):
        next(reading)


def test_a_gzipped_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(GOOD) + "\n")
    assert len(all_of(path)) == 1


def test_a_chat_id_means_seconds_blocks_of_16_and_a_parent(tmp_path):
    rows = [
        {
            "chat_id": 7,
            "parent_chat_id": -1,
            "timestamp": 2.5,
            "input_length": 20,
            "output_length": 3,
            "hash_ids": [4, 5],
        },
        {
            "chat_id": 8,
            "parent_chat_id": 7,
            "timestamp": 4,
            "input_length": 40,
            "output_length": 3,
            "hash_ids": [4, 6, 9],
        },
    ]
    one, other = all_of(wrote(tmp_path, *rows))
    assert (one.block_size, other.at, one.parent, other.parent) == (16, 1.5, None, 0)


def test_csv_of_azure_burstgpt_and_plain_columns(tmp_path):
    azure = wrote(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.4799600,3180,8",
        name="a.csv",
    )
    one, other = all_of(azure)
    assert other.at == pytest.approx(0.5) and (one.input, one.output, one.blocks, other.line) == (4808, 10, (), 3)
    burst = wrote(tmp_path, "Timestamp,Model,Request tokens,Response tokens", "5,x,10,0", "6,x,20,4", name="b.csv")
    (kept,) = all_of(burst)
    assert kept.input == 20, "a request without an answer had failed"
    assert all_of(wrote(tmp_path, "at,input,output", "0,1,2", name="c.csv"))[0].output == 2


def session(**more) -> dict:
    requests = [
        {"t": 0.0, "in": 200, "out": 5, "hash_ids": [1, 2, 3], "api_time": 2.0, "think_time": 0.0},
        {
            "t": 14.0,
            "type": "subagent",
            "agent_id": "a",
            "duration_ms": 10000,
            "tool_tokens": 64,
            "system_tokens": 0,
            "requests": [
                {"t": 0.0, "in": 70, "out": 2, "hash_ids": [9], "api_time": 1.0},
                {"t": 3.0, "in": 70, "out": 2, "hash_ids": [9], "api_time": 1.0, "think_time": 2.0},
            ],
        },
        {"t": 15.0, "in": 260, "out": 5, "hash_ids": [1, 2, 3, 4], "api_time": 2.0, "think_time": 13.0},
    ]
    return {"id": "s", "block_size": 64, "tool_tokens": 100, "system_tokens": 40, "requests": requests} | more


def test_sessions_are_merged_with_sub_agents_and_ids_of_their_own(tmp_path):
    found = all_of(wrote(tmp_path, session(), session(id="z")))
    assert [one.at for one in found] == [0, 0, 4, 4, 7, 7, 15, 15], "a sub-agent starts from what was before it"
    mine = [one for one in found if one.agent.startswith("s/")]
    assert [one.agent for one in mine] == ["s/main", "s/a", "s/a", "s/main"]
    assert [one.parent for one in mine] == [None, 0, 2, 0] and [one.think for one in mine] == [0.0, 2.0, 2.0, 13.0]
    assert mine[0].fixed_blocks == 2 and mine[1].fixed_blocks == 1
    assert not set(mine[0].blocks) & set(next(one for one in found if one.agent == "z/main").blocks)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"timestamp": 1}, "line 2: 'input_length' is missing"),
        (GOOD | {"output_length": 0}, "line 2: output_length=0; a whole number of at least 1"),
        (GOOD | {"input_length": "many"}, "line 2: input_length='many'"),
        (GOOD | {"timestamp": 10}, r"line 2: arrives at 0.01 s, before line 1 at 1 s; .*sort the file"),
        (GOOD | {"hash_ids": [0, 1, 2]}, "line 2: 3 hash_ids for 900 tokens; blocks of 512 tokens allow 2"),
        (GOOD | {"hash_ids": [1, 0]}, "line 2: block 1 follows the start of a prompt, but followed block 0 before"),
        (GOOD | {"hash_ids": "0"}, "line 2: hash_ids must be a list"),
        (GOOD | {"block_size": 64, "hash_ids": [0]}, "line 2: block_size 64"),
        ("[1]", "line 2: a JSON object is needed, found list"),
    ],
)
def test_a_bad_line_is_named_with_what_is_allowed(tmp_path, row, says):
    with pytest.raises(ValueError, match=says):
        all_of(wrote(tmp_path, GOOD, row))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="holds no request"):
        all_of(wrote(tmp_path))
    with pytest.raises(ValueError, match="line 1: columns a, b; read are JSON Lines"):
        all_of(wrote(tmp_path, "a,b", "1,2", name="x.csv"))
    with pytest.raises(ValueError, match="line 2: at, input, output = x, 1, 2"):
        all_of(wrote(tmp_path, "at,input,output", "x,1,2", name="y.csv"))
    with pytest.raises(ValueError, match="line 1: 'requests' must be a list"):
        all_of(wrote(tmp_path, session(requests=3)))
    with pytest.raises(ValueError, match="trace 'nothing': no such file.*mooncake_conversation"):
        traces.find("nothing", tmp_path)


def test_scaling_divides_lengths_and_blocks_and_keeps_what_is_shared():
    requests = [Request(4.0, 1030, 8, (0, 1, 2), 512, fixed=512)]
    (one,) = scaled(requests, 16, 2.0)
    assert (one.at, one.input, one.output, one.block_size, one.blocks, one.fixed_blocks) == (
        2.0,
        65,
        1,
        32,
        (0, 1, 2),
        1,
    )
    assert scaled(requests)[0] == requests[0]
    with pytest.raises(ValueError, match="length_scale=3 does not divide the trace's blocks of 512"):
        scaled(requests, 3)
    with pytest.raises(ValueError, match="above 0"):
        scaled(requests, rate=0)


def test_next_uses_look_ahead_by_request():
    requests = [Request(0.0, 2, 1, blocks, 1) for blocks in ((1, 2), (1, 3), (2,), (1,))]
    inf = float("inf")
    assert list(next_uses(requests)) == [[1, 2], [3, inf], [inf], [inf]]
    with pytest.raises(ValueError, match="requests=0"):
        first(requests, 0)


def public(name: str) -> Path:
    try:
        return traces.find(name, os.environ.get("KVCOMPRESS_DATA", "data"))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "mean_in", "mean_out", "span"),
    [
        ("mooncake_conversation", 12031, 12035.06, 342.62, 3536.999),
        ("mooncake_synthetic", 3993, 15325.48, 149.12, 1022.025),
        ("azure_code", 8819, 2047.8, 27.9, None),
        ("azure_conversation", 19366, 1154.7, 211.1, None),
        ("agent_coding", 1886 + 376, None, None, None),
    ],
)
def test_public_traces_hold_what_their_manifest_says(name, count, mean_in, mean_out, span):
    requests = all_of(public(name))
    assert len(requests) == count and all(one.parent is None or one.parent < at for at, one in enumerate(requests))
    if mean_in is not None:
        assert sum(one.input for one in requests) / count == pytest.approx(mean_in, abs=0.05)
        assert sum(one.output for one in requests) / count == pytest.approx(mean_out, abs=0.05)
    assert span is None or requests[-1].at == pytest.approx(span)
