"""Constants on devices: matrices, tables and masks that never change, copied to each device once.

A copy from the host at every use would have a decode step wait for it, and forbids recording the step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

Tensor = torch.Tensor


class Constant:
    """A tensor that never changes, and its copies by device and float type.

    Attributes:
        value: where it was made, usually on the CPU.
    """

    def __init__(self, value: Tensor):
        self.value = value
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The copy on a device, in the type that it was made in or in another; shared, so read-only."""
        key = (device, dtype or self.value.dtype)
        if key not in self._copies:
            from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

            with unset_fake_temporarily(), disable_proxy_modes_tracing():  # in a trace: a stand-in must not be kept
                self._copies[key] = self.value.to(*key)
        return self._copies[key]

    def like(self, other: Tensor) -> Tensor:
        """The copy where `other` is, in its type."""
        return self.on(other.device, other.dtype)


@cache
def constant(make: Callable[..., Tensor], *arguments: Hashable) -> Constant:
    """What `make(*arguments)` gives, made once per process."""
    return Constant(make(*arguments))


def numbers(values: tuple[int, ...]) -> Tensor:
    """For `constant`: a LongTensor of whole numbers."""
    return torch.tensor(values, dtype=torch.long)


def flags(values: tuple[bool, ...]) -> Tensor:
    """For `constant`: a bool tensor."""
    return torch.tensor(values, dtype=torch.bool)
