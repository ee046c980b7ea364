"""Stored form of a layer in a KV store: exact, or as the codes of a grouped codec.

What is stored is decoded as it is loaded, so that whoever uses a chunk sees keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from kvcompress.reuse.tensor_file import Layout

Tensor = torch.Tensor


class Form(Protocol):
    """Named tensors of one layer, from keys and values `[1, H_kv, n, D]` and back."""

    name: str

    def pack(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]: ...

    def unpack(self, channels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]: ...


def layer_layout(form: Form, heads: int, sizes: tuple[int, int], dtype: torch.dtype, tokens: int) -> Layout:
    """What `pack` makes of a layer: number types and shapes of its tensors by name.

    Args:
        sizes: numbers of a key and of a value.
    """
    keys, values = (torch.empty(1, heads, tokens, size, dtype=dtype, device="meta") for size in sizes)
    return {name: (part.dtype, tuple(part.shape)) for name, part in form.pack(keys, values).items()}


class Exact:
    """Keys and values as they are."""

    name = "plain"

    def pack(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"keys": keys, "values": values}

    def unpack(self, channels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return channels["keys"], channels["values"]


class Grouped:
    """Whole groups of tokens as codes of a grouped codec (KIVI), the chunk's last tokens as they are.

    A chunk is complete when it is stored, so nothing else is held back.

    Args:
        codec: with `group`, `encode_keys`, `decode_keys`, `encode_values` and `decode_values`.
        dtype: of the keys and values that are decoded.

    Raises:
        ValueError: a codec of another kind.
    """

    def __init__(self, codec: Any, dtype: torch.dtype) -> None:
        if not all(hasattr(codec, f"{way}_{kind}") for way in ("encode", "decode") for kind in ("keys", "values")):
            raise ValueError(
                f"chunks cannot be stored as {getattr(codec, 'name', type(codec).__name__)}: a store takes a codec that "
                "works in groups of tokens, such as KIVI's, or None"
            )
        self.codec, self.dtype = codec, dtype
        self.name = repr(codec)

    def pack(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        whole = keys.shape[2] // self.codec.group * self.codec.group
        found: dict[str, Tensor] = {}
        if whole:
            found |= {f"key_{name}": part for name, part in self.codec.encode_keys(keys[:, :, :whole]).items()}
            found |= {f"value_{name}": part for name, part in self.codec.encode_values(values[:, :, :whole]).items()}
        if whole < keys.shape[2]:
            found |= {"keys": keys[:, :, whole:], "values": values[:, :, whole:]}
        return found

    def unpack(self, channels: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._side(channels, "key", self.codec.decode_keys), self._side(
            channels, "value", self.codec.decode_values
        )

    def _side(self, channels: Mapping[str, Tensor], kind: str, decode: Any) -> Tensor:
        coded = {name.removeprefix(f"{kind}_"): part for name, part in channels.items() if name.startswith(f"{kind}_")}
        parts = [decode(coded).to(self.dtype)] if coded else []
        parts += [channels[f"{kind}s"]] if f"{kind}s" in channels else []
        return torch.cat(parts, dim=2)
