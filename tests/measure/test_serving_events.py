"""The event simulation against cases worked out by hand: batching, orders, pools, swaps, memory, and queueing theory."""

from __future__ import annotations

import random

import pytest

from kvcompress.measure.serving.costs import Line, MethodCosts
from kvcompress.measure.serving.requests import Request
from kvcompress.measure.serving.simulation import Server, simulate, tail_mean
from kvcompress.measure.serving.swapping import Swap
from kvcompress.measure.transfers import TierPath

FAST = TierPath(1e18)


def costs(per_token=1.0, step=0.1, held=1.0, reuse="prefix", output=0.0, **more) -> MethodCosts:
    """Prompts of `per_token` seconds a token, steps of `step` seconds, `held` bytes a prompt token."""
    return MethodCosts(
        name="made up",
        reuse=reuse,
        held=Line(0.0, held, output),
        kept=Line(0.0, 1.0, 1.0),
        token_bytes=more.pop("token_bytes", held),
        layers=more.pop("layers", 1),
        prefill=(0.0, per_token, 0.0, 0.0),
        step=(step, 0.0, 0.0),
        **more,
    )


def server(memory=1e9, **more) -> Server:
    return Server(memory, **{"link": FAST, "swap": Swap(FAST), "policy": "none", **more})


def times(job) -> list[float]:
    """When each token came."""
    found = [job.first]
    for gap in job.gaps():
        found.append(found[-1] + gap)
    return found


TWO = [Request(0.0, 1000, 6), Request(1.05, 2000, 3)]
MS = costs(per_token=1e-3)


def test_prompts_go_before_steps_of_others():
    first, second = simulate(TWO, MS, server()).jobs
    assert times(first) == pytest.approx([1, 1.1, 3.2, 3.3, 3.4, 3.5]) and second.ttft == pytest.approx(2.05)
    assert max(first.gaps()) == pytest.approx(2.1)


@pytest.mark.parametrize(("budget", "gap"), [(501, 0.6), (251, 0.35)])
def test_chunked_prefill_bounds_the_gap_and_delays_the_other_prompt(budget, gap):
    first, second = simulate(TWO, MS, server(batching="chunked", budget=budget)).jobs
    assert max(first.gaps()) == pytest.approx(gap) and second.ttft == pytest.approx(2.45)
    if budget == 501:
        assert times(first) == pytest.approx([1, 1.1, 1.7, 2.3, 2.9, 3.5])


def test_two_pools_keep_prompts_out_of_steps_and_the_transfer_falls_on_the_second_token():
    x = 0.25
    pools = server(pools=(1, 1), link=TierPath(1000 / x))  # of 1000 bytes
    first, second = simulate(TWO, MS, pools).jobs
    assert times(first)[:3] == pytest.approx([1, 1.1 + x, 1.2 + x]) and second.ttft == pytest.approx(2.0)


def test_static_batches_wait_for_all_of_the_batch_before():
    """Both prompts of the first batch 0-2, steps to 2.3; the third came at 2.05 and is first computed then."""
    three = [Request(0.0, 1000, 2), Request(0.0, 1000, 4), Request(2.05, 1000, 2)]
    jobs = simulate(three, MS, server(batching="request")).jobs
    assert [job.done for job in jobs] == pytest.approx([2.1, 2.3, 3.4]) and jobs[2].first == pytest.approx(3.3)
    jobs = simulate(three, MS, server()).jobs
    assert jobs[2].first == pytest.approx(3.1), "iteration by iteration it is let in at once"


# ---------------------------------------------------------------------- orders


def alternating(count: int) -> list[Request]:
    """A and B in turn every second: four shared blocks of one token and one of their own."""
    return [query(number, "AB"[number % 2], number) for number in range(count)]


def query(at: int, kind: str, number: int) -> Request:
    base = 0 if kind == "A" else 10
    return Request(float(at), 5, 1, (base, base + 1, base + 2, base + 3, 100 + number), 1)


