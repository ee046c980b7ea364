"""Triton launches: on the tensors' own device, for types and widths whose tiles fit its shared memory, errors told once.

Triton launches on the current device, whatever device its pointers are of, and asks a card for more shared memory than
it has only when it launches. What a kernel takes is known beforehand: the tiles that are in flight, as counted on what
Triton makes for sm80, sm90 and sm100 (`kvcompress.bench.compiled_kernels` compiles them and compares).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

Tensor = torch.Tensor

HALF = (torch.float16, torch.bfloat16)
LEAST = 16  # rows and columns of a tile that a matrix unit takes
SPARE = 1 << 10  # bytes that reductions and barriers take beside the tiles, at most
OLDEST = 49_152  # bytes that every CUDA device gives a block

_refused: dict[Hashable, str] = {}  # kernels that Triton could not compile or launch, and why


class KernelUnusable(RuntimeError):
    """A kernel that this device cannot run, as was found when it was launched: another path has to answer."""


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_gpu(x: Tensor) -> bool:
    """True where Triton compiles a kernel for `x`: on CUDA, with Triton installed."""
    return x.is_cuda and _installed()


def tile(n: int) -> int:
    """Rows or columns of the tile that holds `n`: the next power of 2, at least `LEAST`."""
    return max(LEAST, 1 << (n - 1).bit_length())


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may take on a CUDA device."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", OLDEST))


def fits(x: Tensor, taken: int) -> bool:
    """True if `x`'s device gives a block `taken` bytes of shared memory; elsewhere than on CUDA nothing is too much."""
    return not x.is_cuda or taken + SPARE <= shared_memory(x.device)


def refused(kernel: str, x: Tensor, *shape: Hashable) -> bool:
    """True if Triton has failed on this kernel, type, shape and device before."""
    return (kernel, x.device, x.dtype, shape) in _refused


@contextmanager
def launching(kernel: str, x: Tensor, *shape: Hashable) -> Iterator[None]:
    """Launch inside: on the device of `x`, which need not be the current one.

    Args:
        kernel, shape: what the launch is known by.

    Raises:
        KernelUnusable: Triton failed to compile or launch; told in one warning, and remembered (`refused`).
    """
    if not x.is_cuda:
        yield
        return
    try:
        with torch.cuda.device(x.device):
            yield
    except Exception as error:
        if not _by_triton(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"{kernel}, {str(x.dtype).removeprefix('torch.')}, shape {shape}, on {x.device}"
        _refused[kernel, x.device, x.dtype, shape] = said
        warnings.warn(f"the Triton kernel {what} is not used: {said}; torch's own path runs instead", stacklevel=4)
        raise KernelUnusable(said) from error


def _by_triton(error: Exception) -> bool:
    """True for what Triton says of a kernel that does not compile or does not fit; its interpreter's errors are faults."""
    from triton.errors import TritonError
    from triton.runtime.errors import InterpreterError

    return isinstance(error, TritonError) and not isinstance(error, InterpreterError)
