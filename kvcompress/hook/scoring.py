"""What a method's parts are shown of a layer, and what they then say of it: scores, counts, protection."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.observed import LayerObserved
from kvcompress.kernels.blockwise import Features
from kvcompress.method import LayerView, Method, Needs
from kvcompress.method import budget as budgets
from kvcompress.method.selection import ranked, staged
from kvcompress.models.compat import Rotation

Tensor = torch.Tensor


@dataclass(frozen=True)
class Attended:
    """A layer whose attention has run, before anything is evicted: what there is to decide on.

    Attributes:
        probabilities: a decode step's attention `[B, H_kv, G, 1, P]` where the kernel yielded it.
        features: what the model asks of this layer's attention.
    """

    layer: CompressedLayer
    probabilities: Tensor | None
    features: Features
    forward: Forward
    cache: CompressedCache


class Judge:
    """One method's scorer and allocator, asked about layers. Nothing is evicted here."""

    def __init__(self, method: Method, n_layers: int):
        self.method = method
        self.parts = method.parts()
        if self.parts.schedule.unresolved:
            raise ValueError(
                f"the schedule {self.parts.schedule} speaks of tokens and needs the model's tokenizer: "
                "compress(model, method, tokenizer=tokenizer), or a model that comes from kvcompress.load"
            )
        self.n_layers = n_layers
        self.limited = method.limited and self.parts.scorer is not None
        scorer_needs = self.parts.scorer.needs if self.parts.scorer else Needs()
        self.needs = (scorer_needs | self.parts.allocator.needs) if self.limited else Needs()
        self.needs |= self.parts.codec.needs
        self.observing = self.parts.scorer is not None and self.parts.scorer.observes
        self.rotations: list[Rotation] | None = None  # given by the session where parts need `prerope`
        if self.needs.hidden:
            raise ValueError(
                f"{type(method).__name__} needs 'hidden', which this version's hook layer does not observe"
            )
        self.projections: dict[int, torch.nn.Module] = {}  # output projections by layer, where they are needed

    def _score(self, at: Attended) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scores, scores of a second stage where there is one, and positions."""
        scorer = self.parts.scorer
        assert scorer is not None and at.cache.cap is not None
        view, observed = self._shown_layer(at)
        scores = scorer.score(view, observed, at.layer.state)
        if scores.shape != view.positions.shape or scores.dtype != torch.float32:
            raise ValueError(
                f"{type(scorer).__name__}.score returned {scores.dtype} {tuple(scores.shape)}, not float32 "
                f"{tuple(view.positions.shape)}"
            )
        second = scorer.second(scores, view, observed)
        if at.forward.phase == "prompt":
            at.layer.stat = self.parts.allocator.stat(view, observed)
        return scores, second, observed.positions

    def _staged(
        self, scores: Tensor, second: Tensor | None, positions: Tensor, counts: Tensor, protection: budgets.Protection
    ) -> Tensor:
        """The ranking that heads which keep `counts [B, H_kv]` go by."""
        scorer = self.parts.scorer
        if second is None or scorer is None:
            return scores
        return staged(scores, second, positions, counts, protection, scorer.first_share, scorer.protected_first)

    def _shown_layer(self, at: Attended) -> tuple[LayerView, LayerObserved]:
        """What a scorer sees of a layer."""
        positions = at.layer.positions()
        view = self._view(at.layer, positions, at.forward.phase, self._kept(at.cache))
        rotation = None if self.rotations is None else self.rotations[at.layer.index]
        projection = self.projections.get(at.layer.index)
        return view, LayerObserved(
            at.layer, view, positions, at.probabilities, at.features, at.forward, rotation, projection
        )

    @staticmethod
    def _kept(cache: CompressedCache) -> Tensor:
        """Slots per head that each row keeps on average over layers and heads, `[B]`."""
        assert cache.cap is not None and cache.real is not None
        return torch.minimum(cache.cap, cache.real)

    def _shown(self, scores: Tensor, positions: Tensor, cache: CompressedCache) -> Tensor:
        """Scores with protected and empty slots marked, for an allocator that looks at them."""
        if self.parts.allocator.uniform:
            return scores
        return ranked(scores, positions, self._protected(scores.shape[1], cache))

    def _protected(self, heads: int, cache: CompressedCache) -> budgets.Protection:
        """Sinks and window `[B, H_kv]` of heads that keep what their row keeps on average."""
        scorer, kept = self.parts.scorer, self._kept(cache)[:, None].expand(-1, heads)
        assert scorer is not None
        return budgets.protect(kept, scorer.sinks, scorer.window(kept))

    def _protection(self, counts: Tensor, cache: CompressedCache) -> budgets.Protection:
        """Sinks and window of heads that keep `counts [B, H_kv]`.

        Where the row's cap is too small for them they shrink for the row; a head that an allocator gives less than the
        cap still has them whole, as long as they fit.
        """
        scorer = self.parts.scorer
        assert scorer is not None
        row = self._protected(counts.shape[1], cache)
        asked = scorer.window(counts)
        window = torch.where(row.clamped, torch.minimum(asked, row.window), asked)
        head = budgets.protect(counts, row.sinks, window, spare=0)
        return budgets.Protection(head.sinks, head.window, head.clamped | row.clamped)

    def _view(self, layer: CompressedLayer, positions: Tensor, phase: str, kept: Tensor) -> LayerView:
        real = layer.holder().real
        assert real is not None
        return LayerView(
            layer=layer.index,
            n_layers=self.n_layers,
            read=layer.keys_values,
            positions=positions.expand(-1, layer.held().heads, -1),
            real=real,
            kept=kept,
            phase=phase,
            group=layer.group,
            leader=functools.partial(layer.holder().leader, layer.index),
        )
