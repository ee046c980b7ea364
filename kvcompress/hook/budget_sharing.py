"""BudgetSharing: allocators that look at several layers, whose scores travel with the slots until the budget is shared."""

from __future__ import annotations

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import ScoreSortedStore
from kvcompress.hook.evictor import Evictor
from kvcompress.hook.scoring import LayerScoring, LayerStep
from kvcompress.method import Parts

Tensor = torch.Tensor


class BudgetSharing:
    """Shares a budget among layers: again after each layer (scope `cascade`), or once when all have run (`all`)."""

    def __init__(self, parts: Parts, scoring: LayerScoring, evictor: Evictor, n_layers: int):
        self.allocator, self.scoring, self.evictor, self.n_layers = parts.allocator, scoring, evictor, n_layers

    def counts_of_one(self, step: LayerStep, scores: tuple[Tensor, Tensor | None, Tensor]) -> Tensor:
        """Slots `[B, H_kv]` of a layer by an allocator that looks at no other."""
        cache, layer, (first, _, positions) = step.cache, step.layer, scores
        assert cache.cap is not None
        total = cache.cap * first.shape[1] * self.n_layers
        seen = cache.full_layers.index(layer) + 1
        shown = [self.scoring.marked(first, positions, cache)]
        stat = step.forward.pending.stats.pop(layer.index, None)
        return self.allocator.allocate(shown, [stat], seen, self.n_layers, total)[0]

    def defer(self, step: LayerStep) -> None:
        """Have a layer's scores travel with its slots, and share the budget now if layers are not waited for."""
        layer = step.layer
        scores, second, positions = self.scoring.score(step)
        layer.held().put("score", torch.stack([scores] if second is None else [scores, second], dim=-1))
        step.forward.pending.scores[layer.index] = self.scoring.marked(scores, positions, step.cache)
        if self.allocator.scope == "cascade":
            self.share(step.cache, step.forward)

    def end_of_prompt(self, cache: CompressedCache, forward: Forward) -> None:
        """All layers have run: share the budget where this was waited for, and put slots into positional order."""
        if self.allocator.scope == "all":
            self.share(cache, forward)
        forward.pending.scores.clear()
        forward.pending.stats.clear()
        for layer in cache.full_layers:
            if layer.store is not None:
                layer.restore_order()
                layer.held().drop_channel("score")

    def share(self, cache: CompressedCache, forward: Forward) -> None:
        """Share the budget among the layers scored so far and trim each to its new count."""
        pending = forward.pending
        scored = [layer for layer in cache.full_layers if layer.index in pending.scores]
        if not scored or cache.cap is None:
            return
        shown = [x.store.shown if isinstance(x.store, ScoreSortedStore) else pending.scores[x.index] for x in scored]
        total = cache.cap * scored[0].held().heads * self.n_layers
        stats = [pending.stats.get(layer.index) for layer in scored]
        allocated = self.allocator.allocate(
            [x for x in shown if x is not None], stats, len(scored), self.n_layers, total
        )
        counts = [c.cpu() for c in allocated]
        # an allocator that leaves a prompt whole beyond the budget has decode go on at the cap
        whole = torch.stack([c.sum(1) for c in counts]).sum(0) > total
        whole &= torch.stack([(c >= layer.counts).all(1) for c, layer in zip(counts, scored, strict=True)]).all(0)
        for layer, wanted in zip(scored, counts, strict=True):
            if bool((layer.counts > wanted).any()):
                self._trim(layer, wanted, forward, cache)
            assert cache.real is not None
            wanted = torch.where(whole[:, None], torch.minimum(wanted, cache.cap[:, None]), wanted)
            layer.aim_at(self.allocator.limit(wanted, cache.real))

    def _trim(self, layer: CompressedLayer, wanted: Tensor, forward: Forward, cache: CompressedCache) -> None:
        """Cut a scored layer to its new count: by rank as long as what is protected stays the same, else anew."""
        held = layer.counts
        counts, before = torch.minimum(wanted, held), self.scoring.row_protection(layer.held().heads, cache)
        after = self.scoring.protection(counts, cache)
        one_stage = isinstance(layer.store, ScoreSortedStore) or _held_scores(layer)[1] is None
        one_stage &= layer.encoding.groups is None
        if one_stage and torch.equal(after.sinks, before.sinks) and torch.equal(after.window, before.window):
            cache.note_clamped((after.clamped & (counts < held)).any(1))
            layer.truncate_ranked(counts, forward.pending.scores[layer.index])
            return
        layer.restore_order()
        everyone = torch.ones(len(wanted), dtype=torch.bool)
        scores = (*_held_scores(layer), layer.positions())
        self.evictor.retain(layer, scores, wanted, everyone, forward, cache)
        marked = self.scoring.marked(_held_scores(layer)[0], layer.positions(), cache)
        forward.pending.scores[layer.index] = marked


def _held_scores(layer: CompressedLayer) -> tuple[Tensor, Tensor | None]:
    """Scores of both stages that travel with a layer's slots."""
    scores = layer.held().get("score")
    return scores[..., 0], scores[..., 1] if scores.shape[-1] > 1 else None
