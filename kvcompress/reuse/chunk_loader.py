"""Chunk loader: chunks prefilled alone, stored before rotation, loaded layer by layer at their new positions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import LayerCall, hand_over
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore
from kvcompress.method.parts import PromptRunner
from kvcompress.models import compat
from kvcompress.reuse.kv_store import ChunkKV

Tensor = torch.Tensor

AHEAD = 2  # layers that are loaded before they are needed


def precompute(session: PromptRunner, segments: Sequence[Tensor], disk: bool = True) -> tuple[list[ChunkKV], int]:
    """The chunks of a prompt from the session's store, those that it lacks prefilled and put into it.

    The first segment is prefilled as it is, every other one behind the token that begins a text, where the model has
    one: a chunk's own first token would otherwise get the attention that falls to the first token of any text.

    Args:
        segments: ids `[1, n]` or `[n]` of all segments but the question.
        disk: chunks may be read from disk later on, where they can turn out damaged.

    Returns:
        the chunks, and how many of them were prefilled now.

    Raises:
        ValueError: a segment of several rows, or an empty one, before any is prefilled.
    """
    if rows := next((segment.shape[0] for segment in segments if segment.dim() > 1 and segment.shape[0] > 1), 0):
        raise ValueError(f"chunks are precomputed for one prompt at a time, not for {rows} rows: do so one by one")
    if any(segment.numel() == 0 for segment in segments):
        raise ValueError("an empty chunk has no keys and values: leave it out")
    first, store, computed = compat.first_token(session.model), session.store, 0
    chunks: list[ChunkKV] = []
    for number, segment in enumerate(segments):
        ids = segment.reshape(-1).cpu()
        lead = [] if number == 0 or first is None else [first]
        chunk = store.get(ids, lead, disk=disk)
        if chunk is None:
            chunk, computed = store.put(ids, *chunk_rows(session, ids, lead), lead), computed + 1
        chunks.append(chunk)
    return chunks, computed


@torch.no_grad()
def chunk_rows(session: PromptRunner, ids: Tensor, lead: Sequence[int] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Keys before rotation and values `[1, H_kv, n, D]` per layer of a text of its own: `ids [n]` after `lead`."""
    cache, before = session.new_cache(exact=True), session.cache
    disable_windows(cache)
    text = torch.cat([torch.tensor(list(lead), dtype=torch.long), ids.reshape(-1).cpu()])
    try:
        session.cache = cache
        session.forward("append", text[None])  # nothing is evicted
    finally:
        session.cache = before
    keys, values, at = [], [], torch.arange(len(lead), len(text))
    for layer in cache.layers:
        assert isinstance(layer, CompressedLayer)
        k, v = layer.keys_values()
        rotation = session.reuse_rotations[layer.index]
        keys.append(rotation.unrotate(k[:, :, len(lead) :], at))
        values.append(v[:, :, len(lead) :])
    return keys, values


class UnwindowedLayer(CompressedLayer):
    """Stands in for a sliding layer while a prompt is made: holds all of its tokens, and masks by the window."""

    temporary = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        forward = self.context().forward
        assert forward is not None
        hand_over(kwargs, LayerCall(self, forward))
        if forward.fusion is not None:
            key_states, value_states = forward.fusion.fuse(self.index, key_states, value_states)
        positions = forward.on("positions", key_states.device)[:, None]
        counts = forward.added[:, None].expand(-1, key_states.shape[1])
        self.store = DenseStore({"keys": key_states, "values": value_states, "positions": positions}, counts)
        self.seen, self.current_kv = key_states.shape[2], (key_states, value_states)
        return self.current_kv

    def keys_values(self) -> tuple[Tensor, Tensor]:
        return self.held().get("keys"), self.held().get("values")


def disable_windows(cache: CompressedCache) -> None:
    """Let an empty cache's sliding layers hold all tokens, until `restore_windows`."""
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CompressedLayer):
            cache.replace_layer(index, UnwindowedLayer(cache, index))


def restore_windows(cache: CompressedCache, index: int, sliding: Any) -> None:
    """Put transformers' empty layer `sliding` in the place of one that held all, with what it would hold of it."""
    held = cache.layers[index]
    if isinstance(held, UnwindowedLayer):
        sliding.update(*held.keys_values())
        cache.replace_layer(index, sliding)


class ChunkLoader:
    """The keys and values of chunks laid one after the other from position 0, layer by layer, loaded ahead.

    A thread reads and rotates the next layers while this one is computed. Use as a context manager.

    Attributes:
        bytes_loaded: of keys and values read so far; `load_s` seconds it took to read and rotate them, of which the
            forward had to wait `wait_s`.
    """

    def __init__(self, session: PromptRunner, chunks: Sequence[ChunkKV], first: int, room: int):
        """Args:
        first: layers before it are not reused.
        room: tokens after the chunks that the tensors have room for.
        """
        self.length = sum(len(chunk) for chunk in chunks)
        self.bytes_loaded, self.load_s, self.wait_s = 0, 0.0, 0.0
        self._chunks, self._rotations, self._room = chunks, session.reuse_rotations, room
        self._dtype = session.model.dtype
        found = [next(layer.parameters()).device for layer in compat.decoder_layers(session.model)]
        self._devices = [torch.device("cpu") if device.type == "meta" else device for device in found]  # kept off it
        self._tables: dict[Any, tuple[Tensor, Tensor] | None] = {}
        self._streams: dict[torch.device, Any] = {}
        self._next = first
        self._coming: list[Future[Any]] = []
        self._loader = ThreadPoolExecutor(1)

    def __enter__(self) -> ChunkLoader:
        self._go_ahead()
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)

    def _go_ahead(self) -> None:
        while len(self._coming) < AHEAD and self._next < len(self._devices):
            self._coming.append(self._loader.submit(self._load, self._next))
            self._next += 1

    def take(self) -> tuple[Tensor, Tensor]:
        """The next layer's keys, rotated, and values, `[1, H_kv, length + room, D]`; what is in the room means nothing."""
        start = time.perf_counter()
        keys, values, event = self._coming.pop(0).result()
        self._go_ahead()
        if event is not None:  # loaded on a stream of its own
            current = torch.cuda.current_stream(keys.device)
            event.wait(current)
            keys.record_stream(current)
            values.record_stream(current)
        self.wait_s += time.perf_counter() - start
        return keys, values

    @torch.no_grad()
    def _load(self, index: int) -> tuple[Tensor, Tensor, Any]:
        start, device = time.perf_counter(), self._devices[index]
        if device.type != "cuda":
            return *self._laid_out(index, device, start), None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            keys, values = self._laid_out(index, device, start)
            return keys, values, stream.record_event()

    def _laid_out(self, index: int, device: torch.device, start: float) -> tuple[Tensor, Tensor]:
        parts = [chunk.layer(index) for chunk in self._chunks]
        self.bytes_loaded += sum(k.nbytes + v.nbytes for k, v in parts)
        laid: list[Tensor] = []
        for side in zip(*parts, strict=True):
            whole = torch.cat(side, dim=2).to(device, self._dtype)
            if not laid:  # keys
                whole = self._rotations[index].rotate_by(whole, self._table(index, device))
            room = whole.new_empty(1, whole.shape[1], self.length + self._room, whole.shape[3])
            room[:, :, : self.length] = whole
            laid.append(room)
        self.load_s += time.perf_counter() - start
        return laid[0], laid[1]

    def _table(self, index: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        rotation = self._rotations[index]
        key = id(rotation), device
        if key not in self._tables:
            self._tables[key] = rotation.table(torch.arange(self.length, device=device))
        return self._tables[key]
