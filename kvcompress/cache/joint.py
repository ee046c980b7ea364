"""Joint cache: rows of several caches side by side in one decode forward, so that weights are read once for all.

It holds nothing: each layer splits the new keys and values by member and hands them to the member's own layer, which
stores them, and the attention function does the same with the queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import LayerCall, SplitCall, hand_over, take
from kvcompress.cache.layer import CompressedLayer
from kvcompress.models.compat import Cache, CacheLayerMixin

Tensor = torch.Tensor


@dataclass(eq=False)
class JointMember:
    """One cache's part in a joint forward.

    Attributes:
        cache: in which a forward of one token per row has begun.
        rows: of the joint batch that are its own.
        masks: of its windowed layers, by layer: those of a forward of its own.
        error: what one of its layers raised, which ends its part and no other.
    """

    cache: CompressedCache
    rows: slice
    masks: Mapping[int, Tensor | None] = field(default_factory=dict)
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class JointPart:
    """A member's share of one layer's attention.

    Attributes:
        call: what its layer handed to the attention function; None for a layer of transformers' own.
        held: keys and values `[b, H_kv, P, D]` that a layer of transformers' own attends to; None elsewhere.
        mask: of that layer.
    """

    member: JointMember
    call: Any
    held: tuple[Tensor, Tensor] | None
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class JointCall(SplitCall):
    """One layer's part in a joint forward, by member in the order of rows."""

    parts: Sequence[JointPart]


class JointLayer(CacheLayerMixin):
    """One layer of all members."""

    def __init__(self, index: int, members: Sequence[JointMember]) -> None:
        super().__init__()
        self.index, self.members = index, members
        self.is_sliding = bool(getattr(members[0].cache.layers[index], "is_sliding", False))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Have each member's layer store its rows of the new `[B, H_kv, 1, D]`, which are returned."""
        hand_over(kwargs, JointCall([self._part(member, key_states, value_states, *args) for member in self.members]))
        return key_states, value_states

    def _part(self, member: JointMember, keys: Tensor, values: Tensor, *args: Any) -> JointPart:
        if member.error is not None:
            return JointPart(member, None, None, None)
        layer: Any = member.cache.layers[self.index]
        own: dict[str, Any] = {}
        try:  # copies: what a layer may keep is not to hold on to the storage of all rows
            held = layer.update(keys[member.rows].clone(), values[member.rows].clone(), *args, kwargs=own)
        except Exception as error:
            member.error = error
            return JointPart(member, None, None, None)
        call = take(own)
        if isinstance(layer, CompressedLayer):
            assert isinstance(call, LayerCall)
            return JointPart(member, call, None, None)
        return JointPart(member, None, held, member.masks.get(self.index))

    def get_seq_length(self) -> int:
        layers: list[Any] = [member.cache.layers[self.index] for member in self.members]
        return max(layer.get_seq_length() for layer in layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # no mask of all rows is ever looked at

    def get_max_length(self) -> int:
        return -1


class JointCache(Cache):
    """The cache of one joint forward: a session's hooks let a forward on it pass."""

    def __init__(self, members: Sequence[JointMember]) -> None:
        super().__init__(layers=[JointLayer(index, members) for index in range(len(members[0].cache.layers))])
