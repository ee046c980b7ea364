"""Identity of a model in a KV store: weights, configuration, adapters, number type and tokenizer."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import Any

from kvcompress.models.model_hash import model_hash


def identity(model: Any, tokenizer: Any = None) -> dict[str, str]:
    """Plain facts that must agree for keys and values of one to be those of another."""
    parameter = next(model.parameters())
    return {
        "model": str(model.config.model_type),
        "weights": model_hash(model),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "tokenizer": tokens(tokenizer),
        "transformers": metadata.version("transformers"),
    }


def tokens(tokenizer: Any) -> str:
    """16 hex digits of a tokenizer's vocabulary, "none" where there is no tokenizer."""
    if tokenizer is None:
        return "none"
    words = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else type(tokenizer).__name__
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
