"""Trigger: whether a forward makes the schedule fire in a layer, and for which rows."""

from __future__ import annotations

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.scoring import LayerStep
from kvcompress.method import Parts

Tensor = torch.Tensor


class Trigger:
    """The schedule of a method, asked about layers whose attention has run."""

    def __init__(self, parts: Parts):
        self.schedule, self.allocator = parts.schedule, parts.allocator

    @property
    def every_step(self) -> bool:
        """True if each decode step evicts from rows above their cap."""
        return self.schedule.every == 1 and self.schedule.align == "row"

    def due(self, step: LayerStep) -> Tensor | None:
        """Rows to compress in this layer now, bool `[B]` on the CPU, or None. A prompt sets the layer's target."""
        if step.forward.phase == "prompt":
            rows = self._after_prompt(step)
        elif step.forward.phase == "decode" and self.schedule.in_decode:
            rows = self._in_decode(step.layer, step.layer.counts, step.forward, step.cache)
        else:
            return None
        return rows if rows is not None and bool(rows.any()) else None

    def fires_after(self, layer: CompressedLayer, forward: Forward) -> bool:
        """True if it will fire in a layer for some row when a decode forward that is yet to run has run."""
        cache = layer.context()
        assert isinstance(cache, CompressedCache)
        rows = self._in_decode(layer, layer.counts + forward.added[:, None], forward, cache)
        return rows is not None and bool(rows.any())

    def _after_prompt(self, step: LayerStep) -> Tensor | None:
        layer, cache, counts = step.layer, step.cache, step.layer.counts
        if cache.cap is None:
            return None
        target = cache.cap[:, None].expand_as(counts).clone()
        layer.aim_at(target)
        if not self.schedule.prompt:
            return None
        if self.allocator.scope != "layer":
            return torch.ones(len(counts), dtype=torch.bool)
        if self.allocator.uniform:
            return (counts > target).any(1)
        assert cache.real is not None
        return cache.real > cache.cap  # a layer may get less than the cap

    def _in_decode(
        self, layer: CompressedLayer, counts: Tensor, forward: Forward, cache: CompressedCache
    ) -> Tensor | None:
        every = self.schedule.every
        if layer.target is None:
            return None
        over, closed = (counts - layer.target).amax(1), cache.sequence.closed
        if every is None:
            rows = torch.zeros(len(over), dtype=torch.bool)
        elif self.schedule.align == "row":
            rows = over >= every
        else:
            assert cache.real is not None
            rows = (over > 0) & (cache.real % every == 0)
        if forward.fires is not None:
            rows |= (over > 0) & forward.fires
        if closed is not None:
            rows &= ~closed
        return rows & (forward.added > 0)