ONE_PREFIX = {"memory": 5.0, "policy": "lru"}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({"order": "fcfs"}, [5, 9, 13, 17, 21, 25, 29, 33]),
        ({"order": "klpm", "k": 2}, [5, 10, 4, 9, 13, 18, 12, 17]),
        ({"order": "lpm"}, [5, 12, 4, 11, 3, 10, 2, 9]),
        ({"order": "klpm", "k": 1}, [5, 9, 13, 17, 21, 25, 29, 33]),
    ],
)
def test_orders_of_eight_alternating_queries(order, expected):
    assert [job.ttft for job in simulate(alternating(8), costs(), server(**ONE_PREFIX, **order)).jobs] == expected


@pytest.mark.parametrize(
    ("order", "worst", "mean"),
    [({"order": "fcfs"}, 13, 12), ({"order": "klpm", "k": 4}, 13, 10), ({"order": "lpm"}, 19, 16 / 3)],
)
def test_a_lone_other_query_starves_under_lpm_and_not_under_klpm(order, worst, mean):
    queries = [query(0, "A", 0), query(1, "B", 1), *(query(at, "A", at) for at in range(2, 12))]
    found = [job.ttft for job in simulate(queries, costs(), server(**ONE_PREFIX, **order)).jobs]
    assert max(found) == worst and sum(found) / len(found) == pytest.approx(mean)


