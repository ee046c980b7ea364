"""One forward through a model, as the layers of a cache and the attention function see it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvcompress.common.transfer import upload
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method.view import Pass

Tensor = torch.Tensor

KEYWORD = "kv_layer"  # under which a cache layer's call travels in the attention function's keyword arguments


class Fusing(Protocol):
    """What a layer asks of a forward that computes some of its tokens and reuses the others (`kvcompress.reuse.selective_recompute`)."""

    def fuse(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, H_kv, T, D]` of the whole prompt, from those of the tokens that were computed."""
        ...

    def asked(self, q: Tensor) -> Tensor:
        """Those of the computed queries `[1, H, m, D]` that attend in this layer."""
        ...

    def narrowed(self, forward: Forward) -> Forward:
        """The forward as these queries see it: their positions."""
        ...

    def widened(self, output: Tensor) -> Tensor:
        """Their output `[1, n, ...]` among zeros for the others, `[1, m, ...]`."""
        ...


@dataclass(eq=False)
class PendingDecisions:
    """What has been found out in a prompt's forward and not been decided yet; the session's compressor fills and empties it.

    Attributes:
        passes: (row, Pass) to run when this prompt is in; decisions wait for them.
        attention: what the model asks of the attention of layers that wait for passes, by layer.
        scores: of layers that wait for others, `[B, H_kv, P]` by layer: +inf where a slot is protected, -inf where empty.
        stats: what `Allocator.stat` returned, by layer.
    """

    passes: list[tuple[int, Pass]] = field(default_factory=list)
    attention: dict[int, AttentionParams] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    stats: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward through the model: its phase, and the rows and positions of its new columns.

    Attributes:
        phase: "prompt" (compress when it ends), "append" (attend and store), "decode", or "pass" (observe, not store).
        length: new columns.
        real: bool `[B, length]` on the CPU, None if every new column is a real token.
        positions: int32 `[B or 1, length]` on the CPU, -1 at padding.
        added: LongTensor `[B]` on the CPU, real tokens per row.
        rotated: `[B or 1, length]`, the position ids by which the model rotates.
        pending: decisions that wait for other layers, or for extra passes.
        fires: bool `[B]` on the CPU, rows whose new tokens make the schedule fire; None where tokens do not matter.
        fusion: what a prefill that reuses chunks puts in place of a layer's new keys and values; None where all is new.
        observer: told of each layer's attention (`hook.observer.AttentionObserver`); None where nobody attends.
    """

    phase: str
    length: int
    real: Tensor | None
    positions: Tensor
    added: Tensor
    rotated: Tensor
    pending: PendingDecisions = field(default_factory=PendingDecisions)
    fires: Tensor | None = None
    fusion: Fusing | None = None
    observer: Any = None
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, init=False)

    def on(self, name: str, device: torch.device) -> Tensor:
        """`positions`, `real` or `rotated` on a device, moved once per forward."""
        key = (name, device)
        if key not in self._moved:
            self._moved[key] = upload(getattr(self, name), device)
        return self._moved[key]

    def weights(self, decay: float, device: torch.device) -> Tensor | None:
        """Weight of each new query's attention: decay^(real queries of its row after it), 0 for padding.

        Float32 `[B or 1, n]`, or None where each counts 1.
        """
        if self.real is None and decay == 1.0:
            return None
        key = (f"weights {decay}", device)
        if key not in self._moved:
            age = self.positions.amax(1, keepdim=True) - self.positions
            weights = (decay ** age.double()).masked_fill(self.positions < 0, 0.0)
            self._moved[key] = upload(weights.float(), device)
        return self._moved[key]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer's part in one forward, handed from `cache.update` to the attention function.

    Attributes:
        layer: the cache's layer (`layer.CompressedLayer`).
        forward: the forward it is part of.
    """

    layer: Any
    forward: Forward


class AttendingLayer(Protocol):
    """A cache layer that computes attention itself."""

    def attend(self, q: Tensor, params: AttentionParams) -> Tensor:
        """Output `[B, H, n, D]` of queries `[B, H, n, D]`."""
        ...


class SplitCall:
    """A call that the attention function takes apart (`kvcompress.cache.joint.JointCall`)."""


def hand_over(kwargs: MutableMapping[str, Any] | None, call: LayerCall | AttendingLayer | SplitCall) -> None:
    """Put a layer's call into the keyword arguments that transformers passes on to the attention function.

    Raises:
        RuntimeError: the model does not hand them to `cache.update`.
    """
    if kwargs is None:
        raise RuntimeError("this model's attention does not hand its keyword arguments to cache.update()")
    kwargs[KEYWORD] = call


def take(kwargs: MutableMapping[str, Any]) -> LayerCall | AttendingLayer | SplitCall | None:
    """The call that `hand_over` put there; None for a layer of transformers' own."""
    return kwargs.pop(KEYWORD, None)
