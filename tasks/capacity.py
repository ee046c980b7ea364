"""Capacity: requests served at fixed memory, simulated from times and bytes measured in the same run.

Prompts, compression and decode steps of several requests are measured for the method and for the full cache in turn;
a simulation of continuous batching with Poisson arrivals (`kvcompress.measure.serving_simulation`) says how many requests a memory
serves, and how many of them within targets. It is checked against one real batched run of a size between the measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from kvcompress.data.grid import MeasuredTask
from kvcompress.data.task import Sample, Turn
from kvcompress.measure import capacity_points, footprint, latency, serving_simulation
from kvcompress.measure.latency import FULL, OURS, Shape

SATURATED = ("tokens_per_s", "requests_per_s", "running_mean")


@dataclass(frozen=True, kw_only=True)
class Capacity(MeasuredTask):
    """Requests of one prompt and output length at fixed memory.

    Attributes:
        lengths: tokens of a prompt; each is a sample.
        output: tokens generated for each request, at least 2.
        memory: GiB for weights, caches and a running prompt; None: as much as `full_slots` requests need with the full cache.
        batches: numbers of requests whose decode step is measured; between them and beyond the simulation goes straight.
        check: requests of the real batched run that the simulation is compared with.
        rates: arrivals per second, as shares of what the engine does at most.
        requests: in a simulation.
        ttft, tpot: targets in seconds; None: `slack` times what the full cache takes for a request by itself.
        rounds, warmup: measurements of each side, and those thrown away before.
        source: as of `MeasuredTask`.
    """

    name: ClassVar[str] = "capacity"

    lengths: tuple[int, ...] = (1024,)
    output: int = 32
    memory: float | None = None
    full_slots: int = 4
    batches: tuple[int, ...] = (1, 2, 4, 8)
    check: int = 6
    rates: tuple[float, ...] = (0.5, 0.8, 0.95)
    requests: int = 400
    ttft: float | None = None
    tpot: float | None = None
    slack: float = 5.0
    rounds: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        latency.grid(self.lengths, self.batches, (self.output,))
        for name in ("full_slots", "check", "requests", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name}={getattr(self, name)}; at least 1 is needed")
        for name in ("memory", "ttft", "tpot", "slack"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"task.{name}={value}; above 0, or null where it may be left open")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"task.rates={list(self.rates)}: shares of the highest throughput, above 0")
        if self.source not in latency.SOURCES or self.warmup < 0:
            raise ValueError(
                f"task.source={self.source!r}, task.warmup={self.warmup}; {', '.join(latency.SOURCES)}; from 0"
            )

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """One per prompt length, the shortest first."""
        for length in sorted(set(self.lengths)):
            yield Sample(
                id=f"L{length}-N{self.output}-{self.source}-s{self.seed}",
                segments=(latency.prompt_ids(tokenizer, length, self.source, self.seed),),
                turns=(Turn((), self.output),),
                protocol={"source": self.source, "simulated": True},
                meta={"length": length},
            )

    def effort(self, sample: Sample) -> tuple[float, float]:
        """Both sides in each round: a prompt and the steps of each batch, and the real batched run; then one footprint."""
        runs = 2 * (self.rounds + self.warmup)
        return runs * (1 + self.check) + 2, runs * (len(set(self.batches)) + 1)

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Measure, simulate and check, with a session that is not open.

        Raises:
            ValueError: `memory` holds not even the weights.

        Returns:
            beside what any task returns: `capacity`, for `method` and `full` what `capacity.serve` says and `agreement`
            with the real batched run, the `targets`, and `extrapolated`: more requests than were measured may run.
        """
        ids, weights = sample.segments[0], footprint.weight_bytes(session.model)
        room = footprint.stated_room(self.memory, weights)
        batches = sorted(set(self.batches))
        found, ended = capacity_points.rounds(session, ids, self.output, batches, self.check, self.rounds, self.warmup)
        out: dict[str, Any] = {"tokens": [[]], "finished": ["fixed"], "length": len(ids)}
        if ended:
            name, fault = next(iter(ended.items()))
            shape = Shape(len(ids), max(*batches, self.check), self.output)
            oom = latency.out_of_memory(session, ids, shape, fault, name == FULL)
            return out | {"oom": oom, "capacity": {}, "compressed": None, "end": None}
        costs = {
            name: capacity_points.costs(made, capacity_points.prefill_bytes(session, ids, name == FULL), weights)
            for name, made in found.items()
        }
        whole = costs[FULL]
        memory = whole.weights + whole.prefill + (self.full_slots - 1) * whole.held if room is None else room
        ttft = self.ttft or self.slack * whole.prefill_s
        tpot = self.tpot or self.slack * whole.step(1)
        details: dict[str, Any] = {"targets": {"ttft_s": ttft, "tpot_s": tpot}, "memory": memory}
        for name, cost in costs.items():
            served = serving_simulation.serve(
                cost, memory, self.output, ttft, tpot, self.rates, self.requests, self.seed
            )
            agrees = capacity_points.agreement(found[name], self.check, self.output)
            details[name] = served | {"agreement": agrees, "extrapolated": served["slots"] > batches[-1]}
        last = found[OURS][-1]
        return out | {
            "capacity": details,
            "compressed": last.compressed,
            "end": last.end,
            "ttft_s": [one.prefill_s for one in found[OURS]],
            "tpot_s": [one.steps_s[batches[0]] for one in found[OURS]],
        }

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Simulated figures of each length by its name (`L1024.tokens_per_s`), those of the full cache, and ratios."""
        found: dict[str, Any] = {"simulated": True}
        ratios: dict[str, list[float]] = {}
        for row in rows:
            details, name = row["out"]["capacity"], f"L{row['out']['length']}"
            flat: dict[str, dict[str, float]] = {}
            for side in filter(details.__contains__, (OURS, FULL)):
                one = details[side]
                flat[side] = {"slots": one["slots"], "goodput_rate": one["goodput_rate"]}
                flat[side] |= {key: (one["saturated"] or {}).get(key, 0.0) for key in SATURATED}
                flat[side]["agreement"] = one["agreement"]["ratio"]
            for side, figures in flat.items():
                found |= {f"{name}.{'full.' if side == FULL else ''}{key}": value for key, value in figures.items()}
            for key in ("tokens_per_s", "goodput_rate"):
                if flat and flat[FULL][key] > 0:
                    found[f"{name}.ratio_{key}"] = flat[OURS][key] / flat[FULL][key]
                    ratios.setdefault(key, []).append(flat[OURS][key] / flat[FULL][key])
        return found | {f"ratio_{key}": median(values) for key, values in ratios.items()}
