"""LaneForm: steps that append to a ragged layout, whose segments are given lanes for the tokens to come."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
import torch.nn.functional as F

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import RaggedStore
from kvcompress.cache.layouts.ragged import few
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed.appending import Firing
from kvcompress.hook.fixed.attending import QueryRing
from kvcompress.hook.fixed.form import StepRows, Tensors
from kvcompress.kernels import triton_decode
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.varlen_decode import lane_attention

Tensor = torch.Tensor

KV = ("keys", "values", "positions")


class LaneForm:
    """A token of each row and head goes behind the segment's last; where that is, a table of lanes says.

    Lanes that no segment has reached yet hold nothing, and are read all the same.

    Args:
        layer: holds a ragged store.
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
        store = layer.store
        assert isinstance(store, RaggedStore)
        store.reserve(max(1, tokens if firing is None else firing.room(layer, tokens)))
        self._layer, self.store, self._firing = weakref.ref(layer), store, firing
        needs = compressor.needs
        self.wants = compressor.wants_probabilities
        self.decay = needs.decay if needs.mass and self.wants else None
        beside = sorted((name for name in store.channels if name not in KV), key=lambda name: name != "mass")
        self.buffers = {name: store.channels[name] for name in (*KV, *beside)}
        self._n, self.heads, self.batch = len(self.buffers), store.heads, store.counts.shape[0]
        owners, table = store.owners(), store.table()
        self.lane, self.used = store.lane, len(owners)
        self.lanes = len(self.buffers["positions"]) // self.lane
        # lanes that belong to no segment yet hold nothing, so that it does not matter whose they are taken for
        owners = F.pad(owners, (0, self.lanes - self.used))
        table = F.pad(table, (0, few(table.shape[1]) - table.shape[1]), value=-1)
        self.slots = self.lane * table.shape[1]
        device = owners.device
        self.extents = store.extents.flatten().to(device)
        self._seen: Tensor | None = None
        keys = self.buffers["keys"]
        wide = keys.new_zeros(store.counts.shape[0], store.heads, 0, keys.shape[1])
        self.ring = QueryRing.of(layer, layer.gqa_group * store.heads, wide, ring) if ring else None
        asked = keys.new_empty(self.batch, layer.gqa_group * self.heads, 1, keys.shape[1])
        k, v = self._in_lanes(keys), self._in_lanes(self.buffers["values"])
        self.in_triton = not self.wants and triton_decode.usable(asked, k, v, self.heads)
        self.signature: Hashable = (
            *(type(self), self.heads, self.lane, self.lanes, tuple(beside)),
            *(self.wants, self.decay, ring, self.in_triton),
        )
        self.kernel = "triton" if self.in_triton else "lanes"
        self.beside = [self.extents, table, owners, *(self.ring.tensors if self.ring else ())]
        self.tensors = [*self.buffers.values(), *self.beside]
        layer.form = weakref.ref(self)

    # ------------------------------------------------------------------ what is traced

    def write(self, held: Tensors, keys: Tensor, values: Tensor, rows: StepRows) -> None:
        extents, table = held[self._n], held[self._n + 1]
        lanes = table.gather(1, (extents // self.lane).clamp(max=table.shape[1] - 1)[:, None]).squeeze(1).long()
        place = lanes.clamp(min=0) * self.lane + extents % self.lane
        heads = (-1, self.heads)
        for channel, new in ((held[0], keys), (held[1], values), (held[2], rows.position.expand(*heads, -1))):
            channel.index_copy_(0, place, new.reshape(-1, *channel.shape[1:]))
        for channel in held[3 : self._n]:
            channel.index_fill_(0, place, 0)
        extents.add_((rows.query >= 0).expand(*heads).reshape(-1))

    def attend(self, held: Tensors, q: Tensor, params: AttentionParams, rows: StepRows) -> Tensor:
        if params.window is not None:
            raise ValueError("a layer with a window does not attend over lanes in a step with fixed shapes")
        table, owners = held[self._n + 1 : self._n + 3]
        keys, values, positions = (self._in_lanes(x) for x in held[:3])
        if self.in_triton and params.sinks is None:
            output = triton_decode.decode(q, keys, values, positions, table, params)
        else:
            output, p = lane_attention(q, keys, values, positions < 0, owners, self.heads, params)
            if self.decay is not None:
                self._add_mass(self._in_lanes(held[3]), p, owners, rows)
        if self.ring is not None:
            QueryRing.write(held[self._n + 3 :], q, rows)
        return output

    def _in_lanes(self, flat: Tensor) -> Tensor:
        return flat[: self.lanes * self.lane].view(self.lanes, self.lane, *flat.shape[1:])

    def _add_mass(self, mass: Tensor, p: Tensor, owners: Tensor, rows: StepRows) -> None:
        """Add attention `[lanes, G, slots]` to the sums `[lanes, slots, G]`, which fade first."""
        assert self.decay is not None
        added = (rows.query[:, 0] >= 0)[owners // self.heads][:, None, None]
        if self.decay != 1.0:
            mass.mul_(torch.where(added, self.decay, 1.0))
        mass.add_(p.transpose(1, 2) * added)

    # ------------------------------------------------------------------ Python's account

    def is_of(self, layer: CompressedLayer) -> bool:
        return self._layer() is layer

    def serves(self, layer: CompressedLayer, tokens: int) -> bool:
        store = self.store
        same = layer.holds(store) and all(store.channels.get(name) is held for name, held in self.buffers.items())
        same = same and len(store.channels) == len(self.buffers) and store.used == self.used  # none has come since
        if not same:
            return False
        return store.holds_room(tokens if self._firing is None else self._firing.room(layer, tokens))

    def adopt(self, layer: CompressedLayer, tokens: int) -> bool:
        return False  # segments of another prompt are of other lengths, and so are their lanes

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
        extents = self.store.extents
        if self._seen is None or not torch.equal(self._seen, extents):
            self.extents.copy_(extents.flatten())
            self._seen = extents

    def written(self, forward: Forward) -> None:
        self.store.written(forward.added)
        self._seen = self.store.extents

    def settle(self) -> None:
        layer = self._layer()
        if self.ring is not None and layer is not None and layer.rearranged is self:
            layer.rearranged = None
            layer.queries = self.ring.window()

    def clear(self) -> None:
        self._seen = None  # what a step with no tokens has written lies behind the last ones, at position -1
