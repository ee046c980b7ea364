"""Names of weight types and devices, as torch knows them."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name from `DTYPES` (a `torch.` in front is allowed)."""
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
    elif isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES:
        return DTYPES[dtype.removeprefix("torch.")]
    raise ValueError(f"dtype={dtype!r} is not a weight type; valid: auto, {', '.join(DTYPES)}")


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of a name; `auto` is the first of cuda, mps, cpu that is there. Refuses one that is not."""
    if device == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(kind)
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; valid: auto, cpu, cuda, cuda:<n>, mps") from error
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(resolved.type, 1)
    if (resolved.index or 0) >= count:
        raise ValueError(f"device={device!r} is not there: torch sees {count} of type {resolved.type}; try device=auto")
    return resolved
