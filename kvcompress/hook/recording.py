"""PrefillRecording: what one full prefill shows of its attention, for methods that start from it later."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method import Needs

Tensor = torch.Tensor


@dataclass(eq=False)
class PrefillRecording:
    """Filled by a session's compressor as the layers of a prompt run.

    Attributes:
        needs: the union of what the methods to come observe.
        attention: what the model asks of each layer's attention.
        forward: the forward that was recorded; None where no layer attends to all tokens.
    """

    needs: Needs
    attention: dict[int, AttentionParams] = field(default_factory=dict)
    forward: Forward | None = None

    def note(self, layer: CompressedLayer, q: Tensor, params: AttentionParams, forward: Forward) -> None:
        """A layer's attention has run with queries `q [B, H, n, D]`: those that windows look at stay with the layer."""
        self.attention[layer.index] = params
        if self.forward is None:
            self.forward = replace(forward, observer=None)  # which would hold on to the session
        if self.needs.window:
            layer.remember_queries(q, forward, self.needs.window)
