"""Serving: what a compressed cache is worth to a server that answers a trace of requests, simulated from measured costs.

Prompts, reused prefixes and decode steps are measured for the method and for the full cache in turn, and fitted; a
simulation of prefix caching, tiers and continuous batching (`kvcompress.measure.serving`) then serves public traces at
fixed memory. Every figure but the costs is simulated, and marked so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from kvcompress.common.hashing import digest
from kvcompress.data.grid import MeasuredTask
from kvcompress.data.task import Sample, Turn
from kvcompress.measure import latency, tiers
from kvcompress.measure.latency import FULL, OURS
from kvcompress.measure.serving import board, measured_costs, traces
from kvcompress.measure.serving.costs import STORES, MethodCosts, modelled
from kvcompress.measure.serving.engine import BATCHING
from kvcompress.measure.serving.orders import Order
from kvcompress.measure.serving.policies import policy
from kvcompress.measure.serving.requests import Request, first, scaled
from kvcompress.measure.serving.simulation import Server
from kvcompress.measure.serving.swapping import Swap

MEASURED, MODELLED = "measured", "modelled"


@dataclass(frozen=True, kw_only=True)
class Serving(MeasuredTask):
    """A method and the full cache as servers of the same traces, at the same memories.

    Attributes:
        traces: names (`measure.serving.traces.FILES`, within `paths.data`/traces) or files; each is served at each memory.
        requests: the first so many of a trace; None: all.
        rate_scale: load of the comparison as a multiple of the trace's own rate; None: what the full cache can bear.
        length_scale: tokens and block sizes are divided by it; None: none. Said in the record.
        memory: GiB for caches (weights not among them); None: by `full_slots`.
        full_slots: memories in which the longest request and so many less one mean ones fit with the full cache.
        host, disk: memory below the device's, as multiples of it.
        policy: of eviction: fifo, lru, lfu, kvflow; belady and kvflow-oracle know the future and are bounds; none.
        order: fcfs, lpm, klpm (`k`), priority (`update_every` iterations, `pattern` random or markov).
        batching: iteration, request (static), chunked (`chunk` tokens an iteration).
        pools: prefill and decode instances, each with the memory, and `link` between them; empty: one for both.
        prefetch: agents whose fixed prefix kvflow brings up ahead, at once at most.
        swap: swap or recompute; granularity: block, group or whole; overlap, keep_copy: as of `swapping.Swap`;
            swap_link: between device and host.
        store: of methods that evict: compressed caches reused whole, or exact ones on the host compressed anew.
        costs: measured; modelled for `device_model` and `dimensions`, with the measured share of bytes; or a JSON file of
            `scripts/bench.py serving-costs`.
        closed: requests of a session follow its own answers.
        lengths, shares, batches, steps, rounds, warmup: what is measured, as of `measured_costs.Plan`.
        ttft, tbt: targets in seconds; None: from `slack`, as of `board.Targets`.
        halvings: of the search for each goodput.
        source: as of `MeasuredTask`.
    """

    name: ClassVar[str] = "serving"

    traces: tuple[str, ...] = ("mooncake_conversation",)
    requests: int | None = 2000
    rate_scale: float | None = None
    length_scale: int | None = 16
    memory: float | None = None
    full_slots: tuple[int, ...] = (16,)
    host: float = 4.0
    disk: float = 0.0
    policy: str = "lru"
    order: str = "fcfs"
    k: int = 4
    update_every: int = 25
    pattern: str = "random"
    batching: str = "iteration"
    chunk: int = 512
    pools: tuple[int, ...] = ()
    link: str = "rdma-400g"
    prefetch: int = 0
    swap: str = "swap"
    granularity: str = "block"
    overlap: bool = True
    keep_copy: bool = True
    swap_link: str = "pcie4-x16"
    store: str = "compressed"
    costs: str = MEASURED
    device_model: str = "h100-sxm"
    dimensions: str = "llama3-8b"
    closed: bool = False
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    shares: tuple[float, ...] = (0.5, 0.75)
    batches: tuple[int, ...] = (1, 4, 8)
    steps: int = 8
    rounds: int = 3
    warmup: int = 1
    ttft: float | None = None
    tbt: float | None = None
    slack: float = 25.0
    halvings: int = 4

    def __post_init__(self) -> None:
        self.plan()
        if not self.traces or not self.full_slots or min(self.full_slots) < 1:
            raise ValueError(
                f"task.traces={list(self.traces)}, task.full_slots={list(self.full_slots)}: one or more of each"
            )
        for name in ("requests", "rate_scale", "length_scale", "memory", "ttft", "tbt"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"task.{name}={value}; above 0, or null")
        if not self.slack > 0 or self.halvings < 1:
            raise ValueError(f"task.slack={self.slack}, task.halvings={self.halvings}: above 0, and at least 1")
        if self.policy != "none":
            policy(self.policy)
        if self.batching not in BATCHING or self.store not in STORES:
            raise ValueError(
                f"task.batching={self.batching!r}, task.store={self.store!r}; valid: {', '.join(BATCHING)}; {', '.join(STORES)}"
            )
        if len(self.pools) not in (0, 2):
            raise ValueError(f"task.pools={list(self.pools)}; [] for one instance, or [prefill, decode]")
        if self.costs == MODELLED:
            tiers.dimensions(self.dimensions), tiers.entry("devices", self.device_model)
        if self.source not in latency.SOURCES:
            raise ValueError(f"task.source={self.source!r}; valid: {', '.join(latency.SOURCES)}")
        Order(self.order, self.k, self.update_every, self.pattern)
        self.server(1.0)

    def plan(self) -> measured_costs.Plan:
        """What is measured."""
        return measured_costs.Plan(self.lengths, self.shares, self.batches, self.steps, self.rounds, self.warmup)

    def server(self, memory: float) -> Server:
        """How a server with so many bytes for caches runs."""
        swap = Swap(tiers.path(self.swap_link), self.swap, self.granularity, self.overlap, self.keep_copy)
        return Server(
            memory=memory,
            host=self.host * memory,
            disk=self.disk * memory,
            policy=self.policy,
            order=self.order,
            k=self.k,
            update_every=self.update_every,
            pattern=self.pattern,
            batching=self.batching,
            budget=self.chunk,
            prefetch=self.prefetch,
            pools=(self.pools[0], self.pools[1]) if self.pools else None,
            link=tiers.path(self.link),
            swap=swap,
            closed=self.closed,
            seed=self.seed,
        )

    def trace(self, name: str) -> list[Request]:
        """Requests of a trace as they are served.

        Raises:
            ValueError: there is no such trace, or a line of it is not valid.
        """
        found = first(traces.read(traces.find(name, self.data)), self.requests)
        return scaled(found, self.length_scale)

    def fingerprint(self) -> dict[str, Any]:
        """Sizes of the traces, and what a file of costs says."""
        found: dict[str, Any] = {}
        for name in self.traces:
            found[f"trace.{Path(name).name}"] = traces.find(name, self.data).stat().st_size
        if self.costs not in (MEASURED, MODELLED):
            found["costs"] = digest(Path(self.costs).read_text(encoding="utf-8"))
        return found

    def provenance(self) -> dict[str, Any]:
        return {"data": ",".join(traces.find(name, self.data).name for name in self.traces)}

    def stated_lengths(self) -> tuple[int, ...]:
        return ()  # `lengths` are those of the prompts that costs are measured on: requests come from the trace

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """One: costs are measured once for all traces and memories."""
        longest = max(self.lengths)
        yield Sample(
            id=f"{'+'.join(Path(name).name for name in self.traces)}-s{self.seed}",
            segments=(latency.prompt_ids(tokenizer, longest, self.source, self.seed),),
            turns=(Turn((), self.steps),),
            protocol={"source": self.source, "simulated": True, "length_scale": self.length_scale, "costs": self.costs},
            meta={"length": longest},
        )

    def effort(self, sample: Sample) -> tuple[float, float]:
        """Both sides in each round: prompts of each length with each share reused, and steps of each batch."""
        runs = 2 * (self.rounds + self.warmup)
        whole = sum(self.lengths) / max(self.lengths)
        return runs * whole * (1 + len(self.shares)), runs * len(self.lengths) * len(self.batches)

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Measure costs with a session that is not open, and serve each trace at each memory.

        Returns:
            beside what any task returns: `costs` of both sides, and `serving`: by trace and memory what `board.compare`
            says of `method` and `full`, with exact hit `curve`s.
        """
        ids, name = sample.segments[0], measured_costs.label(session.method)
        served = {trace: self.trace(trace) for trace in self.traces}  # a bad line ends it before anything is measured
        out: dict[str, Any] = {"tokens": [[]], "finished": ["fixed"], "length": len(ids)}
        found, ended = measured_costs.rounds(session, ids, self.plan())
        if ended:
            side, fault = next(iter(ended.items()))
            shape = latency.Shape(len(ids), max(self.batches), self.steps)
            oom = latency.out_of_memory(session, ids, shape, fault, side == FULL)
            return out | {"oom": oom, "serving": {}, "compressed": None, "end": None}
        sides = self.sides(session, name, found)
        details = {trace: self.serve(requests, sides) for trace, requests in served.items()}
        last = found[OURS][-1]
        return out | {
            "costs": {side: one.as_dict() for side, one in sides.items()},
            "serving": details,
            "compressed": last.compressed,
            "end": last.end,
            "ttft_s": [one.prompts[len(ids), 0][0] + one.prompts[len(ids), 0][1] for one in found[OURS]],
            "tpot_s": [one.steps[len(ids), min(self.batches)][0] for one in found[OURS]],
        }

    def sides(
        self, session: Any, name: str, found: Mapping[str, Sequence[measured_costs.Points]]
    ) -> dict[str, MethodCosts]:
        """Costs of the method and of the full cache."""
        method, layers = session.method, session.model.config.get_text_config().num_hidden_layers
        # what a method of chunks keeps for reuse are chunks as the model made them
        store = "exact" if method.parts().prefill.needs_segments else self.store
        reuse = method.cache_reuse
        sides = {
            OURS: measured_costs.costs(name, reuse, found[OURS], layers, store if reuse == "whole" else "compressed"),
            FULL: measured_costs.costs("full", "prefix", found[FULL], layers),
        }
        if self.costs == MODELLED:
            return {side: modelled(one, self.device_model, self.dimensions) for side, one in sides.items()}
        return sides if self.costs == MEASURED else {**sides, **_from_file(Path(self.costs), name)}

    def serve(self, requests: Sequence[Request], sides: Mapping[str, MethodCosts]) -> dict[str, Any]:
        """A trace at each memory."""
        full, found = sides[FULL], {}
        rooms = {f"{self.memory:g}GiB": self.memory * 2**30} if self.memory else {}
        rooms = rooms or {f"slots{n}": board.memory_of(full, requests, n) for n in sorted(set(self.full_slots))}
        targets = board.Targets.of(full, requests, self.slack)
        targets = board.Targets(self.ttft or targets.ttft, self.tbt or targets.tbt)
        rate = None
        if self.rate_scale is not None:
            rate = self.rate_scale * len(requests) / max(1e-9, requests[-1].at - requests[0].at)
        for name, memory in rooms.items():
            compared = board.compare(requests, sides, FULL, self.server(memory), targets, self.halvings, rate)
            for side, one in compared.items():
                one["curve"] = board.curve(requests, sides[side], full.token_bytes, memory, self.policy)
            found[name] = {"memory": memory, "targets": {"ttft": targets.ttft, "tbt": targets.tbt}, "sides": compared}
        return found

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """By trace and memory (`mooncake_conversation.slots16.hit_rate`): the board's figures, the full cache's, ratios."""
        found: dict[str, Any] = {"simulated": True}
        ratios: list[float] = []
        for row in rows:
            for trace, memories in row["out"]["serving"].items():
                for memory, said in memories.items():
                    for side, one in said["sides"].items():
                        stem = f"{Path(trace).name}.{memory}.{'full.' if side == FULL else ''}"
                        flat = {key: one["at"][key] for key in BOARD}
                        flat |= {
                            key: one[key] for key in ("goodput_rate", "share_of_unlimited") if one[key] is not None
                        }
                        found |= {stem + key: value for key, value in flat.items()}
                        if side == OURS:
                            found[stem + "extrapolated"] = bool(one["extrapolated"])
                            found[stem + "bound"] = one["at"]["bound"]
                            if one["to_base"] is not None:
                                found[stem + "ratio_goodput_rate"] = one["to_base"]
                                ratios.append(one["to_base"])
        return found | ({"ratio_goodput_rate": median(ratios)} if ratios else {})


BOARD = (
    "hit_rate", "speedup_bound", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "goodput_per_s", "attained", "preemptions",
    "load_wait_s",
)  # fmt: skip


def _from_file(path: Path, name: str) -> dict[str, MethodCosts]:
    """Costs of the method and of the full cache from a file of `scripts/bench.py serving-costs`.

    Raises:
        ValueError: no such file, or it does not know the method.
    """
    try:
        known = {one["name"]: one for one in json.loads(path.read_text(encoding="utf-8"))["costs"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"task.costs={str(path)!r}: measured, modelled, or a file of costs; {error}") from error
    for wanted in (name, "full"):
        if wanted not in known:
            raise ValueError(f"{path} has no costs of {wanted!r}; it has {', '.join(known)}")
    return {OURS: MethodCosts.of(known[name]), FULL: MethodCosts.of(known["full"])}
