"""LayerForm: one layer's part in a decode step with fixed shapes, tensors in and out; and the cache layer it acts as."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcompress.cache.forward import Forward, hand_over
from kvcompress.cache.layer import CompressedLayer
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.models import compat

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class StepRows:
    """What a step says of its rows, the same for all layers.

    Attributes:
        position: int32 `[B, 1, 1]`, of the new token, -1 in rows that get none: then nothing that the row holds changes.
        real: LongTensor `[B]`, real tokens each row has seen, the new one included.
        kept: LongTensor `[B]`, slots per head that the row keeps on average.
    """

    position: Tensor
    real: Tensor
    kept: Tensor

    @classmethod
    def of(cls, table: Tensor) -> StepRows:
        """From the step's one table, LongTensor `[B, 3]`."""
        return cls(table[:, 0, None, None].int(), table[:, 1], table[:, 2])

    @property
    def query(self) -> Tensor:
        """Positions of the queries, int32 `[B, 1]`."""
        return self.position[:, 0]

    @property
    def ids(self) -> Tensor:
        """Position ids by which the model rotates, LongTensor `[B, 1]`."""
        return self.query.clamp(min=0).long()


class LayerForm(Protocol):
    """One layer's part in a step.

    `write` and `attend` are what a step traces: they are given the tensors that `tensors` names, perhaps stand-ins of
    them, change them in place, and ask nothing of the host. The others are Python's account of the same: they read
    nothing from the device.

    Attributes:
        signature: what a traced step depends on beside shapes.
        batch: rows.
        slots: columns of keys.
        kernel: name of the attention, for reports.
        tensors: all that `write` and `attend` read or change, always the same ones.
        beside: those of them that are not the store's.
    """

    signature: Hashable
    batch: int
    slots: int
    kernel: str
    tensors: list[Tensor]
    beside: list[Tensor]

    def write(self, held: Tensors, keys: Tensor, values: Tensor, rows: StepRows) -> None:
        """Take a new token `[B, H_kv, 1, D]`."""
        ...

    def attend(self, held: Tensors, q: Tensor, params: AttentionParams, rows: StepRows) -> Tensor:
        """Output `[B, H, 1, D_v]` of a single query `[B, H, 1, D]` over all that is held; then drop what goes."""
        ...

    def is_of(self, layer: CompressedLayer) -> bool:
        """True if it is `layer` that uses this form's tensors, or did last."""
        ...

    def serves(self, layer: CompressedLayer, tokens: int) -> bool:
        """True if `layer` holds what this form's tensors hold, with room for `tokens` more."""
        ...

    def adopt(self, layer: CompressedLayer, tokens: int) -> bool:
        """Have `layer` hold in this form's tensors what it holds elsewhere, if it fits; False leaves all as it was."""
        ...

    def due(self, forward: Forward) -> bool:
        """True if this token is to be taken by an eager step, as the layer then drops many."""
        ...

    def begin(self, forward: Forward) -> None:
        """A step on this forward comes: have the tensors say what the layer holds."""
        ...

    def written(self, forward: Forward) -> None:
        """The step has been taken: count what it did."""
        ...

    def settle(self) -> None:
        """Bring the layer's store back to the layout that everything else expects, in the same tensors."""
        ...

    def clear(self) -> None:
        """Nothing in empty slots, where a step that was tried out (with position -1 in all rows) has left something."""
        ...


class StaticDecodeLayer(compat.CacheLayerMixin):
    """A form as the layer of a step's cache."""

    is_sliding = False

    def __init__(self, form: LayerForm, held: Tensors, rows: StepRows):
        super().__init__()
        self.form, self.held, self.rows = form, held, rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a new token `[B, H_kv, 1, D]`, and hand this layer on to the attention function."""
        hand_over(kwargs, self)
        self.form.write(self.held, key_states, value_states, self.rows)
        return key_states, value_states

    def attend(self, q: Tensor, params: AttentionParams) -> Tensor:
        """Output `[B, H, 1, D_v]` of a single query `[B, H, 1, D]` over all slots that hold a token."""
        return self.form.attend(self.held, q, params, self.rows)

    def get_seq_length(self) -> int:
        return self.form.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.form.slots, 0

    def get_max_length(self) -> int:
        return self.form.slots


class StaticDecodeCache(compat.Cache):
    """The cache of one step: a session's hooks let a forward on it pass."""
