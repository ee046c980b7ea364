"""KV store: keys and values of chunks of text for reuse, in memory up to a limit and on disk.

An entry is known by what its values follow from: the model (weights, configuration, number type), the tokenizer, the
chunk's token ids, the `lead` it was prefilled behind, and whether its keys are stored before rotation ("raw", to be used
at any position) or as the cache holds them ("rotated"). What is damaged or of another origin is reported and never
used; who asked for it computes it again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kvcompress.models import compat
from kvcompress.models.loading import cache_dir
from kvcompress.models.tokenizers import tokenizer_of
from kvcompress.reuse.disk_tier import FORMAT, Damaged, DiskTier, Entry
from kvcompress.reuse.model_identity import identity
from kvcompress.reuse.stored_form import Exact, Form, Grouped, layer_layout
from kvcompress.reuse.tensor_file import Layout

__all__ = ["FORMS", "ChunkKV", "Damaged", "KVStore", "Stats", "store_of"]

Tensor = torch.Tensor

FORMS = ("raw", "rotated")
MEMORY_BYTES = 2 << 30
DISK_MB = 16 << 10  # of a store that nobody gave a limit


class ChunkKV(Protocol):
    """The keys and values of one chunk."""

    ids: Tensor

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        ...

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, `[1, H_kv, n, D]` each, on the CPU; not to be written to.

        Raises:
            Damaged: what is on disk is not what was stored; the store has forgotten the entry by then.
        """
        ...


@dataclass
class Stats:
    """What a store has done so far.

    Attributes:
        hits, misses: entries that were asked for, and how many of the hits were in memory (`memory_hits`).
        bytes_loaded: bytes of keys and values handed out, `bytes_from_disk` of them read from files, in `load_s` seconds.
        stored, bytes_stored: entries put, and their bytes.
        damaged, foreign: entries not used, since they were not what was stored, or not of this model.
        evicted: entries that left memory for want of room.
    """

    hits: int = 0
    misses: int = 0
    memory_hits: int = 0
    bytes_loaded: int = 0
    bytes_from_disk: int = 0
    load_s: float = 0.0
    stored: int = 0
    bytes_stored: int = 0
    damaged: int = 0
    foreign: int = 0
    evicted: int = 0

    def since(self, before: Stats) -> dict[str, float]:
        """What was added since a copy was taken."""
        then = asdict(before)
        return {name: value - then[name] for name, value in asdict(self).items()}

    def copy(self) -> Stats:
        return Stats(**asdict(self))


@dataclass
class Held:
    """A chunk in memory."""

    ids: Tensor
    layers: list[dict[str, Tensor]]
    store: KVStore

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.layers))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        self.store.count(bytes_loaded=_nbytes(self.layers[index]))
        return self.store.held_as.unpack(self.layers[index])


class OnDisk:
    """A chunk on disk: each layer is read, and checked, when it is asked for; complete, it moves into memory."""

    def __init__(self, entry: Entry, store: KVStore, key: str) -> None:
        self.ids, self._entry, self._store, self._key = entry.ids, entry, store, key
        self._layers: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self._entry.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        found = self._layers.get(index)
        if found is None:
            start = time.perf_counter()
            try:
                found = self._entry.layer(index)
            except Damaged as fault:
                self._store.refuse(self._entry.path, fault)
                raise Damaged(f"{self._entry.path} {fault}") from None
            self._store.count(bytes_from_disk=_nbytes(found), load_s=time.perf_counter() - start)
            if self._store.memory_bytes:
                self._layers[index] = found
                if len(self._layers) == self._entry.layers:
                    layers = [self._layers[i] for i in range(self._entry.layers)]
                    self._store.remember(self._key, Held(self.ids, layers, self._store))
        self._store.count(bytes_loaded=_nbytes(found))
        return self._store.held_as.unpack(found)


