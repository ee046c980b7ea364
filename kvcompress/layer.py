"""One layer of a compressed cache: keys, values and the token in every slot, held dense or ragged."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvcompress.codec import Codec, GroupedCodec, Plain, Slots, overwritten
from kvcompress.compat import CacheLayerMixin, Rotation
from kvcompress.forward import Forward
from kvcompress.layouts import Blocks, DenseStore, RaggedStore, RankedStore, Store, joined, keep_slots
from kvcompress.view import State

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

    def rotation(self, layer: int) -> Rotation | None: ...

    def leader(self, layer: int, size: int) -> Tensor | None: ...


class CompressedLayer(CacheLayerMixin):
    """Keys, values and positions of one full-attention layer, and the state a method keeps beside them."""

    is_sliding = False
    temporary = False  # True where it stands in for a sliding layer while a prompt is made: then nothing is evicted
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: Holder, index: int):
        super().__init__()
        self.cache = weakref.ref(cache)
        self.index = index
        self.store: Store | None = None
        self.seen = 0
        self.dtype = torch.float32
        self.state: State = {}
        self.sealed = False  # what is held is in the codec's form
        self.blocks: Blocks | None = None  # keys and values of a grouped codec, in the slots of `store`
        self.codec_state: State = {}  # beside the codes, dim 0 the row
        self.target: Tensor | None = None  # [B, H_kv] slots a decode schedule keeps, set when a prompt ends
        self.steady: Any = None  # `steady.Steady`, while decode drops one token per head and step
        self.shown: Tensor | None = None  # scores as the allocator sees them, while a prompt runs
        self.stat: Any = None  # what the allocator remembers of this layer while a prompt runs
        self.evicted = 0
        self.group = 1  # query heads per KV head
        self._borrowed: DenseStore | None = None  # another cache's slots, until own()
        self.windows: dict[int, Any] = {}  # attention of these windows, for all that borrow this prompt; None: not yet
        self.queries: Tensor | None = None  # [B, H, n, D] of this forward, while it is looked at
        self.fresh: tuple[Tensor, Tensor] | None = None  # keys and values of this forward, until its attention is done

    # ------------------------------------------------------------------ what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens `[B, H_kv, n, D]`, and hand this layer on to the attention function through `kwargs`."""
        cache = self.cache()
        if kwargs is None:
            raise RuntimeError("this model's attention does not hand its keyword arguments to cache.update()")
        if cache is None or cache.forward is None:
            raise RuntimeError(
                "this CompressedCache was used outside its session: call the model inside `with compress(...)`"
            )
        kwargs["kv_layer"] = self
        forward, heads = cache.forward, key_states.shape[1]
        if forward.fusion is not None:
            key_states, value_states = forward.fusion.fuse(self.index, key_states, value_states)
        rotation = cache.rotation(self.index)
        if rotation is not None:
            key_states = rotation.unrotate(key_states, forward.on("rotated", key_states.device)[:, None])
        new = {"keys": key_states, "values": value_states}
        if self.blocks is not None:
            self.blocks.append(key_states, value_states, forward.real)
            new = {}
        elif self.sealed:
            new = cache.codec.encode(key_states, value_states, self._new_slots(heads))
        new["positions"] = forward.on("positions", key_states.device)[:, None].expand(key_states.shape[0], 1, -1)
        if self.store is None:
            self.is_initialized = True
            self.device, self.dtype = key_states.device, key_states.dtype
            self.full_width = heads * (key_states.shape[3] + value_states.shape[3]) * key_states.element_size()
            self.store = DenseStore.of(
                new, forward.added[:, None].expand(-1, heads).clone(), grow=not self._drops(cache)
            )
        else:
            evicted_next = cache.limited and forward.phase in ("prompt", "pass")
            self.store.append(new, forward.real, forward.added, grow=not evicted_next)
        self.seen += key_states.shape[2]
        self.fresh = None
        if not self.sealed and isinstance(self.store, DenseStore) and rotation is None:
            # views of the buffer, so that the caller's own tensors can be freed
            held = self.store.get("keys"), self.store.get("values")
            self.fresh = self._attended(*held)
            return (key_states, value_states) if cache.latents else held
        if (
            self.sealed and self.blocks is None and forward.phase == "prompt" and not self.absorbed
        ):  # which attends to its own tokens as they are
            real, ragged = forward.real, not isinstance(self.store, DenseStore)
            keys, values = self.keys_values()
            new_keys, new_values = self._attended(key_states, value_states)
            self.fresh = overwritten(keys, new_keys, real, ragged), overwritten(values, new_values, real, ragged)
        return key_states, value_states

    @staticmethod
    def _drops(cache: Holder) -> bool:
        """True if what a prompt stores is cut or encoded when it ends, so that headroom would be for nothing."""
        return cache.limited or not isinstance(cache.codec, Plain)

    def get_seq_length(self) -> int:
        """Logical length: columns seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(P + q, L - P): lines new keys up with the query offset L."""
        return self.length + query_length, self.seen - self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store, self.seen, self.state, self.target, self.is_initialized = None, 0, {}, None, False
        self.sealed, self.codec_state, self.blocks = False, {}, None
        self.steady = self.shown = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(row_index(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self._select_rows(torch.arange(self.counts.shape[0]).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError("a compressed cache cannot be cropped: evicted tokens cannot come back; fork() it before")

    def _select_rows(self, index: Tensor) -> None:
        if self.store is None:
            return
        self.store.select_rows(index)
        self.blocks = None if self.blocks is None else self.blocks.select_rows(index.cpu())
        for held in (self.state, self.codec_state):
            held.update({k: v.index_select(0, index.to(v.device)) for k, v in held.items()})
        self.steady = None
        self.target = None if self.target is None else self.target.index_select(0, index.cpu())

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
        return self.store

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
            return self._attended(*cache.codec.decode(channels, self.slots()))
        keys, values = self._attended(channels["keys"], channels["values"])
        rotation = cache.rotation(self.index)
        return (keys if rotation is None else rotation.rotate(keys, self.ranks())), values

    def _attended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as attention uses them, from what the model gave: of latents `[..., d_c]` and rotated keys
        `[..., d_r]` (MLA), both of them and the latents."""
        return (torch.cat([keys, values], dim=-1), keys) if self.holder().latents else (keys, values)

    @property
    def absorbed(self) -> bool:
        """True if all queries are multiplied with what the codec holds, in its own terms."""
        return self.sealed and self.holder().codec.absorbed

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
            self._seal_groups(codec, store)
            return
        window, shown = codec.needs.window, None
        if window and "queries" in self.state:
            shown = self.state["queries"][:, :, -window:], self.state["query_positions"][:, -window:]
        channels = codec.encode(store.get("keys"), store.get("values"), self.slots(queries=shown))
        if isinstance(store, DenseStore):
            others = {name: store.get(name) for name in store.channels if name not in ("keys", "values")}
            self.store = DenseStore.of(others | channels, store.counts, grow=not self.holder().limited)
        else:
            for name in ("keys", "values"):
                store.drop_channel(name)
            for name, value in channels.items():
                store.put(name, value)
        self._borrowed, self.sealed = None, True

    def _seal_groups(self, codec: GroupedCodec, store: Store) -> None:
        self.blocks = Blocks.of(codec, store.get("keys"), store.get("values"), store.get("positions"), store.counts)
        self.blocks.flush()
        if isinstance(store, DenseStore):
            others = {name: store.get(name) for name in store.channels if name not in ("keys", "values")}
            self.store = DenseStore.of(others, store.counts, grow=not self.holder().limited)
        else:
            for name in ("keys", "values"):
                store.drop_channel(name)
        self._borrowed, self.sealed = None, True

    def slots(self, queries: tuple[Tensor, Tensor] | None = None) -> Slots:
        """What a codec is told of all that is held."""
        return self._told(self.positions(), queries=queries)

    def _new_slots(self, heads: int) -> Slots:
        """The same of this forward's new tokens."""
        cache = self.holder()
        assert cache.forward is not None
        return self._told(cache.forward.on("positions", self.device)[:, None], heads=heads)

    def _told(
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
        return codec.query(q, self._query_slots()), *self._attended(keys, values)

    def read_lanes(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for what lies in lanes: keys and values `[lanes, slots, ...]`."""
        store, codec = self.held(), self.holder().codec
        assert isinstance(store, RaggedStore)
        channels = {name: store.in_lanes(name) for name in self.coded()}
        if not self.sealed:
            return q, *self._attended(channels["keys"], channels["values"])
        slots = self._told(store.in_lanes("positions")[None], owners=store.owners())
        keys, values = codec.read({name: value[None] for name, value in channels.items()}, slots)
        return codec.query(q, self._query_slots()), *self._attended(keys[0], values[0])

    def expand(self, output: Tensor) -> Tensor:
        """What a single query's weighted sum of the values of `read` stands for, `[B, H, 1, D_v]`."""
        return self.holder().codec.expand(output, self._query_slots()) if self.sealed else output

    def _query_slots(self) -> Slots:
        cache = self.holder()
        assert cache.forward is not None
        return self._told(cache.forward.on("positions", self.device)[:, None])

    def ranks(self) -> Tensor:
        """Index of each held token among those held, `[B, H_kv or 1, P]`: its position when positions are compact."""
        return ((self.positions() >= 0).cumsum(-1) - 1).clamp(min=0)

    def compact_queries(self, q: Tensor, rotation: Rotation) -> Tensor:
        """New queries `[B, H, n, D]` turned from the model's positions to their ranks among the held."""
        cache = self.holder()
        assert cache.forward is not None and cache.real is not None
        shift = (self.counts[:, 0] - cache.real)[:, None]
        ranks = (cache.forward.positions.long() + shift).clamp(min=0).to(q.device)
        return rotation.rotate(q, (ranks - cache.forward.on("rotated", q.device))[:, None])

    def keep(self, mask: Tensor, grow: bool = False, must: Tensor | None = None) -> None:
        """Keep the marked slots, in order, and free the rest. `mask` bool `[B, H_kv, P]`.

        Of what a grouped codec has encoded whole groups are kept, those with a slot in `must` first.
        """
        self.fresh, store = None, self.held()
        before = int(store.counts.sum())
        if mask.shape != (*store.counts.shape, store.length):
            raise ValueError(
                f"keep() needs a mask of shape {(*store.counts.shape, store.length)}, got {tuple(mask.shape)}"
            )
        if self.blocks is not None:
            held = (store.get("positions") >= 0).expand_as(mask)
            mask = self.blocks.whole_groups(
                mask, torch.zeros_like(mask) if must is None else must.expand_as(mask), held
            )
            self.blocks.keep(mask, held)
        self.store = keep_slots(store, mask, grow)
        self.evicted += before - int(self.store.counts.sum())

    def cut(self, counts: Tensor) -> None:
        """While a prompt runs: hold the best `counts [B, H_kv]` by what the allocator was shown."""
        self.fresh, store = None, self.held()
        self.evicted += int((store.counts - counts).sum())
        if isinstance(store, RankedStore):
            store.cut(counts)
        else:
            assert self.shown is not None
            channels = {name: store.get(name) for name in store.channels}
            self.store = RankedStore(channels, self.shown, counts)  # type: ignore[assignment]  # until finish()

    def finish(self) -> None:
        """Put what `cut` left into positional order."""
        if isinstance(self.store, RankedStore):
            ordered = self.store.finish()
            self.store = ordered if ordered.full else keep_slots(ordered, ordered.get("positions") >= 0)

    def drop_one(self, slots: Tensor, drop: Tensor | None = None) -> None:
        """Empty one slot `[B, H_kv, 1]` of the heads in `drop` (bool `[B, H_kv]`, CPU; None for all) in place."""
        self.held().mark_empty(slots, drop)
        self.evicted += slots.numel() if drop is None else int(drop.sum())

    def add_lane_mass(self, mass: Tensor, fade: Tensor | None) -> None:
        """The same for what is held in lanes, from `[lanes, G, slots]`."""
        store = self.held()
        assert isinstance(store, RaggedStore)
        if "mass" not in store.channels:
            store.put("mass", store.padded(mass.transpose(1, 2)))
            return
        before = store.in_lanes("mass")
        if fade is not None:
            before.mul_(fade.to(mass.device)[store.owners() // store.heads, None, None])
        before.add_(mass.transpose(1, 2))

    def add_mass(self, mass: Tensor, fade: Tensor | None) -> None:
        """Add attention mass `[B, H_kv, G, P]` to the slots' sums, held as `[B, H_kv, P, G]` float32.

        Args:
            fade: float32 `[B]`, what the sums so far are multiplied by first; None for 1.
        """
        store, mass = self.held(), mass.transpose(2, 3)
        if "mass" not in store.channels:
            store.put("mass", mass.contiguous())
            return
        before = store.get("mass")
        if fade is not None:
            before = before.mul_(fade.to(mass.device)[:, None, None, None])
        if isinstance(store, DenseStore):
            before.add_(mass)
        else:
            store.put("mass", before + mass)

    def fork(self, cache: Holder) -> CompressedLayer:
        copy = CompressedLayer(cache, self.index)
        copy.store = None if self.store is None else self.store.fork()
        copy.seen, copy.evicted, copy.is_initialized = self.seen, self.evicted, self.is_initialized
        if self.store is not None:
            copy.device, copy.dtype, copy.full_width = self.device, self.dtype, self.full_width
            copy.group = self.group
        copy.state = {k: v.clone() for k, v in self.state.items()}
        copy.blocks = None if self.blocks is None else self.blocks.fork()
        copy.sealed, copy.codec_state = self.sealed, {k: v.clone() for k, v in self.codec_state.items()}
        copy.target = None if self.target is None else self.target.clone()
        return copy

    def alone(self, cache: Holder, number: int, real: int) -> CompressedLayer:
        """A copy of one row, which has seen `real` tokens, for another cache; empty slots are left out."""
        twin, store, one = CompressedLayer(cache, self.index), self.held(), torch.tensor([number])
        if isinstance(store, DenseStore):
            held: Store = DenseStore({n: store.get(n)[number : number + 1] for n in store.channels}, store.counts[one])
        else:
            wanted = store.get("positions") >= 0
            wanted[torch.arange(len(wanted)) != number] = False
            held = RaggedStore(store.packed(wanted), store.counts[one])
        everything = (held.get("positions") >= 0).expand(-1, held.heads, -1)
        twin.store = keep_slots(held, everything, grow=not cache.limited)
        twin.seen, twin.is_initialized, twin.group = real, True, self.group
        twin.device, twin.dtype, twin.full_width = self.device, self.dtype, self.full_width
        twin.state = {name: value.index_select(0, one.to(value.device)) for name, value in self.state.items()}
        twin.codec_state = {k: value.index_select(0, one.to(value.device)) for k, value in self.codec_state.items()}
        twin.sealed = self.sealed
        twin.blocks = None if self.blocks is None else self.blocks.select_rows(one)
        twin.evicted = real * store.heads - int(twin.counts.sum())
        return twin

    def borrow(self, other: CompressedLayer, mass: bool) -> None:
        """Hold what `other` holds without a copy: what is kept of it is copied then, the rest by `own()`.

        Args:
            other: the same layer of another cache, which nothing was dropped from.
            mass: with the attention mass that `other` has summed up.
        """
        store = other.held()
        assert isinstance(store, DenseStore)
        self.store = self._borrowed = store.borrow(n for n in store.channels if n != "mass" or mass)
        self.seen, self.is_initialized, self.group = other.seen, True, other.group
        self.device, self.dtype, self.full_width = other.device, other.dtype, other.full_width
        self.windows = other.windows

    def own(self) -> None:
        """Copy what is still borrowed, as a prompt of this cache's own would have left it."""
        self.windows = {}
        if self._borrowed is not None and self.store is self._borrowed:
            store = self._borrowed
            self.store = DenseStore.of(store.channels, store.counts, grow=not self.holder().limited)
        self._borrowed = None

    def gather(self, others: Sequence[CompressedLayer]) -> None:
        """Hold copies of what the same layer of other caches holds, their rows one after the other."""
        first = others[0]
        self.store = joined([other.held() for other in others], leave_out=BESIDE[1:])
        self.seen, self.is_initialized, self.group = max(o.seen for o in others), True, first.group
        self.device, self.dtype, self.full_width = first.device, first.dtype, first.full_width

    def holder(self) -> Holder:
        """The cache this layer belongs to."""
        cache = self.cache()
        if cache is None:
            raise RuntimeError("the cache of this layer is gone")
        return cache


def row_index(indices: Tensor) -> Tensor:
    """Batch rows as numbers, from numbers or from a bool per row."""
    return indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
