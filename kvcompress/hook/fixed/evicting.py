"""EvictForm: steps after each of which a head that holds more than its target drops one token.

A new token goes into an empty slot, and the slot that a head gives up is empty for the next. So slots lie in any order;
`order` has them by position, and all rules count along it: sinks are its first slots, the window its last.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed.appending import copied
from kvcompress.hook.fixed.attending import QueryRing, add_mass, attend
from kvcompress.hook.fixed.compact import SinkRotation
from kvcompress.hook.fixed.form import StepRows, Tensors
from kvcompress.hook.fixed.observed import StepObserved
from kvcompress.hook.scoring import mean_kept
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method import LayerView
from kvcompress.method.budget import MOST_TOKENS
from kvcompress.method.selection import last_lowest

Tensor = torch.Tensor

KV = ("keys", "values", "positions")


class EvictForm:
    """Per-step eviction in buffers of fixed shape, by the scorer's own scores of a decode step.

    Below its target a head only takes tokens; nothing else differs. Steps are steady once
    all heads are at it. Where a method keeps positions compact, keys are
    held as the model rotates them, and only the sinks are turned (`SinkRotation`).

    Args:
        layer: holds a dense store.
        tokens: that room is made for where heads may still grow.
        evicts: False where the schedule ends with the prompt, and only compact positions ask for this form.
        ring: size of the window of queries to remember, 0 for none.
    """

    def __init__(self, layer: CompressedLayer, compressor: Compressor, tokens: int, evicts: bool, ring: int):
        store = layer.held()
        assert isinstance(store, DenseStore)
        self.evicts, self._scoring = evicts, compressor.scoring
        self.scorer, self.n_layers = compressor.parts.scorer, compressor.scoring.n_layers
        self.index, self.group = layer.index, layer.gqa_group
        needs = compressor.needs
        self.wants = compressor.wants_probabilities or (evicts and needs.window > 0)
        self.decay = needs.decay if needs.mass and self.wants else None
        room = self._wanted(layer, tokens) - store.length
        store.fix(max(1, room))
        for name in store.channels:
            store.spread(name)
        keys = store.channels["keys"]
        self.batch, self.slots = keys.shape[0], keys.shape[2]
        beside = sorted((name for name in store.channels if name not in KV), key=lambda name: name != "mass")
        self.buffers = {name: store.channels[name] for name in (*KV, *beside)}
        self._n = len(self.buffers)
        whole = torch.zeros(keys.shape[:3], dtype=torch.long, device=keys.device)
        self.order, limits = whole, [whole.new_zeros(keys.shape[:2]) for _ in range(3)]
        self.target, self.sinks, self.window = limits
        self.ring = QueryRing.of(layer, self.group * store.heads, keys, ring) if ring else None
        rope = layer.encoding.compact_rope
        self.compact = None if rope is None else SinkRotation(rope, keys, self.scorer.sinks if self.scorer else 0)
        self.signature: Hashable = (
            *(type(self), self.scorer, self.index, self.n_layers, self.group, tuple(beside)),
            *(self.wants, self.decay, evicts, ring, rope is None),
        )
        self.kernel = "blockwise" if self.wants else "sdpa"
        parts = [part for part in (self.ring, self.compact) if part is not None]
        self.beside = [self.order, *limits, *(tensor for part in parts for tensor in part.tensors)]
        self.tensors = [*self.buffers.values(), *self.beside]
        self._use(layer, store)
        self._arrange(layer)

    def _use(self, layer: CompressedLayer, store: DenseStore) -> None:
        self._layer, self.store = weakref.ref(layer), store
        layer.form = weakref.ref(self)

    def _wanted(self, layer: CompressedLayer, tokens: int) -> int:
        """Slots that the fullest head fills within `tokens` steps, and one for a new token."""
        counts, target = layer.counts, self._target(layer)
        return int(torch.minimum(counts + tokens, torch.maximum(target, counts)).max()) + 1

    def _target(self, layer: CompressedLayer) -> Tensor:
        assert layer.target is not None
        return layer.target if self.evicts else torch.full_like(layer.target, MOST_TOKENS)

    # ------------------------------------------------------------------ what is traced

    def write(self, held: Tensors, keys: Tensor, values: Tensor, rows: StepRows) -> None:
        slot = held[self._n][..., :1]  # an empty one
        for channel, new in ((held[0], keys), (held[1], values)):
            channel.scatter_(2, slot[..., None].expand(-1, -1, -1, channel.shape[3]), new)
        held[2].scatter_(2, slot, rows.position.expand(-1, held[2].shape[1], -1))
        for channel in held[3 : self._n]:
            channel.scatter_(2, slot[..., None].expand(-1, -1, -1, channel.shape[3]), 0.0)

    def attend(self, held: Tensors, q: Tensor, params: AttentionParams, rows: StepRows) -> Tensor:
        keys, values, positions, order = held[0], held[1], held[2], held[self._n]
        extra = list(held[self._n + 4 :])
        added = rows.position >= 0
        moved = torch.where(added, order.roll(-1, 2), order)  # the new token's slot lies last
        if self.compact is not None:
            self.compact.turn(extra[3 if self.ring else 0 :], keys, positions, rows)
        output, p = attend(q, keys, values, positions, params, rows, self.wants)
        if self.decay is not None:
            assert p is not None
            add_mass(held[3], p, self.decay, rows)
        if self.ring is not None:
            QueryRing.write(extra[:3], q, rows)
        if self.evicts:
            moved = self._evict(held, moved, p, params, rows)
        order.copy_(moved)
        return output

    def _evict(self, held: Tensors, moved: Tensor, p: Tensor | None, params: AttentionParams, rows: StepRows) -> Tensor:
        """Empty one slot of each head above its target → the order of slots after it."""
        positions, (target, sinks, window) = held[2], (x[..., None] for x in held[self._n + 1 : self._n + 4])
        number = torch.arange(moved.shape[2], device=moved.device)
        first = moved.shape[2] - (positions >= 0).sum(-1, keepdim=True)
        scores = self._scores(held, moved, p, params, rows)
        rank = last_lowest(scores, (number < first + sinks) | (number >= moved.shape[2] - window))
        leaving = moved.gather(2, rank)
        drop = (rows.position >= 0) & (moved.shape[2] - first > target)
        positions.scatter_(2, leaving, torch.where(drop, -1, positions.gather(2, leaving)))
        without = torch.where(number == 0, leaving, torch.where(number <= rank, moved.roll(1, 2), moved))
        return torch.where(drop, without, moved)

    def _scores(
        self, held: Tensors, moved: Tensor, p: Tensor | None, params: AttentionParams, rows: StepRows
    ) -> Tensor:
        """The scorer's scores `[B, H_kv, P]`, by position."""
        scorer, positions = self.scorer, held[2]
        assert scorer is not None
        if scorer.in_order:
            positions = positions.gather(2, moved)
            p = None if p is None else p.gather(4, moved[:, :, None, None].expand_as(p))
        view = LayerView(
            layer=self.index,
            n_layers=self.n_layers,
            read=lambda: (held[0], held[1]),
            positions=positions,
            real=rows.real,
            kept=rows.kept,
            phase="decode",
            group=self.group,
        )
        mass = None if self.decay is None else held[3].transpose(2, 3)
        scores = scorer.score(view, StepObserved(p, rows.query, mass, params), {})
        return scores if scorer.in_order else scores.gather(2, moved)

    # ------------------------------------------------------------------ Python's account

    def is_of(self, layer: CompressedLayer) -> bool:
        return self._layer() is layer

    def serves(self, layer: CompressedLayer, tokens: int) -> bool:
        store = self.store
        same = layer.holds(store) and all(store.channels.get(name) is held for name, held in self.buffers.items())
        if not same or len(store.channels) != len(self.buffers) or layer.target is None:
            return False
        return (self._steady and layer.rearranged is self) or self._wanted(layer, tokens) <= self.slots

    def adopt(self, layer: CompressedLayer, tokens: int) -> bool:
        if layer.target is None or self._wanted(layer, tokens) > self.slots:
            return False
        store = copied(layer, self._layer(), self.store, self.buffers, self.slots - 1)
        if store is None:
            return False
        self._use(layer, store)
        self._arrange(layer)
        return True

    def due(self, forward: Forward) -> bool:
        layer = self._layer()
        assert layer is not None
        if self._steady and layer.rearranged is self:
            return False
        over = layer.counts + forward.added[:, None] - self._target(layer)
        return bool(((over > 1) & (forward.added > 0)[:, None]).any())

    def begin(self, forward: Forward) -> None:
        layer = self._layer()
        assert layer is not None
        if layer.rearranged is not self:  # someone looked, and may have added tokens
            self._arrange(layer)
        cache = layer.context()
        assert isinstance(cache, CompressedCache)
        if self._kept is None or not torch.equal(mean_kept(cache), self._kept):
            self._limit(layer, cache)

    def _arrange(self, layer: CompressedLayer) -> None:
        """Know the order of what the store holds now."""
        queries = layer.queries
        layer.evict_by(None)
        positions = self.buffers["positions"]
        self.order.copy_(positions.argsort(dim=2, stable=True))
        self._dirty = self._steady = False
        self._kept: Tensor | None = None  # what rows kept when the limits were copied last
        if self.ring is not None:
            self.ring.load(queries)
            layer.queries = None
        if self.compact is not None:
            self.compact.load(self.buffers["keys"], positions, self.order)
        layer.rearranged = self

    def _limit(self, layer: CompressedLayer, cache: CompressedCache) -> None:
        """Copy what heads may hold, and what of it is protected."""
        target = self._target(layer)
        protection = self._scoring.protection(target, cache) if self.evicts else None
        self._clamped = None if protection is None else protection.clamped
        sinks = torch.zeros_like(target) if protection is None else protection.sinks
        window = torch.zeros_like(target) if protection is None else protection.window
        for buffer, value in ((self.target, target), (self.sinks, sinks), (self.window, window)):
            buffer.copy_(value)
        self._kept = mean_kept(cache)

    def written(self, forward: Forward) -> None:
        layer = self._layer()
        assert layer is not None
        self._dirty = True
        if self._steady and forward.real is None:
            layer.evicted += self.target.numel()
            return
        grown, target = layer.counts + forward.added[:, None], self._target(layer)
        drop = (grown > target) & (forward.added > 0)[:, None]
        self.store.recount(grown - drop.long())
        self._steady = bool((self.store.counts == target).all())
        if not bool(drop.any()):
            return
        layer.evicted += int(drop.sum())
        if self._clamped is not None and bool(self._clamped.any()):
            cache = layer.context()
            assert isinstance(cache, CompressedCache)
            cache.note_clamped((self._clamped & drop).any(1))

    def settle(self) -> None:
        layer = self._layer()
        if layer is None or layer.rearranged is not self:
            return
        layer.rearranged = None
        if self.compact is not None:
            self.compact.settle(self.buffers["keys"], self.buffers["positions"])
        if self._dirty:
            longest = int(self.store.counts.max())
            self.store.put_in_order(self.order[..., self.slots - longest :])
            self._dirty = False
        if self.ring is not None:
            layer.queries = self.ring.window()

    def clear(self) -> None:
        pass  # a later token writes over whatever lies in an empty slot
