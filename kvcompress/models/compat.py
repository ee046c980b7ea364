"""Everything that depends on a transformers release: names, registrations, which models are supported, rotation.

No other module imports cache, mask or attention internals of transformers. `tests/models/test_compat.py` is the contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, create_masks_for_generate, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvcompress.models.rotation import Rotation

Tensor = torch.Tensor

ATTENTION = "kvcompress"

VERIFIED = (  # tests/hook/test_truth.py compares each with its own eager attention
    "cohere2 deepseek_v2 deepseek_v3 gemma2 gemma3_text glm4 gpt_oss granite llama mistral olmo2 phi3 qwen2 qwen3 "
    "qwen3_moe smollm3 starcoder2"
).split()  # noqa: SIM905

REFUSED = {
    "deepseek_v32": "its cache holds indexer keys beside MLA latents, which need an adapter of their own",
    "gemma3n_text": "its layers share key-value states",
}

SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

__all__ = [
    "ATTENTION",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "REFUSED",
    "Rotation",
    "VERIFIED",
    "base_model",
    "bound_arguments",
    "check_model",
    "check_reusable",
    "decoder_layers",
    "feed_forward",
    "first_token",
    "foreign_attention",
    "is_empty_dynamic",
    "is_full_attention",
    "head_sizes",
    "holds_latents",
    "kv_heads",
    "layer_types",
    "max_positions",
    "positions_of",
    "new_layers",
    "only_rows",
    "register",
    "registered_attention",
    "rotations",
    "text_config",
    "window_masks",
]

foreign_attention = sdpa_attention_forward


def text_config(model: PreTrainedModel) -> Any:
    """The decoder's configuration."""
    return model.config.get_text_config(decoder=True)


def base_model(model: PreTrainedModel) -> torch.nn.Module:
    """The module that makes the attention mask and runs the layers: what the session hooks."""
    return model.base_model


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence the model's positions were made for, or None where the model names none."""
    return positions_of(model.config)


def positions_of(config: Any) -> int | None:
    """The same of a model's configuration."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def layer_types(model: PreTrainedModel) -> list[str]:
    """One of "full_attention", "sliding_attention", … per layer."""
    return get_layer_types_and_kwargs(text_config(model))[0]


def head_sizes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Numbers of a cached key and of a cached value, for each layer with full attention."""
    config = text_config(model)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (config.kv_lora_rank, config.qk_rope_head_dim) if holds_latents(model) else (width, width)
    return [sizes for kind in layer_types(model) if kind == "full_attention"]


def new_layers(model: PreTrainedModel, make_full: Callable[[int], CacheLayerMixin]) -> list[CacheLayerMixin]:
    """Cache layers for a model: ours where attention is full, transformers' own class elsewhere."""
    types, kwargs = get_layer_types_and_kwargs(text_config(model))
    return [
        make_full(i) if kind == "full_attention" else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kw)
        for i, (kind, kw) in enumerate(zip(types, kwargs, strict=True))
    ]


