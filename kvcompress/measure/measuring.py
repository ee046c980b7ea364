"""Timing and peak memory with the device synchronised, and the hardware as a record names it.

Benchmarks compare two things by pairs run one after the other in one process, so that a slow spell of the machine
falls on both; the same comparison of a thing with itself (A/A) tells how far chance alone strays.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvcompress.measure.machine import Device, cpu_mhz, gpu_facts, libraries, load, resident, status_bytes


def synchronize(device: Device = "cpu") -> None:
    """Wait until everything queued on `device` has run. Nothing to wait for on the CPU."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


class Timer:
    """Seconds of a `with` block, the device synchronised at both ends.

    Use it again to measure again: `seconds` is the last block, `total` their sum, `count` how many.
    """

    def __init__(self, device: Device = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds = 0.0
        self.total = 0.0
        self.count = 0
        self._start = 0.0

    def __enter__(self) -> Timer:
        synchronize(self.device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self._start
        self.total += self.seconds
        self.count += 1


def timed(function: Callable[[], Any], device: Device = "cpu") -> tuple[Any, float]:
    """What `function()` returns, and its seconds."""
    with Timer(device) as timer:
        result = function()
    return result, timer.seconds


_peaks_wanted: ContextVar[bool] = ContextVar("_peaks_wanted", default=True)


@contextmanager
def without_peaks() -> Iterator[None]:
    """Inside, `PeakMemory` measures nothing: where no one reads peaks, collecting garbage for them is time lost."""
    token = _peaks_wanted.set(False)
    try:
        yield
    finally:
        _peaks_wanted.reset(token)


@dataclass
class PeakMemory:
    """Highest memory within a `with` block.

    Attributes:
        device: whose memory. On CUDA the allocator's own peak; on the CPU the resident memory of this process.
        start: bytes in use when the block began.
        peak: highest bytes in use within it, `start` included.
        reserved: highest bytes the CUDA allocator held, None elsewhere.
        method: how it was measured: "cuda", "VmHWM" (Linux, exact), "sampled" (every 2 ms, may miss a short peak), or
            "none" inside `without_peaks()`, where all figures are 0.
    """

    device: Device = "cpu"
    start: int = 0
    peak: int = 0
    reserved: int | None = None
    method: str = ""
    _sampler: _Sampler | None = field(default=None, repr=False)

    @property
    def growth(self) -> int:
        """Bytes by which the block raised memory at its highest, `peak - start`."""
        return self.peak - self.start

    @property
    def bytes(self) -> int:
        """The figure for records: the allocator's peak on CUDA; on the CPU the growth, since the process's resident
        memory also counts the interpreter, its libraries and the weights."""
        return self.peak if self.method == "cuda" else self.growth

    def __enter__(self) -> PeakMemory:
        if not _peaks_wanted.get():
            self.method = "none"
            return self
        gc.collect()
        trim()
        if torch.device(self.device).type == "cuda":
            synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start, self.method = torch.cuda.memory_allocated(self.device), "cuda"
        elif _reset_high_water_mark():
            self.start, self.method = status_bytes("VmRSS"), "VmHWM"
        else:
            self._sampler = _Sampler()
            self.start, self.method = self._sampler.peak, "sampled"
            self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.method == "none":
            return
        if self.method == "cuda":
            synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device)
            self.reserved = torch.cuda.max_memory_reserved(self.device)
        elif self._sampler is not None:
            self.peak, self._sampler = self._sampler.stop(), None
        else:
            self.peak = max(self.start, status_bytes("VmHWM"))


def trim() -> None:
    """Give freed memory back to the system, or a second block would grow into what the first one left (glibc only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water_mark() -> bool:
    """Set Linux's high-water mark of this process to what it holds now; False where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        # a kernel or container may take the write and do nothing
        return status_bytes("VmHWM") <= status_bytes("VmRSS") + (16 << 20)
    except (OSError, KeyError):
        return False


class _Sampler(threading.Thread):
    def __init__(self, interval: float = 0.002) -> None:
        super().__init__(daemon=True)
        self.interval = interval
        self.peak = resident()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self.interval):
            self.peak = max(self.peak, resident())

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return max(self.peak, resident())


