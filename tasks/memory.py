"""Memory: the peaks of prompt and decode, what is left after the compression and at the end, and what fits.

Every cell of the grid prompt length x batch x output length is a sample. The same is measured of the full cache in the
same process. With `memory` the largest batch and the longest prompt that fit are looked for by running them, and said
beside what a small model predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, ClassVar

from kvcompress.common.memory import is_oom, release
from kvcompress.data.grid import GridTask
from kvcompress.data.task import Sample
from kvcompress.measure import footprint, latency
from kvcompress.measure.latency import FULL, OURS, Shape
from kvcompress.models.compat import max_positions

FIGURES = (
    "prefill_growth",
    "after_growth",
    "decode_growth",
    "steady_growth",
    "cache_after",
    "cache_end",
    "prefill_rest",
)


@dataclass(frozen=True, kw_only=True)
class Memory(GridTask):
    """Where memory goes, over a grid.

    Attributes:
        lengths, batches, outputs, source: as of `GridTask`.
        compare: also measure the full cache.
        memory: GiB into which weights and requests must fit; None: nothing is looked for.
        tries: runs of each search at most.
        most: rows of a batch that are tried at most.
    """

    name: ClassVar[str] = "memory"
    compare: bool = True
    memory: float | None = None
    tries: int = 10
    most: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None and not self.memory > 0:
            raise ValueError(f"task.memory={self.memory}; GiB above 0, or null to look for nothing")
        if self.tries < 1 or self.most < 1:
            raise ValueError(f"task.tries={self.tries}, task.most={self.most}: at least 1")

    def effort(self, sample: Sample) -> tuple[float, float]:
        """One run of each side, and those that look for what fits: as large as what fits, of which little is known."""
        batch, sides = sample.meta["shape"]["batch"], 2 if self.compare else 1
        searched = 0 if self.memory is None else footprint.SEARCHED + footprint.SEARCHES * self.tries
        return (sides + searched) * batch, sides

    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Measure one cell of the grid with a session that is not open.

        Raises:
            ValueError: `memory` is less than the weights take.

        Returns:
            beside what any task returns (without times): `memory`, the footprints of `method` and `full`, and with a
            memory to fit into `fits`; `oom` where memory ran out for the method, as in task=latency.
        """
        shape = Shape(**sample.meta["shape"])
        room = footprint.stated_room(self.memory, footprint.weight_bytes(session.model))
        ids = sample.segments[0]
        details: dict[str, Any] = {}
        out: dict[str, Any] = {"shape": asdict(shape), "tokens": [[]], "finished": ["fixed"], "memory": details}
        out |= {"compressed": None, "end": None}
        for name in (FULL, OURS) if self.compare else (OURS,):
            try:
                with latency.again(session, full=name == FULL) as opened:
                    prompts = latency.batch_ids(ids, shape.batch, opened.model.device)
                    found, compressed, end, tokens = footprint.footprint(opened, prompts, shape.output)
            except Exception as fault:
                if not is_oom(fault):
                    raise
                text = fault.with_traceback(None)
                release()
                details[f"{name}_oom"] = latency.out_of_memory(session, ids, shape, text, name == FULL)
                continue
            details[name] = found.as_dict()
            if name == OURS:
                out |= {"compressed": compressed, "end": end, "tokens": [tokens]}
                out |= {"prefill_peak": found.prefill_peak, "decode_peak": found.decode_peak}
        if f"{OURS}_oom" in details:
            return out | {"oom": details[f"{OURS}_oom"]}
        if room is not None:
            longest = max_positions(session.model)
            longest = (longest or 2**20) - footprint.STEPS
            details["fits"] = footprint.fits(session, ids, shape, room, self.most, longest, self.tries)
        return out

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Bytes of each cell of the grid by its name (`L4096-B1-N32.prefill_growth`), shares of the full cache's, fits."""
        found: dict[str, Any] = {}
        shares: dict[str, list[float]] = {}
        for row in rows:
            details, name = row["out"]["memory"], Shape(**row["out"]["shape"]).name
            for figure in FIGURES:
                for prefix, side in (("", OURS), ("full.", FULL)):
                    if side in details:
                        found[f"{name}.{prefix}{figure}"] = details[side][figure]
                whole = details.get(FULL, {}).get(figure)
                if whole and OURS in details:
                    found[f"{name}.ratio_{figure}"] = details[OURS][figure] / whole
                    shares.setdefault(figure, []).append(details[OURS][figure] / whole)
            if OURS in details:
                found["weights"] = details[OURS]["weights"]
            for side in (OURS, FULL):
                if f"{side}_oom" in details:
                    found[f"{name}.{side}_oom"] = details[f"{side}_oom"]["last_good"]
            for kind in ("batch_together", "batch_apart", "context"):
                if "fits" in details:
                    fit = details["fits"][kind]
                    found |= {f"{name}.fits_{kind}": fit["found"], f"{name}.predicted_{kind}": fit["predicted"]}
        return found | {f"ratio_{figure}": median(values) for figure, values in shares.items()}
