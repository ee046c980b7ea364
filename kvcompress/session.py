"""`compress(model, method)`: attach to a model, run prompts and decoding through a compressed cache, detach."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress import attention  # noqa: F401  (registers the attention function)
from kvcompress import budget as budgets
from kvcompress import compat
from kvcompress.cache import CompressedCache, CompressedLayer, Forward
from kvcompress.compression import Compressor
from kvcompress.generate import Generation, generate
from kvcompress.method import Method

Tensor = torch.Tensor
PHASES = ("prompt", "append", "decode")


@dataclass(frozen=True)
class Prefilled:
    """What a prompt leaves behind: the cache, logits `[B, V]` of its last position, real tokens seen `[B]`."""

    cache: CompressedCache
    logits: Tensor
    seen: Tensor


class Session:
    """One method attached to one model. Use it as a context manager; everything is undone on exit.

    Inside, `model(...)` and `model.generate(...)` work as usual on a compressed cache, and `prefill`, `append` and
    `generate` say explicitly which phase a forward is.
    """

    def __init__(self, model: PreTrainedModel, method: Method):
        """Raises:
        ValueError: for a model that cannot be supported, by name, before any work.
        """
        compat.check_model(model)
        if not isinstance(method, Method):
            raise ValueError(f"compress() needs a method such as SnapKV(budget=0.25), got {type(method).__name__}")
        self.model, self.method = model, method
        types = compat.layer_types(model)
        self.full_layers = [i for i, kind in enumerate(types) if kind == "full_attention"]
        if not self.full_layers and method.limited:
            raise ValueError(
                f"{model.config.model_type!r} has no full-attention layer to compress: all {len(types)} use a sliding window"
            )
        self.compressor = Compressor(method, len(self.full_layers))
        self.cache: CompressedCache | None = None
        self.prefill_seconds = 0.0
        self._logits: Tensor | None = None
        self._pending: Tensor | None = None  # [B, 1] picked by generate(), not fed yet
        self._phase: str | None = None
        self._real: Tensor | None = None
        self._outer: torch.nn.Module | None = None  # whose forward is running
        self._undo: list[Any] = []
        self._open = False

    # ------------------------------------------------------------------ attaching

    def __enter__(self) -> Session:
        if getattr(self.model, "_kvcompress_session", None) is not None:
            raise ValueError("this model is already being compressed by another session: leave its `with` block first")
        self._rotations = (
            compat.rotations(self.model) if self.method.compact_positions and self.compressor.limited else None
        )
        before = self.model.config._attn_implementation
        expected = None if compat.text_config(self.model).model_type in compat.VERIFIED else self._probe()
        try:
            self.model.__dict__["_kvcompress_session"] = self
            self._undo.append(lambda: self.model.__dict__.pop("_kvcompress_session", None))
            self._undo.append(lambda: self.model.set_attn_implementation(before))
            self.model.set_attn_implementation(compat.ATTENTION)
            if compat.text_config(self.model)._attn_implementation != compat.ATTENTION:
                raise ValueError(f"{self.model.config.model_type!r} does not let its attention implementation be set")
            # some heads run a decoder inside the base model, and some callers the base model: hook both, act once
            for module in {id(m): m for m in (self.model, compat.base_model(self.model))}.values():
                self._undo.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
                after = module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
                self._undo.append(after.remove)
            if hasattr(self.model, "generate"):
                self._undo.append(lambda: self.model.__dict__.pop("generate", None))
                stock = self.model.generate
                self.model.__dict__["generate"] = functools.wraps(stock)(functools.partial(self._model_generate, stock))
            self._open = True
            if expected is not None:
                self._check_probe(expected)
        except BaseException:
            self._detach()
            raise
        return self

    @torch.no_grad()
    def _probe(self, cache: Any = None) -> list[Tensor]:
        """Hidden states of a few tokens run in three steps, for an architecture that no test of ours covers."""
        base = compat.base_model(self.model)
        ids = torch.arange(1, 8, device=self.model.device)[None] % compat.text_config(self.model).vocab_size
        cache = compat.DynamicCache(config=compat.text_config(self.model)) if cache is None else cache
        return [base(input_ids=ids[:, a:b], cache=cache, use_cache=True)[0] for a, b in ((0, 4), (4, 5), (5, 7))]

    def _check_probe(self, expected: list[Tensor]) -> None:
        kind = self.model.config.model_type
        self._phase = "append"
        try:
            found = self._probe(self.new_cache())
        except Exception as error:
            raise ValueError(f"cannot compress {kind!r}: its attention does not work with ours ({error})") from error
        finally:
            self._phase = None
        self.cache = None
        scale = max(float(e.float().abs().max()) for e in expected)
        error = max(float((e.float() - f.float()).abs().max()) for e, f in zip(expected, found, strict=True)) / scale
        if not error < (1e-4 if expected[0].dtype == torch.float32 else 5e-2):
            if getattr(self.model.config, "is_decoder", None) is False:
                raise ValueError(
                    f"cannot compress {kind!r}: it is an encoder, not a causal decoder, so it has no KV cache"
                )
            raise ValueError(
                f"cannot compress {kind!r}: through our attention its output is off by {error:.1e} (relative)"
            )
        warnings.warn(f"{kind!r} is not among the verified architectures; a probe of 7 tokens agrees", stacklevel=3)

    def __exit__(self, *exc: object) -> None:
        self._detach()

    def _detach(self) -> None:
        self._open = False
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------ what the model's forward passes through

    def new_cache(self) -> CompressedCache:
        """An empty cache for this model and method."""
        compressor = self.compressor
        cache = CompressedCache([], compressor.parts.codec, compressor.limited, self._rotations)
        cache.layers = compat.new_layers(self.model, lambda i: CompressedLayer(cache, i))
        cache.owner = compressor
        return cache

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        # inside another hooked forward; the same module again means an interrupt kept the last one from ending
        if self._outer is not None and self._outer is not module:
            return None
        named = compat.bound_arguments(module, args, kwargs)
        if named.get("use_cache") is False:
            raise ValueError(
                "use_cache=False leaves nothing to compress: drop it, or call the model outside compress()"
            )
        if named.get("output_attentions") or getattr(module.config, "output_attentions", False):
            raise ValueError(
                "output_attentions=True is not available under compress(): attention weights are never built"
            )
        tokens = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
        if tokens is None or tokens.shape[1] == 0 or tokens.shape[0] == 0:
            raise ValueError("the prompt is empty: give at least one token")
        named["cache"] = cache = self._adopt(named.get("cache"))
        named["use_cache"] = True
        unchanged = cache.real, cache.cap, cache.columns
        try:
            forward = self._describe(cache, tokens, named.get("attention_mask"))
            self._check_length(cache, forward)
        except ValueError:  # a refused forward leaves no trace
            cache.real, cache.cap, cache.columns = unchanged
            raise
        cache.forward = forward
        if cache.columns is not None and named.get("attention_mask") is None:
            named["attention_mask"] = cache.columns.to(tokens.device)
        if self._rotations is not None:
            named["position_ids"] = self._compact_ids(cache, forward, tokens.device)
        self.cache = cache
        self._outer = module
        return (), named

    def _adopt(self, cache: Any) -> CompressedCache:
        """The cache of this forward: the caller's if it is ours, a new one in place of an empty one."""
        if cache is None:
            return self.new_cache()
        if isinstance(cache, CompressedCache):
            if cache.broken:
                raise ValueError(
                    "a failed forward left this cache half written: start again, or go on from a fork() made before"
                )
            if cache.owner is not self.compressor:
                if not isinstance(cache.owner, Compressor) or cache.owner.method != self.method:
                    raise ValueError("this cache was made by another method: prefill it again in this session")
                cache.owner = self.compressor
            return cache
        if compat.is_empty_dynamic(cache):
            if not hasattr(cache, "_kvcompress"):
                cache._kvcompress = self.new_cache()
            return cache._kvcompress
        raise ValueError(
            f"a {type(cache).__name__} cannot be compressed: pass no cache, an empty DynamicCache, or one made by this session"
        )

    def _describe(self, cache: CompressedCache, tokens: Tensor, mask: Tensor | None) -> Forward:
        """Phase, padding and positions of the new columns."""
        batch, length = tokens.shape[:2]
        seen = cache.get_seq_length()
        real = self._real
        if real is None and mask is not None:
            if mask.dim() != 2:
                raise ValueError(
                    f"attention_mask needs 2 dimensions [batch, tokens] under compress(), got {mask.dim()}"
                )
            if mask.shape[1] != seen + length:
                raise ValueError(
                    f"attention_mask covers {mask.shape[1]} tokens, but the cache has seen {seen} and {length} are new: "
                    f"give a mask of {seen + length}; to ask more of this cache, pass the new ids after the old ones"
                )
            real = mask[:, -length:].bool().cpu()
        if real is not None and bool(real.all()):
            real = None
        before = cache.real if cache.real is not None else torch.zeros(batch, dtype=torch.long)
        if len(before) != batch:
            raise ValueError(f"the cache holds {len(before)} rows, the input has {batch}")
        if real is None:
            added = torch.full((batch,), length)
            start = before[:1] if bool((before == before[0]).all()) else before
            positions = start[:, None] + torch.arange(length)
        else:
            added = real.sum(1)
            positions = torch.where(real, before[:, None] + real.long().cumsum(1) - 1, -1)
            if cache.real is None and self._real is None and bool((added == 0).any()):
                raise ValueError("a row of the batch has no real token: its attention_mask is all zero")
        self._note_columns(cache, real, batch, length)
        cache.real = before + added
        phase = self._phase or ("prompt" if length > 1 or seen == 0 else "decode")
        if phase == "prompt":
            cache.cap = budgets.cap(self.method.budget, cache.real) if self.compressor.limited else None
        return Forward(phase, length, real, positions.int(), added)

    @staticmethod
    def _note_columns(cache: CompressedCache, real: Tensor | None, batch: int, length: int) -> None:
        if real is None and cache.columns is None:
            return
        old = (
            cache.columns if cache.columns is not None else torch.ones(batch, cache.get_seq_length(), dtype=torch.bool)
        )
        new = real if real is not None else torch.ones(batch, length, dtype=torch.bool)
        cache.columns = torch.cat([old, new], dim=1)

    def _check_length(self, cache: CompressedCache, forward: Forward) -> None:
        limit = compat.max_positions(self.model)
        if limit is None or forward.phase == "decode":
            return
        assert cache.real is not None
        longest = (
            int(cache.real.max())
            if self._rotations is None or cache.full_layers[0].store is None
            else int(cache.held_rows().max()) + forward.length
        )
        if longest > limit:
            raise ValueError(
                f"the prompt reaches {longest} tokens, but {self.model.config.model_type!r} has {limit} positions: shorten "
                "it, or use compact positions (StreamingLLM(positions='compact')) through session.prefill"
            )

    @staticmethod
    def _compact_ids(cache: CompressedCache, forward: Forward, device: torch.device) -> Tensor:
        """Rotation of new tokens: the number held, counting on."""
        assert cache.real is not None
        held = cache.held_rows() if cache.full_layers[0].store is not None else torch.zeros_like(cache.real)
        before = cache.real - forward.added
        ids = forward.positions.long() + (held - before)[:, None]
        return torch.where(forward.positions < 0, 0, ids).to(device)

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if module is not self._outer:
            return
        self._outer = None
        cache = self.cache
        if cache is None or cache.forward is None:
            return
        forward = cache.forward
        try:
            if output is not None and all(layer.seen == cache.full_layers[0].seen for layer in cache.full_layers):
                self.compressor.end_of_forward(cache)
                self._note_moment(cache, forward)
        finally:
            cache.forward = None
            cache.broken = output is None

    def _note_moment(self, cache: CompressedCache, forward: Forward) -> None:
        if not cache.full_layers:
            return
        cache.kept_max = max(cache.kept_max, max(int(layer.counts.max()) for layer in cache.full_layers))
        if forward.phase == "decode":
            return
        nbytes = cache.nbytes()
        cache.moments.append(
            {
                "moment": forward.phase,
                "seen": cache.get_seq_length(),
                "tokens_held": float(cache.kept_tokens().double().mean()),
                "bytes_valid": nbytes["valid"],
                "bytes_allocated": nbytes["allocated"],
            }
        )

    # ------------------------------------------------------------------ explicit phases

    @torch.no_grad()
    def prefill(
        self, ids: Tensor | Sequence[Tensor], attention_mask: Tensor | None = None, cache: CompressedCache | None = None
    ) -> Prefilled:
        """Run a prompt and compress when it ends.

        Args:
            ids: LongTensor `[B, n]`, or segments `[B, n_i]` that are concatenated.
            attention_mask: `[B, n]` of these ids (or `[B, seen + n]`); zeros are padding.
            cache: continue this sequence with a later turn; by default a new sequence starts.

        Returns:
            the cache, logits `[B, V]` of the last position, and real tokens seen `[B]`.
        """
        self._must_be_open()
        segments = [ids] if isinstance(ids, Tensor) else list(ids)
        if not segments or sum(s.shape[-1] for s in segments) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        segments = [s[None] if s.dim() == 1 else s for s in segments]
        if cache is not None and cache is self.cache:
            segments[0], attention_mask = self._with_pending(segments[0], attention_mask)
        self.cache = cache if cache is not None else self.new_cache()
        self._pending = None
        self.compressor.seconds = 0.0
        self.compressor.kernels.clear()
        start = time.perf_counter()
        prefilled = self.compressor.parts.prefill.run(self, segments, attention_mask)
        self._synchronise()
        self.prefill_seconds = time.perf_counter() - start
        self._logits = prefilled.logits
        return prefilled

    def forward_prompt(self, ids: Tensor, mask: Tensor | None, chunk: int | None = None) -> Prefilled:
        """Run `ids [B, n]` as prompt on the current cache, whole or in chunks that are each compressed."""
        cache = self._current()
        self._check_mask(cache, ids, mask)
        if cache.real is None and mask is not None and not bool(mask.bool().any(1).all()):
            raise ValueError("a row of the batch has no real token: its attention_mask is all zero")
        limit = compat.max_positions(self.model)
        if chunk is None and self._rotations is not None and limit is not None and ids.shape[1] > limit:
            chunk = self._streaming_chunk(limit)
        logits = None
        for start in range(0, ids.shape[1], chunk or ids.shape[1]):
            stop = start + (chunk or ids.shape[1])
            part = None if mask is None else mask[:, -ids.shape[1] :][:, start:stop]
            logits = self._forward("prompt", ids[:, start:stop], part)
        assert logits is not None and cache.real is not None
        return Prefilled(cache, logits, cache.real.clone())

    @staticmethod
    def _check_mask(cache: CompressedCache, ids: Tensor, mask: Tensor | None) -> None:
        """Raise ValueError unless a mask covers the new ids, or all columns with them."""
        if mask is None:
            return
        rows, n, seen = ids.shape[0], ids.shape[1], cache.get_seq_length()
        if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] not in (n, seen + n):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; allowed: {(rows, n)} for the new ids, or {(rows, seen + n)} "
                "with what the cache has seen"
            )

    def _streaming_chunk(self, limit: int) -> int:
        """The largest chunk that fits the model's positions beside what is held, for compact positions."""
        budget = self.method.budget
        cap = budget if isinstance(budget, int) else limit // 2
        if isinstance(budget, float):
            raise ValueError(
                f"a prompt longer than the model's {limit} positions needs a budget in tokens (an int) with compact "
                f"positions; budget={budget} is a share"
            )
        if cap >= limit:
            raise ValueError(f"budget={cap} leaves no room for new tokens within the model's {limit} positions")
        return limit - cap

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
        self._current()
        ids, attention_mask = self._with_pending(ids[None] if ids.dim() == 1 else ids, attention_mask)
        self._logits = self._forward("append", ids, attention_mask)
        return self._logits

    def _with_pending(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """New ids with the last token that generate() picked before them: it belongs to the sequence."""
        if self._pending is None:
            return ids, mask
        pending, self._pending = self._pending.to(ids.device), None
        if mask is not None:
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask[:, -ids.shape[1] :]], dim=1)
        return torch.cat([pending, ids], dim=1), mask

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """One decode forward on the current cache: `ids [B, 1]` → logits `[B, V]`. Rows not `real [B]` store nothing."""
        return self._forward("decode", ids, None if real is None else real[:, None])

    @torch.no_grad()
    def generate(
        self,
        max_new_tokens: int,
        stop: Iterable[int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> Generation:
        """Continue the current cache from its last logits; greedy at temperature 0.

        The last token picked for a row (its stop token, where it has one) is fed when the sequence goes on: by another
        generate(), append() or prefill(cache=session.cache).

        Args:
            max_new_tokens: at most this many tokens per row.
            stop: token ids, any of which ends a row and is not part of its tokens.
            temperature, top_p, top_k, seed: sampling.
        """
        self._must_be_open()
        if self._logits is None:
            raise ValueError("nothing to continue: call prefill() (or append()) before generate()")
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._logits = self.step(pending)
        output = generate(self.step, self._logits, max_new_tokens, stop, temperature, top_p, top_k, seed)
        self._pending = output.pending
        return output

    def _forward(self, phase: str, ids: Tensor, mask: Tensor | None) -> Tensor:
        cache = self._current()
        real = None if mask is None else mask[:, -ids.shape[1] :].bool().cpu()
        ids = ids.to(self.model.device)
        self._phase, self._real = phase, real if real is not None else torch.ones(ids.shape, dtype=torch.bool)
        try:
            before = cache.real if cache.real is not None else torch.zeros(ids.shape[0], dtype=torch.long)
            steps = self._real.long().cumsum(1)
            position_ids = (before[:, None] + steps - 1).clamp(min=0).to(ids.device)
            output = self.model(
                input_ids=ids,
                attention_mask=None,
                position_ids=position_ids,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            self._phase = self._real = None
        return output.logits[:, -1]

    def _current(self) -> CompressedCache:
        if self.cache is None:
            raise ValueError("no sequence yet: call prefill() first")
        return self.cache

    def _must_be_open(self) -> None:
        if not self._open:
            raise ValueError("the session is closed: use it inside `with compress(model, method) as session`")

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    # ------------------------------------------------------------------ model.generate

    def _model_generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with what a compressed cache cannot do refused before any work."""
        for name in ("assistant_model", "prompt_lookup_num_tokens", "penalty_alpha"):
            if kwargs.get(name) is not None:
                raise ValueError(f"generate({name}=…) rewinds the cache, which an evicting cache cannot: drop it")
        for name in ("use_cache", "output_attentions", "cache_implementation"):
            if kwargs.get(name) not in (None, name == "use_cache"):
                raise ValueError(f"generate({name}={kwargs[name]!r}) is not available under compress()")
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if ids is not None and ids.shape[-1] == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if isinstance(cache, CompressedCache) and ids is not None and ids.shape[1] <= cache.get_seq_length():
            raise ValueError(
                f"generate() got {ids.shape[1]} ids, but the cache has already seen {cache.get_seq_length()}: pass all ids so "
                "far with the new ones at the end, or use session.append() and session.generate()"
            )
        if cache is None:
            kwargs["cache"] = self.new_cache()
        return stock(*args, **kwargs)

    # ------------------------------------------------------------------ reporting

    def report(self) -> dict[str, Any]:
        """What the method did to the current cache, and what is held now. Keys as in a record's `kv.*`."""
        cache = self._current()
        held, kept = cache.nbytes(), cache.kept_tokens()
        evicted = sum(layer.evicted for layer in cache.full_layers)
        batch = max(1, kept.shape[1])
        return {
            "kv": {
                "bytes_held": held["valid"],
                "bytes_allocated": held["allocated"],
                "bytes_full": held["full"],
                "ratio": held["valid"] / held["full"] if held["full"] else 1.0,
                "bytes_host": held["host"],
                "kept_tokens_mean": float(kept.double().mean()),
                "kept_tokens_max": max(cache.kept_max, int(kept.max())),
                "read_bytes_per_token": (held["keys_values"] + held["other_layers"]) // batch,
                "moved_bytes_per_token": 0,
                "storage": "real",
            },
            "nbytes": held,
            "active": evicted > 0,
            "evicted": evicted,
            "clamped": cache.clamped,
            "kept_per_layer": kept.double().mean(dim=(1, 2)).tolist(),
            "kernel": "+".join(sorted(self.compressor.kernels)),
            "time": {"prefill_s": self.prefill_seconds, "compress_s": self.compressor.seconds},
            "moments": list(cache.moments),
        }


def compress(model: PreTrainedModel, method: Method) -> Session:
    """Compress the KV cache of `model` with `method` inside a `with` block.

    Example:
        >>> with compress(model, SnapKV(budget=0.25)) as session:
        ...     output = model.generate(**inputs, max_new_tokens=64)
        ...     session.cache.nbytes()

    Raises:
        ValueError: for a model or method that cannot work, naming it, before any work.
    """
    return Session(model, method)
