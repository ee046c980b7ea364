"""What one layer of a compressed cache holds, and in what form: as the model made it, or in the codec's."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layouts import DenseStore, PagedStore, QuantizedGroups, RaggedStore, Store
from kvcompress.method.codec import Codec, GroupedCodec, Plain, Slots
from kvcompress.method.view import State
from kvcompress.models.compat import CacheLayerMixin, Rotation

Tensor = torch.Tensor

BESIDE = ("positions", "mass", "score", "passes")  # channels that are not the codec's


class Holder(Protocol):
    """What a layer asks of the cache it belongs to."""

    codec: Codec
    limited: bool
    rotations: list[Rotation] | None
    forward: Forward | None
    real: Tensor | None
    owner: Any
    turns: list[Rotation] | None
    latents: bool
    shift: Tensor | None
    prompted: Tensor | None

    def rotation(self, layer: int) -> Rotation | None: ...

    def leader(self, layer: int, size: int) -> Tensor | None: ...


class HeldLayer(CacheLayerMixin):
    """The store of one full-attention layer, read through the codec."""

    device: torch.device

    def __init__(self, cache: Holder, index: int):
        super().__init__()
        self.cache = weakref.ref(cache)
        self.index = index
        self.store: Store | PagedStore | None = None  # in pages between prompts only, where a reader asks for it
        self.seen = 0
        self.dtype = torch.float32
        self.state: State = {}
        self.sealed = False  # what is held is in the codec's form
        self.blocks: QuantizedGroups | None = None  # keys and values of a grouped codec, in the slots of `store`
        self.codec_state: State = {}  # beside the codes, dim 0 the row
        self.target: Tensor | None = None  # [B, H_kv] slots a decode schedule keeps, set when a prompt ends
        self.steady: Any = None  # `steady.Steady`, while decode drops one token per head and step
        self.shown: Tensor | None = None  # scores as the allocator sees them, while a prompt runs
        self.stat: Any = None  # what the allocator remembers of this layer while a prompt runs
        self.evicted = 0
        self.traffic: State = {}  # what readers of pages read and moved, `[B]` each
        self.step = torch.zeros(1, dtype=torch.long)  # [B] of a reader of pages: steps since the last longer forward
        self.group = 1  # query heads per KV head
        self._borrowed: DenseStore | None = None  # another cache's slots, until own()
        self.windows: dict[int, Any] = {}  # attention of these windows, for all that borrow this prompt; None: not yet
        self.queries: Tensor | None = None  # [B, H, n, D] of this forward, while it is looked at
        self.fresh: tuple[Tensor, Tensor] | None = None  # keys and values of this forward, until its attention is done

    # ------------------------------------------------------------------ what is held

    @property
    def length(self) -> int:
        """Slots held per head, empty ones included (the longest head's for a ragged layout)."""
        return 0 if self.store is None else self.store.length

    @property
    def counts(self) -> Tensor:
        """Non-empty slots, LongTensor `[B, H_kv]` on the CPU."""
        if self.store is None:
            return torch.zeros(0, 0, dtype=torch.long)
        return self.store.counts

    def held(self) -> Store:
        if self.store is None:
            raise ValueError(f"layer {self.index} holds nothing yet")
        return self.store  # type: ignore[return-value]  # a prompt, which may change what is held, never meets pages

    def positions(self) -> Tensor:
        """Int32 `[B, H_kv or 1, P]`: the token in each slot, -1 where empty; strictly increasing otherwise."""
        return self.held().get("positions")

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H_kv, P, D]` as attention sees them: decoded, rotated; garbage in empty slots."""
        if self.fresh is not None:
            return self.fresh
        cache, store = self.holder(), self.held()
        if self.blocks is not None:
            return self.blocks.keys_values(store.get("positions"))
        channels = {name: store.get(name) for name in self.coded()}
        if self.sealed:
            return self.attended(*cache.codec.decode(channels, self.slots()))
        keys, values = self.attended(channels["keys"], channels["values"])
        rotation = cache.rotation(self.index)
        return (keys if rotation is None else rotation.rotate(keys, self.ranks())), values

    def attended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as attention uses them, from what the model gave: of latents `[..., d_c]` and rotated keys
        `[..., d_r]` (MLA), both of them and the latents."""
        return (torch.cat([keys, values], dim=-1), keys) if self.holder().latents else (keys, values)

    @property
    def absorbed(self) -> bool:
        """True if all queries are multiplied with what the codec holds, in its own terms."""
        return self.sealed and self.holder().codec.absorbed

    def ranks(self) -> Tensor:
        """Index of each held token among those held, `[B, H_kv or 1, P]`: its position when positions are compact."""
        return ((self.positions() >= 0).cumsum(-1) - 1).clamp(min=0)

    def coded(self) -> list[str]:
        """Names of the channels that hold keys and values."""
        return [name for name in self.held().channels if name not in BESIDE]

    # ------------------------------------------------------------------ the codec

    def seal(self) -> None:
        """Hold what is kept in the codec's form from here on; nothing to do for a plain codec.

        Called when a forward's attention and selection are done. Once it is sealed a layer encodes new tokens as they
        come, and only a grouped codec has some to encode here.
        """
        codec = self.holder().codec
        if isinstance(codec, Plain) or self.store is None:
            return
        if self.blocks is not None:
            self.blocks.flush()
        if self.sealed:
            return
        self.fresh, store = None, self.held()
        if isinstance(codec, GroupedCodec):
            keys, values, positions = (store.get(name) for name in ("keys", "values", "positions"))
            self.blocks = QuantizedGroups.of(codec, keys, values, positions, store.counts)
            self.blocks.flush()
            self._exchange(store, {})
            return
        window, shown = codec.needs.window, None
        if window and "queries" in self.state:
            shown = self.state["queries"][:, :, -window:], self.state["query_positions"][:, -window:]
        self._exchange(store, codec.encode(store.get("keys"), store.get("values"), self.slots(queries=shown)))

    def _exchange(self, store: Store, channels: dict[str, Tensor]) -> None:
        """Hold these channels instead of keys and values."""
        if isinstance(store, DenseStore):
            others = {name: store.get(name) for name in store.channels if name not in ("keys", "values")}
            self.store = DenseStore.of(others | channels, store.counts, grow=not self.holder().limited)
        else:
            for name in ("keys", "values"):
                store.drop_channel(name)
            for name, value in channels.items():
                store.put(name, value)
        self._borrowed, self.sealed = None, True

    def slots(self, queries: tuple[Tensor, Tensor] | None = None) -> Slots:
        """What a codec is told of all that is held."""
        return self.told(self.positions(), queries=queries)

    def _new_slots(self, heads: int) -> Slots:
        """The same of this forward's new tokens."""
        cache = self.holder()
        assert cache.forward is not None
        return self.told(cache.forward.on("positions", self.device)[:, None], heads=heads)

    def told(
        self,
        positions: Tensor,
        queries: tuple[Tensor, Tensor] | None = None,
        owners: Tensor | None = None,
        heads: int | None = None,
    ) -> Slots:
        cache, rotated = self.holder(), positions.clamp(min=0).long()
        if cache.shift is not None and bool(cache.shift.any()):
            shift = cache.shift.to(rotated.device)
            if owners is None:
                rotated = rotated + shift[:, None, None]
            else:
                rotated = rotated + shift[owners // self.held().heads][None, :, None]
        rotation = None if cache.turns is None else cache.turns[self.index]
        heads = self.held().heads if heads is None else heads
        taken = positions >= 0
        return Slots(self.index, rotated, self.codec_state, heads, self.dtype, queries, owners, rotation, taken)

    def read(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A single query `[B, H, 1, D]`, and the keys and values that it attends to, in the codec's own terms."""
        if not self.sealed:
            return q, *self.keys_values()
        store, codec = self.held(), self.holder().codec
        keys, values = codec.read({name: store.get(name) for name in self.coded()}, self.slots())
        return self.asked(q), *self.attended(keys, values)

    def asked(self, q: Tensor) -> Tensor:
        """A single query in the codec's own terms."""
        return self.holder().codec.query(q, self._query_slots()) if self.sealed else q

    def read_lanes(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for what lies in lanes: keys and values `[lanes, slots, ...]`."""
        store, codec = self.held(), self.holder().codec
        assert isinstance(store, RaggedStore)
        channels = {name: store.in_lanes(name) for name in self.coded()}
        if not self.sealed:
            return q, *self.attended(channels["keys"], channels["values"])
        slots = self.told(store.in_lanes("positions")[None], owners=store.owners())
        keys, values = codec.read({name: value[None] for name, value in channels.items()}, slots)
        return codec.query(q, self._query_slots()), *self.attended(keys[0], values[0])

    def expand(self, output: Tensor) -> Tensor:
        """What a single query's weighted sum of the values of `read` stands for, `[B, H, 1, D_v]`."""
        return self.holder().codec.expand(output, self._query_slots()) if self.sealed else output

    def _query_slots(self) -> Slots:
        cache = self.holder()
        assert cache.forward is not None
        return self.told(cache.forward.on("positions", self.device)[:, None])

    def holder(self) -> Holder:
        """The cache this layer belongs to."""
        cache = self.cache()
        if cache is None:
            raise RuntimeError("the cache of this layer is gone")
        return cache
