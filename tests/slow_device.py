"""A stand-in for a device that runs what is queued on it later, in another thread: launching returns at once."""

from __future__ import annotations

import queue
import threading
import time

import torch


class SlowDevice:
    """Takes the place of CUDA's clock and synchronisation.

    Attributes:
        took: seconds that each launched kernel really took.
    """

    def __init__(self, monkeypatch) -> None:
        self.jobs: queue.Queue = queue.Queue()
        self.took: list[float] = []
        threading.Thread(target=self._work, daemon=True).start()
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.jobs.join())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def _work(self) -> None:
        while True:
            self.jobs.get()()
            self.jobs.task_done()

    def launch(self, seconds: float) -> None:
        """Queue a kernel of about this length."""

        def kernel() -> None:
            start = time.perf_counter()
            time.sleep(seconds)
            self.took.append(time.perf_counter() - start)

        self.jobs.put(kernel)


class Event:
    """Noted when the device gets to it, as in a stream."""

    def __init__(self, device: SlowDevice) -> None:
        self.device, self.at = device, 0.0

    def _note(self) -> None:
        self.at = time.perf_counter()

    def record(self, stream: object) -> None:
        self.device.jobs.put(self._note)

    def synchronize(self) -> None:
        self.device.jobs.join()

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)
