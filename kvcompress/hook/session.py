"""`compress(model, method)`: run prompts and decoding through a compressed cache, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.retention_map import retention_map
from kvcompress.cache.traffic import per_token, skipped
from kvcompress.hook.generation import Generation, check_sampling, generate
from kvcompress.hook.stepper import Stepping
from kvcompress.method import Method
from kvcompress.method.parts import Prefill, Prefilled
from kvcompress.models import compat
from kvcompress.reuse import chunk_loader, selective_recompute
from kvcompress.reuse.kv_store import KVStore, store_of

if TYPE_CHECKING:
    from kvcompress.hook.shared_prefill import SharedPrefill

Tensor = torch.Tensor


class Session(Stepping):
    """One method attached to one model. Use it as a context manager; everything is undone on exit.

    Inside, `model(...)` and `model.generate(...)` work as usual on a compressed cache, and `prefill`, `append` and
    `generate` say explicitly which phase a forward is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        kernel: str = "auto",
        tokenizer: Any = None,
        shared: SharedPrefill | None = None,
        store: KVStore | None = None,
        decode: str = "eager",
    ):
        super().__init__(model, method, kernel, tokenizer, decode)
        self._store: KVStore | None = None
        if store is not None:
            self.store = store
        self.prefill_seconds: float | None = None  # unknown where the model was called, not the session
        self.shared = shared

    @property
    def store(self) -> KVStore:
        """Chunks that a prefill reuses: by default in memory, as long as the model lives. Another may be set.

        Raises:
            ValueError: when set, if it holds chunks of another model.
        """
        if self._store is None:
            self._store = store_of(self.model, "chunks")
        return self._store

    @store.setter
    def store(self, store: KVStore) -> None:
        store.check(self.model)
        self._store = store

    # ------------------------------------------------------------------ explicit phases

    @torch.no_grad()
    def prefill(
        self,
        ids: Tensor | Sequence[Tensor],
        attention_mask: Tensor | None = None,
        cache: CompressedCache | None = None,
        how: Prefill | None = None,
    ) -> Prefilled:
        """Run a prompt and compress when it ends.

        Args:
            ids: LongTensor `[B, n]`, or segments `[B, n_i]` that are concatenated. A prefill that reuses chunks takes
                the first of several for the prefix and the last for the question.
            attention_mask: `[B, n]` of these ids (or `[B, seen + n]`); zeros are padding.
            cache: continue this sequence with a later turn; by default a new sequence starts.
            how: prefill this prompt in another way than the method does.

        Returns:
            the cache, logits `[B, V]` of the last position, and real tokens seen `[B]`.
        """
        self._must_be_open()
        segments = [ids] if isinstance(ids, Tensor) else list(ids)
        if not segments or sum(s.shape[-1] for s in segments) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        cache = cache if cache is not None else self.new_cache()
        segments, mask = self._with_pending(cache, [s[None] if s.dim() == 1 else s for s in segments], attention_mask)
        mask = self._new_columns(cache, torch.cat(segments, dim=1), mask)
        if cache.real is None and mask is not None and not bool(mask.bool().any(1).all()):
            raise ValueError("a row of the batch has no real token: its attention_mask is all zero")
        self.cache = cache
        self.compressor.stats.reset()
        self._fixed = self._eager_for = None
        start = time.perf_counter()
        if how is None and self.shared is not None and self.shared.serves(cache, segments, mask):
            prefilled = self.shared.hand_over(self, cache)
        else:
            prefilled = (how or self.compressor.parts.prefill).run(self, segments, mask)
        self._synchronise()
        self.prefill_seconds = time.perf_counter() - start
        self.compressor.end_of_prompt(prefilled.cache)
        return prefilled

    @torch.no_grad()
    def precompute(self, segments: Sequence[Tensor]) -> int:
        """Have the chunks of a prompt `[prefix or first chunk, chunk, …, question]` in the store before it is run.

        Returns:
            how many were not there yet and were prefilled now; 0 where the prefill does not reuse chunks.
        """
        self._must_be_open()
        if not self.compressor.parts.prefill.needs_segments:
            return 0
        return chunk_loader.precompute(self, list(segments)[:-1])[1]

    def forward_prompt(self, ids: Tensor, mask: Tensor | None, chunk: int | None = None) -> Prefilled:
        """Run `ids [B, n]` as prompt on the current cache, whole or in chunks that are each compressed."""
        cache = self._current()
        mask = self._new_columns(cache, ids, mask)
        limit = compat.max_positions(self.model)
        if chunk is None and self.facts.compact_rope is not None and limit is not None and ids.shape[1] > limit:
            chunk = self._streaming_chunk(limit)
        logits = None
        for start in range(0, ids.shape[1], chunk or ids.shape[1]):
            stop = start + (chunk or ids.shape[1])
            part = None if mask is None else mask[:, start:stop]
            logits = self._forward("prompt", ids[:, start:stop], part)
        assert logits is not None and cache.real is not None
        return Prefilled(cache, logits, cache.real.clone())

    def forward_blended(self, segments: list[Tensor], mask: Tensor | None, plan: selective_recompute.Plan) -> Prefilled:
        """Run a prompt whose segments but the last are reused as far as `plan` says."""
        return selective_recompute.prefill(self, segments, mask, plan)

    def _streaming_chunk(self, limit: int) -> int:
        """The largest chunk that fits the model's positions beside what is held, for compact positions."""
        budget = self.method.budget
        if isinstance(budget, float):
            raise ValueError(
                f"a prompt longer than the model's {limit} positions needs a budget in tokens (an int) with compact "
                f"positions; budget={budget} is a share"
            )
        if budget >= limit:
            raise ValueError(f"budget={budget} leaves no room for new tokens within the model's {limit} positions")
        return limit - budget

    @torch.no_grad()
    def append(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attend and store, never compress: a question asked of a compressed context.

        Args:
            ids: LongTensor `[B, n]`.
            attention_mask: `[B, n]` of these ids (or `[B, seen + n]`).

        Returns:
            logits `[B, V]` of the last position.
        """
        self._must_be_open()
        cache = self._current()
        if ids.shape[-1] == 0:
            raise ValueError("what to append is empty: give at least one token")
        segments, mask = self._with_pending(cache, [ids[None] if ids.dim() == 1 else ids], attention_mask)
        return self._forward("append", torch.cat(segments, dim=1), mask)

    @staticmethod
    def _with_pending(
        cache: CompressedCache, segments: list[Tensor], mask: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """New ids with the last token that generate() picked before them: it belongs to the sequence."""
        if cache.pending is None:
            return segments, mask
        new = sum(s.shape[1] for s in segments)
        if mask is not None and mask.dim() == 2 and mask.shape[1] == new:
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
        return [cache.pending.to(segments[0].device), *segments], mask

    @torch.no_grad()
    def generate(
        self,
        max_new_tokens: int,
        stop: Iterable[int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        watch: Callable[[], None] | None = None,
        min_new_tokens: int = 0,
        until: Callable[[list[int]], bool] | None = None,
    ) -> Generation:
        """Continue the current cache from its last logits; greedy at temperature 0.

        The last token picked for a row (its stop token, where it has one) is fed when the sequence goes on: by another
        generate(), append() or prefill(cache=session.cache).

        Args:
            max_new_tokens: at most this many tokens per row.
            stop: token ids, any of which ends a row and is not part of its tokens.
            temperature, top_p, top_k, seed: sampling.
            watch: called after every decode step, outside of what is timed.
            min_new_tokens: no stop token is picked before this many.
            until: asked with a row's tokens after each; True ends the row, as where a text holds a stop string.
        """
        self._must_be_open()
        check_sampling(max_new_tokens, temperature, top_p, top_k)
        cache = self._current()
        if cache.logits is None:
            raise ValueError(
                "nothing to continue: run the last tokens with session.prefill() or append(), which keep logits"
            )
        self.prepare(max_new_tokens)
        logits = cache.logits if cache.pending is None else self.step(cache.pending)
        output = generate(
            self.step, logits, max_new_tokens, stop, temperature, top_p, top_k, seed, watch, min_new_tokens, until
        )
        cache.keep_pending(output.pending)
        return output

    @torch.no_grad()
    def follow(self, ids: Tensor, block: int = 64) -> Iterator[Tensor]:
        """Feed tokens that are known as if each had just been decoded; yields the logits that predicted them.

        One forward per token where the method acts in decode. Elsewhere a forward takes up to `block` tokens, which is
        the same but for rounding. As after generate(), the last token has been picked and not been fed.

        Args:
            ids: LongTensor `[B, n]`, all of them real tokens.

        Yields:
            logits `[B, m, V]`, n in all: the first from what the cache ended with, the others after each token.
        """
        self._must_be_open()
        cache, ids = self._current(), ids[None] if ids.dim() == 1 else ids
        if ids.shape[1] == 0:
            raise ValueError("nothing to follow: give at least one token")
        if cache.logits is None:
            raise ValueError("nothing predicts the first token: run the tokens before it with session.prefill()")
        yield (cache.logits if cache.pending is None else self.step(cache.pending))[:, None]
        phase, length = ("decode", 1) if self.compressor.acts_in_decode else ("append", block)
        for start in range(0, ids.shape[1] - 1, length):
            part = ids[:, start : min(start + length, ids.shape[1] - 1)]
            yield self._forward(phase, part, None, every=True)
        cache.keep_pending(ids[:, -1:])

    # ------------------------------------------------------------------ reporting

    def report(self, row: int | None = None, kept_map: bool = False) -> dict[str, Any]:
        """What the method did to the current cache, and what is held now. Keys as in a record's `kv.*`.

        Args:
            row: of a batch, as if it were alone: its bytes are those of a copy without padding. None: all rows.
            kept_map: also where the tokens lie that the first row holds (`kvcompress.cache.retention_map`).
        """
        cache = self._current() if row is None else self._current().row(row)
        held, kept = cache.nbytes(), cache.kept_tokens()
        evicted = sum(layer.evicted for layer in cache.full_layers)
        batch = max(1, kept.shape[1])
        if kept.numel() == 0 and cache.real is not None:  # every layer slides: what was seen is all there is to say
            kept = cache.real.view(1, -1, 1)
        # sliding-window layers hold the same with and without compression: part of both sides of the ratio
        valid, full = held["valid"] + held["other_layers"], held["full"] + held["other_layers"]
        return {
            "kv": {
                "bytes_held": valid,
                "bytes_allocated": held["allocated"] + held["other_allocated"],
                "bytes_full": full,
                "ratio": valid / full if full else 1.0,
                "bytes_host": held["host"],
                "bytes_summaries": held["summaries"],
                "bytes_tables": held["tables"],
                "bytes_scores": held["scores"],
                "kept_tokens_mean": float(kept.double().mean()),
                "kept_tokens_max": max(cache.sequence.kept_max, int(kept.max())),
                **per_token(cache, batch),
                "storage": "real",
            },
            "nbytes": held,
            "active": evicted > 0
            or any(layer.encoding.is_encoded or skipped(layer) for layer in cache.full_layers)
            or bool(cache.sequence.reuse and cache.sequence.reuse["tokens_reused"] > 0),
            "evicted": evicted,
            "clamped": cache.sequence.clamped,
            "notes": [*self.notes, *self._reuse_notes(cache)],
            "kept_per_layer": kept.double().mean(dim=(1, 2)).tolist(),
            "kernel": "+".join(sorted(self.compressor.stats.kernels)),
            "step": dict(self.stepped),
            "time": {"prefill_s": self.prefill_seconds, "compress_s": self.compressor.stats.seconds},
            "moments": list(cache.sequence.moments),
            **({} if cache.sequence.reuse is None else {"reuse": dict(cache.sequence.reuse)}),
            **(retention_map(cache) if kept_map else {}),
        }

    def _reuse_notes(self, cache: CompressedCache) -> list[str]:
        prefill = self.compressor.parts.prefill
        if not prefill.needs_segments or cache.sequence.reuse is not None:
            return []
        return [f"prefill={prefill.name} had nothing to reuse: a prompt of one segment is all question"]


def compress(
    model: PreTrainedModel,
    method: Method,
    kernel: str = "auto",
    tokenizer: Any = None,
    shared: SharedPrefill | None = None,
    store: KVStore | None = None,
    decode: str = "eager",
) -> Session:
    """Compress the KV cache of `model` with `method` inside a `with` block.

    Args:
        kernel: "auto" takes SDPA wherever no probabilities are wanted; "blockwise" takes the kernel that also yields
            attention mass everywhere, so that methods that need it and others can be compared on one kernel.
        tokenizer: for methods that write prompts of their own (KVzip) and schedules that speak of tokens; by default the
            one `load` gave with the model.
        shared: a full prefill made before (`prefill_once`): a prompt of the same ids starts from it.
        store: of chunks that a prefill reuses; by default one in memory that lives as long as the model.
        decode: how steps of a session's `generate` and `step` run. "eager" through the model as it is; with fixed shapes
            "static" (the model's own Python), "compiled" (by torch.inductor, when first needed) or "graph" (a CUDA
            graph), which are refused where they do not go; "auto" takes the best that goes and says so in the report.

    Example:
        >>> with compress(model, SnapKV(budget=0.25)) as session:
        ...     output = model.generate(**inputs, max_new_tokens=64)
        ...     session.cache.nbytes()

    Raises:
        ValueError: for a model or method that cannot work, naming it, before any work.
    """
    return Session(model, method, kernel, tokenizer, shared, store, decode)
