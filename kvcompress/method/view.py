"""Views: what parts ask for (`Needs`), a layer as it is held (`LayerView`), and its observed attention (`Observed`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

Tensor = torch.Tensor
GroupReduce = Literal["mean", "max"]


@dataclass(frozen=True)
class Needs:
    """What a part wants the hook layer to observe.

    Attributes:
        window: attention of the last `window` real queries over all held keys.
        mass: attention mass per key, summed over all queries so far.
        prerope: queries as they were before rotation, and the rotation itself. Refused for models without rotary
            positions and for those whose rotation depends on the length.
        extra_passes: 1 if inputs of `Scorer.passes` are to be run when a prompt is in.
        hidden: nothing asks for it yet; a session refuses it by name.
        decay: of the mass: a query that k later ones of its row followed counts decay^k.
        output: length of each value after the attention's output projection.
    """

    window: int = 0
    mass: bool = False
    hidden: bool = False
    prerope: bool = False
    extra_passes: int = 0
    decay: float = 1.0
    output: bool = False

    def __or__(self, other: Needs) -> Needs:
        decays = {needs.decay for needs in (self, other) if needs.mass}
        if len(decays) > 1:
            raise ValueError(f"attention mass has one decay per session, not {' and '.join(map(str, sorted(decays)))}")
        return Needs(
            max(self.window, other.window),
            self.mass or other.mass,
            self.hidden or other.hidden,
            self.prerope or other.prerope,
            max(self.extra_passes, other.extra_passes),
            decays.pop() if decays else 1.0,
            self.output or other.output,
        )


@dataclass(frozen=True)
class LayerView:
    """What a scorer may read of one layer. Tensors are read-only by contract.

    Attributes:
        layer: index of the layer in the model; `n_layers` full-attention layers take part in the budget.
        read: gives keys and values `[B, H_kv, P, D]` as the codec returns them, RoPE applied; called when first asked.
        positions: int `[B, H_kv, P]`, original position of each slot, -1 where empty.
        real: LongTensor `[B]` on the CPU, real tokens each row has seen.
        kept: LongTensor `[B]` on the CPU, slots per head that the row will keep (the cap, or all if fewer).
        phase: "prompt" or "decode".
        group: query heads per KV head.
        leader: for a size n, positions `[B, H_kv, P]` now held by the first layer of this one's group of n successive
            full-attention layers; None if this is that layer.
    """

    layer: int
    n_layers: int
    read: Callable[[], tuple[Tensor, Tensor]]
    positions: Tensor
    real: Tensor
    kept: Tensor
    phase: str
    group: int
    leader: Callable[[int], Tensor | None] = lambda size: None

    @cached_property
    def _keys_values(self) -> tuple[Tensor, Tensor]:
        return self.read()

    @property
    def keys(self) -> Tensor:
        """`[B, H_kv, P, D]`"""
        return self._keys_values[0]

    @property
    def values(self) -> Tensor:
        """`[B, H_kv, P, D]`"""
        return self._keys_values[1]


class Observed(ABC):
    """What the hook layer saw, in float32. Each quantity is computed when asked for."""

    @abstractmethod
    def window(self, size: int) -> tuple[Tensor, Tensor]:
        """Attention of the last `size` real queries of each row.

        Returns:
            probabilities `[B, H_kv, G, size, P]`, softmax over all slots visible to that query (0 elsewhere, and for a
            query that nothing is left of which it saw), and a bool `[B, size]` that is False where the row has fewer
            real queries than `size`.
        """

    @abstractmethod
    def logits(self, size: int) -> tuple[Tensor, Tensor]:
        """Attention logits of the last `size` queries, before softmax and without sink logits.

        `[B, H_kv, G, size, P]`, -inf where not visible.

        For scorers with a normalisation of their own. In decode they need a window of at least 2 (of one, the step's
        own attention is all that is known). Also the same bool `[B, size]`; the rest means nothing where it is False.
        """

    @property
    @abstractmethod
    def mass(self) -> Tensor:
        """Attention mass per key and query head `[B, H_kv, G, P]`, summed over all queries that saw the key."""

    @abstractmethod
    def window_parts(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The attention that `window` gives, a few queries at a time, oldest first: for windows of hundreds.

        Each part has the queries' positions beside it, int `[B, n]`, -1 where the row has fewer real queries.
        """

    @property
    def passes(self) -> Tensor:
        """Strongest attention per key in the extra passes `[B, H_kv, P]`, 0 where none has observed the key."""
        raise NotImplementedError

    @property
    @abstractmethod
    def scaling(self) -> float:
        """The model's factor on q·k, usually 1 / sqrt(D)."""

    @property
    @abstractmethod
    def queries(self) -> tuple[Tensor, Tensor]:
        """Queries of this forward's new tokens, as attention used them.

        Returns:
            `[B, H_kv, G, n, D]` float32, and their positions, int `[B, n]`: -1 marks padding, whose query means nothing.
        """

    @property
    @abstractmethod
    def output_norms(self) -> Tensor:
        """L1 norm of each value after the output projection of each query head, float32 `[B, H_kv, G, P]`."""

    @property
    @abstractmethod
    def prerope(self) -> tuple[Tensor, Tensor]:
        """`queries` before they were rotated. A scale that the model multiplies into its rotation stays in them."""

    @abstractmethod
    def mean_rotation(self, ahead: int) -> Tensor:
        """Mean over the next `ahead` positions of the matrix that rotates a query there, `[B, D, D]` float32.

        It starts at the position after the row's last real token. The mean of rotations is not one: it shrinks what
        turns fast.
        """


@dataclass(frozen=True)
class Pass:
    """One extra input of one row.

    Attributes:
        ids: LongTensor `[m]`, run behind all that the row holds.
        first, last: tokens `first` to `last - 1` of the row are observed: the strongest attention each key gets.
        beside: keys of the first tokens that share the softmax with these and the pass's own.
    """

    ids: Tensor
    first: int
    last: int
    beside: int = 0


State = dict[str, Tensor]
"""Per-layer tensors a scorer keeps between calls; dim 0 is the batch row. Forked, reordered and selected with it."""


def reduce_group(scores: Tensor, how: GroupReduce, dim: int = 2) -> Tensor:
    """Reduce per-query-head scores to their KV head over `dim` by mean or max."""
    if how == "mean":
        return scores.mean(dim)
    if how == "max":
        return scores.amax(dim)
    raise ValueError(f"group_reduce={how!r}; valid: mean, max")
