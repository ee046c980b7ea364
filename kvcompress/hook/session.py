"""Session: prompts and decoding through a compressed cache, phase by phase; `compress(model, method)` opens one."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Fusing
from kvcompress.hook.auxiliary import AuxiliaryForwards
from kvcompress.hook.cache_factory import CacheFactory
from kvcompress.hook.compatibility import check_codec, check_tokenizer
from kvcompress.hook.compression import Compressor
from kvcompress.hook.generation import Generation, Guide, check_sampling, generate
from kvcompress.hook.model_facts import ModelFacts
from kvcompress.hook.model_hooks import ModelHooks
from kvcompress.hook.planner import ForwardPlanner
from kvcompress.hook.recording import PrefillRecording
from kvcompress.hook.runner import ForwardRunner, new_columns, with_pending
from kvcompress.hook.scoring import evicts, needs_of
from kvcompress.hook.sequence_report import SequenceReport, nan_notes
from kvcompress.hook.session_chunks import SessionChunks
from kvcompress.hook.sources import ChunkStore, PrefillSource
from kvcompress.hook.stepper import DecodeStepper, synchronize
from kvcompress.method import Method
from kvcompress.method.parts import Prefill, Prefilled
from kvcompress.models import compat, projections, tokenizers

Tensor = torch.Tensor


class Session:
    """One method attached to one model. Use it as a context manager; everything is undone on exit.

    Inside, `model(...)` and `model.generate(...)` work as usual on a compressed cache, and `prefill`, `append` and
    `generate` say explicitly which phase a forward is.

    Attributes:
        hooks, runner, planner, caches, stepper: what a forward goes through, in modules of these names.
        compressor: the runtime of the method.
        notes: warnings about the method on this model.
        prefill_seconds: of the last prompt; None where the model was called, not the session.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        kernel: str = "auto",
        tokenizer: Any = None,
        shared: PrefillSource | None = None,
        store: ChunkStore | None = None,
        decode: str = "eager",
        *,
        recording: PrefillRecording | None = None,
        step: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        attach: bool = True,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ):
        """As `compress`, and for those who drive sessions:

        Args:
            recording: is told of a full prefill's attention, for other methods; needs a method that drops nothing.
            step: takes a decode step in place of the session's own stepper, `(ids [B, 1], real [B]) -> logits [B, V]`.
            attach: False hooks the model for each forward apart, so that several sessions may be open on it.
            on_logits: called by `generate` with a token's number in its answer and the logits `[B, V]` it is picked from.

        Raises:
            ValueError: for a model or method that cannot work, by name, before any work.
        """
        compat.check_model(model)
        projections.check_latent_attention(model)
        if not isinstance(method, Method):
            raise ValueError(f"compress() needs a method such as SnapKV(budget=0.25), got {type(method).__name__}")
        check_codec(model, method.parts().codec)  # before it is bound, which may take a measurement
        method = method.ready(model)
        self.tokenizer = tokenizers.tokenizer_of(model) if tokenizer is None else tokenizer
        if self.tokenizer is not None:
            method = method.for_tokenizer(self.tokenizer)
        self.model, self.method = model, method
        types = compat.layer_types(model)
        self.full_layers = [i for i, kind in enumerate(types) if kind == "full_attention"]
        if not self.full_layers and method.limited:
            raise ValueError(
                f"{model.config.model_type!r} has no full-attention layer to compress: all {len(types)} use a window"
            )
        compact = method.compact_positions and evicts(method, method.parts())
        facts = ModelFacts(model, needs_of(method), compact)
        self.compressor = Compressor(method, len(self.full_layers), kernel, facts, recording)
        check_tokenizer(self.compressor, self.tokenizer)
        self.notes = method.notes(model) if self.compressor.limited else []
        self.runner = ForwardRunner(model)
        auxiliary = AuxiliaryForwards(model, self.compressor, self.tokenizer, self.runner)
        self.planner = ForwardPlanner(model, self.compressor, auxiliary)
        self.caches = CacheFactory(model, self.compressor, facts)
        self.hooks = ModelHooks(model, self.compressor, self.runner, self.planner, self.caches)
        self.stepper = DecodeStepper(model, self.compressor, self.runner, self.planner, self.caches, decode)
        self.shared = shared
        self.prefill_seconds: float | None = None
        self._reporter = SequenceReport(self.compressor, self.notes)
        self._take_step = step or self.stepper.step
        self._attach, self._on_logits, self._open = attach, on_logits, False
        self._chunks = SessionChunks(model, self.compressor.parts.prefill, store)

    def __enter__(self) -> Self:
        for note in self.notes:
            warnings.warn(note, stacklevel=2)
        if self._attach:
            self.hooks.attach()
        self._open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._open = False
        self.stepper.reset()  # a closed session holds no buffers but its cache's
        self.hooks.detach()

    def _must_be_open(self) -> None:
        if not self._open:
            raise ValueError("the session is closed: use it inside `with compress(model, method) as session`")

    # ------------------------------------------------------------------ what it holds

    @property
    def cache(self) -> CompressedCache | None:
        """The current sequence: the cache of the last forward, or one that was set to go on with."""
        return self.runner.cache

    @cache.setter
    def cache(self, cache: CompressedCache | None) -> None:
        self.runner.cache = cache

    def new_cache(self, headroom: bool = True, exact: bool = False) -> CompressedCache:
        """An empty cache for this model and method. Arguments as of `CacheFactory.new`."""
        return self.caches.new(headroom, exact)

    @property
    def store(self) -> Any:
        """Chunks that a prefill reuses: by default in memory, as long as the model lives. Another may be set.

        None where the method's prefill reuses none.

        Raises:
            ValueError: when set, if it holds chunks of another model.
        """
        return self._chunks.store

    @store.setter
    def store(self, store: ChunkStore) -> None:
        self._chunks.give(store)

    @property
    def reuse_rotations(self) -> list[compat.Rotation]:
        """RoPE per layer, by which reused keys are turned to their place; empty where the method reuses none."""
        return self.caches.reuse_rotations

    @property
    def observed_queries(self) -> int:
        """How many of the last queries of a prompt the method looks at: they are made in one forward."""
        return self.compressor.needs.window if self.compressor.limited else 0

    @property
    def decode(self) -> str:
        """How decode steps were asked to run, as of `compress`."""
        return self.stepper.decode

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
        self._chunks.check()
        segments = [ids] if isinstance(ids, Tensor) else list(ids)
        if not segments or sum(s.shape[-1] for s in segments) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        cache = cache if cache is not None else self.new_cache()
        segments, mask = with_pending(cache, [s[None] if s.dim() == 1 else s for s in segments], attention_mask)
        mask = new_columns(cache, torch.cat(segments, dim=1), mask)
        if cache.real is None and mask is not None and not bool(mask.bool().any(1).all()):
            raise ValueError("a row of the batch has no real token: its attention_mask is all zero")
        self.cache = cache
        self.compressor.stats.reset()
        self.stepper.reset()
        if how is not None:
            self._chunks.open_for(how)
        start = time.perf_counter()
        if how is None and self.shared is not None and self.shared.serves(cache, segments, mask):
            prefilled = self.shared.hand_over(self.compressor, cache)
        else:
            prefilled = (how or self.compressor.parts.prefill).run(self, segments, mask)
        synchronize(self.model)
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
        self._chunks.check()
        return self.compressor.parts.prefill.precompute(self, list(segments))

    def forward_prompt(self, ids: Tensor, mask: Tensor | None, chunk: int | None = None) -> Prefilled:
        """Run `ids [B, n]` as prompt on the current cache, whole or in chunks that are each compressed."""
        cache = self.runner.current()
        mask = new_columns(cache, ids, mask)
        size = chunk or self.planner.chunk(cache, ids.shape[1])
        logits = None
        for start in range(0, ids.shape[1], size):
            stop = start + size
            part = None if mask is None else mask[:, start:stop]
            logits = self.forward("prompt", ids[:, start:stop], part)
        assert logits is not None and cache.real is not None
        return Prefilled(cache, logits, cache.real.clone())

    @torch.no_grad()
    def forward(
        self,
        phase: str,
        ids: Tensor,
        mask: Tensor | None = None,
        every: bool = False,
        recompute: Fusing | None = None,
    ) -> Tensor:
        """One forward of the current cache in a stated phase → logits; arguments as of `ForwardRunner.run`."""
        self.stepper.release_unusable(ids.shape[1])
        with self.hooks.attached():
            return self.runner.run(phase, ids, mask, every, recompute)

    @torch.no_grad()
    def load(self, ids: Tensor, rows: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Put keys and values that were computed before at the end of the current cache, as if they had been appended.

        Args:
            ids: LongTensor `[1, n]`.
            rows: keys, rotated, and values `[1, H_kv, n, D]` of a layer. What it raises leaves the cache of no use.

        Raises:
            ValueError: sliding layers, which hold a window only.
        """
        self.planner.load(self.runner.current(), ids, rows)

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
        cache = self.runner.current()
        if ids.shape[-1] == 0:
            raise ValueError("what to append is empty: give at least one token")
        segments, mask = with_pending(cache, [ids[None] if ids.dim() == 1 else ids], attention_mask)
        return self.forward("append", torch.cat(segments, dim=1), mask)

    # ------------------------------------------------------------------ decoding

    @torch.no_grad()
    def prepare(self, tokens: int) -> None:
        """Make room for `tokens` decode steps of the current cache and have its step ready, compiled if it is to be.

        generate() does so by itself, before anything is timed. Nothing to do for decode=eager. The longest that it took
        this session is in `report()["step"]["ready_s"]`: compiling, where it did.

        Raises:
            ValueError: what is held does not go with the `decode` that was asked for by name.
        """
        self._must_be_open()
        self.stepper.prepare(tokens)

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """One decode forward on the current cache: `ids [B, 1]` → logits `[B, V]`; rows not `real [B]` add nothing."""
        self._must_be_open()
        self.hooks.check_intact()
        return self._take_step(ids, real)

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
        guides: Sequence[Guide | None] = (),
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
            guides: one per row, or none at all: rules of thinking parts, `kvcompress.hook.generation.Guide`.
        """
        self._must_be_open()
        check_sampling(max_new_tokens, temperature, top_p, top_k)
        cache = self.runner.current()
        if cache.logits is None:
            raise ValueError(
                "nothing to continue: run the last tokens with session.prefill() or append(), which keep logits"
            )
        self.prepare(max_new_tokens)
        logits = cache.logits if cache.pending is None else self.step(cache.pending)
        output = generate(
            self.step,
            logits,
            max_new_tokens,
            stop,
            temperature,
            top_p,
            top_k,
            seed,
            watch,
            min_new_tokens,
            until,
            self._on_logits,
            guides,
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
        cache, ids = self.runner.current(), ids[None] if ids.dim() == 1 else ids
        if ids.shape[1] == 0:
            raise ValueError("nothing to follow: give at least one token")
        if cache.logits is None:
            raise ValueError("nothing predicts the first token: run the tokens before it with session.prefill()")
        yield (cache.logits if cache.pending is None else self.step(cache.pending))[:, None]
        phase, length = ("decode", 1) if self.compressor.acts_in_decode else ("append", block)
        for start in range(0, ids.shape[1] - 1, length):
            part = ids[:, start : min(start + length, ids.shape[1] - 1)]
            yield self.forward(phase, part, None, every=True)
        cache.keep_pending(ids[:, -1:])

    # ------------------------------------------------------------------ reporting

    def report(self, row: int | None = None, kept_map: bool = False) -> dict[str, Any]:
        """What the method did to the current cache, and what is held now. Keys as in a record's `kv.*`.

        Args:
            row: of a batch, as if it were alone: its bytes are those of a copy without padding. None: all rows.
            kept_map: also where the tokens lie that the first row holds (`kvcompress.cache.retention_map`).
        """
        whole = self.runner.current()
        cache = whole if row is None else whole.row(row)
        report = self._reporter.build(cache, self.stepper.how, self.prefill_seconds, kept_map)
        if whole.logits is not None:
            report["notes"] += nan_notes(whole.logits, row)
        return report


def compress(
    model: PreTrainedModel,
    method: Method,
    kernel: str = "auto",
    tokenizer: Any = None,
    shared: PrefillSource | None = None,
    store: ChunkStore | None = None,
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
    session = Session(model, method, kernel, tokenizer, shared, store, decode)
    asked = sys._getframe(1).f_globals.get("__name__", "")
    if keeps_all(method) and not asked.startswith("kvcompress."):  # sweeps say it in their own way
        name = type(method).__name__
        text = f"{name}(budget=1.0), the default, keeps every token: give a share, {name}(budget=0.25), or a number of tokens"
        warnings.warn(text, stacklevel=2)
    return session


def keeps_all(method: Method) -> bool:
    """True for a method that evicts, at the budget that evicts nothing."""
    return method.budget_kind == "held_tokens" and not method.limited and method.parts().scorer is not None