class KVStore:
    """Keys and values of one model's chunks.

    Args:
        model: whose; an entry of any other is never used.
        memory_bytes: limit of the tier in memory; what was used least recently leaves it first. 0: no such tier.
        folder: of the tier on disk, which several models and processes may share; None: no such tier.
        disk_bytes: limit of all files in the folder, the least recently used are deleted; None: no limit.
        tokenizer: whose ids the chunks are of; by default the one `load` gave with the model.
        codec: hold chunks as its codes (KIVI's: it has to work in groups of tokens); None: as they are.

    Raises:
        ValueError: a limit that is none, a folder that is none, or a codec of another kind.
    """

    def __init__(
        self,
        model: Any,
        memory_bytes: int = MEMORY_BYTES,
        folder: str | Path | None = None,
        disk_bytes: int | None = None,
        tokenizer: Any = None,
        codec: Any = None,
    ) -> None:
        check_limit("memory_bytes", memory_bytes, "bytes")
        check_limit("disk_bytes", disk_bytes, "bytes", none=True)
        if folder is not None and not isinstance(folder, (str, os.PathLike)):
            raise ValueError(f"folder={folder!r} is no path: a str or Path, or None for no tier on disk")
        self.identity = identity(model, tokenizer_of(model) if tokenizer is None else tokenizer)
        self.held_as: Form = Exact()
        if codec is not None:
            bound = codec.bind(model) if hasattr(codec, "bind") else codec
            self.held_as = Grouped(bound, getattr(torch, self.identity["dtype"]))
        self.memory_bytes = memory_bytes
        self.disk: DiskTier | None = None
        if folder is not None:
            layout = functools.lru_cache(maxsize=64)(self._layout_for(model))
            layers = len(compat.layer_types(model))
            self.disk = DiskTier(Path(folder).expanduser(), self.identity, layout, layers, disk_bytes)
        self.stats = Stats()
        self._purpose: str | None = None
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()  # layers may be loaded by a thread beside the one that computes

    def _layout_for(self, model: Any) -> Callable[[int], Layout]:
        """The layout of a layer of a model's chunks, by their number of tokens."""
        sizes = (compat.head_sizes(model) or [(0, 0)])[0]
        heads, dtype = compat.kv_heads(model), getattr(torch, self.identity["dtype"])
        return functools.partial(layer_layout, self.held_as, heads, sizes, dtype)

    def __repr__(self) -> str:
        where = "" if self.disk is None else f", {self.disk.folder}"
        return f"KVStore({self.identity['model']}, {len(self._held)} chunks, {self._bytes / 2**20:.1f} MiB in memory{where})"

    @property
    def bytes_in_memory(self) -> int:
        return self._bytes

    def serves(self, model: Any) -> bool:
        """True where chunks of `model` as it is now are those of this store."""
        return not self._differs(identity(model))

    def _differs(self, other: Mapping[str, str]) -> list[str]:
        return [key for key in ("model", "weights", "dtype") if other[key] != self.identity[key]]

    def check(self, model: Any) -> None:
        """Refuse to serve another model.

        Raises:
            ValueError: names both.
        """
        other = identity(model)
        if differ := self._differs(other):
            theirs = ", ".join(f"{key} {self.identity[key]}" for key in differ)
            ours = ", ".join(f"{key} {other[key]}" for key in differ)
            raise ValueError(
                f"this store holds chunks of another model ({theirs}; here {ours}): KVStore(model) for this"
            )

    def key(self, ids: Sequence[int] | Tensor, lead: Sequence[int] | Tensor = (), form: str = "raw") -> str:
        """32 hex digits that stand for a chunk of this model.

        Raises:
            ValueError: an empty chunk, or an unknown form.
        """
        if form not in FORMS:
            raise ValueError(f"form={form!r}; valid: {', '.join(FORMS)}")
        chunk, before = _listed(ids), _listed(lead)
        if not chunk:
            raise ValueError("an empty chunk has no keys and values: leave it out")
        text = json.dumps(
            [FORMAT, self.identity, form, self.held_as.name, before, chunk], sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(
        self, ids: Sequence[int] | Tensor, lead: Sequence[int] | Tensor = (), form: str = "raw", disk: bool = True
    ) -> ChunkKV | None:
        """The chunk `ids [n]` as it is behind `lead`, or None where it has to be computed.

        Args:
            lead: ids it was prefilled behind: none, only the model's first token, or all of a prompt so far.
            form: of its keys, "raw" (before rotation) or "rotated".
            disk: look for it on disk too.
        """
        key = self.key(ids, lead, form)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                self.count(hits=1, memory_hits=1)
                return held
        if self.disk is not None and disk:
            start = time.perf_counter()
            try:
                entry = self.disk.open(key, _listed(ids))
            except Damaged as fault:
                self.refuse(self.disk.path(key), fault)
                entry = None
            self.count(load_s=time.perf_counter() - start)
            if entry is not None:
                self.count(hits=1)
                return OnDisk(entry, self, key)
        self.count(misses=1)
        return None

    def put(
        self,
        ids: Sequence[int] | Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        lead: Sequence[int] | Tensor = (),
        form: str = "raw",
    ) -> ChunkKV:
        """Keep a copy of a chunk's keys and values, one `[1, H_kv, n, D]` of each per layer, and return it.

        It is returned, and can be used, whether or not there was room to keep it. With a codec it is what was stored:
        whoever computes a chunk uses what others will load.

        Raises:
            ValueError: shapes that do not fit the ids.
        """
        key, chunk = self.key(ids, lead, form), _listed(ids)
        if len(keys) != len(values):
            raise ValueError(f"keys of {len(keys)} layers and values of {len(values)}: a chunk has both of each layer")
        for kind, tensors in (("keys", keys), ("values", values)):
            for index, tensor in enumerate(tensors):
                if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != len(chunk):
                    raise ValueError(
                        f"{kind} of layer {index} have shape {tuple(tensor.shape)}: a chunk of {len(chunk)} tokens has "
                        f"[1, heads, {len(chunk)}, size]"
                    )
        packed = (self.held_as.pack(k, v) for k, v in zip(keys, values, strict=True))
        layers = [{name: _copy(part) for name, part in layer.items()} for layer in packed]
        made = Held(torch.tensor(chunk), layers, self)
        self.count(stored=1, bytes_stored=made.nbytes)
        self.remember(key, made)
        if self.disk is not None:
            self.disk.write(key, chunk, layers)
        return made

    def remember(self, key: str, chunk: Held) -> None:
        """Take a chunk into memory, if it fits at all, and let go what was used least recently."""
        size = chunk.nbytes
        with self._lock:
            before = self._held.pop(key, None)
            self._bytes -= 0 if before is None else before.nbytes
            if size > self.memory_bytes:
                return
            while self._bytes + size > self.memory_bytes:
                _, oldest = self._held.popitem(last=False)
                self._bytes -= oldest.nbytes
                self.stats.evicted += 1
            self._held[key] = chunk
            self._bytes += size

    def serve(self, purpose: str) -> KVStore:
        """This store for a purpose: what it keeps in memory from another one is forgotten."""
        if self._purpose not in (None, purpose):
            self.forget()
        self._purpose = purpose
        return self

    def forget(self) -> None:
        """Empty the tier in memory, so that the next chunks come from disk or have to be computed."""
        with self._lock:
            self._held.clear()
            self._bytes = 0
        if self.disk is not None:
            self.disk.cool()

    def refuse(self, path: Path, fault: Damaged) -> None:
        """Count, report and forget an entry that must not be used."""
        assert self.disk is not None
        self.disk.refuse(path, fault)
        self.count(**{"foreign" if fault.foreign else "damaged": 1})

    def count(self, **added: float) -> None:
        with self._lock:
            for name, value in added.items():
                setattr(self.stats, name, getattr(self.stats, name) + value)


def check_limit(name: str, value: Any, unit: str, none: bool = False) -> None:
    """Refuse a limit that is no whole number of at least 0, or None where that is allowed.

    Raises:
        ValueError: names it and its value.
    """
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{name}={value!r}: a limit is 0 {unit} or more, an int" + (", or None for none" if none else "")
        )


