"""Tokenizers of models that were loaded here."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_tokenizers: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def remember_tokenizer(model: torch.nn.Module, tokenizer: Any) -> None:
    """Note which tokenizer belongs to a model, for methods that write prompts of their own."""
    _tokenizers[model] = tokenizer


def tokenizer_of(model: torch.nn.Module) -> Any:
    """The tokenizer that was loaded with a model, or None."""
    return _tokenizers.get(model)
