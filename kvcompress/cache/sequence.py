"""Cache specification and sequence state: settings that never change, and the state of a cache's rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from kvcompress.method.codec import Codec
from kvcompress.models.compat import Rotation

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """Settings of a cache, the same for it and its forks.

    Attributes:
        codec: form in which keys and values are held.
        limited: tokens will be evicted, so a prompt's buffers get no headroom.
        compact_rope: rotation per layer, given if positions are compact: keys are held before rotation.
        codec_rope: rotation per layer, given if the codec or reader turns keys back.
        latents: a layer is given MLA latents and the rotated key beside them.
        method: the method that it was made for; None for any.
        model: weak reference to the model that fills it.
    """

    codec: Codec
    limited: bool
    compact_rope: list[Rotation] | None = None
    codec_rope: list[Rotation] | None = None
    latents: bool = False
    method: Any = None
    model: Any = None


@dataclass(frozen=True, eq=False)
class SequenceState:
    """State of the rows of one sequence batch. It is not changed: a new one takes its place.

    Attributes:
        real: LongTensor `[B]` on the CPU, real tokens seen.
        prompted: `[B]`, real tokens when the last prompt ended.
        cap: `[B]`, tokens kept per head, None without limit.
        closed: bool `[B]` on the CPU, rows that decode without compression from here on.
        columns: bool `[B, L]` on the CPU, real columns; None while no column was padding.
        shift: `[B]`, how far position ids lie ahead of `positions`, where keys are turned back.
        logits: `[B, V]` of the last position, where a session ran the last forward.
        pending: `[B, 1]`, picked by generate(), not fed yet.
        fed: `[B, L]`, ids fed so far, -1 at padding, and `passed [B, 1]`, tokens that had their auxiliary forwards;
            where a scorer asks for these.
        clamped_rows: bool `[B]`, rows of a batch whose budget was too small for what is protected.
        kept_rows: `[B]`, the most tokens a head of the row held.
        clamped, kept_max: the same over all rows, those included that have gone.
        moments: what was held when each forward ended.
        reuse: report of a prefill that reused chunks.
    """

    real: Tensor | None = None
    prompted: Tensor | None = None
    cap: Tensor | None = None
    closed: Tensor | None = None
    columns: Tensor | None = None
    shift: Tensor | None = None
    logits: Tensor | None = None
    pending: Tensor | None = None
    fed: Tensor | None = None
    passed: Tensor | None = None
    clamped_rows: Tensor | None = None
    kept_rows: Tensor | None = None
    clamped: bool = False
    kept_max: int = 0
    moments: tuple[dict[str, Any], ...] = ()
    reuse: dict[str, Any] | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> SequenceState:
        """The same with `change` applied to every tensor; dim 0 is the row."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        changed: dict[str, Any] = {name: change(value) for name, value in values if isinstance(value, Tensor)}
        reuse = None if self.reuse is None else copy.copy(self.reuse)
        return replace(self, **changed, moments=tuple(dict(m) for m in self.moments), reuse=reuse)

    def select(self, index: Tensor) -> SequenceState:
        """Rows `index` (LongTensor)."""
        return self.map(lambda value: value.index_select(0, index.to(value.device)))

    def alone(self, row: int) -> SequenceState:
        """One row as if it had run alone."""
        one = self.select(torch.tensor([row]))
        clamped = self.clamped if one.clamped_rows is None else bool(one.clamped_rows)
        kept = self.kept_max if one.kept_rows is None else int(one.kept_rows)
        return SequenceState(
            one.real, shift=one.shift, fed=one.fed, passed=one.passed, clamped=clamped, kept_max=kept, reuse=one.reuse
        )


class CacheContext(Protocol):
    """What a layer asks of the cache it belongs to."""

    spec: CacheSpec

    @property
    def sequence(self) -> SequenceState: ...

    @property
    def forward(self) -> Any: ...

    def leader(self, layer: int, size: int) -> Tensor | None: ...
