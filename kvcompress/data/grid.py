"""Base classes of tasks that measure time or memory: nothing is graded, and the task opens its own sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kvcompress.data.task import Sample, Task, Turn
from kvcompress.measure.latency import SOURCES, grid, prompt_ids


@dataclass(frozen=True, kw_only=True)
class MeasuredTask(Task):
    """A task whose score is the share of its samples that could be measured.

    Attributes:
        source: of the prompts, "random" ids or "text" (built-in prose).
    """

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "completed"
    metric_version: ClassVar[str] = "1"
    shares_prefill: ClassVar[bool] = False
    opens_sessions: ClassVar[bool] = True
    thinks: ClassVar[bool] = False

    source: str = "random"

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """1 where it was measured, 0 where memory ran out."""
        return {"score": 0.0 if out.get("oom") else 1.0}


@dataclass(frozen=True, kw_only=True)
class GridTask(MeasuredTask):
    """Every cell of a grid prompt length x batch x output length is a sample.

    Attributes:
        lengths: tokens of a prompt; batches: prompts at once; outputs: tokens generated for each, at least 2.
    """

    lengths: tuple[int, ...] = (1024, 4096)
    batches: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] = (32,)

    def __post_init__(self) -> None:
        grid(self.lengths, self.batches, self.outputs)
        if self.source not in SOURCES:
            raise ValueError(f"task.source={self.source!r}; valid: {', '.join(SOURCES)}")

    def protocol(self) -> dict[str, Any]:
        """How every cell is measured."""
        return {"source": self.source}

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """One per cell of the grid, the smallest first."""
        for shape in grid(self.lengths, self.batches, self.outputs):
            yield Sample(
                id=f"{shape.name}-{self.source}-s{self.seed}",
                segments=(prompt_ids(tokenizer, shape.prompt, self.source, self.seed),),
                turns=(Turn((), shape.output),),
                protocol=self.protocol(),
                meta={"shape": asdict(shape)},
            )
