"""Prefix trees and their policies: rules by hand, published answers to the token, and another program's."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from kvcompress.measure.serving import traces
from kvcompress.measure.serving.__main__ import main
from kvcompress.measure.serving.hits import replay
from kvcompress.measure.serving.kvflow import After, Claims, steps_to_execution
from kvcompress.measure.serving.policies import KVFlow, policy
from kvcompress.measure.serving.prefix_tree import PrefixTree
from kvcompress.measure.serving.requests import Request

CAPACITIES = (1000, 5859, 10_000, 30_000, 50_000, 100_000)
# by token, whole trace
LRU = {
    "mooncake_conversation": (0.0454, 0.1387, 0.2157, 0.3322, 0.3615, 0.3708),
    "mooncake_synthetic": (0.0857, 0.3151, 0.4318, 0.6356, 0.6512, 0.6512),
}
LFU = {
    "mooncake_conversation": (0.0490, 0.0988, 0.1343, 0.2814, 0.3506, 0.3702),
    "mooncake_synthetic": (0.0511, 0.2562, 0.3691, 0.6374, 0.6512, 0.6512),
}
# tokens of the last half, at the first four
LAST_HALF = {
    "mooncake_conversation": (3_173_822, 9_286_131, 14_910_149, 23_347_784),
    "mooncake_synthetic": (4_755_642, 16_553_342, 22_061_940, 30_623_566),
}
BELADY = {
    "mooncake_conversation": (0.1970, 0.3762, 0.3981, 0.3981),
    "mooncake_synthetic": (0.3642, 0.7197, 0.8259, 0.8627),
}
FLAT = {
    "mooncake_conversation": (0.0457, 0.1283, 0.1831, 0.3042),
    "mooncake_synthetic": (0.1217, 0.4418, 0.5657, 0.7866),
}
UNLIMITED = {"mooncake_conversation": (0.3736, 0.3497), "mooncake_synthetic": (0.6512, 0.5088)}


@pytest.fixture(scope="module", params=sorted(LRU))
def public(request):
    """A public trace by name; skipped where it is absent."""
    try:
        path = traces.find(request.param, os.environ.get("KVCOMPRESS_DATA", "data"))
    except ValueError as error:
        pytest.skip(str(error))
    return request.param, list(traces.read(path))


@pytest.mark.data
def test_lru_and_lfu_hit_the_published_shares_at_six_capacities(public):
    name, requests = public
    for chosen, known in (("lru", LRU), ("lfu", LFU)):
        assert [round(replay(requests, room, chosen).rate, 4) for room in CAPACITIES] == list(known[name])


@pytest.mark.data
def test_the_last_half_hits_the_known_tokens(public):
    name, requests = public
    half = len(requests) // 2
    assert [replay(requests, room, count_from=half).hit for room in CAPACITIES[:4]] == list(LAST_HALF[name])
    for chosen, known in (("belady", BELADY), ("fifo-flat", FLAT)):
        assert [round(replay(requests, room, chosen, count_from=half).rate, 4) for room in CAPACITIES[:4]] == list(
            known[name]
        )


@pytest.mark.data
def test_caches_that_are_reused_whole_hit_less_without_any_limit(public):
    name, requests = public
    found = replay(requests, None).rate, replay(requests, None, reuse="whole").rate
    assert tuple(round(rate, 4) for rate in found) == UNLIMITED[name]


@pytest.mark.data
def test_hits_equal_those_of_kvcache_simulator(public, tmp_path):
    plan = pytest.importorskip("kvcache_sim.plan")
    theirs = pytest.importorskip("kvcache_sim.policies")
    parse = pytest.importorskip("kvcache_sim.trace").parse_trace_file
    name, requests = public
    made = plan.build_execution_plan(
        parse(traces.find(name, os.environ.get("KVCOMPRESS_DATA", "data")), block_size=512)
    )
    half = len(requests) // 2
    for mine, other in (("lru", "lru"), ("belady", "optimal"), ("fifo-flat", "fifo")):
        for room in (1000, 10_000):
            assert (
                replay(requests, room, mine, count_from=half).hit == theirs.simulate_policy(made, other, room).hitTokens
            )


def made_up(seed: int, count: int = 400) -> list[Request]:
    """Random walks down a tree, in blocks of 4 tokens."""
    rng, ids = random.Random(seed), {}
    found = []
    for number in range(count):
        path, blocks = (), []
        for _ in range(rng.randint(1, 7)):
            path = (*path, rng.choice((0, 0, 1, 2)))
            blocks.append(ids.setdefault(path, len(ids)))
        found.append(Request(float(number), 4 * len(blocks) - rng.randint(0, 3), 1, tuple(blocks), 4))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_made_up_traces_hit_as_in_kvcache_simulator(seed, tmp_path):
    plan = pytest.importorskip("kvcache_sim.plan")
    theirs = pytest.importorskip("kvcache_sim.policies")
    parse = pytest.importorskip("kvcache_sim.trace").parse_trace_file
    requests, path = made_up(seed), tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps({"block_size": 4, "input_length": r.input, "hash_ids": list(r.blocks)}) + "\n" for r in requests
        )
    )
    made = plan.build_execution_plan(parse(path))
    for mine, other in (("lru", "lru"), ("belady", "optimal"), ("fifo-flat", "fifo")):
        for room in (5, 12, 40):
            assert (
                replay(requests, room, mine, count_from=200).hit == theirs.simulate_policy(made, other, room).hitTokens
            )


@pytest.mark.parametrize("chosen", ["fifo", "lru", "lfu", "belady", "kvflow", "kvflow-oracle"])
@pytest.mark.parametrize("lower", [(), (20,), (15, 30)])
def test_no_block_is_lost_or_held_twice(chosen, lower):
    rule = policy(chosen)
    tree = PrefixTree([8, *lower], rule)
    requests = made_up(5, 300)
    for request in requests:
        path = tree.match(request.blocks)
        tree.lock(path)
        tree.promote(path)
        tree.touch(path)
        tree.insert(request.blocks, path)
        tree.unlock(path)
        counts = [0] * (1 + len(lower))
        for node in tree.nodes.values():
            counts[node.tier] += 1
            assert node.parent is None or (tree.nodes[node.parent.id] is node.parent and node.parent.tier <= node.tier)
        assert counts == tree.held and all(held <= room for held, room in zip(counts, tree.rooms, strict=True))
        assert tree.locked == 0
    unlimited = replay(requests, None).hit
    assert replay(requests, 8, chosen).hit <= replay(requests, 8, chosen, lower=lower or (100,)).hit <= unlimited


@pytest.mark.long
def test_a_million_blocks_are_replayed_in_ten_seconds_of_one_core():
    """A quarter of that here. Seconds of the processor: others may use the machine as well."""
    requests = [Request(0.0, 3200, 1, tuple(range(200 * (n % 977), 200 * (n % 977) + 200)), 16) for n in range(1250)]
    start = time.process_time()
    replay(requests, 50_000)
    assert time.process_time() - start < 2.5


def test_leaves_go_before_their_parents_and_locked_ones_not_at_all():
    tree = PrefixTree([3])
    path = []
    tree.insert((1, 2, 3), path)
    assert tree.evict() is None, "a request runs on all of them"
    tree.unlock(path)
    assert [tree.evict() for _ in range(4)] == [3, 2, 1, None]


def test_kvflow_evicts_by_steps_and_leaves_first_where_they_are_equal():
    """Shared S above e1 (1 step) and e2 (4 steps), and r (3): S counts 1."""
    tree = PrefixTree([10], KVFlow())
    for blocks, due in ((("S", "e1"), (1, 1)), (("S", "e2"), (1, 4)), (("r",), (3,))):
        path = tree.match(blocks)
        tree.lock(path)
        tree.touch(path, due)
        tree.insert(blocks, path, due)
        tree.unlock(path)
    assert [tree.evict() for _ in range(4)] == ["e2", "r", "e1", "S"]


@pytest.mark.parametrize(("agents", "room"), [(4, 3), (10, 5), (10, 9)])
def test_agents_in_a_circle_hit_as_kvflow_says_and_never_under_lru(agents, room):
    requests = [
        Request(float(n), 1, 1, (n % agents,), 1, agent=str(n % agents), fixed=1)
        for n in range(agents * (agents - 1) * 40)
    ]
    start = agents * (agents - 1)
    assert replay(requests, room, "lru", count_from=start).hit == 0
    found = replay(requests, room, "kvflow-oracle", count_from=start)
    assert found.rate == pytest.approx((room - 1) / (agents - 1), abs=0.01) and found.bound
    thinking = replay(requests, room, "kvflow", count_from=start)
    assert thinking.rate == pytest.approx(found.rate, abs=0.01) and not thinking.bound


def test_steps_to_execution_take_the_most_of_all_and_the_fewest_of_any():
    workflow = {
        "a": After(()),
        "b": After(("a",)),
        "c": After(("b",)),
        "join": After(("a", "c"), "all"),
        "any": After(("a", "c")),
        "loop": After(("any",)),
        "never": After(("lost",)),
        "lost": After(()),
    }
    steps = steps_to_execution(workflow, {"a"})
    assert steps == {
        "a": 0,
        "b": 1,
        "c": 2,
        "join": 3,
        "any": 1,
        "loop": 2,
        "never": float("inf"),
        "lost": float("inf"),
    }
    circle = {str(n): After((str((n - 1) % 4),)) for n in range(4)}
    assert steps_to_execution(circle, {"1"}) == {"0": 3, "1": 0, "2": 1, "3": 2}
    with pytest.raises(ValueError, match="agent 'x' is not in the workflow"):
        steps_to_execution(circle, {"x"})


def test_a_block_that_two_agents_share_is_due_when_the_first_returns():
    requests = [
        Request(float(at), 2, 1, blocks, 1, agent=agent, fixed=2)
        for at, agent, blocks in ((0, "a", (1, 2)), (1, "b", (1, 3)), (2, "a", (1, 2)), (9, "b", (1, 3)))
    ]
    claims = Claims(requests, "oracle")
    assert claims.due(0, 0.0) == [2, 2] and claims.due(1, 1.0) == [2, 3]


def test_whole_caches_match_where_an_earlier_prompt_ended():
    earlier, longer = Request(0.0, 9, 1, (1, 2, 3), 4), Request(1.0, 16, 1, (1, 2, 7, 8), 4)
    other = Request(2.0, 12, 1, (1, 5, 6), 4)
    assert replay([earlier, longer, other], None, reuse="whole").hit == 8, (
        "two whole blocks of the first, nothing of the third"
    )
    assert replay([earlier, longer, other], None).hit == 8 + 4


def test_a_smaller_cache_holds_more_blocks_or_entries():
    requests = made_up(9, 600)
    for reuse in ("prefix", "whole"):
        rates = [replay(requests, 12, reuse=reuse, ratio=ratio).rate for ratio in (1.0, 0.5, 0.25)]
        assert rates == sorted(rates) and rates[0] < rates[-1]


def test_the_command_prints_hits_and_marks_bounds(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": n,
                    "input_length": 8,
                    "output_length": 1,
                    "block_size": 4,
                    "hash_ids": [n % 3, 10 + n % 3],
                }
            )
            + "\n"
            for n in range(12)
        )
    )
    out = tmp_path / "hits.json"
    assert main(["hits", str(path), "--blocks", "4,6", "--policies", "lru,belady", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "belady (bound)" in said and "12 requests" in said
    rows = json.loads(out.read_text())["rows"]
    assert [(row["policy"], row["bound"]) for row in rows] == [("lru", False)] * 2 + [("belady", True)] * 2
    assert rows[1]["hit"] == 9 * 8
    for wrong, says in ((["--blocks", "x"], "--blocks 'x'"), (["--policies", "mru"], "valid: fifo, lru")):
        assert main(["hits", str(path), *wrong]) == 1
        assert says in capsys.readouterr().err


def test_a_trace_without_ids_says_nothing_of_hits():
    with pytest.raises(ValueError, match="no hash_ids"):
        replay([Request(0.0, 5, 1)], 10)
    with pytest.raises(ValueError, match="ratio=0"):
        replay(made_up(0, 3), 10, ratio=0)
