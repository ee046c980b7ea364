"""CompressedLayer: keys, values and positions of one full-attention layer, and the state a method keeps beside them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvcompress.cache.encoding import BESIDE, LayerEncoding
from kvcompress.cache.forward import Forward, LayerCall, hand_over
from kvcompress.cache.incremental_evictor import IncrementalEvictor
from kvcompress.cache.layouts import DenseStore, PagedStore, ScoreSortedStore, Store, joined, keep_slots, one_row
from kvcompress.cache.query_window import QueryWindow
from kvcompress.cache.read_account import ReadAccount
from kvcompress.cache.sequence import CacheContext
from kvcompress.common.transfer import upload
from kvcompress.method.codec import Plain, overwritten
from kvcompress.method.view import State
from kvcompress.models.compat import CacheLayerMixin

Tensor = torch.Tensor


class Rearranged(Protocol):
    """What steps with fixed shapes have made of a layer's tensors (`kvcompress.hook.fixed`).

    Attributes:
        beside: tensors that it keeps beside the layer's own.
    """

    beside: list[Tensor]

    def is_of(self, layer: CompressedLayer) -> bool:
        """True if it is `layer` that uses its tensors, or did last."""
        ...

    def settle(self) -> None:
        """Have store and queries be again what they are for everything else."""
        ...


class CompressedLayer(CacheLayerMixin):
    """One full-attention layer: a store of slots, the encoding of what they hold, and state kept beside them.

    Attributes:
        index: of the layer in the model.
        store: positions, keys and values by slot; in pages between prompts only, where a reader asks for it.
        encoding: the form of keys and values in the store.
        seen: columns seen, padding included.
        evicted: slots dropped, over rows and heads.
        state: tensors of the method's scorer, dim 0 the row.
        reader_state: tensors of the reader, dim 0 the row; of a reader of pages until the next prompt.
        account: of decode steps and bytes read, where a reader of pages reads.
        rearranged: while steps with fixed shapes keep store and queries in an order of their own; who asks for either
            has them settled first.
        form: part of this layer in such steps, for as long as somebody takes them.
        queries: last queries of each row, where a scorer or codec asks for them.
        target: LongTensor `[B, H_kv]` on the CPU, slots a decode schedule keeps; set when a prompt ends (`aim_at`).
        evictor: while decode drops one token per head and step (`evict_by`).
        current_kv: keys and values `[B, H_kv, P, D]` of this forward, until its attention is done.
        gqa_group: query heads per KV head.
        shared_window_attention: attention of windows (by size) that all caches share which start from this prompt; None
            where it is not computed yet.
        full_width: bytes of a token in a DynamicCache, all heads together.
    """

    is_sliding = False
    temporary = False  # True where it stands in for a sliding layer while a prompt is made: then nothing is evicted
    observing_only = False  # True where it holds a copy for one forward: `observe` then stands for all decisions
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    device: torch.device

    def __init__(self, cache: CacheContext, index: int):
        super().__init__()
        self.context: Callable[[], CacheContext] = functools.partial(_alive, weakref.ref(cache))
        self.index = index
        self.rearranged: Rearranged | None = None
        self.form: weakref.ref[Rearranged] | None = None
        self.encoding = LayerEncoding(self.context, index)
        self.gqa_group, self.full_width = 1, 0
        self.shared_window_attention: dict[int, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self.rearranged = None
        self._store: Store | PagedStore | None = None
        self._queries: QueryWindow | None = None
        self.seen, self.evicted, self.is_initialized = 0, 0, False
        self.state: State = {}
        self.reader_state: State = {}
        self.account = ReadAccount()
        self.target: Tensor | None = None
        self.evictor: IncrementalEvictor | None = None
        self.current_kv: tuple[Tensor, Tensor] | None = None
        self._shared: DenseStore | None = None  # another cache's slots, until `materialise`

    # ------------------------------------------------------------------ what is held

    @property
    def store(self) -> Store | PagedStore | None:
        self._settle()
        return self._store

    @store.setter
    def store(self, store: Store | PagedStore | None) -> None:
        self._settle()
        self._store = store

    @property
    def queries(self) -> QueryWindow | None:
        self._settle()
        return self._queries

    @queries.setter
    def queries(self, queries: QueryWindow | None) -> None:
        self._settle()
        self._queries = queries

    def _settle(self) -> None:
        if self.rearranged is not None:
            self.rearranged.settle()

    def beside_steps(self) -> list[Tensor]:
        """Tensors that steps with fixed shapes keep beside this layer's own."""
        form = None if self.form is None else self.form()
        return [] if form is None or not form.is_of(self) else form.beside

    def holds(self, store: Store) -> bool:
        """True if it is this store that it holds, in whatever order."""
        return self._store is store

    @property
    def length(self) -> int:
        """Slots held per head, empty ones included (the longest head's for a ragged layout)."""
        return 0 if self.store is None else self.store.length

    @property
    def counts(self) -> Tensor:
        """Non-empty slots, LongTensor `[B, H_kv]` on the CPU."""
        if self._store is None:
            return torch.zeros(0, 0, dtype=torch.long)
        return self._store.counts

    def held(self) -> Store:
        if self.store is None:
            raise ValueError(f"layer {self.index} holds nothing yet")
        return self.store  # type: ignore[return-value]  # a prompt, which may change what is held, never meets pages

    def positions(self) -> Tensor:
        """Int32 `[B, H_kv or 1, P]`: the token in each slot, -1 where empty; strictly increasing otherwise."""
        return self.held().get("positions")

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H_kv, P, D]` as attention sees them: decoded, rotated; garbage in empty slots."""
        return self.encoding.keys_values(self.held()) if self.current_kv is None else self.current_kv

    # ------------------------------------------------------------------ what transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens `[B, H_kv, n, D]`, and hand this layer on to the attention function through `kwargs`.

        Returns:
            keys and values of the new tokens, or of all that is held where these are the model's own.

        Raises:
            RuntimeError: outside a session's forward.
        """
        cache = self.context()
        forward: Forward | None = cache.forward
        if forward is None:
            raise RuntimeError(
                "this CompressedCache was used outside its session: call the model inside `with compress(...)`"
            )
        hand_over(kwargs, LayerCall(self, forward))
        spec, heads = cache.spec, key_states.shape[1]
        self.account.begin(forward)
        if forward.phase in ("prompt", "pass"):
            self.from_pages()
        if forward.fusion is not None:
            key_states, value_states = forward.fusion.fuse(self.index, key_states, value_states)
        rope = self.encoding.compact_rope
        if rope is not None:
            key_states = rope.unrotate(key_states, forward.on("rotated", key_states.device)[:, None])
        new = self.encoding.encode_new(key_states, value_states, forward)
        new["positions"] = forward.on("positions", key_states.device)[:, None].expand(key_states.shape[0], 1, -1)
        if self.store is None:
            self._measure(key_states, value_states)
            # headroom would be for nothing where the prompt is cut or encoded when it ends
            drops = spec.limited or not isinstance(spec.codec, Plain)
            self.store = DenseStore.of(new, forward.added[:, None].expand(-1, heads).clone(), grow=not drops)
        elif isinstance(self.store, PagedStore):
            shown = self.encoding.shown_keys(new, key_states, value_states, forward)
            self.store.append(new, forward.real, forward.added, seen=shown)
            if forward.length > 1:
                self.store.note_full_read()
        else:
            evicted_next = spec.limited and forward.phase in ("prompt", "pass")
            self.store.append(new, forward.real, forward.added, grow=not evicted_next)
        self.seen += key_states.shape[2]
        self.current_kv = None
        encoding = self.encoding
        if not encoding.is_encoded and isinstance(self.store, DenseStore) and rope is None:
            # views of the buffer, so that the caller's own tensors can be freed
            held = self.store.get("keys"), self.store.get("values")
            self.current_kv = encoding.attention_kv(*held)
            return (key_states, value_states) if spec.latents else held
        exact_prompt = encoding.is_encoded and encoding.groups is None and forward.phase == "prompt"
        if exact_prompt and not encoding.absorbs_projection:  # a prompt attends to its own tokens as they are
            real, ragged = forward.real, not isinstance(self.store, DenseStore)
            keys, values = self.keys_values()
            new_keys, new_values = encoding.attention_kv(key_states, value_states)
            self.current_kv = overwritten(keys, new_keys, real, ragged), overwritten(values, new_values, real, ragged)
        return key_states, value_states

    def _measure(self, keys: Tensor, values: Tensor) -> None:
        """Note what the model's keys and values look like when the first come."""
        self.is_initialized, self.device, self.encoding.dtype = True, keys.device, keys.dtype
        self.full_width = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()

    def get_seq_length(self) -> int:
        """Logical length: columns seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(P + q, L - P): lines new keys up with the query offset L."""
        return self.length + query_length, self.seen - self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.encoding = LayerEncoding(self.context, self.index)
        self._clear()

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

    # ------------------------------------------------------------------ attention

    def begin_attention(self, q: Tensor, forward: Forward) -> Tensor:
        """New queries `[B, H, n, D]` as they meet what is held: turned to their ranks where positions are compact."""
        self.gqa_group = q.shape[1] // self.held().heads
        rope, real = self.encoding.compact_rope, self.context().sequence.real
        if rope is None or real is None:
            return q
        shift = (self.counts[:, 0] - real)[:, None]
        ranks = upload((forward.positions.long() + shift).clamp(min=0), q.device)
        return rope.rotate(q, (ranks - forward.on("rotated", q.device))[:, None])

    def end_attention(self) -> None:
        """The forward's attention and the decisions after it are done."""
        self.current_kv = None

    def observe(self, q: Tensor, params: Any, forward: Forward) -> None:
        """See the queries of a forward that stores nothing; only where `observing_only`."""
        raise NotImplementedError

    def remember_queries(self, q: Tensor, forward: Forward, size: int) -> None:
        """Keep the last `size` real queries of each row."""
        self.queries = QueryWindow.of(self.queries, q, forward, size)

    def forget_queries(self) -> None:
        """Nobody will ask for the last queries again."""
        self.queries = None

    # ------------------------------------------------------------------ what is kept, and in what form

    def encode(self) -> None:
        """Hold what is kept in the codec's form from here on; nothing to do for a plain codec."""
        if self.store is None:
            return
        store, window, encoded = self.held(), self.encoding.codec.needs.window, self.encoding.is_encoded
        queries = self.queries.last(window) if window and self.queries is not None else None
        if not encoded:
            self.current_kv = None
        self.store = self.encoding.encode(store, queries)
        if encoded != self.encoding.is_encoded:
            self._shared = None

    def retain(self, mask: Tensor, grow: bool = False, must: Tensor | None = None) -> None:
        """Keep the marked slots, in order, and free the rest. `mask` bool `[B, H_kv, P]`.

        Of what a grouped codec has encoded whole groups are kept, those with a slot in `must` first.
        """
        self.current_kv, store, groups = None, self.held(), self.encoding.groups
        before = int(store.counts.sum())
        if mask.shape != (*store.counts.shape, store.length):
            raise ValueError(
                f"retain() needs a mask of shape {(*store.counts.shape, store.length)}, got {tuple(mask.shape)}"
            )
        if groups is not None:
            held = (store.get("positions") >= 0).expand_as(mask)
            mask = groups.whole_groups(mask, torch.zeros_like(mask) if must is None else must.expand_as(mask), held)
            groups.keep(mask, held)
        self.store = keep_slots(store, mask, grow)
        self.evicted += before - int(self.store.counts.sum())

    def aim_at(self, target: Tensor) -> None:
        """Have a decode schedule keep `target [B, H_kv]` slots (on the CPU)."""
        self.target = target

    def evict_by(self, evictor: IncrementalEvictor | None) -> None:
        """Let the next decode steps evict by these candidates; None: by scores of all slots."""
        self.evictor = evictor

    def truncate_ranked(self, counts: Tensor, scores: Tensor) -> None:
        """While a prompt runs: hold the best `counts [B, H_kv]` by `scores [B, H_kv, P]`, which the allocator was shown."""
        self.current_kv, store = None, self.held()
        self.evicted += int((store.counts - counts).sum())
        if isinstance(store, ScoreSortedStore):
            store.cut(counts)
        else:
            channels = {name: store.get(name) for name in store.channels}
            sorted_store = ScoreSortedStore(channels, scores, counts)
            self.store = sorted_store  # type: ignore[assignment]  # until restore_order()

    def restore_order(self) -> None:
        """Put what `truncate_ranked` left into positional order."""
        if isinstance(self.store, ScoreSortedStore):
            ordered = self.store.finish()
            self.store = ordered if ordered.full else keep_slots(ordered, ordered.get("positions") >= 0)

    def evict_one(self, slots: Tensor, drop: Tensor | None = None) -> None:
        """Empty one slot `[B, H_kv, 1]` of the heads in `drop` (bool `[B, H_kv]`, CPU; None for all) in place."""
        self.held().mark_empty(slots, drop)
        self.evicted += slots.numel() if drop is None else int(drop.sum())

    def go_into_pages(self, store: PagedStore) -> None:
        """Hold the same slots in pages, for the decode steps to come."""
        self.store, self.current_kv, self._shared = store, None, None

    def from_pages(self) -> None:
        """Before a prompt: hold slots that a reader had in pages as before, in one tier."""
        store = self.store
        if not isinstance(store, PagedStore):
            return
        store.note_full_read()
        if store.host is not None:
            self.account.add(store.host.moved)
        everything = (store.get("positions") >= 0).expand(-1, store.heads, -1)
        self.store = keep_slots(store, everything, grow=not self.context().spec.limited)  # type: ignore[arg-type]
        self.reader_state = {}

    # ------------------------------------------------------------------ rows and copies

    def _select_rows(self, index: Tensor) -> None:
        if self.store is None:
            return
        self.store.select_rows(index)
        self.encoding = self.encoding.select(self.context, index)
        self.state, self.reader_state = _rows(self.state, index), _rows(self.reader_state, index)
        self.account, self.evictor = self.account.select(index), None
        self.queries = None if self.queries is None else self.queries.select(index)
        self.target = None if self.target is None else self.target.index_select(0, index.cpu())

    def _like(self, other: CompressedLayer) -> None:
        """Take over what is known of the model's tensors."""
        self.is_initialized, self.gqa_group = True, other.gqa_group
        self.device, self.full_width, self.encoding.dtype = other.device, other.full_width, other.encoding.dtype

    def fork(self, cache: CacheContext) -> CompressedLayer:
        copy = CompressedLayer(cache, self.index)
        if self.store is not None:
            copy._like(self)
            copy.store = self.store.fork()
        copy.seen, copy.evicted, copy.encoding = self.seen, self.evicted, self.encoding.fork(copy.context)
        copy.state = {name: value.clone() for name, value in self.state.items()}
        copy.reader_state = {name: value.clone() for name, value in self.reader_state.items()}
        copy.account, copy.target = self.account.fork(), None if self.target is None else self.target.clone()
        copy.queries = None if self.queries is None else self.queries.fork()
        return copy

    def select_row(self, cache: CacheContext, number: int, real: int) -> CompressedLayer:
        """A copy of one row, which has seen `real` tokens, for another cache; empty slots are left out."""
        twin, store, one = CompressedLayer(cache, self.index), self.held(), torch.tensor([number])
        twin._like(self)
        twin.encoding = self.encoding.select(twin.context, one)
        twin.state, twin.reader_state = _rows(self.state, one), _rows(self.reader_state, one)
        twin.queries = None if self.queries is None else self.queries.select(one)
        twin.account = self.account.select(one)
        twin.store = one_row(store, number, grow=not cache.spec.limited)
        twin.seen, twin.evicted = real, real * store.heads - int(twin.counts.sum())
        return twin

    def share_from(self, other: CompressedLayer, mass: bool, window: int) -> None:
        """Hold what `other` holds without a copy: what is kept of it is copied then, the rest by `materialise`.

        Args:
            other: the same layer of another cache, which nothing was dropped from.
            mass: with the attention mass that `other` has summed up.
            window: so many of the last queries that `other` remembers.
        """
        store = other.held()
        assert isinstance(store, DenseStore)
        self.store = self._shared = store.borrow(n for n in store.channels if n != "mass" or mass)
        self.seen, self.shared_window_attention = other.seen, other.shared_window_attention
        self.queries = other.queries.cut(window) if window and other.queries is not None else None
        self._like(other)

    def share_window_attention(self, window: int) -> None:
        """Have caches that start from this one compute the attention of a window of queries once for all."""
        self.shared_window_attention = {window: None}

    def materialise(self) -> None:
        """Copy what is still shared, as a prompt of this cache's own would have left it."""
        self.shared_window_attention = {}
        if self._shared is not None and self.store is self._shared:
            store = self._shared
            self.store = DenseStore.of(store.channels, store.counts, grow=not self.context().spec.limited)
        self._shared = None

    def concat_rows(self, others: Sequence[CompressedLayer]) -> None:
        """Hold copies of what the same layer of other caches holds, their rows one after the other."""
        self.store = joined([other.held() for other in others], leave_out=BESIDE[1:])
        self.seen = max(other.seen for other in others)
        self._like(others[0])


def _alive(reference: weakref.ref[Any]) -> Any:
    cache = reference()
    if cache is None:
        raise RuntimeError("the cache of this layer is gone")
    return cache


def _rows(state: State, index: Tensor) -> State:
    return {name: value.index_select(0, index.to(value.device)) for name, value in state.items()}


def row_index(indices: Tensor) -> Tensor:
    """Batch rows as numbers, from numbers or from a bool per row."""
    return indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
