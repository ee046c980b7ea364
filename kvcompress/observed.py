"""What scorers and allocators may see of one layer's attention, computed when they ask."""

from __future__ import annotations

import torch

from kvcompress.kernels.blockwise import Features, logits_block, softmax_block, visible
from kvcompress.layer import CompressedLayer, Forward
from kvcompress.parts import LayerView, Observed

Tensor = torch.Tensor


class LayerObserved(Observed):
    """What was seen of one layer in this forward and, through its state, before."""

    def __init__(
        self,
        layer: CompressedLayer,
        view: LayerView,
        positions: Tensor,
        probabilities: Tensor | None,
        features: Features,
        forward: Forward,
    ):
        self.layer, self.view, self.positions = layer, view, positions
        self.probabilities, self.features, self.forward = probabilities, features, forward
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}  # a scorer and an allocator may ask for the same

    def window(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._windows:
            self._windows[size] = self._window(size)
        return self._windows[size]

    def _window(self, size: int) -> tuple[Tensor, Tensor]:
        if size == 1 and self.probabilities is not None:
            real = self.forward.on("positions", self.probabilities.device) >= 0
            return self.probabilities, real.expand(self.probabilities.shape[0], -1)
        queries, at, allowed = self._queries(size)
        _, p = softmax_block(queries, self.view.keys, self.view.keys[..., :1], allowed, self.features)
        return p.masked_fill((at < 0)[:, None, None, :, None], 0.0), at >= 0

    def logits(self, size: int) -> tuple[Tensor, Tensor]:
        queries, at, allowed = self._queries(size)
        return logits_block(queries, self.view.keys, allowed, self.features), at >= 0

    def _queries(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last `size` queries `[B, H, size, D]`, their positions `[B, size]`, and which slots each sees."""
        if "queries" not in self.layer.state:
            raise ValueError("the scorer asks for a window of queries it did not declare in `needs`")
        queries, at = self.layer.state["queries"][:, :, -size:], self.layer.state["query_positions"][:, -size:]
        return queries, at, visible(self.positions, at, self.features.window)

    @property
    def mass(self) -> Tensor:
        store = self.layer.held()
        if "mass" not in store.channels:
            raise ValueError("the scorer asks for attention mass it did not declare in `needs`")
        return store.get("mass").transpose(2, 3)
