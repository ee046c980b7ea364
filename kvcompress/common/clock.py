"""Clock: the time that compression takes, apart from the model's own work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Time spent deciding and applying, on the device's own clock on CUDA, so that nothing waits for it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count what is done inside."""
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self._events.append((first, last))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Seconds counted so far; waits for the device."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        self._events.clear()
        return self._seconds