def kv_heads(model: PreTrainedModel) -> int:
    """Heads whose keys and values a full-attention layer's cache holds."""
    config = text_config(model)
    return 1 if holds_latents(model) else getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def holds_latents(model: PreTrainedModel) -> bool:
    """True for multi-head latent attention, whose cache holds one latent and one rotated key for all heads."""
    return bool(getattr(text_config(model), "kv_lora_rank", None))


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers in order: modules called with hidden states `[B, n, hidden]` first.

    Raises:
        ValueError: no list of that many modules is found.
    """
    number = text_config(model).num_hidden_layers
    for module in base_model(model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == number:
            if all(any(hasattr(m, "layer_idx") for m in layer.modules()) for layer in module):
                return list(module)
    raise ValueError(f"{model.config.model_type!r} has no list of its {number} decoder layers that we know")


def check_reusable(model: PreTrainedModel, sliding: bool = True) -> None:
    """Refuse by name a model whose chunks cannot be reused. What rotates them is `rotations`' to say.

    Args:
        sliding: chunks can be reused in sliding-window layers.

    Raises:
        ValueError: layers that do not hold all tokens, or whose place in the forward is not known.
    """
    can = {"full_attention", "sliding_attention"} if sliding else {"full_attention"}
    other = sorted(set(layer_types(model)) - can)
    if other:
        raise ValueError(
            f"{model.config.model_type!r} has layers with {', '.join(other)}: this prefill reuses chunks in layers with "
            f"{' and '.join(sorted(can))} only; use prefill=oneshot"
        )
    decoder_layers(model)


def only_rows(arguments: dict[str, Any], rows: Tensor, length: int) -> dict[str, Any]:
    """A decoder layer's keyword arguments for some of `length` tokens, `rows [m]`: what belongs to positions is cut.

    Raises:
        ValueError: an attention mask, or tensors of a name that we do not know with one entry per token.
    """
    found = dict(arguments)
    for name, value in arguments.items():
        if name == "position_ids" and value is not None:
            found[name] = value.index_select(-1, rows.to(value.device))
        elif name == "position_embeddings" and value is not None:
            found[name] = tuple(part.index_select(-2, rows.to(part.device)) for part in value)
        elif isinstance(value, Tensor) and length in value.shape:
            raise ValueError(f"a decoder layer is given {name} {tuple(value.shape)}, which we do not know how to cut")
    return found


def feed_forward(layer: torch.nn.Module) -> torch.nn.Module | None:
    """A decoder layer's MLP, which works on each token alone: hidden states in, hidden states (first) out; or None."""
    found = getattr(layer, "mlp", None)
    return found if isinstance(found, torch.nn.Module) else None


def first_token(model: PreTrainedModel) -> int | None:
    """The token that begins a text, by the model's configuration."""
    found = getattr(text_config(model), "bos_token_id", None)
    return found[0] if isinstance(found, (list, tuple)) else found


def check_model(model: Any) -> None:
    """Refuse by name, before any work, a model this library cannot compress.

    Raises:
        ValueError: names the model type and the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"compress() needs a transformers model, got {type(model).__name__}{_wrapped(model)}")
    kind = model.config.model_type
    text_kind = text_config(model).model_type

    def refuse(reason: str) -> None:
        raise ValueError(
            f"cannot compress {kind!r} ({type(model).__name__}): {reason}. Verified: {', '.join(VERIFIED)}"
        )

    for name in (kind, text_kind):
        if name in REFUSED:
            refuse(REFUSED[name])
    if model.config.is_encoder_decoder:
        refuse("encoder-decoder models are not supported")
    if not getattr(text_config(model), "is_causal", True):
        refuse("it is not a causal decoder, so it has no KV cache to compress")
    unsupported = (
        sorted(set(layer_types(model)) - SUPPORTED_LAYERS) if _has_attention_layers(model) else ["state-space"]
    )
    if unsupported:
        refuse(f"it has layers without a per-token KV cache that we can hold ({', '.join(unsupported)})")
    if not getattr(model, "_supports_attention_backend", False) or not model._can_set_attn_implementation():
        refuse("its attention does not go through transformers' AttentionInterface")


def _wrapped(model: Any) -> str:
    """How a model of peft's can be compressed, "" for anything else."""
    if not callable(getattr(model, "get_base_model", None)):
        return ""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return ", whose virtual tokens do not pass through the model: merge it or take an adapter of another kind"
    return ": compress(model.get_base_model(), …), in which its adapters stay active"


def _has_attention_layers(model: PreTrainedModel) -> bool:
    parameters = inspect.signature(base_model(model).forward).parameters
    return "cache" in parameters and "cache_params" not in parameters


def bound_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward call by name; the cache under `cache` whatever the caller called it."""
    named = dict(kwargs)
    if args:
        names = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]
        named.update(zip(names, args, strict=False))
    if "past_key_values" in named:
        named["cache"] = named.pop("past_key_values")
    return named


def register(attention: Callable[..., Any]) -> None:
    """Register our attention and mask under one name of their own; nothing of transformers' is replaced."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def registered_attention() -> Any:
    """The attention function that is registered under our name now."""
    return AttentionInterface._global_mapping.get(ATTENTION)


def is_full_attention(module: torch.nn.Module) -> bool:
    """True for an attention module of a decoder layer that attends to all earlier tokens."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or not isinstance(layer, int):
        return False
    types = get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]
    return layer < len(types) and types[layer] == "full_attention"


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None for full-attention layers, whose visibility comes from positions; the stock mask for windowed layers."""
    if kwargs.get("local_size") is None and not args:
        return None
    return sdpa_mask(*args, **kwargs)


