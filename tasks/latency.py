"""Latency: time to first token, time per output token by position, and throughput, beside the full cache's.

Every cell of the grid prompt length x batch x output length is a sample. In each the method and the full cache are run
in turn, in one process and in changing order, and compared round by round; times mean something only as such ratios
where others use the machine. Prompts never come from a shared prefill, and no token ends an output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, ClassVar

from kvcompress.data.grid import GridTask
from kvcompress.data.task import Sample
from kvcompress.measure import latency, roofline
from kvcompress.measure.latency import FULL, OURS, Shape

FIGURES = ("ttft_s", "prefill_s", "compress_s", "tpot_s", "tokens_per_s", "decode_tokens_per_s")
RATIOS = ("ttft", "tpot", "total")


@dataclass(frozen=True, kw_only=True)
class Latency(GridTask):
    """What a user waits for, over a grid.

    Attributes:
        lengths, batches, outputs, source: as of `GridTask`.
        rounds: measurements of each side in each cell of the grid.
        warmup: runs of each side before them, thrown away.
        aa: also measure the full cache a second time in each round, to see how far chance alone strays.
        floor: also say how far the run is from what the device's bandwidth and matrix rate allow (a short calibration).
    """

    name: ClassVar[str] = "latency"
    rounds: int = 5
    warmup: int = 1
    aa: bool = True
    floor: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 1 or self.warmup < 0:
            raise ValueError(f"task.rounds={self.rounds}, task.warmup={self.warmup}: at least 1 and 0")

    def protocol(self) -> dict[str, Any]:
        return {**super().protocol(), "rounds": self.rounds, "warmup": self.warmup}

    def effort(self, sample: Sample) -> tuple[float, float]:
        """Both sides in each round, the full cache twice for A/A; a batch decodes as fast as a row, or nearly."""
        runs = (self.rounds + self.warmup) * (3 if self.aa else 2)
        return runs * sample.meta["shape"]["batch"], runs

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Measure one cell of the grid with a session that is not open.

        Returns:
            beside what any task returns (times are lists, one entry per round): `latency`, the figures of `method` and
            `full`, their `ratios` and the `machine`; `oom`, where memory ran out for the method: `error`, `last_good`,
            the largest smaller shape that a single run of it could do (batch halved, then the prompt). Then there is
            no `end`. For the full cache the same is in `latency`, and the method's own times stand.
        """
        shape = Shape(**sample.meta["shape"])
        ids = sample.segments[0]
        found, ended, machine = latency.measured(session, ids, shape, self.rounds, self.warmup, self.aa)
        out: dict[str, Any] = {"shape": asdict(shape), "tokens": [[]], "finished": ["fixed"]}
        sides = {name: latency.side(found[name], shape) for name in (OURS, FULL) if found[name]}
        details: dict[str, Any] = {**sides, "ratios": latency.ratios(found), "machine": machine}
        for name in (FULL, OURS):
            if name in ended:
                details[f"{name}_oom"] = latency.out_of_memory(session, ids, shape, ended[name], name == FULL)
        out["latency"] = details
        if OURS in ended or not found[OURS]:
            return out | {"oom": details[f"{OURS}_oom"], "compressed": None, "end": None}
        requests = found[OURS]
        last = requests[-1]
        notes: list[str] = []
        if self.floor:
            kv = {
                name: roofline.between(one[-1].compressed["kv"], one[-1].end["kv"])
                for name, one in found.items()
                if one
            }
            tpot = sides[OURS]["tpot_s"]["median"]
            details["roofline"], notes = roofline.beside(session.model, kv[OURS], kv.get(FULL), shape.batch, tpot)
        last.end["notes"] = [*last.end["notes"], *notes]
        return out | {
            "tokens": [last.tokens],
            "compressed": last.compressed,
            "end": last.end,
            **{
                name: [getattr(one, name) for one in requests]
                for name in ("ttft_s", "prefill_s", "compress_s", "tpot_s")
            },
        }

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Figures of each cell of the grid by its name (`L4096-B1-N32.tpot_s`), and ratios to the full cache over all."""
        found: dict[str, Any] = {}
        every: dict[str, list[float]] = {}
        for row in rows:
            details, name = row["out"]["latency"], Shape(**row["out"]["shape"]).name
            for figure in FIGURES:
                for prefix, side in (("", OURS), ("full.", FULL)):
                    if side in details:
                        found[f"{name}.{prefix}{figure}"] = details[side][figure]["median"]
            for kind in [*RATIOS, *(f"aa_{kind}" for kind in RATIOS)]:
                spread = details["ratios"].get(kind)
                if spread is not None:
                    found |= {f"{name}.ratio_{kind}{end}": spread[key] for end, key in _ENDS}
                    every.setdefault(kind, []).append(spread["median"])
            for side in (OURS, FULL):
                if f"{side}_oom" in details:
                    found[f"{name}.{side}_oom"] = details[f"{side}_oom"]["last_good"]
            if "roofline" in details:
                found[f"{name}.of_floor"] = details["roofline"]["of_floor"]
        return found | {f"ratio_{kind}": median(values) for kind, values in every.items()}


_ENDS = (("", "median"), (".q1", "q1"), (".q3", "q3"))
