"""AppendForm: steps that append to a dense layout and drop nothing, or only when the schedule fires, in an eager step."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed.attending import QueryRing, add_mass, attend
from kvcompress.hook.fixed.form import StepRows, Tensors
from kvcompress.hook.trigger import Trigger
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method import Schedule

Tensor = torch.Tensor


@dataclass(frozen=True)
class Firing:
    """When a decode schedule that drops many tokens at once fires: in an eager step."""

    trigger: Trigger
    schedule: Schedule

    def due(self, layer: CompressedLayer, forward: Forward) -> bool:
        """True if it fires after a forward to come."""
        return self.trigger.fires_after(layer, forward)

    def room(self, layer: CompressedLayer, tokens: int) -> int:
        """Of `tokens` to come, those that a layer takes before it fires, and the one with which it does."""
        every = self.schedule.every
        if every is None or self.schedule.until or layer.target is None:
            return tokens
        return min(tokens, max(1, int((layer.target - layer.counts).max()) + every))


class AppendForm:
    """A token goes into the column that a tensor names, where the eager step would have put it.

    Between two firings of a decode schedule that is all there is to do, but for the queries it wants remembered.

    Args:
        layer: holds a dense store, which is given spare slots.
        tokens: that room is made for.
        ring: size of the window of queries to remember, 0 for none.
        firing: of a decode schedule; None if it never fires.
    """

    def __init__(
        self,
        layer: CompressedLayer,
        compressor: Compressor,
        tokens: int,
        ring: int,
        firing: Firing | None,
    ):
        store = layer.held()
        assert isinstance(store, DenseStore)
        store.fix(max(1, tokens if firing is None else firing.room(layer, tokens)))
        self._use(layer, store)
        needs, self._firing = compressor.needs, firing
        self.wants = compressor.wants_probabilities
        self.decay = needs.decay if needs.mass and self.wants else None
        channels = store.channels
        keys = channels["keys"]
        self.batch, self.slots = keys.shape[0], keys.shape[2]
        self.column = torch.full((1,), store.length, device=keys.device)
        self._others = [name for name in channels if name not in ("keys", "values", "positions")]
        if "mass" in self._others:  # first of those beside
            self._others.sort(key=lambda name: name != "mass")
        self.ring = QueryRing.of(layer, layer.gqa_group * store.heads, keys, ring) if ring else None
        self.signature: Hashable = (type(self), tuple(self._others), self.wants, self.decay, ring)
        self.kernel = "blockwise" if self.wants else "sdpa"
        names = ["keys", "values", "positions", *self._others]
        self.buffers = {name: channels[name] for name in names}
        self.beside = [self.column, *(self.ring.tensors if self.ring else ())]
        self.tensors = [*self.buffers.values(), *self.beside]

    def _use(self, layer: CompressedLayer, store: DenseStore) -> None:
        self._layer, self.store, self._column = weakref.ref(layer), store, -1
        layer.form = weakref.ref(self)

    # ------------------------------------------------------------------ what is traced

    def write(self, held: Tensors, keys: Tensor, values: Tensor, rows: StepRows) -> None:
        column = held[3 + len(self._others)]
        held[0].index_copy_(2, column, keys)
        held[1].index_copy_(2, column, values)
        held[2].index_copy_(2, column, rows.position.expand(-1, held[2].shape[1], -1))
        for channel in held[3 : 3 + len(self._others)]:
            channel.index_fill_(2, column, 0)

    def attend(self, held: Tensors, q: Tensor, params: AttentionParams, rows: StepRows) -> Tensor:
        output, p = attend(q, held[0], held[1], held[2], params, rows, self.wants)
        if self.decay is not None:
            assert p is not None
            add_mass(held[3], p, self.decay, rows)
        after = 3 + len(self._others)
        if self.ring is not None:
            QueryRing.write(held[after + 1 :], q, rows)
        held[after].add_((rows.query >= 0).any())  # a step that is tried out stays where it is
        return output

    # ------------------------------------------------------------------ Python's account

    def is_of(self, layer: CompressedLayer) -> bool:
        return self._layer() is layer

    def serves(self, layer: CompressedLayer, tokens: int) -> bool:
        store = self.store
        same = layer.holds(store) and all(store.channels.get(name) is held for name, held in self.buffers.items())
        if not same or len(store.channels) != len(self.buffers):
            return False
        return store.spare >= tokens or (self._firing is not None and store.spare >= self._firing.room(layer, tokens))

    def adopt(self, layer: CompressedLayer, tokens: int) -> bool:
        wanted = tokens if self._firing is None else self._firing.room(layer, tokens)
        store = copied(layer, self._layer(), self.store, self.buffers, self.slots - wanted)
        if store is None:
            return False
        self._use(layer, store)
        return True

    def due(self, forward: Forward) -> bool:
        layer = self._layer()
        assert layer is not None
        return self._firing is not None and self._firing.due(layer, forward)

    def begin(self, forward: Forward) -> None:
        layer = self._layer()
        assert layer is not None
        if self.ring is not None and layer.rearranged is not self:
            self.ring.load(layer.queries)
            layer.queries = None
            layer.rearranged = self
        if self._column != self.store.length:
            self._column = self.store.length
            self.column.fill_(self._column)

    def written(self, forward: Forward) -> None:
        self.store.written(forward.real, forward.added)
        self._column = self._column + 1 if forward.real is None or bool(forward.real.any()) else -1

    def settle(self) -> None:
        layer = self._layer()
        if self.ring is not None and layer is not None and layer.rearranged is self:
            layer.rearranged = None
            layer.queries = self.ring.window()

    def clear(self) -> None:
        self.store.clear_spare()


def copied(
    layer: CompressedLayer,
    owner: CompressedLayer | None,
    before: DenseStore,
    buffers: dict[str, Tensor],
    most: int,
) -> DenseStore | None:
    """A store within `buffers` that holds what `layer` holds, which holds it from now on; None where it does not fit.

    Args:
        owner: the layer that the buffers were used for.
        before: the store it had in them: buffers that something else still holds are left alone.
        most: slots that it may fill.
    """
    store = layer.held()
    if owner is not None and owner.holds(before):  # in use, perhaps by `layer` itself, for which they do not do
        return None
    if not isinstance(store, DenseStore) or {*store.channels} != {*buffers} or store.length > most:
        return None
    for name, buffer in buffers.items():
        mine = store.channels[name]
        same = mine.shape[0] == buffer.shape[0] and mine.shape[3:] == buffer.shape[3:] and mine.dtype == buffer.dtype
        if not same or mine.device != buffer.device or mine.shape[1] not in (1, buffer.shape[1]):
            return None
    for name, buffer in buffers.items():
        buffer[:, :, : store.length] = store.get(name)
    found = DenseStore.within(buffers, store.length, store.counts)
    found.clear_spare()
    layer.store = found
    return found
