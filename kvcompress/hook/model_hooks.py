"""Forward pre-/post-hooks and the patched `generate` that route a model through a compressed cache."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.hook import (
    attention,  # noqa: F401  (registers the attention function)
    model_generate,
)
from kvcompress.hook.cache_factory import CacheFactory
from kvcompress.hook.compression import Compressor
from kvcompress.hook.planner import ForwardPlanner
from kvcompress.hook.runner import ForwardRequest, ForwardRunner
from kvcompress.hook.static_decode import StaticDecodeCache
from kvcompress.models import compat

Tensor = torch.Tensor


class ModelHooks:
    """Attached, every forward of the model gets a compressed cache, a phase and positions; detached, it is as before."""

    def __init__(
        self,
        model: PreTrainedModel,
        compressor: Compressor,
        runner: ForwardRunner,
        planner: ForwardPlanner,
        caches: CacheFactory,
    ) -> None:
        self.model, self._compressor = model, compressor
        self._runner, self._planner, self._caches = runner, planner, caches
        self._outer: torch.nn.Module | None = None  # whose forward is running
        self._inner_due = False  # its base model is still to be called
        self._chunked_prompt: int | None = None  # tokens of a prompt that generate() feeds in chunks
        self._due = 0  # tokens that each layer has seen when it has run
        self._undo: list[Callable[[], Any]] = []
        self._guards: list[tuple[str, Callable[[], bool]]] = []  # what is checked before a forward, by name

    # ------------------------------------------------------------------ attaching

    @property
    def is_attached(self) -> bool:
        return bool(self._undo)

    def attach(self) -> None:
        """Hook the model.

        Raises:
            ValueError: another session's hooks are on it, or it does not work through ours; it is as before then.
        """
        marks = [vars(module).get("_kvcompress_session") for module in self._modules()]
        if any(mark is not None and mark.is_attached for mark in marks):
            raise ValueError("this model is already being compressed by another session: leave its `with` block first")
        self._caches.find_rotations()
        expected = None if compat.text_config(self.model).model_type in compat.VERIFIED else self._probe()
        self._put()
        try:
            if expected is not None:
                self._check_probe(expected)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take everything out of the model again."""
        self._guards.clear()
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks inside the block, whether or not they were there before it."""
        if self.is_attached:
            yield
            return
        self.attach()
        try:
            yield
        finally:
            self.detach()

    def _modules(self) -> list[torch.nn.Module]:
        # some heads run a decoder inside the base model, and some callers the base model: hook both, act once
        return list({id(module): module for module in (self.model, compat.base_model(self.model))}.values())

    def _put(self) -> None:
        before = self.model.config._attn_implementation
        try:
            self._undo.append(lambda: self.model.set_attn_implementation(before))
            self.model.set_attn_implementation(compat.ATTENTION)
            if compat.text_config(self.model)._attn_implementation != compat.ATTENTION:
                raise ValueError(f"{self.model.config.model_type!r} does not let its attention implementation be set")
            for module in self._modules():
                self._set(module, "_kvcompress_session", self)
                self._set(module, "__deepcopy__", functools.partial(self._deepcopy, module))
                pre = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
                after = module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
                self._undo += [pre.remove, after.remove]
                self._guard_module(module, pre.id, after.id)
            if hasattr(self.model, "generate"):
                stock: Callable[..., Any] = self.model.generate  # type: ignore[assignment]
                self._set(self.model, "generate", functools.wraps(stock)(functools.partial(self._generate, stock)))
            for name in model_generate.BATCHING:
                if hasattr(self.model, name):
                    self._set(self.model, name, model_generate.refuse_batching(name))
            self._guard_model()
        except BaseException:
            self.detach()
            raise

    def _set(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Set an attribute of the instance, until `detach` puts back what it had."""
        had = {name: vars(module)[name]} if name in vars(module) else {}
        self._undo.append(functools.partial(vars(module).update, had))
        self._undo.append(functools.partial(vars(module).pop, name, None))
        vars(module)[name] = value

    def _deepcopy(self, module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the stock model: hooks and caches stay with the original."""
        self.detach()
        try:
            return copy.deepcopy(module, memo)
        finally:
            self._put()

    def __reduce__(self) -> Any:
        raise TypeError("a model inside compress() cannot be pickled: save it outside of the `with` block")

    # ------------------------------------------------------------------ what must stay as it was put

    def _guard_module(self, module: torch.nn.Module, pre: int, after: int) -> None:
        kind = type(module)
        forward, stock = vars(module).get("forward"), kind.forward
        compiled = getattr(module, "_compiled_call_impl", None)
        self._guards += [
            (
                f"the hooks of its {kind.__name__}",
                lambda: pre in module._forward_pre_hooks and after in module._forward_hooks,
            ),
            (
                f"the forward of its {kind.__name__}",
                lambda: vars(module).get("forward") is forward and kind.forward is stock,
            ),
            (f"the class of its {kind.__name__}", lambda: type(module) is kind),
            (f"{kind.__name__}.compile()", lambda: getattr(module, "_compiled_call_impl", None) is compiled),
        ]

    def _guard_model(self) -> None:
        model, config, base = self.model, self.model.config, compat.base_model(self.model)
        generate, attend = vars(model).get("generate"), compat.registered_attention()
        places, attends = _attention_places(base)
        layers = compat.text_config(model).num_hidden_layers
        self._guards += [
            ("its layers", lambda: all(siblings.get(name) is child for siblings, name, child in places)),
            (
                "the attention of its layers",
                lambda: all(
                    part.config._attn_implementation == compat.ATTENTION and vars(part).get("forward") is forward
                    for part, forward in attends
                ),
            ),
            ("its configuration", lambda: model.config is config),
            ("its number of layers", lambda: compat.text_config(model).num_hidden_layers == layers),
            ("its base model", lambda: compat.base_model(model) is base),
            ("its attention implementation", lambda: config._attn_implementation == compat.ATTENTION),
            (
                "its decoder's attention implementation",
                lambda: compat.text_config(model)._attn_implementation == compat.ATTENTION,
            ),
            ("its generate", lambda: vars(model).get("generate") is generate),
            (f"the attention registered as {compat.ATTENTION!r}", lambda: compat.registered_attention() is attend),
        ]

    def check_intact(self) -> None:
        """Check that everything the hooks put in place, or rely on, is still there.

        Raises:
            ValueError: it is not; it names what was changed.
        """
        changed = [what for what, holds in self._guards if not holds()]
        if changed:
            raise ValueError(
                f"the model was changed inside compress(): {', '.join(changed)}. It would no longer be compressed: change "
                "it outside of the `with` block"
            )

    @torch.no_grad()
    def _probe(self, cache: Any = None) -> list[Tensor]:
        """Hidden states of a few tokens run in three steps, for an architecture that no test of ours covers."""
        base = compat.base_model(self.model)
        ids = torch.arange(1, 8, device=self.model.device)[None] % compat.text_config(self.model).vocab_size
        cache = compat.DynamicCache(config=compat.text_config(self.model)) if cache is None else cache
        return [base(input_ids=ids[:, a:b], cache=cache, use_cache=True)[0] for a, b in ((0, 4), (4, 5), (5, 7))]

    def _check_probe(self, expected: list[Tensor]) -> None:
        kind = self.model.config.model_type
        try:
            with self._runner.requesting(ForwardRequest("append")):
                found = self._probe(self._caches.new())
        except Exception as error:
            raise ValueError(f"cannot compress {kind!r}: its attention does not work with ours ({error})") from error
        self._runner.cache = None
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
        warnings.warn(f"{kind!r} is not among the verified architectures; a probe of 7 tokens agrees", stacklevel=4)

    # ------------------------------------------------------------------ around a forward

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        named = compat.bound_arguments(module, args, kwargs)
        current = self._runner.cache
        inner = self._inner_due and module is not self._outer and current is not None
        if inner and named.get("cache") is current:
            self._inner_due = False  # the base model inside the forward that was prepared already
            return None
        if isinstance(named.get("cache"), StaticDecodeCache):  # a static step is planned and noted by who takes it
            return None
        self.check_intact()
        if self.model.training and torch.is_grad_enabled() and self.model.is_activation_checkpointing:
            raise ValueError(
                "gradient checkpointing drops the cache in training mode: call model.eval() before compressing"
            )
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
        named["cache"] = cache = self._caches.adopt(named.get("cache"))
        named["use_cache"] = True
        request, seen = self._runner.request, cache.get_seq_length()
        if request is None and 0 < seen == (self._chunked_prompt or 0) - tokens.shape[1]:
            request = ForwardRequest("prompt")  # its last chunk, even of a single token
        cache.begin(self._planner.plan(cache, tokens, named.get("attention_mask"), request, named.get("position_ids")))
        if cache.columns is not None and named.get("attention_mask") is None:
            named["attention_mask"] = cache.columns.to(tokens.device)
        self._runner.cache = cache
        self._outer, self._inner_due = module, module is self.model
        self._due = seen + tokens.shape[1]
        return (), named

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if module is not self._outer:
            return
        self._outer = None
        cache = self._runner.cache
        if cache is None or cache.forward is None:
            return
        forward, broken = cache.forward, True
        try:
            short = [layer.index for layer in cache.full_layers if layer.seen != self._due]
            if output is not None and short:
                raise ValueError(
                    f"layers {', '.join(map(str, short))} did not hand their keys and values to the cache: inside compress() "
                    "every layer has to run, and be given the cache"
                )
            if output is not None and forward.phase != "pass":
                self._planner.auxiliary.run(cache, forward)
                self._compressor.end_of_forward(cache)
                cache.note_moment(forward.phase)
            broken = output is None
        finally:
            cache.end(complete=not broken)
            self._inner_due = False
            cache.keep_logits(None)  # a session that ran this forward sets them again

    # ------------------------------------------------------------------ model.generate

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with what a compressed cache cannot do refused before any work."""
        if not self.is_attached:  # kept by someone beyond the session
            return stock(*args, **kwargs)
        self.check_intact()
        model_generate.check(self.model, args, kwargs)
        cache = model_generate.named_arguments(args, kwargs).get("cache")
        if cache is None:
            kwargs.pop("past_key_values", None)
            kwargs["cache"] = cache = self._caches.new()
        self._chunked_prompt = model_generate.chunked_prompt(self.model, args, kwargs)
        try:
            with model_generate.restoring(self.model):
                output = stock(*args, **kwargs)
        finally:
            self._chunked_prompt = None
        # not another that ran beside it, such as that of classifier-free guidance
        self._runner.cache = cache if isinstance(cache, CompressedCache) else None
        return output


def _attention_places(base: torch.nn.Module) -> tuple[list[tuple[dict[str, Any], str, Any]], list[tuple[Any, Any]]]:
    """Where a decoder's attention modules hang (siblings by name, name, module), and these with a forward of their own."""
    places: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    attends = []
    for path, found in base.named_modules():
        if not path or not isinstance(getattr(found, "layer_idx", None), int) or not hasattr(found, "config"):
            continue
        attends.append((found, vars(found).get("forward")))
        parent = base
        for name in path.split("."):
            siblings: dict[str, Any] = parent._modules
            places[id(parent), name] = siblings, name, siblings[name]
            parent = siblings[name]
    return list(places.values()), attends
