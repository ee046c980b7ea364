"""A discrete-event simulation of a server that answers the requests of a trace: simulated, and labelled so.

Instances compute prompts and decode steps (`engine.Engine`), together or in two pools with a link between them. Nothing
but the costs of the method, loads and transfers takes time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcompress.measure.serving.cache_pool import CachePool
from kvcompress.measure.serving.costs import MethodCosts
from kvcompress.measure.serving.engine import Engine
from kvcompress.measure.serving.job import Job
from kvcompress.measure.serving.kvflow import Claims
from kvcompress.measure.serving.orders import Order
from kvcompress.measure.serving.policies import NEVER, KVFlow, policy
from kvcompress.measure.serving.requests import Request, next_uses
from kvcompress.measure.serving.swapping import Swap
from kvcompress.measure.tiers import path
from kvcompress.measure.transfers import TierPath

TAIL = 0.1  # of a request's gaps: TBT is the mean of its longest ones


@dataclass(frozen=True)
class Server:
    """How a server runs.

    Attributes:
        memory: bytes for caches of each instance; host, disk: bytes of the tiers below.
        policy: of eviction, as of `policies`, or "none" for no reuse.
        order, k, update_every, pattern: as of `orders.Order`; batching, budget, most, prefetch: as of `engine.Engine`.
        pools: prefill and decode instances, or None for one instance that does both.
        link: between pools; swap: between device and host; disk_link: beyond the host.
        closed: requests of a session follow one another, instead of arriving when the trace says.
    """

    memory: float
    host: float = 0.0
    disk: float = 0.0
    policy: str = "lru"
    order: str = "fcfs"
    k: int = 4
    update_every: int = 25
    pattern: str = "random"
    batching: str = "iteration"
    budget: int = 512
    most: int | None = None
    prefetch: int = 0
    pools: tuple[int, int] | None = None
    link: TierPath = field(default_factory=lambda: path("rdma-400g"))
    swap: Swap = field(default_factory=lambda: Swap(path("pcie4-x16")))
    disk_link: TierPath = field(default_factory=lambda: path("nvme-pcie4"))
    closed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.memory > 0 or self.host < 0 or self.disk < 0:
            raise ValueError(f"memory={self.memory}, host={self.host}, disk={self.disk} bytes: above 0, and from 0")
        if self.pools is not None and min(self.pools) < 1:
            raise ValueError(
                f"pools={list(self.pools)}: at least 1 prefill and 1 decode instance, or 0 for both together"
            )


@dataclass(frozen=True)
class Outcome:
    """What became of a trace.

    Attributes:
        jobs: in the order of the trace; seconds: from the first arrival to the end.
        instances: that served it; bound: the policy knew the future.
    """

    jobs: tuple[Job, ...]
    seconds: float
    instances: tuple[Engine, ...]
    bound: bool

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return sum(job.hit for job in self.jobs) / sum(job.request.input for job in self.jobs)

    def tbt(self) -> list[float]:
        """Per request the mean of the longest tenth of its gaps; 0 where it has none."""
        return [tail_mean(job.gaps()) for job in self.jobs]

    def attained(self, ttft: float, tbt: float) -> float:
        """Share of all requests that met both targets, in seconds."""
        return sum(a <= ttft and b <= tbt for a, b in zip(self.ttfts(), self.tbt(), strict=True)) / len(self.jobs)

    def ttfts(self) -> list[float]:
        return [job.ttft for job in self.jobs]

    def figures(self) -> dict[str, Any]:
        """Plain values for a record; all simulated."""
        ttft, tbt, rate = self.ttfts(), self.tbt(), self.hit_rate
        moved = {"down": [one.pool.down for one in self.instances], "up": [one.pool.up for one in self.instances]}
        return {
            "simulated": True,
            "bound": self.bound,
            "requests": len(self.jobs),
            "seconds": self.seconds,
            "requests_per_s": len(self.jobs) / self.seconds,
            "tokens_per_s": sum(job.request.output for job in self.jobs) / self.seconds,
            "hit_rate": rate,
            "speedup_bound": 1 / (1 - rate) if rate < 1 else math.inf,
            "ttft_p50": float(np.percentile(ttft, 50)),
            "ttft_p99": float(np.percentile(ttft, 99)),
            "tbt_p50": float(np.percentile(tbt, 50)),
            "tbt_p99": float(np.percentile(tbt, 99)),
            "load_wait_s": sum(job.load_s for job in self.jobs),
            "preemptions": sum(one.preemptions for one in self.instances),
            "swapped_out": sum(one.out_bytes for one in self.instances),
            "swapped_in": sum(one.in_bytes for one in self.instances),
            **{f"bytes_{way}": [sum(tier) for tier in zip(*rows, strict=False)] for way, rows in moved.items()},
            "running_most": max(one.most_rows for one in self.instances),
            "busy": sum(one.busy_s for one in self.instances) / (len(self.instances) * self.seconds),
        }


def tail_mean(gaps: Sequence[float]) -> float:
    """Mean of the longest tenth, at least of one."""
    if not gaps:
        return 0.0
    count = max(1, math.ceil(TAIL * len(gaps)))
    return sum(sorted(gaps)[-count:]) / count


class Simulation:
    """Requests, instances and the clock. Made for one run.

    Raises:
        ValueError: a request that fits into no memory, named by its line.
    """

    def __init__(self, requests: Sequence[Request], costs: MethodCosts, server: Server) -> None:
        self.requests, self.costs, self.server = requests, costs, server
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        rule = None if server.policy == "none" else policy(server.policy)
        self.bound = rule is not None and rule.future
        self.claims = Claims(requests, rule.expects) if isinstance(rule, KVFlow) else None
        self._next = list(next_uses(requests)) if self.bound and self.claims is None else None
        size = max(request.block_size for request in requests)
        lower = [room for room in (server.host, server.disk) if room > 0]

        def instance(decodes: bool, keeps: bool) -> Engine:
            chosen = policy(server.policy) if keeps and rule is not None else None
            chunked = server.batching == "chunked" and decodes and keeps
            pool = CachePool(costs, size, server.memory, chosen, lower if keeps else (), chunked)
            order = Order(server.order if keeps else "fcfs", server.k, server.update_every, server.pattern, server.seed)
            batching = server.batching if decodes and keeps else "iteration"
            disk = server.disk_link
            return Engine(
                self,
                costs,
                pool,
                order,
                server.swap,
                batching,
                server.budget,
                decodes,
                server.most,
                server.prefetch,
                disk,
            )

        if server.pools is None:
            self.prompts = self.decodes = [instance(True, True)]
        else:
            self.prompts = [instance(False, True) for _ in range(server.pools[0])]
            self.decodes = [instance(True, False) for _ in range(server.pools[1])]
        self.instances = list(dict.fromkeys([*self.prompts, *self.decodes]))
        self._check()
        self.jobs = [Job(number, request, request.at) for number, request in enumerate(requests)]
        self.children: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            if server.closed and request.parent is not None:
                self.children.setdefault(request.parent, []).append(number)
            else:
                self.at(request.at, lambda now, number=number: self._arrive(number, now))  # type: ignore[misc]

    def _check(self) -> None:
        for request in self.requests:
            for one in self.instances:
                need = one.pool.need(request)
                if need > self.server.memory:
                    where = f"line {request.line}: " if request.line else ""
                    raise ValueError(
                        f"{where}a request of {request.input} + {request.output} tokens needs {need / 2**30:.4g} GiB, and caches "
                        f"have {self.server.memory / 2**30:.4g} GiB: more memory (or full_slots), a larger length_scale, or "
                        "another batching, as chunks hold the whole prompt"
                    )

    def run(self) -> Outcome:
        """Serve everything."""
        now, start = 0.0, None
        while self._heap:
            now = self._heap[0][0]
            start = now if start is None else start
            while self._heap and self._heap[0][0] == now:
                heapq.heappop(self._heap)[2](now)
            for one in self.instances:
                end = one.begin(now)
                if end is not None:
                    self.at(end, one.end)
        left = [job for job in self.jobs if job.done is None]
        assert not left, f"{len(left)} requests were not served, the first is {left[0].number}"
        return Outcome(tuple(self.jobs), max(now - (start or 0.0), 1e-12), tuple(self.instances), self.bound)

    # ------------------------------------------------------------------ what instances ask

    def at(self, time: float, act: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, act))

    def due(self, job: Job, now: float) -> Sequence[float] | None:
        """When the blocks of a request are needed next, for policies that ask."""
        if self.claims is not None:
            return self.claims.due(job.number, now)
        return None if self._next is None else self._next[job.number]

    def expected(self) -> list[tuple[float, str, Sequence[int]]]:
        """Agents that are not under way, by when they are expected back."""
        return [] if self.claims is None else self.claims.soonest()

    def prompt_done(self, job: Job, engine: Engine, now: float) -> None:
        """The first token is there; the cache goes to the decode instance that has least to do."""
        seconds = self.server.link.seconds(self.costs.held.at(job.request.input), objects=1)
        engine.link_free = max(now, engine.link_free) + seconds

        def moved(time: float) -> None:
            assert job.admitted is not None
            engine.pool.release(job.admitted)
            engine.blocked = False
            if job.request.output == 1:
                return
            job.prefilled = True
            min(self.decodes, key=lambda one: len(one.waiting) + len(one.running)).add(job)

        if job.request.output == 1:
            job.done = now
            self.finished(job, now)
        self.at(engine.link_free, moved)

    def finished(self, job: Job, now: float) -> None:
        for number in self.children.get(job.number, ()):
            self.jobs[number].arrived = now + self.requests[number].think
            self.at(self.jobs[number].arrived, lambda time, number=number: self._arrive(number, time))  # type: ignore[misc]

    def _arrive(self, number: int, now: float) -> None:
        job = self.jobs[number]
        if len(self.prompts) == 1:
            self.prompts[0].add(job)
        else:
            self._assign(job, now)

    def _assign(self, job: Job, now: float) -> None:
        """To the prefill instance of least predicted TTFT: its queue and the prompt given its own prefix, or given the
        longest prefix of any instance after a transfer (Mooncake, algorithm 1)."""
        request, costs = job.request, self.costs
        hits = [one.pool.lookup(request) for one in self.prompts]
        best, least = max(hits), NEVER
        chosen = self.prompts[0]
        for one, own in zip(self.prompts, hits, strict=True):
            compute = costs.prefill_s(request.input, own)
            ways = [(compute, (0, 0.0), compute)]
            if best > own:
                moved = self.server.link.seconds(costs.held.per_prompt * (best - own))
                compute = costs.prefill_s(request.input, best)
                ways.append((moved + compute, (best, moved), compute))
            for seconds, remote, compute in ways:
                if one.queue_s(now) + seconds < least:
                    least, chosen = one.queue_s(now) + seconds, one
                    job.remote, job.predicted = remote, compute
        chosen.promised += job.predicted
        chosen.add(job)


def simulate(requests: Sequence[Request], costs: MethodCosts, server: Server) -> Outcome:
    """Serve a trace.

    Raises:
        ValueError: settings that are not valid, or a request that fits into no memory, named by its line.
    """
    return Simulation(requests, costs, server).run()
