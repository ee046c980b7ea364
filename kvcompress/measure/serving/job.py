"""A request on its way through a simulated server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcompress.measure.serving.cache_pool import Admission
from kvcompress.measure.serving.requests import Request


@dataclass
class Job:
    """A request on its way.

    Attributes:
        number: place in the trace; arrived, first, done: seconds, the latter two None until then.
        hit: prompt tokens that were not computed; load_s: seconds it waited for loads.
        generated: tokens until it last joined the running ones; segments: decode steps that it took part in.
        held_up: swapped out or dropped; copied: bytes of it that lie on the host.
        prefilled: its prompt was computed on another instance.
        progress: prompt tokens that are done, in chunks; remote: tokens of a prefix on another instance and the seconds
            to bring them here; predicted: seconds of its prompt.
        joined: decode step from which it runs; ends: when each step of its instance ended.
    """

    number: int
    request: Request
    arrived: float
    rank: float = 0.0
    hit: int = 0
    load_s: float = 0.0
    first: float | None = None
    done: float | None = None
    generated: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)
    held_up: bool = False
    copied: float = 0.0
    prefilled: bool = False
    progress: int = 0
    joined: int = -1
    remote: tuple[int, float] = (0, 0.0)
    predicted: float = 0.0
    admitted: Admission | None = None
    ends: Sequence[float] = ()

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        assert self.first is not None
        return self.first - self.arrived

    def gaps(self) -> list[float]:
        """Seconds between its tokens."""
        if self.first is None:
            return []
        times = [self.first]
        for start, end in self.segments:
            times += self.ends[start:end]
        return [b - a for a, b in zip(times, times[1:], strict=False)]
