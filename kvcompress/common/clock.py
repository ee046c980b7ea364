"""Clock: the time that compression takes, apart from the model's own work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Time spent deciding and applying, on the device's own clock on CUDA, so that nothing waits for it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count what is done inside."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)  # of that device, which need not be the current one
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record(stream)
            yield
            last.record(stream)
            self._events.append((first, last))
            self._fold()
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def _fold(self) -> None:
        """Add up what the device is done with, so that few events are held however long a sequence gets."""
        while self._events and self._events[0][1].query():
            first, last = self._events.popleft()
            self._seconds += first.elapsed_time(last) / 1e3

    @property
    def seconds(self) -> float:
        """Seconds counted so far; waits for the device."""
        for _, last in self._events:
            last.synchronize()
        self._fold()
        return self._seconds
