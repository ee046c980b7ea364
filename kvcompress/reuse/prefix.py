"""Exact prefix reuse: the longest run of whole segments that was prefilled before, behind the same ids, is loaded.

What is loaded is what a full prefill would compute again, so nothing is lost; segments in another order share nothing
behind the first that differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.method.parts import Prefill, Prefilled, PromptRunner
from kvcompress.models import compat
from kvcompress.reuse.kv_store import ChunkKV, Damaged, KVStore, store_of

Tensor = torch.Tensor

FORM = "rotated"  # as they lie in the cache: they come back to the same positions


@dataclass(frozen=True)
class PrefixReuse(Prefill):
    """Segments seen before behind the same ids are loaded, the others computed and stored; the last one is computed.

    Stored in `session.store`. A prompt without segments, a later turn of a conversation and a batch are prefilled
    whole. Equal to a full prefill but for rounding.
    """

    name: ClassVar[str] = "prefix"
    all_queries: ClassVar[bool] = False

    def run(self, session, segments, mask):
        ids = torch.cat(segments, dim=1)
        cache = session.cache
        padded = mask is not None and not bool(mask.bool().all())
        if len(segments) < 2 or ids.shape[0] > 1 or padded or cache.get_seq_length():
            return session.forward_prompt(ids, mask)
        check_segments(session, segments)
        for _ in range(len(segments)):  # each time an entry turns out damaged there is one fewer to load
            try:
                return _run(session, segments)
            except Damaged:
                session.cache = session.new_cache()
        return session.forward_prompt(ids, mask)  # others go on damaging what is there

    def open_store(self, model):
        return store_of(model, "chunks")


def check_segments(session: PromptRunner, segments: Sequence[Tensor]) -> None:
    """Refuse what cannot be reused, before any work.

    Raises:
        ValueError: an empty segment, a prompt longer than the model's positions, layers that hold a window only, or a
            store that holds codes.
    """
    for number, segment in enumerate(segments):
        if segment.shape[1] == 0:
            raise ValueError(f"segment {number + 1} of {len(segments)} of the prompt is empty: leave it out")
    limit, total = compat.max_positions(session.model), sum(segment.shape[1] for segment in segments)
    if limit is not None and total > limit:
        raise ValueError(
            f"the prompt reaches {total} tokens, but {session.model.config.model_type!r} has {limit} positions: shorten or "
            f"leave out segments (the longest has {max(segment.shape[1] for segment in segments)})"
        )
    compat.check_reusable(session.model, sliding=False)
    if session.store.held_as.name != "plain":
        raise ValueError(
            f"this store holds chunks as {session.store.held_as.name}, and prefix reuse is exact: give the session a store "
            "without a codec"
        )


def _run(session: PromptRunner, segments: Sequence[Tensor]) -> Prefilled:
    store = session.store
    before, spent = store.stats.copy(), 0.0
    sizes = [segment.shape[1] for segment in segments]
    whole = torch.cat(list(segments), dim=1)
    # scorers look at the last queries, which have to be made in one forward: as many segments as that takes
    window = session.observed_queries
    tail = next((n for n in range(1, len(sizes)) if sum(sizes[-n:]) >= window), len(sizes))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - tail)]
    starts = [0, *ends][: len(ends)]
    spans = list(zip(starts, ends, strict=True))

    chunks: list[ChunkKV] = []
    for start, end in spans:
        found = store.get(whole[0, start:end], lead=whole[0, :start], form=FORM)
        if found is None:
            break
        chunks.append(found)
    reused = ends[len(chunks) - 1] if chunks else 0
    loaded, missing = sum(chunk.nbytes for chunk in chunks), spans[len(chunks) :]
    cache = session.cache
    direct = cache.spec.codec.name == "plain" and cache.spec.compact_rope is None
    if missing:
        scratch = cache if direct else session.new_cache(exact=True)
        session.cache = scratch
        place(session, whole[:, :reused], chunks)
        session.forward("append", whole[:, reused : missing[-1][1]])
        at = time.perf_counter()
        chunks += [_keep(store, scratch, whole, start, end) for start, end in missing]
        spent = time.perf_counter() - at
        session.cache = cache
    if not missing or not direct:
        place(session, whole[:, : ends[-1] if ends else 0], chunks)
    prefilled = session.forward_prompt(whole[:, ends[-1] if ends else 0 :], None)
    did = store.stats.since(before)
    computed = whole.shape[1] - reused
    cache.note_reuse(
        {
            "context_tokens": sum(sizes[:-1]),
            "question_tokens": sizes[-1],
            "tokens_reused": reused,
            "tokens_recomputed": sum(sizes[:-1]) - reused,
            "recompute_share": computed / whole.shape[1],
            "chunks": len(spans),
            "chunks_computed": len(missing),
            "bytes_loaded": loaded,
            "bytes_from_disk": int(did["bytes_from_disk"]),
            "load_s": did["load_s"],
            "precompute_s": 0.0,
            "store_s": spent,
        }
    )
    return prefilled


def _keep(store: KVStore, cache: CompressedCache, whole: Tensor, start: int, end: int) -> ChunkKV:
    """Store the rows of a part of the prompt."""
    pairs = [cache.keys_values(index) for index in range(len(cache.layers))]
    if cache.spec.latents:  # what a layer is given: latents, and the rotated key that attention finds behind them
        pairs = [(latents, keys[..., latents.shape[3] :]) for keys, latents in pairs]
    keys, values = ([pair[side][:, :, start:end] for pair in pairs] for side in (0, 1))
    return store.put(whole[0, start:end], keys, values, lead=whole[0, :start], form=FORM)


def place(session: PromptRunner, ids: Tensor, chunks: Sequence[ChunkKV]) -> None:
    """Put the rotated keys and values of `ids [1, n]` at the end of the session's cache, as if they had been appended.

    Raises:
        Damaged: a chunk is not what was stored; the cache is of no use any more.
    """

    def rows(layer: int) -> tuple[Tensor, Tensor]:
        pairs = [chunk.layer(layer) for chunk in chunks]
        return torch.cat([keys for keys, _ in pairs], dim=2), torch.cat([values for _, values in pairs], dim=2)

    if chunks:
        session.load(ids, rows)
