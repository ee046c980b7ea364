"""AttentionObserver: what the attention function asks of a session's compressor, and tells it."""

from __future__ import annotations

from typing import Protocol

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.run_stats import RunStats
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method.parts import Reader

Tensor = torch.Tensor


class AttentionObserver(Protocol):
    """Asked by attention what to compute beside its output, and given it.

    Attributes:
        blockwise: the kernel that yields probabilities is to run everywhere.
        stats: is told which kernels ran.
    """

    blockwise: bool
    stats: RunStats

    @property
    def reader(self) -> Reader:
        """Chooses what a decode query attends to."""
        ...

    @property
    def wants_mass(self) -> bool:
        """True if attention mass is summed up."""
        ...

    @property
    def mass_decay(self) -> float:
        """Factor by which the mass fades with every query."""
        ...

    def wants_weights(self, phase: str) -> bool:
        """True if the attention weights of a single query are used: then they are computed once, with the output."""
        ...

    def select(self, layer: CompressedLayer, q: Tensor) -> Tensor | None:
        """Slots that a reader lets a decode query attend to, `[B, H_kv or H, n]`, or None for all."""
        ...

    def add_mass(self, layer: CompressedLayer, mass: Tensor, forward: Forward) -> None:
        """Add a forward's attention mass `[B, H_kv, G, P]` to the slots' sums."""
        ...

    def add_lane_mass(self, layer: CompressedLayer, mass: Tensor, forward: Forward) -> None:
        """`add_mass` for a ragged layout, `[lanes, G, slots]`."""
        ...

    def after_attention(
        self,
        layer: CompressedLayer,
        q: Tensor,
        probabilities: Tensor | None,
        params: AttentionParams,
        forward: Forward,
    ) -> None:
        """Called once per layer and forward, when the output that used the un-evicted keys is computed.

        Args:
            q: new queries `[B, H, n, D]`.
            probabilities: `[B, H_kv, G, 1, P]` of a single query, where they were wanted.
        """
        ...