def window_masks(model: PreTrainedModel, cache: Any, rows: int, columns: Tensor | None) -> dict[int, Tensor | None]:
    """Masks, by layer, that a forward of one token in each of `rows` makes for the windowed layers of a hooked model.

    Args:
        cache: as it is before that forward.
        columns: bool `[rows, L + 1]`, real columns; None where none is padding.
    """
    windowed = {index: kind for index, kind in enumerate(layer_types(model)) if kind != "full_attention"}
    if not windowed:
        return {}
    made = create_masks_for_generate(
        config=text_config(model),
        inputs_embeds=torch.empty(rows, 1, 0, dtype=model.dtype, device=model.device),
        attention_mask=None if columns is None else columns.to(model.device),
        cache=cache,
    )
    return {index: made.get(kind) if isinstance(made, dict) else made for index, kind in windowed.items()}


@torch.no_grad()
def rotations(model: PreTrainedModel) -> list[Rotation]:
    """How each layer rotates its keys, found by checking candidates against keys the model makes.

    A sequence of one token attends only to itself, so its keys at two positions differ by the rotation alone, in
    every layer.

    Raises:
        ValueError: if the rotation depends on the sequence length, or matches no known form.
    """
    if holds_latents(model):
        raise ValueError(
            f"{model.config.model_type!r} holds latents and one rotated key beside them, which cannot be turned back as "
            "keys: compact positions, queries before rotation, chunks reused elsewhere and low-rank codecs do not go with it; "
            "take another method"
        )
    rotary = [m for n, m in base_model(model).named_modules() if n.split(".")[-1] == "rotary_emb"]
    if not rotary:
        raise ValueError(
            f"{model.config.model_type!r} has no rotary positions, which compact positions, queries before rotation and "
            "reused chunks need: use positions='original', prefill=oneshot, or another method"
        )
    kinds = {str(k) for m in rotary for k in _rope_types(m)}
    if varying := kinds & {"dynamic", "longrope"}:
        raise ValueError(
            f"rotation of {model.config.model_type!r} depends on the length ({', '.join(varying)} RoPE scaling)"
        )
    # three tokens, as rows of a batch: one alone may be padding, whose embedding is zero
    vocabulary = text_config(model).vocab_size
    token = torch.tensor([[1], [vocabulary // 3], [vocabulary // 2]], device=model.device)
    keys = []
    for position in (3, 11):
        cache = DynamicCache(config=text_config(model))
        base_model(model)(input_ids=token, position_ids=torch.full_like(token, position), cache=cache, use_cache=True)
        keys.append([layer.keys for layer in cache.layers])  # type: ignore[union-attr]
    frequencies = [
        b.float() for m in rotary for n, b in m.named_buffers() if n.endswith("inv_freq") and "original" not in n
    ]
    candidates = [Rotation("none")] + [Rotation(s, f) for f in frequencies for s in ("half", "interleaved")]
    return [_fit(candidates, a, b, i, model) for i, (a, b) in enumerate(zip(*keys, strict=True))]


def _rope_types(module: Any) -> list[Any]:
    kind = getattr(module, "rope_type", "default")
    return list(kind.values()) if isinstance(kind, dict) else [kind]


def _fit(candidates: list[Rotation], before: Tensor, after: Tensor, layer: int, model: PreTrainedModel) -> Rotation:
    tolerance = 1e-4 if before.dtype == torch.float32 else 3e-2
    delta = torch.tensor([[[8]]])
    for rotation in candidates:
        if rotation.inv_freq is not None and 2 * rotation.inv_freq.numel() > before.shape[-1]:
            continue
        error = (rotation.rotate(before, delta) - after).float().norm() / after.float().norm().clamp(min=1e-12)
        if error < tolerance:
            return rotation
    raise ValueError(f"layer {layer} of {model.config.model_type!r} rotates its keys in a way that is not known")


def is_empty_dynamic(cache: Any) -> bool:
    """True for a cache that `generate` made and nothing was written to."""
    return isinstance(cache, DynamicCache) and cache.get_seq_length() == 0
