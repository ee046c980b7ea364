"""Compatibility of a method's parts with a model: what is refused by name before any work."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from kvcompress.hook.compression import Compressor
from kvcompress.method.codec import Codec, GroupedCodec
from kvcompress.models import compat


def check_codec(model: PreTrainedModel, codec: Codec) -> None:
    """Check that a model which holds latents is not given a codec that changes how keys are read.

    Raises:
        ValueError: it is, by name.
    """
    changes = codec.needs_rotation or type(codec).query is not Codec.query or isinstance(codec, GroupedCodec)
    if compat.holds_latents(model) and changes:
        raise ValueError(
            f"codec={codec.name} has a way of its own to read keys, and {model.config.model_type!r} holds latents: "
            "take codec=plain, or one that codes token by token, such as int8"
        )


def check_tokenizer(compressor: Compressor, tokenizer: Any) -> None:
    """Check that a method which writes prompts of its own has a tokenizer.

    Raises:
        ValueError: it has none.
    """
    if compressor.needs.extra_passes and tokenizer is None:
        raise ValueError(
            f"{type(compressor.method).__name__} writes prompts of its own and needs the model's tokenizer: "
            "compress(model, method, tokenizer=tokenizer), or a model that comes from kvcompress.load"
        )
