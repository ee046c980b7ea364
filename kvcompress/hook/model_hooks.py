"""The hook layer: what a session puts into a model's forward and `generate`, and takes out again."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward, Fusing
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.pages import PagedReader, check_host
from kvcompress.cache.sequence import CacheSpec
from kvcompress.hook import (
    attention,  # noqa: F401  (registers the attention function)
    auxiliary,
)
from kvcompress.hook.compatibility import check_codec, check_tokenizer
from kvcompress.hook.compression import Compressor
from kvcompress.hook.model_facts import ModelFacts
from kvcompress.hook.scoring import evicts, needs_of
from kvcompress.hook.static_decode import FixedCache
from kvcompress.method import Method
from kvcompress.models import compat, tokenizers

Tensor = torch.Tensor


class Hooks:
    """One method attached to one model: every forward gets a compressed cache, phases and positions; undone on exit."""

    def __init__(self, model: PreTrainedModel, method: Method, kernel: str = "auto", tokenizer: Any = None):
        """Raises:
        ValueError: for a model that cannot be supported, by name, before any work.
        """
        compat.check_model(model)
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
        self.facts = ModelFacts(model, needs_of(method), compact)
        self.compressor = Compressor(method, len(self.full_layers), kernel, self.facts)
        check_tokenizer(self.compressor, self.tokenizer)
        self.notes = method.notes(model) if self.compressor.limited else []
        self.cache: CompressedCache | None = None
        self._phase: str | None = None
        self._real: Tensor | None = None
        self._fusion: Fusing | None = None  # of the forward to come
        self.reuse_rotations: list[compat.Rotation] = []  # per layer, where the prefill reuses chunks
        self._outer: torch.nn.Module | None = None  # whose forward is running
        self._inner_due = False  # its base model is still to be called
        self._undo: list[Any] = []
        self._open = False
        self._turns: list[compat.Rotation] | None = None  # how keys are turned back, where the codec wants to

    # ------------------------------------------------------------------ attaching

    def __enter__(self) -> Self:
        modules = {id(m): m for m in (self.model, compat.base_model(self.model))}.values()
        if any(getattr(m, "_kvcompress_session", None) is not None for m in modules):
            raise ValueError("this model is already being compressed by another session: leave its `with` block first")
        self.facts.measure()
        if self.compressor.parts.prefill.needs_segments:
            compat.check_reusable(self.model)
            self.reuse_rotations = self.facts.rope or compat.rotations(self.model)
        if (self.compressor.parts.codec.needs_rotation or self.compressor.reader.rank) and self._turns is None:
            self._turns = compat.rotations(self.model)
        for note in self.notes:
            warnings.warn(note, stacklevel=2)
        before = self.model.config._attn_implementation
        expected = None if compat.text_config(self.model).model_type in compat.VERIFIED else self._probe()
        try:
            for module in modules:
                module.__dict__["_kvcompress_session"] = self
                self._undo.append(functools.partial(module.__dict__.pop, "_kvcompress_session", None))
            self._undo.append(lambda: self.model.set_attn_implementation(before))
            self.model.set_attn_implementation(compat.ATTENTION)
            if compat.text_config(self.model)._attn_implementation != compat.ATTENTION:
                raise ValueError(f"{self.model.config.model_type!r} does not let its attention implementation be set")
            # some heads run a decoder inside the base model, and some callers the base model: hook both, act once
            for module in modules:
                self._undo.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
                after = module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
                self._undo.append(after.remove)
            if hasattr(self.model, "generate"):
                own = {"generate": self.model.__dict__["generate"]} if "generate" in self.model.__dict__ else {}
                self._undo.append(functools.partial(self.model.__dict__.update, own))
                self._undo.append(functools.partial(self.model.__dict__.pop, "generate", None))
                stock: Callable[..., Any] = self.model.generate  # type: ignore[assignment]
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
        off = max(float((e.float() - f.float()).abs().max()) for e, f in zip(expected, found, strict=True)) / scale
        if not off < (1e-4 if expected[0].dtype == torch.float32 else 5e-2):
            if getattr(self.model.config, "is_decoder", None) is False:
                raise ValueError(
                    f"cannot compress {kind!r}: it is an encoder, not a causal decoder, so it has no KV cache"
                )
            raise ValueError(
                f"cannot compress {kind!r}: through our attention its output is off by {off:.1e} (relative)"
            )
        warnings.warn(f"{kind!r} is not among the verified architectures; a probe of 7 tokens agrees", stacklevel=3)

    def __exit__(self, *exc: object) -> None:
        self._detach()

    def _detach(self) -> None:
        self._open = False
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------ what the model's forward passes through

    def new_cache(self, **changes: Any) -> CompressedCache:
        """An empty cache for this model and method; `changes` are fields of its `CacheSpec`."""
        spec = CacheSpec(
            codec=self.compressor.parts.codec,
            limited=self.compressor.limited,
            compact_rope=self.facts.compact_rope,
            codec_rope=self._turns,
            latents=compat.holds_latents(self.model),
            method=self.method,
            model=weakref.ref(self.model),
        )
        return CompressedCache(
            replace(spec, **changes),
            lambda cache: compat.new_layers(self.model, lambda index: CompressedLayer(cache, index)),
        )

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        named = compat.bound_arguments(module, args, kwargs)
        inner = self._inner_due and module is not self._outer and self.cache is not None
        if inner and named.get("cache") is self.cache:
            self._inner_due = False  # the base model inside the forward that was prepared already
            return None
        if isinstance(named.get("cache"), FixedCache):  # a step that is described and noted by who takes it
            return None
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
        unchanged = cache.sequence
        try:
            forward = self._describe(cache, tokens, named.get("attention_mask"))
            self._check_length(cache, forward)
            if named.get("position_ids") is not None:
                forward = replace(forward, rotated=named["position_ids"])
            if self._turns is not None:
                cache.note_shift(forward)
            auxiliary.plan(self, cache, forward, named.get("input_ids"))
        except ValueError:  # a refused forward leaves no trace
            cache.restore(unchanged)
            raise
        cache.begin(forward)
        if cache.columns is not None and named.get("attention_mask") is None:
            named["attention_mask"] = cache.columns.to(tokens.device)
        self.cache = cache
        self._outer, self._inner_due = module, module is self.model
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
            if cache.spec.model is None or cache.spec.model() is not self.model:
                raise ValueError("this cache was filled by another model: prefill it again in this session")
            if cache.spec.method is not self.method and cache.spec.method != self.method:
                raise ValueError("this cache was made by another method: prefill it again in this session")
            return cache
        if compat.is_empty_dynamic(cache):
            if not hasattr(cache, "_kvcompress"):
                cache._kvcompress = self.new_cache()
            return cache._kvcompress
        raise ValueError(
            f"a {type(cache).__name__} cannot be compressed: pass no cache, an empty DynamicCache, or one made by this "
            "session"
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
                    f"attention_mask covers {mask.shape[1]} tokens, the cache has seen {seen} and {length} are new: "
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
        cache.advance(real, added)
        phase = self._phase or ("prompt" if length > 1 or seen == 0 else "decode")
        prefill = self.compressor.parts.prefill
        if phase == "prompt" and self._phase is None and prefill.needs_segments:
            raise ValueError(
                f"prefill={prefill.name} reuses the segments of a prompt, and a plain model() or generate() call has none: "
                "run the prompt with session.prefill([prefix, chunk, …, question]), then session.generate(); or use "
                "prefill=oneshot"
            )
        if phase == "prompt":
            assert cache.real is not None
            self._check_host(batch, cache.real)
            cache.begin_prompt(self.method.cap(cache.real) if self.compressor.limited else None)
        columns = torch.arange(seen, seen + length)[None]  # what transformers rotates by unless told otherwise
        fires = self._read_tokens(cache, tokens, real, phase)
        fusion = self._fusion if phase == "prompt" else None  # a scorer's extra passes are whole
        observer = self.compressor
        return Forward(
            phase, length, real, positions.int(), added, columns, fires=fires, fusion=fusion, observer=observer
        )

    def _read_tokens(self, cache: CompressedCache, tokens: Tensor, real: Tensor | None, phase: str) -> Tensor | None:
        """Let the schedule read new tokens `[B, n]`: rows that must fire, bool `[B]`; rows that end are noted in `cache`.

        Raises:
            ValueError: embeddings were given where the schedule needs ids.
        """
        schedule = self.compressor.parts.schedule
        if phase != "decode" or not self.compressor.limited or not (schedule.newline_ids or schedule.until_ids):
            return None
        if tokens.dim() != 2:
            raise ValueError("the schedule fires on token ids, and this forward was given embeddings: pass input_ids")
        ids = tokens.cpu() if real is None else tokens.cpu().masked_fill(~real, -1)

        def among(wanted: tuple[int, ...]) -> Tensor:
            return torch.isin(ids, torch.tensor(wanted, dtype=torch.long)).any(1)

        if schedule.until_ids:
            cache.close_rows(among(schedule.until_ids))
        return among(schedule.newline_ids) if schedule.newline_ids else None

    def _check_length(self, cache: CompressedCache, forward: Forward) -> None:
        limit = compat.max_positions(self.model)
        if limit is None or forward.phase == "decode":
            return
        assert cache.real is not None
        longest = (
            int(cache.real.max())
            if cache.spec.compact_rope is None or cache.full_layers[0].store is None
            else int(cache.held_rows().max()) + forward.length
        )
        if longest > limit:
            raise ValueError(
                f"the prompt reaches {longest} tokens, but {self.model.config.model_type!r} has {limit} positions: "
                "shorten it, or use compact positions (StreamingLLM(positions='compact')) through session.prefill"
            )

    def _check_host(self, batch: int, real: Tensor) -> None:
        reader = self.compressor.reader
        if isinstance(reader, PagedReader):
            per_token = reader.host_numbers(*compat.head_sizes(self.model)[0]) * torch.finfo(self.model.dtype).bits // 8
            check_host(reader, self.full_layers, batch, int(real.max()), per_token)

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if module is not self._outer:
            return
        self._outer = None
        cache = self.cache
        if cache is None or cache.forward is None:
            return
        forward, broken = cache.forward, True
        try:
            whole = output is not None and all(x.seen == cache.full_layers[0].seen for x in cache.full_layers)
            if whole and forward.phase != "pass":
                auxiliary.run(self, cache, forward)
                self.compressor.end_of_forward(cache)
                cache.note_moment(forward.phase)
            broken = output is None
        finally:
            cache.end(complete=not broken)
            self._inner_due = False
            cache.keep_logits(None)  # a session that ran this forward sets them again

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
                f"generate() got {ids.shape[1]} ids, but the cache has already seen {cache.get_seq_length()}: pass all "
                "ids so far with the new ones at the end, or use session.append() and session.generate()"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool(mask.bool().any(1).all()):
            raise ValueError("a row of the batch has no real token: its attention_mask is all zero")
        if cache is None:
            kwargs["cache"] = self.new_cache()
        return stock(*args, **kwargs)