def _listed(ids: Sequence[int] | Tensor) -> list[int]:
    """Token ids as a list.

    Raises:
        ValueError: something that is no integer among them.
    """
    listed = ids.reshape(-1).tolist() if isinstance(ids, Tensor) else list(ids)
    for token in listed:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(f"ids hold {token!r}: token ids are integers")
    return [int(token) for token in listed]


def _nbytes(layer: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in layer.values())


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU that holds no more memory than its own."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copied.copy_(tensor.detach())


_stores: weakref.WeakKeyDictionary[Any, dict[Any, KVStore]] = weakref.WeakKeyDictionary()


def store_of(
    model: Any, name: str, memory_mb: int = MEMORY_BYTES >> 20, disk: bool = False, disk_mb: int | None = DISK_MB
) -> KVStore:
    """The store of a model for a purpose `name`, made when first asked for: one per purpose and settings.

    Where the model's weights or number type have changed since, a new one takes its place.

    Args:
        memory_mb, disk_mb: limits in MiB.
        disk: with a tier on disk, in `KVCOMPRESS_STORE` or the user's cache folder.
    """
    check_limit("memory_mb", memory_mb, "MiB")
    check_limit("disk_mb", disk_mb, "MiB", none=True)
    folder = str(default_folder()) if disk else None
    settings = (name, memory_mb, folder, disk_mb)
    stores = _stores.setdefault(model, {})
    if settings not in stores or not stores[settings].serves(model):
        limit = None if disk_mb is None else disk_mb << 20
        stores[settings] = KVStore(model, memory_mb << 20, folder, limit)
    return stores[settings]


def default_folder() -> Path:
    """`KVCOMPRESS_STORE`, else a folder beside the converted models."""
    return Path(os.environ.get("KVCOMPRESS_STORE") or cache_dir() / "kv").expanduser()
