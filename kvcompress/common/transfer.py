"""Small copies from the host to a device, which the host does not wait for."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """`x` on a device. What goes from the host to CUDA is pinned first: a pageable copy waits for what is queued there."""
    if device.type != "cuda" or x.device.type != "cpu" or x.numel() == 0:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)
