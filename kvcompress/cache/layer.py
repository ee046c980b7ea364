"""One layer of a compressed cache: keys, values and the token in every slot, held dense or ragged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompress.cache.encoding import BESIDE, HeldLayer, Holder
from kvcompress.cache.layouts import DenseStore, PagedStore, RaggedStore, ScoreSortedStore, Store, joined, keep_slots
from kvcompress.cache.pages import fetch, unpaged
from kvcompress.method.codec import Plain, overwritten
from kvcompress.models.compat import Rotation

Tensor = torch.Tensor


class CompressedLayer(HeldLayer):
    """Keys, values and positions of one full-attention layer, and the state a method keeps beside them."""

    is_sliding = False
    temporary = False  # True where it stands in for a sliding layer while a prompt is made: then nothing is evicted
    is_croppable = False
    is_compileable = False
    supports_early_init = False

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
        if forward.length > 1 or forward.phase != "decode":
            self.step = self.step * (forward.added == 0)
        if forward.phase in ("prompt", "pass"):
            unpaged(self)
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
            if isinstance(self.store, PagedStore):
                shown = cache.codec.decode(new, self._new_slots(heads)) if self.sealed else (key_states, value_states)
                self.store.append(new, forward.real, forward.added, seen=self.attended(*shown)[0])
                if forward.length > 1:
                    fetch(self.store)
            else:
                self.store.append(new, forward.real, forward.added, grow=not evicted_next)
        self.seen += key_states.shape[2]
        self.fresh = None
        if not self.sealed and isinstance(self.store, DenseStore) and rotation is None:
            # views of the buffer, so that the caller's own tensors can be freed
            held = self.store.get("keys"), self.store.get("values")
            self.fresh = self.attended(*held)
            return (key_states, value_states) if cache.latents else held
        if (
            self.sealed and self.blocks is None and forward.phase == "prompt" and not self.absorbed
        ):  # which attends to its own tokens as they are
            real, ragged = forward.real, not isinstance(self.store, DenseStore)
            keys, values = self.keys_values()
            new_keys, new_values = self.attended(key_states, value_states)
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
        self.sealed, self.codec_state, self.blocks, self.traffic = False, {}, None, {}
        self.step = torch.zeros(1, dtype=torch.long)
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
        for held in (self.state, self.codec_state, self.traffic):
            held.update({k: v.index_select(0, index.to(v.device)) for k, v in held.items()})
        self.steady = None
        self.step = self.step if len(self.step) == 1 else self.step.index_select(0, index.cpu())
        self.target = None if self.target is None else self.target.index_select(0, index.cpu())

    # ------------------------------------------------------------------ what is kept

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
        if isinstance(store, ScoreSortedStore):
            store.cut(counts)
        else:
            assert self.shown is not None
            channels = {name: store.get(name) for name in store.channels}
            self.store = ScoreSortedStore(channels, self.shown, counts)  # type: ignore[assignment]  # until finish()

    def finish(self) -> None:
        """Put what `cut` left into positional order."""
        if isinstance(self.store, ScoreSortedStore):
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
        copy.traffic, copy.step = {k: v.clone() for k, v in self.traffic.items()}, self.step.clone()
        copy.blocks = None if self.blocks is None else self.blocks.fork()
        copy.sealed, copy.codec_state = self.sealed, {k: v.clone() for k, v in self.codec_state.items()}
        copy.target = None if self.target is None else self.target.clone()
        return copy

    def alone(self, cache: Holder, number: int, real: int) -> CompressedLayer:
        """A copy of one row, which has seen `real` tokens, for another cache; empty slots are left out."""
        twin, store, one = CompressedLayer(cache, self.index), self.held(), torch.tensor([number])
        held: Store
        if isinstance(store, PagedStore):
            held = store.fork()
            held.select_rows(one)
        elif isinstance(store, DenseStore):
            held = DenseStore({n: store.get(n)[number : number + 1] for n in store.channels}, store.counts[one])
        else:
            wanted = store.get("positions") >= 0
            wanted[torch.arange(len(wanted)) != number] = False
            held = RaggedStore(store.packed(wanted), store.counts[one])
        everything = (held.get("positions") >= 0).expand(-1, held.heads, -1)
        twin.store = held
        if not isinstance(held, PagedStore):
            twin.store = keep_slots(held, everything, grow=not cache.limited)
        twin.traffic = {name: value.index_select(0, one.to(value.device)) for name, value in self.traffic.items()}
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


def row_index(indices: Tensor) -> Tensor:
    """Batch rows as numbers, from numbers or from a bool per row."""
    return indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
