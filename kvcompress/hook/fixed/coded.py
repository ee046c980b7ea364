"""CodedForm: steps that hold the new token in a codec's form and attend to codes; nothing is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from contextlib import suppress

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed.appending import copied
from kvcompress.hook.fixed.attending import add_mass, attend
from kvcompress.hook.fixed.form import StepRows, Tensors
from kvcompress.kernels import triton_codes
from kvcompress.kernels.blockwise import AttentionParams, visible
from kvcompress.kernels.coded_rows import Rows, attend_rows, is_stand_in
from kvcompress.kernels.launch import KernelUnusable
from kvcompress.method.codec import Slots

Tensor = torch.Tensor


class CodedForm:
    """A token is encoded and goes into the column that a tensor names; queries meet codes as in an eager step.

    Args:
        layer: holds a dense store in the form of a codec that encodes token by token; it is given spare slots.
        tokens: that room is made for.
    """

    def __init__(self, layer: CompressedLayer, compressor: Compressor, tokens: int):
        store, encoding = layer.held(), layer.encoding
        assert isinstance(store, DenseStore)
        store.fix(max(1, tokens))
        self._use(layer, store)
        self.codec, self.index = encoding.codec, layer.index
        self.dtype, self.rotation = encoding.dtype, encoding.codec_rope
        self.heads, self.batch, self.slots = store.heads, store.counts.shape[0], store.capacity
        self.wants = compressor.wants_probabilities
        self.decay = compressor.needs.decay if compressor.needs.mass and self.wants else None
        codes = encoding.channels(store)
        beside = sorted(
            (name for name in store.channels if name not in (*codes, "positions")), key=lambda n: n != "mass"
        )
        self.buffers = {name: store.channels[name] for name in (*codes, "positions", *beside)}
        self.state = dict(encoding.state)
        self.column = torch.full((1,), store.length, device=layer.device)
        self._names = codes, beside, list(self.state)
        what = type(self), self.codec, self.index, *map(tuple, self._names)
        self.signature: Hashable = (*what, self.wants, self.decay)
        self.kernel = "blockwise" if self.wants else "sdpa" if encoding.rows(store) is None else "codes"
        self.beside = [self.column]
        self.tensors = [*self.buffers.values(), *self.state.values(), *self.beside]

    def _use(self, layer: CompressedLayer, store: DenseStore) -> None:
        self._layer, self.store, self._column = weakref.ref(layer), store, -1
        layer.form = weakref.ref(self)

    # ------------------------------------------------------------------ what is traced

    def write(self, held: Tensors, keys: Tensor, values: Tensor, rows: StepRows) -> None:
        codes, beside, state, column = self._parts(held)
        new = self.codec.encode(keys, values, self._slots(rows.position, state))
        new["positions"] = rows.position.expand(-1, codes["positions"].shape[1], -1)
        for name, channel in codes.items():
            channel.index_copy_(2, column, new[name])
        for channel in beside.values():
            channel.index_fill_(2, column, 0)

    def attend(self, held: Tensors, q: Tensor, params: AttentionParams, rows: StepRows) -> Tensor:
        codes, beside, state, column = self._parts(held)
        positions = codes.pop("positions")
        new, slots = self._slots(rows.position, state), self._slots(positions, state)
        query, coded = self.codec.query(q, new), self.codec.rows(codes, slots)
        if coded is None:
            keys, values = self.codec.read(codes, slots)
            if positions.shape[1] > keys.shape[1]:  # held once for heads that see different slots
                keys, values = (x.expand(-1, positions.shape[1], -1, -1) for x in (keys, values))
            output, p = attend(query, keys, values, positions, params, rows, self.wants)
        elif not self.wants and (made := self._by_kernel(query, *coded, positions, params)) is not None:
            output, p = made, None
        else:
            output, p = attend_rows(query, *coded, visible(positions, rows.query, params.window), params)
        if self.decay is not None:
            assert p is not None
            add_mass(beside["mass"], p.view(len(p), self.heads, -1, 1, p.shape[-1]), self.decay, rows)
        column.add_((rows.query >= 0).any())  # a step that is tried out stays where it is
        return self.codec.expand(output, new)

    def _by_kernel(
        self, q: Tensor, keys: Rows, values: Rows, positions: Tensor, params: AttentionParams
    ) -> Tensor | None:
        """The output by the kernel for codes; None where it cannot be run."""
        apart = params.window is None and positions.shape[1] in (1, keys.shape[1])
        if apart and not is_stand_in(q) and triton_codes.usable(q, keys, values, params):
            with suppress(KernelUnusable):
                output = triton_codes.decode(q, keys, values, positions, params)  # type: ignore[arg-type]
                self.kernel = "triton"
                return output
        return None

    def _parts(self, held: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Codes and positions, channels beside them, the codec's state, the column."""
        codes, beside, state = self._names
        left = iter(held)
        first = {name: next(left) for name in (*codes, "positions")}
        return first, {name: next(left) for name in beside}, {name: next(left) for name in state}, next(left)

    def _slots(self, positions: Tensor, state: dict[str, Tensor]) -> Slots:
        at = positions.clamp(min=0).long()
        return Slots(self.index, at, state, self.heads, self.dtype, rotation=self.rotation, taken=positions >= 0)

    # ------------------------------------------------------------------ Python's account

    def is_of(self, layer: CompressedLayer) -> bool:
        return self._layer() is layer

    def serves(self, layer: CompressedLayer, tokens: int) -> bool:
        channels, state = self.store.channels, layer.encoding.state
        if not layer.holds(self.store) or len(channels) != len(self.buffers) or len(state) != len(self.state):
            return False
        same = all(channels.get(name) is held for name, held in self.buffers.items())
        return same and all(state.get(n) is held for n, held in self.state.items()) and self.store.spare >= tokens

    def adopt(self, layer: CompressedLayer, tokens: int) -> bool:
        encoding = layer.encoding
        if not encoding.is_encoded or encoding.codec is not self.codec or {*encoding.state} != {*self.state}:
            return False
        if any(encoding.state[name].shape != held.shape for name, held in self.state.items()):
            return False
        store = copied(layer, self._layer(), self.store, self.buffers, self.slots - tokens)
        if store is None:
            return False
        for name, held in self.state.items():
            held.copy_(encoding.state[name])
        encoding.state = dict(self.state)
        self._use(layer, store)
        return True

    def due(self, forward: Forward) -> bool:
        return False

    def begin(self, forward: Forward) -> None:
        if self._column != self.store.length:
            self._column = self.store.length
            self.column.fill_(self._column)

    def written(self, forward: Forward) -> None:
        self.store.written(forward.real, forward.added)
        self._column = self._column + 1 if forward.real is None or bool(forward.real.any()) else -1

    def settle(self) -> None:
        """A dense store is in order at any time."""

    def clear(self) -> None:
        self.store.clear_spare()
