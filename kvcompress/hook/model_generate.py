"""`model.generate` on a compressed cache: options that rewind or replace the cache, or rewrite the model, are refused.

An option may come as an argument, in `generation_config=` or in `model.generation_config`; what holds in the end is
worked out as transformers does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from kvcompress.cache.cache import CompressedCache

# positional parameters of GenerationMixin.generate
POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)

# why an option is refused where it is set
REWINDS = "rewinds the cache, which an evicting cache cannot"
HUB = "runs a decoding loop from the Hub, which handles the cache in a way of its own"
OWN_CACHE = "asks for a cache of transformers' own"
REFUSED = {
    "assistant_model": REWINDS,
    "assistant_early_exit": f"{REWINDS}, and runs the model with fewer layers in between",
    "prompt_lookup_num_tokens": REWINDS,
    "use_mtp": REWINDS,
    "is_assistant": f"has its model draft for another, which {REWINDS}",
    "penalty_alpha": REWINDS,
    "dola_layers": HUB,
    "constraints": HUB,
    "force_words_ids": HUB,
    "num_beam_groups": HUB,
    "diversity_penalty": HUB,
    "cache_implementation": OWN_CACHE,
    "output_attentions": "asks for attention weights, which are never built",
}
UNSET: dict[str, tuple[Any, ...]] = {"num_beam_groups": (1,), "diversity_penalty": (0.0,)}  # that mean: not in use

# methods of a model that generate with a paged cache of transformers'
BATCHING = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a `generate` call by name; the cache under `cache` whatever the caller called it."""
    named = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
    if named.get("cache") is None and named.get("past_key_values") is not None:
        named["cache"] = named["past_key_values"]
    return named


def check(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse by name what a compressed cache cannot do, before any work.

    Raises:
        ValueError: an option that rewinds or replaces the cache or rewrites the model, an empty prompt, or ids that the
            cache has seen.
    """
    named = named_arguments(args, kwargs)
    _check_options(model, named)
    ids, cache = named.get("inputs"), named.get("cache")
    if ids is None:
        ids = named.get("input_ids")
    if ids is not None and ids.shape[-1] == 0:
        raise ValueError("the prompt is empty: give at least one token")
    if isinstance(cache, CompressedCache) and ids is not None and ids.shape[1] <= cache.get_seq_length():
        raise ValueError(
            f"generate() got {ids.shape[1]} ids, but the cache has already seen {cache.get_seq_length()}: pass all "
            "ids so far with the new ones at the end, or use session.append() and session.generate()"
        )
    mask = named.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not bool(mask.bool().any(1).all()):
        raise ValueError("a row of the batch has no real token: its attention_mask is all zero")


def chunked_prompt(model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt, where `generate` feeds it in chunks (`prefill_chunk_size`)."""
    named = named_arguments(args, kwargs)
    ids = named.get("inputs") if named.get("inputs") is not None else named.get("input_ids")
    own = named.get("generation_config"), getattr(model, "generation_config", None)
    chunk = named.get("prefill_chunk_size")
    chunked = chunk is not None or any(getattr(config, "prefill_chunk_size", None) is not None for config in own)
    return None if ids is None or not chunked else int(ids.shape[1])


def _check_options(model: PreTrainedModel, named: Mapping[str, Any]) -> None:
    given = named.get("generation_config")
    options = {name: value for name, value in named.items() if name not in POSITIONAL}
    settings: Any = given
    if hasattr(model, "_prepare_generation_config") and isinstance(given, GenerationConfig | None):
        merge: Any = model._prepare_generation_config
        settings, _ = merge(given, **options)

    def place(name: str) -> str:
        if named.get(name) is not None:
            return "generate"
        return "generation_config" if getattr(given, name, None) is not None else "model.generation_config"

    def value_of(name: str) -> Any:
        value = named.get(name)
        return getattr(settings, name, None) if value is None else value

    def refuse(name: str, reason: str) -> None:
        said = value_of(name)
        text = repr(said) if isinstance(said, (bool, int, float, str)) else "…"
        raise ValueError(f"{place(name)}({name}={text}) {reason}: leave it out under compress()")

    for name, reason in REFUSED.items():
        value = value_of(name)
        if value is None or value is False or value in UNSET.get(name, ()):
            continue
        if name == "cache_implementation" and value == "hybrid" and named.get(name) is None:
            continue  # an old default of models with sliding windows, which transformers ignores as well
        refuse(name, reason)
    if value_of("use_cache") is False:
        refuse("use_cache", "leaves nothing to compress")
    if isinstance(named.get("custom_generate"), str):
        refuse("custom_generate", HUB)


def refuse_batching(name: str) -> Any:
    """A stand-in for a method of `BATCHING`."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name}() generates with a paged cache of transformers' own: call it outside compress()")

    return refused


@contextmanager
def restoring(model: PreTrainedModel) -> Iterator[None]:
    """Whatever runs inside, the model's configurations are afterwards as they were."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    own = getattr(model, "generation_config", None)
    if isinstance(own, GenerationConfig):
        configs[id(own)] = own
    before = [(config, {name: _copied(value) for name, value in vars(config).items()}) for config in configs.values()]
    try:
        yield
    finally:
        if own is not None:
            model.generation_config = own
        for config, values in before:
            fields = vars(config)
            for name in [name for name in fields if name not in values]:
                del fields[name]
            fields.update({name: value for name, value in values.items() if _differs(fields.get(name), value)})


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _differs(now: Any, before: Any) -> bool:
    if now is before:
        return False
    return type(now) is not type(before) or not isinstance(now, (list, dict, set, int, float, str)) or now != before
