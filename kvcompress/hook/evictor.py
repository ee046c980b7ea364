"""Evictor: from scores and counts to the slots that a layer keeps, with sinks and window in it by construction."""

from __future__ import annotations

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.incremental_evictor import IncrementalEvictor
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.scoring import LayerScoring, LayerStep
from kvcompress.method import Parts
from kvcompress.method.selection import candidates, lowest_slot, top_slots

Tensor = torch.Tensor

MAX_HOLES = 32  # slots emptied in place, one per decode step, before a layer is compacted


class Evictor:
    """Applies decisions to layers: keeps a set of slots, or empties one slot per head in a decode step.

    Args:
        every_step: each decode step evicts, so that one step's candidates are the next one's but for one token.
    """

    def __init__(self, parts: Parts, scoring: LayerScoring, every_step: bool):
        self.allocator, self.scoring, self.every_step = parts.allocator, scoring, every_step

    @staticmethod
    def goes_on(step: LayerStep) -> bool:
        """True if this step evicts by the candidates of the last one."""
        layer = step.layer
        if step.forward.phase != "decode" or layer.evictor is None or step.cache.sequence.closed is not None:
            return False
        return layer.evictor.is_valid(layer.held(), layer.target)

    def evict_in_step(self, step: LayerStep) -> None:
        """Evict one token per head by the candidates of the last step."""
        assert step.layer.evictor is not None
        step.layer.evict_one(step.layer.evictor.choose(self.scoring.score(step)[0]))

    def retain(
        self,
        layer: CompressedLayer,
        scores: tuple[Tensor, Tensor | None, Tensor],
        counts: Tensor,
        rows: Tensor,
        forward: Forward,
        cache: CompressedCache,
    ) -> None:
        """Keep `counts [B, H_kv]` slots per head in rows `[B]` (bool on the CPU), all of them elsewhere.

        Args:
            scores: first stage, second stage or None, and positions, as `LayerScoring.score` gives them.
        """
        first, second, positions = scores
        held, wanted = layer.counts, counts.cpu()
        counts = torch.where(rows[:, None], torch.minimum(wanted, held), held)
        protection = self.scoring.protection(counts, cache)
        cache.note_clamped((protection.clamped & rows[:, None] & (counts < held)).any(1))
        ranking = self.scoring.staged(first, second, positions, counts, protection)
        decode, drop = forward.phase == "decode", held - counts
        if decode and layer.held().holes < MAX_HOLES and int(drop.max()) == 1:
            layer.evict_one(lowest_slot(ranking, positions, protection), drop > 0)
            if bool((drop == 1).all()) and second is None and self.every_step:
                assert layer.target is not None
                layer.evict_by(IncrementalEvictor.of(layer.held(), layer.target, protection, MAX_HOLES))
            return
        in_groups = layer.encoding.groups is not None
        must = ~candidates(positions, protection) & (positions >= 0) if in_groups else None
        layer.retain(top_slots(ranking, positions, counts, protection), grow=decode, must=must)
        if not decode:
            assert layer.target is not None and cache.real is not None
            # in decode a head may grow to what it was given
            layer.aim_at(torch.where(rows[:, None], self.allocator.limit(wanted, cache.real), layer.target))
