"""Roofline of a decode step: bytes and operations that it needs at least, over what the device can do.

A step reads every weight once and what the cache holds for each row of the batch. Rates are measured in this process by
a short calibration: no data sheet is believed. A run is never faster than its floor but for what a CPU's caches hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from kvcompress.common.memory import release
from kvcompress.measure.machine import Device
from kvcompress.measure.measuring import Timer
from kvcompress.models.compat import text_config

SMALL_SAVING = 0.05  # below which a run says that it can hardly show anything
REPEATS = 5


@dataclass(frozen=True)
class Rates:
    """What a device did at its best in a few tries.

    Attributes:
        copy: bytes per second read and written while copying a tensor (both counted).
        read: bytes per second read while adding one up.
        matmul: operations per second of a square matrix product in the weights' type (a product and a sum are two).
    """

    copy: float
    read: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second: the higher of the two, as decoding mostly reads."""
        return max(self.copy, self.read)


@dataclass(frozen=True)
class Step:
    """What one decode step of a batch must move and reckon.

    Attributes:
        weights, cache: bytes read; operations: products and sums, attention included.
    """

    weights: int
    cache: int
    operations: int

    @property
    def bytes(self) -> int:
        return self.weights + self.cache

    def floor(self, rates: Rates) -> float:
        """Seconds: whatever takes longer, moving or reckoning."""
        return max(self.bytes / rates.bandwidth, self.operations / rates.matmul)


def rates(device: Device, dtype: torch.dtype) -> Rates:
    """The rates of a device, measured once per process, type and number of threads."""
    return _rates(str(device), dtype, torch.get_num_threads())


@lru_cache
def _rates(device: str, dtype: torch.dtype, threads: int) -> Rates:
    found = _measured(device, dtype)
    release()
    return found


def _measured(device: str, dtype: torch.dtype) -> Rates:
    cpu = torch.device(device).type == "cpu"
    # larger than any cache; on a fast device several in a row, as one is over before it is waited for
    size, side, in_a_row = (128 << 20, 1024, 1) if cpu else (512 << 20, 8192, 20)
    source = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    timer, best = Timer(device), [float("inf")] * 3
    square = torch.ones(side, side, dtype=dtype, device=device)
    jobs: tuple[Callable[[], Any], ...] = (lambda: target.copy_(source), source.sum, lambda: square @ square)
    for repeat in range(REPEATS + 1):
        for number, job in enumerate(jobs):
            with timer:
                for _ in range(in_a_row):
                    job()
            if repeat:  # the first touches pages and chooses kernels
                best[number] = min(best[number], timer.seconds / in_a_row)
    return Rates(2 * size / best[0], size / best[1], 2 * side**3 / best[2])


def weights(model: Any, batch: int = 1) -> tuple[int, int]:
    """Bytes of weights that a decode step reads, and its operations on them for the whole batch.

    Of an embedding that is not also the output matrix a row per sequence is read; of experts as many as a batch can
    choose at most.
    """
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    tied = output is None or output.weight is embedding or output.weight.data_ptr() == embedding.data_ptr()
    config = text_config(model)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    read, operations, seen = 0, 0, set()
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() in seen:
            continue
        seen.add(parameter.data_ptr())
        elements = parameter.numel()
        if parameter.data_ptr() == embedding.data_ptr() and not tied:
            read += batch * parameter.shape[1] * parameter.element_size()
            continue
        used = 1.0
        if ".experts." in name and experts > 1:
            used = min(1.0, chosen * batch / experts)
        read += round(elements * used) * parameter.element_size()
        if parameter.dim() > 1:
            share = chosen / experts if ".experts." in name and experts > 1 else 1.0
            operations += round(2 * elements * share) * batch
    return read, operations


def step(model: Any, read: int, kept: float, batch: int = 1) -> Step:
    """What a step moves and reckons.

    Args:
        read: bytes of the cache read for one row, `kv.read_bytes_per_token` of a report.
        kept: tokens attended to per head, mean over layers and heads, `kv.kept_tokens_mean`.
    """
    config = text_config(model)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    moved, operations = weights(model, batch)
    attention = round(4 * config.num_hidden_layers * heads * width * kept * batch)
    return Step(moved, read * batch, operations + attention)


def of_report(model: Any, kv: Mapping[str, Any], batch: int) -> Step:
    """The step that a session's report (`report()["kv"]`) speaks of."""
    return step(model, int(kv["read_bytes_per_token"]), float(kv["kept_tokens_mean"]), batch)


def between(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float]:
    """Two reports' `kv`, half-way: what the steps from one to the other read and attended to in the mean."""
    return {key: (first[key] + last[key]) / 2 for key in ("read_bytes_per_token", "kept_tokens_mean")}


def beside(
    model: Any, kv: Mapping[str, Any], full: Mapping[str, Any] | None, batch: int, tpot: float
) -> tuple[dict[str, Any], list[str]]:
    """How far a measured time per token is from the floor, and what to note of it.

    Args:
        kv, full: `report()["kv"]` of the method and of the full cache at the same place of the output, or `between` two.
        tpot: measured seconds per output token.

    Returns:
        flat figures: bytes and operations of a step, rates of the device, `floor_s`, `of_floor` (measured over floor),
        `achieved_bytes_per_s`, and `predicted_saving`, the share of the full cache's floor that can be saved at most;
        notes: that this is under 5%.
    """
    ours = of_report(model, kv, batch)
    measured = rates(model.device, model.dtype)
    floor = ours.floor(measured)
    found: dict[str, Any] = {
        **{f"step_{name}": value for name, value in asdict(ours).items()},
        **{f"rate_{name}": value for name, value in asdict(measured).items()},
        "floor_s": floor,
        "of_floor": tpot / floor,
        "achieved_bytes_per_s": ours.bytes / tpot,
    }
    if full is None:
        return found, []
    whole = of_report(model, full, batch)
    saving = 1.0 - floor / whole.floor(measured)
    found |= {"full_step_cache": whole.cache, "predicted_saving": saving}
    if saving >= SMALL_SAVING or ours.cache >= whole.cache:
        return found, []
    share = whole.cache / whole.bytes
    return found, [
        f"a decode step of {batch} {'rows' if batch > 1 else 'row'} can get at most {max(saving, 0.0):.1%} faster than with "
        f"the full cache: of what it reads, keys and values are {share:.1%}, the rest weights"
    ]