def hardware(device: Device = "cpu") -> dict[str, Any]:
    """What a record says of the machine and the software; flat, JSON-ready, None where unknown."""
    resolved = torch.device(device)
    on_cuda = resolved.type == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(resolved) if on_cuda else resolved.type,
        "device_memory": torch.cuda.get_device_properties(resolved).total_memory if on_cuda else None,
        "cpu": _cpu_name(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory": _memory_bytes(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": metadata.version("transformers"),
        "git_commit": _own_commit(),
        "cpu_mhz": cpu_mhz(),
        "load": load()["load"],
        **libraries(),
        **gpu_facts(resolved),
    }


@functools.cache
def _cpu_name() -> str:
    with suppress(OSError):  # there on Linux only
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int | None:
    """Cores this process may use, which containers and job schedulers limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


@functools.cache
def _own_commit() -> str | None:
    """The commit this process runs, asked for once: what it has imported stays what it was."""
    return git_commit()


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the repository that `folder` (default: this package's) is part of, "+dirty" if files differ from it.

    None where the folder merely lies in a repository whose files it is not among, as a `.venv` inside another project.
    """
    where = folder or Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(where), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", "--", "."):
            return None
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class Ratios:
    """Paired ratios b/a and, where measured, a/a.

    Attributes:
        median, quartiles: of b/a over the pairs.
        pairs: how many.
        a, b: median of each side, in the unit of what the runs returned (seconds, bytes).
        aa, aa_quartiles: the same of a against itself, None if it was not measured.
    """

    median: float
    quartiles: tuple[float, float]
    pairs: int
    a: float
    b: float
    aa: float | None = None
    aa_quartiles: tuple[float, float] | None = None

    @classmethod
    def of(cls, a: Sequence[float], b: Sequence[float]) -> Ratios:
        """Of two measurements that were made in turn, pair by pair.

        Raises:
            ValueError: a baseline that measured nothing.
        """
        if min(a) <= 0:
            raise ValueError("the baseline measured 0 or less, so there is no ratio to it; measure more work at a time")
        found = [one / base for base, one in zip(a, b, strict=True)]
        return cls(statistics.median(found), quartiles(found), len(found), statistics.median(a), statistics.median(b))

    def missed(self, target: float) -> bool:
        """True if the median exceeds `target` by more than chance alone strays, |A/A - 1|."""
        return self.median - target > abs((self.aa if self.aa is not None else 1.0) - 1.0)


def paired_ratios(
    run_a: Callable[[], float],
    run_b: Callable[[], float],
    pairs: int = 11,
    aa: bool = True,
    warmup: int = 1,
    progress: Callable[[], None] | None = None,
) -> Ratios:
    """Compare two measurements by interleaved pairs; which goes first alternates.

    Args:
        run_a: the baseline; measures once and returns its figure (seconds, bytes).
        run_b: what is compared with it.
        pairs: how many pairs.
        aa: also compare `run_a` with itself, one more run beside each pair.
        warmup: runs of each before the first pair, thrown away.
        progress: called after each run.

    Raises:
        ValueError: no pairs asked for, or a baseline that measured nothing.
    """
    if pairs < 1:
        raise ValueError(f"pairs={pairs} must be at least 1")

    def measure(run: Callable[[], float]) -> float:
        value = run()
        if progress is not None:
            progress()
        return value

    for _ in range(warmup):
        measure(run_a)
        measure(run_b)
    rounds = [_round(i, measure, run_a, run_b, aa) for i in range(pairs)]
    firsts, seconds, others = zip(*rounds, strict=True)
    found = Ratios.of(firsts, seconds)
    if not aa:
        return found
    again = Ratios.of(firsts, others)
    return replace(found, aa=again.median, aa_quartiles=again.quartiles)


def _round(
    index: int, measure: Callable[..., float], run_a: Callable, run_b: Callable, aa: bool
) -> tuple[float, float, float]:
    """One pair (a, b), and the second a. a comes first in even rounds and last in odd ones, the second a opposite."""
    first = measure(run_a) if aa or index % 2 == 0 else 0.0
    b = measure(run_b)
    last = measure(run_a) if aa or index % 2 else 0.0
    return (first, b, last) if index % 2 == 0 else (last, b, first)


def quartiles(values: list[float] | tuple[float, ...]) -> tuple[float, float]:
    """First and third quartile; both the value itself if there is only one."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Run with `count` torch threads (None leaves it), and as before afterwards; yields what is in force."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def command_line() -> str:
    """How this process was started, for records."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
