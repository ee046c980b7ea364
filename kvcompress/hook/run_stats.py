"""RunStats: attention kernels that ran in a session since its last prompt began, and the time that compressing took."""

from __future__ import annotations

from collections.abc import Iterable

from kvcompress.common.clock import Clock


class RunStats:
    """Statistics of one compressor, for reports.

    Attributes:
        kernels: names of the attention kernels that ran.
        clock: time spent compressing.
    """

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self.clock = Clock()

    def reset(self) -> None:
        """A prompt begins."""
        self.kernels.clear()
        self.clock = Clock()

    def note_kernel(self, *names: str) -> None:
        """Attention kernels that ran."""
        self.kernels.update(names)

    def merge(self, kernels: Iterable[str]) -> None:
        """Kernels that ran elsewhere for this session."""
        self.kernels.update(kernels)

    @property
    def seconds(self) -> float:
        """Seconds spent compressing since the last prompt began."""
        return self.clock.seconds
