"""Arguments of `model.generate` that do not go with a compressed cache."""

from __future__ import annotations

from typing import Any

from kvcompress.cache.cache import CompressedCache


def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse by name what a compressed cache cannot do, before any work.

    Raises:
        ValueError: an option that rewinds or replaces the cache, an empty prompt, or ids that the cache has seen.
    """
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