@pytest.mark.parametrize("pattern", ["random", "markov"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_priorities_preempt_and_nothing_is_lost(mode, pattern):
    requests = [Request(0.2 * number, 100, 30) for number in range(12)]
    swap = Swap(TierPath(1e4, 1e-3), mode, "group")
    found = simulate(
        requests,
        costs(per_token=1e-3, output=1.0),
        server(memory=400.0, order="priority", update_every=5, pattern=pattern, swap=swap),
    )
    assert all(job.done is not None and len(job.gaps()) == 29 for job in found.jobs)
    said = found.figures()
    assert said["preemptions"] > 0 and (said["swapped_out"] > 0) == (mode == "swap")
    assert found.instances[0].pool.private == pytest.approx(0.0)


def test_a_kept_copy_writes_only_what_is_new_and_coarse_copies_are_few():
    """FastSwitch: 1000 tokens, 32 layers, 8 heads x 128, bfloat16; 32 GB/s and 10 µs a copy."""
    link, nbytes = TierPath(3.2e10, 1e-5), 131_072_000
    found = {how: Swap(link, granularity=how) for how in ("block", "group", "whole")}
    assert [one.copies(1000, 32) for one in found.values()] == [4032, 128, 1]
    seconds = [1000 * one.seconds(1000, nbytes, 32) for one in found.values()]
    assert seconds == pytest.approx([44.4, 5.4, 4.1], abs=0.05)
    assert found["group"].written(nbytes + 100 * 131072, nbytes) == 13_107_200
    assert Swap(link, keep_copy=False).written(nbytes, nbytes) == nbytes
    with pytest.raises(ValueError, match="valid: swap, recompute; block, group, whole"):
        Swap(link, granularity="page")


# ---------------------------------------------------------------------- reuse, tiers, memory


def test_a_shared_prefix_is_computed_once():
    two = [Request(0.0, 4, 1, (1, 2, 3, 4), 1), Request(10.0, 5, 1, (1, 2, 3, 9, 10), 1)]
    jobs = simulate(two, costs(), server(policy="lru")).jobs
    assert [job.hit for job in jobs] == [0, 3] and [job.ttft for job in jobs] == [4, 2]
    whole = simulate(two, costs(reuse="whole"), server(policy="lru")).jobs
    assert [job.hit for job in whole] == [0, 0], "the first prompt is no beginning of the second"
    longer = [two[0], Request(10.0, 5, 1, (1, 2, 3, 4, 10), 1)]
    assert simulate(longer, costs(reuse="whole"), server(policy="lru")).jobs[1].hit == 4


def test_at_least_the_last_token_is_computed():
    same = [Request(float(at), 4, 1, (1, 2), 2) for at in (0, 10)]
    assert [job.hit for job in simulate(same, costs(), server(policy="lru")).jobs] == [0, 3]


@pytest.mark.parametrize("overlap", [True, False])
def test_what_went_to_the_host_is_loaded_before_its_prompt(overlap):
    """Room for five: three blocks of the first are pushed out by the second, and come back at 2 bytes a second."""
    three = [
        Request(0.0, 4, 1, (1, 2, 3, 4), 1),
        Request(10.0, 4, 1, (5, 6, 7, 8), 1),
        Request(20.0, 5, 1, (1, 2, 3, 4, 9), 1),
    ]
    how = server(memory=5.0, host=100.0, policy="lru", swap=Swap(TierPath(2.0), granularity="whole", overlap=overlap))
    found = simulate(three, costs(), how)
    last = found.jobs[2]
    assert last.hit == 4 and last.ttft == pytest.approx(1.5 + 1) and last.load_s == pytest.approx(1.5)
    said = found.figures()
    assert said["bytes_up"] == [0.0, 3.0] and said["bytes_down"] == [3.0 + 4.0, 0.0] and said["load_wait_s"] == 1.5


def test_an_exact_store_reuses_any_prefix_of_an_eviction_method_and_loads_it():
    two = [Request(0.0, 4, 1, (1, 2, 3, 4), 1), Request(10.0, 5, 1, (1, 2, 3, 9, 10), 1)]
    exact = costs(reuse="whole", held=0.5, token_bytes=1.0, store="exact")
    how = server(policy="lru", host=100.0, swap=Swap(TierPath(1.0), granularity="whole"))
    second = simulate(two, exact, how).jobs[1]
    assert second.hit == 3 and second.load_s == 3.0 and second.ttft == 5.0


def test_memory_limits_how_many_run_at_once():
    """Each needs 10 bytes of prompt and 1 of its answer: two of four fit into 25."""
    four = [Request(0.0, 10, 11) for _ in range(4)]
    found = simulate(four, costs(per_token=0.01, output=1 / 11), server(memory=25.0))
    assert found.instances[0].most_rows == 2
    assert (
        simulate(four, costs(per_token=0.01, held=0.5, output=1 / 11), server(memory=25.0)).instances[0].most_rows == 4
    )


def test_a_method_that_evicts_needs_the_exact_prompt_while_chunks_come():
    evicting = costs(reuse="whole", held=0.1, token_bytes=1.0, layers=10)
    one = [Request(0.0, 100, 2)]
    assert simulate(one, evicting, server(memory=20.0)).jobs[0].done is not None
    with pytest.raises(ValueError, match="needs .* and caches have"):
        simulate(one, evicting, server(memory=20.0, batching="chunked"))


def test_a_request_longer_than_the_memory_is_refused_with_its_line():
    requests = [Request(0.0, 10, 1, line=1), Request(1.0, 300, 1, line=2)]
    with pytest.raises(ValueError, match=r"line 2: a request of 300 \+ 1 tokens needs .*full_slots.*length_scale"):
        simulate(requests, costs(), server(memory=100.0))


def test_sessions_follow_their_own_answers_in_a_closed_loop():
    turns = [Request(0.0, 10, 1), Request(1.0, 10, 1, parent=0, think=5.0)]
    assert simulate(turns, costs(), server(closed=True)).jobs[1].arrived == 15.0
    assert simulate(turns, costs(), server()).jobs[1].arrived == 1.0


def test_prompts_go_to_the_instance_that_has_their_prefix_unless_its_queue_is_long():
    shared = tuple(range(8))
    first = Request(0.0, 8, 1, shared, 1)
    again = Request(20.0, 9, 1, (*shared, 100), 1)
    found = simulate([first, again], costs(), server(pools=(2, 1), policy="lru"))
    assert found.jobs[1].hit == 8
    # two at once: the second takes the prefix over a link that is fast, rather than wait
    other = Request(20.0, 9, 1, (*shared, 101), 1)
    fast = simulate([first, again, other], costs(), server(pools=(2, 1), policy="lru", link=TierPath(80.0)))
    assert [job.hit for job in fast.jobs] == [0, 8, 8] and fast.jobs[2].ttft == pytest.approx(1.1)
    slow = simulate([first, again, other], costs(), server(pools=(2, 1), policy="lru", link=TierPath(0.1)))
    assert slow.jobs[2].ttft == pytest.approx(2.0), "waiting for the other's prompt is shorter"


def test_prefetched_agents_find_their_prefix_on_the_device():
    """Three agents in turn with room for two prefixes: each was on the host, and comes up while another runs."""
    requests = []
    for turn in range(30):
        agent = turn % 3
        blocks = tuple(100 * agent + number for number in range(4)) + (10_000 + turn,)
        requests.append(Request(20.0 * turn, 5, 2, blocks, 1, agent=str(agent), fixed=4))
    link = Swap(TierPath(0.5), granularity="whole")
    waits = [
        simulate(requests, costs(), server(memory=12.0, host=100.0, policy="kvflow-oracle", swap=link, prefetch=count))
        for count in (0, 1)
    ]
    assert waits[1].figures()["load_wait_s"] < waits[0].figures()["load_wait_s"]
    assert waits[0].bound and waits[1].hit_rate >= waits[0].hit_rate


# ---------------------------------------------------------------------- queueing theory


@pytest.mark.parametrize(("rate", "expected"), [(0.3, 1.2143), (0.5, 1.5), (0.8, 3.0)])
def test_prompts_of_one_length_wait_as_an_m_d_1_queue_does(rate, expected):
    means = []
    for seed in range(3):
        rng, now, requests = random.Random(seed), 0.0, []
        for _ in range(3000):
            now += rng.expovariate(rate)
            requests.append(Request(now, 1, 1))
        jobs = simulate(requests, costs(), server()).jobs
        means.append(sum(job.ttft for job in jobs) / len(jobs))
    spread = (max(means) - min(means)) / 2
    assert sum(means) / len(means) == pytest.approx(expected, abs=max(0.02, 1.5 * spread))


def test_no_request_or_byte_is_lost_whatever_the_settings():
    rng = random.Random(3)
    for _trial in range(40):
        requests, now = [], 0.0
        for number in range(30):
            now += rng.expovariate(0.5)
            shared = tuple(range(rng.choice([0, 3, 6])))
            blocks = (*shared, *(1000 + 20 * number + place for place in range(rng.randint(1, 5))))
            requests.append(Request(now, 2 * len(blocks) - rng.randint(0, 1), rng.randint(1, 6), blocks, 2))
        cost = costs(
            per_token=0.05, held=rng.choice([0.3, 1.0]), reuse=rng.choice(["prefix", "whole"]), output=1.0, token_bytes=1.0,
            store=rng.choice(["compressed", "exact"]),
        )  # fmt: skip
        how = server(
            memory=rng.choice([45.0, 80.0]),
            host=rng.choice([0.0, 50.0]),
            disk=rng.choice([0.0, 100.0]),
            policy=rng.choice(["none", "fifo", "lru", "lfu", "belady", "kvflow"]),
            order=rng.choice(["fcfs", "lpm", "klpm", "priority"]),
            update_every=3,
            batching=rng.choice(["iteration", "request", "chunked"]),
            budget=8,
            pools=rng.choice([None, None, (2, 2)]),
            swap=Swap(TierPath(20.0, 0.01), rng.choice(["swap", "recompute"]), overlap=rng.choice([True, False])),
        )
        found = simulate(requests, cost, how)
        for job in found.jobs:
            assert job.done is not None and job.first is not None and job.first >= job.arrived
            assert len(job.gaps()) == job.request.output - 1 and 0 <= job.hit < job.request.input
        for one in found.instances:
            assert one.pool.private == pytest.approx(0.0, abs=1e-6) and not one.running and not one.waiting
            held = one.pool.tree or one.pool.store
            assert held is None or held.locked == pytest.approx(0.0, abs=1e-6)
        assert found.hit_rate == 0.0 or how.policy != "none"


def test_the_tail_of_gaps_is_the_mean_of_the_longest_tenth():
    assert tail_mean([1.0] * 18 + [3.0, 5.0]) == 4.0 and tail_mean([2.0]) == 2.0 and tail_mean([]) == 0.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"order": "best"}, "valid: fcfs, lpm, klpm, priority"),
        ({"policy": "mru"}, "valid: fifo, lru, lfu, belady, kvflow"),
        ({"batching": "x"}, "valid: iteration, request, chunked"),
        ({"memory": 0.0}, "memory=0.0"),
        ({"pools": (0, 1)}, "at least 1 prefill"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        simulate(TWO, MS, server(**given))
