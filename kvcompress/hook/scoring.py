"""LayerScoring: builds the scorer's view of one layer, and calls scorer and allocator's `stat`. Evicts nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.model_facts import ModelFacts
from kvcompress.hook.observed import LayerObserved
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method import LayerView, Method, Needs, Parts
from kvcompress.method import budget as budgets
from kvcompress.method.selection import ranked, staged

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerStep:
    """A layer whose attention has run in a forward, before anything is evicted.

    Attributes:
        probabilities: a decode step's attention `[B, H_kv, G, 1, P]` where the kernel yielded it.
        params: what the model asks of this layer's attention.
        queries: `[B, H, n, D]` of this forward; None where they have gone.
    """

    layer: CompressedLayer
    probabilities: Tensor | None
    params: AttentionParams
    forward: Forward
    cache: CompressedCache
    queries: Tensor | None = None


def evicts(method: Method, parts: Parts) -> bool:
    """True if a session may drop tokens."""
    return method.limited and parts.scorer is not None


def needs_of(method: Method) -> Needs:
    """What a method's parts want to see of a prompt: scorer and allocator nothing where no token can be dropped.

    Raises:
        ValueError: they cannot both be served.
    """
    parts = method.parts()
    if parts.scorer is None or not evicts(method, parts):
        return parts.codec.needs
    return parts.scorer.needs | parts.allocator.needs | parts.codec.needs


class LayerScoring:
    """One method's scorer and allocator, asked about layers."""

    def __init__(self, parts: Parts, n_layers: int, facts: ModelFacts):
        self.parts, self.n_layers, self.facts = parts, n_layers, facts

    def score(self, step: LayerStep) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scores, scores of a second stage where there is one, and positions.

        Raises:
            ValueError: the scorer returned another shape or type.
        """
        scorer = self.parts.scorer
        assert scorer is not None and step.cache.cap is not None
        view, observed = self._observed(step)
        scores = scorer.score(view, observed, step.layer.state)
        if scores.shape != view.positions.shape or scores.dtype != torch.float32:
            raise ValueError(
                f"{type(scorer).__name__}.score returned {scores.dtype} {tuple(scores.shape)}, not float32 "
                f"{tuple(view.positions.shape)}"
            )
        second = scorer.second(scores, view, observed)
        if step.forward.phase == "prompt":
            step.forward.pending.stats[step.layer.index] = self.parts.allocator.stat(view, observed)
        return scores, second, observed.positions

    def observe(self, step: LayerStep) -> None:
        """Show the scorer this forward."""
        assert self.parts.scorer is not None
        self.parts.scorer.observe(*self._observed(step), step.layer.state)

    def staged(
        self, scores: Tensor, second: Tensor | None, positions: Tensor, counts: Tensor, protection: budgets.Protection
    ) -> Tensor:
        """The ranking that heads which keep `counts [B, H_kv]` go by."""
        scorer = self.parts.scorer
        if second is None or scorer is None:
            return scores
        return staged(scores, second, positions, counts, protection, scorer.first_share, scorer.protected_first)

    def marked(self, scores: Tensor, positions: Tensor, cache: CompressedCache) -> Tensor:
        """Scores with protected and empty slots marked, for an allocator that looks at them."""
        if self.parts.allocator.uniform:
            return scores
        return ranked(scores, positions, self.row_protection(scores.shape[1], cache))

    def row_protection(self, heads: int, cache: CompressedCache) -> budgets.Protection:
        """Sinks and window `[B, H_kv]` of heads that keep what their row keeps on average."""
        scorer, kept = self.parts.scorer, mean_kept(cache)[:, None].expand(-1, heads)
        assert scorer is not None
        return budgets.protect(kept, scorer.sinks, scorer.window(kept))

    def protection(self, counts: Tensor, cache: CompressedCache) -> budgets.Protection:
        """Sinks and window of heads that keep `counts [B, H_kv]`.

        Where the row's cap is too small for them they shrink for the row; a head that an allocator gives less than the
        cap still has them whole, as long as they fit.
        """
        scorer = self.parts.scorer
        assert scorer is not None
        row = self.row_protection(counts.shape[1], cache)
        asked = scorer.window(counts)
        window = torch.where(row.clamped, torch.minimum(asked, row.window), asked)
        head = budgets.protect(counts, row.sinks, window, spare=0)
        return budgets.Protection(head.sinks, head.window, head.clamped | row.clamped)

    def _observed(self, step: LayerStep) -> tuple[LayerView, LayerObserved]:
        layer = step.layer
        positions, facts = layer.positions(), self.facts
        shown = self.view(layer, positions, step.forward.phase, mean_kept(step.cache))
        rope = None if facts.rope is None else facts.rope[layer.index]
        return shown, LayerObserved(
            layer,
            shown,
            positions,
            step.probabilities,
            step.params,
            step.forward,
            step.queries,
            rope,
            facts.projections.get(layer.index),
        )

    def view(self, layer: CompressedLayer, positions: Tensor, phase: str, kept: Tensor) -> LayerView:
        """A layer as scorers and readers see it; `kept [B]` slots per head on average."""
        cache = layer.context()
        assert cache.sequence.real is not None
        return LayerView(
            layer=layer.index,
            n_layers=self.n_layers,
            read=layer.keys_values,
            positions=positions.expand(-1, layer.held().heads, -1),
            real=cache.sequence.real,
            kept=kept,
            phase=phase,
            group=layer.gqa_group,
            leader=functools.partial(cache.leader, layer.index),
        )


def mean_kept(cache: CompressedCache) -> Tensor:
    """Slots per head that each row keeps on average over layers and heads, `[B]`."""
    assert cache.cap is not None and cache.real is not None
    return torch.minimum(cache.cap, cache.real)
