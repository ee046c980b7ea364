"""What tells one model's keys and values from another's: weights, configuration, number type and tokenizer."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch

WHOLE = 2 << 30  # bytes of weights that are hashed whole; of larger models the edges of every tensor
EDGE = 1 << 20
SAMPLE = 16  # numbers of each tensor that are looked at, about
_known: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def identity(model: Any, tokenizer: Any = None) -> dict[str, str]:
    """Plain facts that must agree for keys and values of one to be those of another."""
    parameter = next(model.parameters())
    return {
        "model": str(model.config.model_type),
        "weights": weights(model),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "tokenizer": tokens(tokenizer),
        "transformers": metadata.version("transformers"),
    }


def weights(model: Any) -> str:
    """16 hex digits of configuration and weights. Remembered until a weight is written to or replaced.

    What is written through `.data`, as when adapters are merged, counts no version: it shows in a few numbers of each.
    """
    named = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    versions = (
        (name, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for name, tensor in named.items()
    )
    state = *versions, _sample(named.values())
    from kvcompress.models.loading import fingerprint as folder_fingerprint

    if model in _known and _known[model][0] == state:
        return _known[model][1]
    found = hashlib.sha256(_config(model).encode())
    whole = sum(tensor.numel() * tensor.element_size() for tensor in named.values()) <= WHOLE
    if any(
        tensor.is_meta for tensor in named.values()
    ):  # weights off every device: the files they come from have to do
        place = str(getattr(model.config, "_name_or_path", ""))
        found.update(json.dumps([place, folder_fingerprint(place) if place else {}]).encode())
    seen: set[int] = set()
    for name, tensor in sorted(named.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if tensor.data_ptr() in seen or tensor.is_meta:  # tied weights, and those above
            continue
        seen.add(tensor.data_ptr())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for part in [flat] if whole or len(flat) <= 2 * EDGE else [flat[:EDGE], flat[-EDGE:]]:
            found.update(part.cpu().numpy().data)
    _known[model] = state, found.hexdigest()[:16]
    return _known[model][1]


def _sample(tensors: Iterable[torch.Tensor]) -> bytes:
    """A few numbers of each tensor."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
            found.setdefault(tensor.device, []).append(some.contiguous().view(torch.uint8))
    return b"".join(torch.cat(parts).cpu().numpy().tobytes() for parts in found.values())


def _config(model: Any) -> str:
    """What the configuration says of the computation; not where it came from or which attention kernel runs."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str)


def tokens(tokenizer: Any) -> str:
    """16 hex digits of a tokenizer's vocabulary, "none" where there is no tokenizer."""
    if tokenizer is None:
        return "none"
    words = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else type(tokenizer).__name__
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
