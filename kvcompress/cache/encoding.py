"""LayerEncoding: the form in which one layer holds keys and values, and how attention reads them from it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layouts import DenseStore, PagedStore, QuantizedGroups, RaggedStore, Store
from kvcompress.cache.sequence import CacheContext
from kvcompress.kernels.coded_rows import Rows, RowsBeside
from kvcompress.method.codec import Codec, GroupedCodec, Plain, Slots
from kvcompress.method.view import State
from kvcompress.models.compat import Rotation

Tensor = torch.Tensor

BESIDE = ("positions", "mass", "score", "passes")  # channels that are not the codec's


class LayerEncoding:
    """Keys and values of a layer as the model made them or, once encoded, in the codec's form.

    Stores are arguments: the layer owns its store, the encoding says what its channels mean.

    Attributes:
        is_encoded: what is held is in the codec's form.
        groups: keys and values of a grouped codec, in the slots of the store.
        state: tensors of the codec beside its codes, dim 0 the row.
        dtype: of the model's keys and values.
    """

    def __init__(self, context: Callable[[], CacheContext], index: int):
        self._context, self.index = context, index
        self.is_encoded = False
        self.groups: QuantizedGroups | None = None
        self.state: State = {}
        self.dtype = torch.float32

    @property
    def codec(self) -> Codec:
        return self._context().spec.codec

    @property
    def compact_rope(self) -> Rotation | None:
        """The layer's rotation where positions are compact: keys are held before it."""
        rope = self._context().spec.compact_rope
        return None if rope is None else rope[self.index]

    @property
    def codec_rope(self) -> Rotation | None:
        """The layer's rotation where the codec or reader turns keys back."""
        rope = self._context().spec.codec_rope
        return None if rope is None else rope[self.index]

    @property
    def absorbs_projection(self) -> bool:
        """True if all queries are multiplied with what the codec holds, in its own terms."""
        return self.is_encoded and self.codec.absorbed

    @property
    def is_plain(self) -> bool:
        """True if channels hold keys and values as attention takes them, so that a kernel can read them in place."""
        spec = self._context().spec
        return not self.is_encoded and self.groups is None and not spec.latents and spec.compact_rope is None

    @property
    def readable_in_place(self) -> bool:
        """True if single queries may read channels where they lie, in a ragged layout."""
        return self._context().spec.compact_rope is None and (self.codec.in_lanes or not self.is_encoded)

    # ------------------------------------------------------------------ what codecs are told

    def slot_info(
        self,
        positions: Tensor,
        heads: int,
        queries: tuple[Tensor, Tensor] | None = None,
        owners: Tensor | None = None,
    ) -> Slots:
        """Position ids, heads and rotation of slots at `positions [B, H_kv or 1, n]` (-1 = empty), for the codec.

        Args:
            queries: the prompt's last queries, where the codec asks for them.
            owners: LongTensor `[lanes]`, `row * heads + head` of each, where positions are `[1, lanes, slots]`.
        """
        rotated, shift = positions.clamp(min=0).long(), self._context().sequence.shift
        if shift is not None and bool(shift.any()):
            shift = shift.to(rotated.device)
            rotated = rotated + (shift[:, None, None] if owners is None else shift[owners // heads][None, :, None])
        rope = self.codec_rope
        return Slots(self.index, rotated, self.state, heads, self.dtype, queries, owners, rope, positions >= 0)

    def _new_slots(self, forward: Forward, heads: int, device: torch.device) -> Slots:
        return self.slot_info(forward.on("positions", device)[:, None], heads)

    @staticmethod
    def channels(store: Store | PagedStore) -> list[str]:
        """Names of a store's channels that hold keys and values."""
        return [name for name in store.channels if name not in BESIDE]

    # ------------------------------------------------------------------ writing

    def encode_new(self, keys: Tensor, values: Tensor, forward: Forward) -> dict[str, Tensor]:
        """Channels of new tokens `[B, H_kv, n, D]`; none where a grouped codec takes them into its groups."""
        if self.groups is not None:
            self.groups.append(keys, values, forward.real)
            return {}
        if self.is_encoded:
            return self.codec.encode(keys, values, self._new_slots(forward, keys.shape[1], keys.device))
        return {"keys": keys, "values": values}

    def shown_keys(self, new: dict[str, Tensor], keys: Tensor, values: Tensor, forward: Forward) -> Tensor:
        """Keys of new tokens as attention will see them, from the channels that `encode_new` made of them."""
        if self.is_encoded:
            keys, values = self.codec.decode(new, self._new_slots(forward, keys.shape[1], keys.device))
        return self.attention_kv(keys, values)[0]

    def encode(self, store: Store, queries: tuple[Tensor, Tensor] | None) -> Store:
        """Take what a store holds into the codec's form → the store that holds it then.

        Called when a forward's attention and selection are done. Once encoded, new tokens are encoded as they come,
        and only a grouped codec has some to encode here.

        Args:
            queries: last queries of the prompt `[B, H, w, D]` and their positions, where the codec's `needs` ask for some.
        """
        codec = self.codec
        if isinstance(codec, Plain):
            return store
        if self.groups is not None:
            self.groups.flush()
        if self.is_encoded:
            return store
        keys, values = store.get("keys"), store.get("values")
        if isinstance(codec, GroupedCodec):
            self.groups = QuantizedGroups.of(codec, keys, values, store.get("positions"), store.counts)
            self.groups.flush()
            new = {}
        else:
            new = codec.encode(keys, values, self.slot_info(store.get("positions"), store.heads, queries))
        self.is_encoded = True
        if isinstance(store, DenseStore):
            others = {name: store.get(name) for name in store.channels if name not in ("keys", "values")}
            return DenseStore.of(others | new, store.counts, grow=not self._context().spec.limited)
        for name in ("keys", "values"):
            store.drop_channel(name)
        for name, value in new.items():
            store.put(name, value)
        return store

    # ------------------------------------------------------------------ reading

    def keys_values(self, store: Store | PagedStore) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H_kv, P, D]` as attention sees them: decoded, rotated; garbage in empty slots."""
        positions = store.get("positions")
        if self.groups is not None:
            return self.groups.keys_values(positions)
        held = {name: store.get(name) for name in self.channels(store)}
        if self.is_encoded:
            return self.attention_kv(*self.codec.decode(held, self.slot_info(positions, store.heads)))
        keys, values = self.attention_kv(held["keys"], held["values"])
        if self.compact_rope is not None:  # a token's position is its rank among those held
            keys = self.compact_rope.rotate(keys, ((positions >= 0).cumsum(-1) - 1).clamp(min=0))
        return keys, values

    def attention_kv(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as attention uses them, from what the model gave: of latents `[..., d_c]` and rotated keys
        `[..., d_r]` (MLA), both of them and the latents."""
        return (torch.cat([keys, values], dim=-1), keys) if self._context().spec.latents else (keys, values)

    def encode_query(self, q: Tensor, forward: Forward, heads: int) -> Tensor:
        """A single query `[B, H, 1, D]` in the codec's own terms."""
        return self.codec.query(q, self._new_slots(forward, heads, q.device)) if self.is_encoded else q

    def decode_operands(self, q: Tensor, store: Store, forward: Forward) -> tuple[Tensor, Tensor, Tensor]:
        """A query `[B, H, 1, D]`, and the keys and values that it attends to, in the codec's own terms."""
        if not self.is_encoded:
            return q, *self.keys_values(store)
        held = {name: store.get(name) for name in self.channels(store)}
        keys, values = self.codec.read(held, self.slot_info(store.get("positions"), store.heads))
        return self.encode_query(q, forward, store.heads), *self.attention_kv(keys, values)

    def rows(self, store: Store) -> tuple[Rows, Rows] | None:
        """Keys and values that a single query attends to, in the codec's own terms and made a block at a time.

        None where attention reads tensors: `decode_operands`.
        """
        if not self.is_encoded or self.groups is not None:
            return None
        held = {name: store.get(name) for name in self.channels(store)}
        return self._rows(held, self.slot_info(store.get("positions"), store.heads))

    def lane_rows(self, store: RaggedStore) -> tuple[Rows, Rows] | None:
        """`rows` of a ragged layout where they lie, `[1, lanes, slots, ...]`."""
        if not self.is_encoded:
            return None
        held = {name: store.in_lanes(name)[None] for name in self.channels(store)}
        slots = self.slot_info(store.in_lanes("positions")[None], store.heads, owners=store.owners())
        return self._rows(held, slots)

    def _rows(self, held: dict[str, Tensor], slots: Slots) -> tuple[Rows, Rows] | None:
        found = self.codec.rows(held, slots)
        if found is None or not self._context().spec.latents:
            return found
        return RowsBeside(found), found[0]  # as of `attention_kv`

    def lane_operands(self, q: Tensor, store: RaggedStore, forward: Forward) -> tuple[Tensor, Tensor, Tensor]:
        """`decode_operands` of a ragged layout, keys and values where they lie: `[lanes, slots, ...]`."""
        held = {name: store.in_lanes(name) for name in self.channels(store)}
        if not self.is_encoded:
            return q, *self.attention_kv(held["keys"], held["values"])
        slots = self.slot_info(store.in_lanes("positions")[None], store.heads, owners=store.owners())
        keys, values = self.codec.read({name: value[None] for name, value in held.items()}, slots)
        return self.encode_query(q, forward, store.heads), *self.attention_kv(keys[0], values[0])

    def decode_output(self, output: Tensor, forward: Forward, heads: int) -> Tensor:
        """A query's output `[B, H, 1, D_v]`, from its weighted sum of the values of `decode_operands`."""
        return self.codec.expand(output, self._new_slots(forward, heads, output.device)) if self.is_encoded else output

    # ------------------------------------------------------------------ rows and copies

    def select(self, context: Callable[[], CacheContext], index: Tensor) -> LayerEncoding:
        """Rows `index` (LongTensor), copied, for a layer of the cache that `context` gives."""
        twin = self._twin(context)
        twin.groups = None if self.groups is None else self.groups.select_rows(index.cpu())
        twin.state = {name: value.index_select(0, index.to(value.device)) for name, value in self.state.items()}
        return twin

    def fork(self, context: Callable[[], CacheContext]) -> LayerEncoding:
        twin = self._twin(context)
        twin.groups = None if self.groups is None else self.groups.fork()
        twin.state = {name: value.clone() for name, value in self.state.items()}
        return twin

    def _twin(self, context: Callable[[], CacheContext]) -> LayerEncoding:
        twin = LayerEncoding(context, self.index)
        twin.is_encoded, twin.dtype = self.is_encoded, self.dtype
        return twin
