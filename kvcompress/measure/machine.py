"""State of the machine: clocks, load, memory in use and left."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Device = str | torch.device

LIBRARIES = ("accelerate", "triton", "flash-attn", "flashinfer-python")
# what nvidia-smi is asked, and the name it gets
_QUERIES = {
    "driver_version": "driver",
    "clocks.sm": "clock_sm_mhz",
    "clocks.mem": "clock_memory_mhz",
    "clocks.max.sm": "clock_sm_max_mhz",
    "power.limit": "power_limit_w",
    "utilization.gpu": "utilization_percent",
}
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt, from malloc.h
_ENDURING = ("driver", "clock_sm_max_mhz", "power_limit_w")


@contextmanager
def exact_heap() -> Iterator[None]:
    """Inside, large tensors of the CPU get memory of their own and give it back at once (glibc; elsewhere nothing).

    Otherwise the C library keeps freed memory for later, how much depends on what ran before, and resident memory strays
    by a tenth from run to run. It costs time (pages are touched anew), so nothing is timed inside.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield
        return
    tune(_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:  # glibc's own highest: what a process that frees large tensors comes to by itself
        tune(_MMAP_THRESHOLD, 32 << 20)
        tune(_TRIM_THRESHOLD, 64 << 20)


def status_bytes(key: str) -> int:
    """A figure of Linux's `/proc/self/status`, such as VmRSS.

    Raises:
        OSError, KeyError: there is none.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def resident() -> int:
    """Resident bytes of this process."""
    with suppress(OSError, KeyError):
        return status_bytes("VmRSS")
    import psutil  # comes with accelerate

    return int(psutil.Process().memory_info().rss)


def memory_now(device: Device = "cpu") -> dict[str, int]:
    """Bytes in use, as each that knows sees them.

    Returns:
        on CUDA `allocated` (tensors), `reserved` (what torch holds of the device) and `driver` (what is in use on it, by
        all processes and the driver itself); on MPS `allocated` and `driver`; on both MPS and the CPU `rss`, the resident
        memory of this process, which also counts the interpreter and its libraries.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return {"allocated": allocated, "reserved": reserved, "driver": total - free}
    if kind == "mps":
        held, taken = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return {"allocated": held, "driver": taken, "rss": resident()}
    return {"rss": resident()}


def load(device: Device = "cpu") -> dict[str, Any]:
    """What else bears on a time measured now; flat, None where unknown.

    Returns:
        `load` (processes that want a core, mean of a minute, this one included), `threads` of torch, `cpu_mhz` (mean of
        the cores), and on CUDA `clock_sm_mhz`, `clock_memory_mhz` and `utilization_percent` of the device.
    """
    found: dict[str, Any] = {"load": _load_average(), "threads": torch.get_num_threads(), "cpu_mhz": cpu_mhz()}
    facts = gpu_facts(device)
    return found | {name: facts[name] for name in _QUERIES.values() if name in facts and name not in _ENDURING}


def _load_average() -> float | None:
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def cpu_mhz() -> float | None:
    """Mean clock of the cores at this moment; None where the system does not say."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        clocks = [float(line.split(":", 1)[1]) for line in lines if line.startswith("cpu MHz")]
        return round(statistics.fmean(clocks), 1) if clocks else None
    return None


def gpu_facts(device: Device) -> dict[str, Any]:
    """Driver, clocks and load of a CUDA device as `nvidia-smi` says them; empty for other devices, None where unsaid."""
    resolved = torch.device(device)
    if resolved.type != "cuda" or not torch.cuda.is_available():
        return {}
    unknown: dict[str, Any] = dict.fromkeys(_QUERIES.values())
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return unknown
    which = str(getattr(torch.cuda.get_device_properties(resolved), "uuid", "") or resolved.index or 0)
    which = which if which.isdigit() or which.startswith("GPU-") else f"GPU-{which}"
    command = [tool, f"--id={which}", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return unknown
    return unknown | parse_facts(line)


def parse_facts(line: str) -> dict[str, Any]:
    """The line that `nvidia-smi` prints, by name; what is no number is None but for the driver's version."""
    found: dict[str, Any] = {}
    for name, text in zip(_QUERIES.values(), line.strip().split(","), strict=False):
        text = text.strip()
        if name == "driver":
            found[name] = text
            continue
        try:
            found[name] = float(text)
        except ValueError:  # "[N/A]"
            found[name] = None
    return found


@functools.cache
def libraries() -> dict[str, str | None]:
    """Versions of libraries that attention kernels may come from; None for those that are not there."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name.replace("-", "_")] = None
    return found | {"cudnn": str(torch.backends.cudnn.version() or "") or None}
