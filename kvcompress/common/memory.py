"""Out-of-memory errors, and giving memory back. Knows torch alone."""

from __future__ import annotations

import gc

import torch


def is_oom(error: BaseException) -> bool:
    """True where memory ran out, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in ("out of memory", "can't allocate memory", "not enough memory")
    )


def release() -> None:
    """Give memory back that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
