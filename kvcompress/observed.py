"""What scorers and allocators may see of one layer's attention, computed when they ask."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.blockwise import Features, blocks, softmax_block, visible
from kvcompress.layer import CompressedLayer, Forward
from kvcompress.parts import LayerView, Observed

Tensor = torch.Tensor

CPU_ELEMENTS = 1 << 18  # projected numbers of one block: 1 MiB in float32 stays in a CPU's cache
ELEMENTS = 1 << 24  # elsewhere, where each block costs a launch


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
        projection: torch.nn.Module | None = None,
    ):
        self.layer, self.view, self.positions = layer, view, positions
        self.probabilities, self.features, self.forward = probabilities, features, forward
        self.projection = projection
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}  # a scorer and an allocator may ask for the same

    def window(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._windows:
            self._windows[size] = self._window(size)
        return self._windows[size]

    def _window(self, size: int) -> tuple[Tensor, Tensor]:
        if size == 1 and self.probabilities is not None:
            real = self.forward.on("positions", self.probabilities.device) >= 0
            return self.probabilities, real.expand(self.probabilities.shape[0], -1)
        return self._attention(*self._queries(size))

    def window_parts(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        if size == 1 and self.probabilities is not None:
            at = self.forward.on("positions", self.probabilities.device)
            yield self.probabilities, at.expand(self.probabilities.shape[0], -1)
            return
        queries, at = self._queries(size)
        for part in blocks(queries.shape[2], queries, self.view.keys):
            yield self._attention(queries[:, :, part], at[:, part])[0], at[:, part]

    def _queries(self, size: int) -> tuple[Tensor, Tensor]:
        if "queries" not in self.layer.state:
            raise ValueError("the scorer asks for a window of queries it did not declare in `needs`")
        return self.layer.state["queries"][:, :, -size:], self.layer.state["query_positions"][:, -size:]

    def _attention(self, queries: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of some of the window's queries, `[B, H_kv, G, n, P]`, and which are real, `[B, n]`."""
        allowed = visible(self.positions, at, self.features.window)
        _, p = softmax_block(queries, self.view.keys, self.view.keys[..., :1], allowed, self.features)
        return p.masked_fill((at < 0)[:, None, None, :, None], 0.0), at >= 0

    @property
    def mass(self) -> Tensor:
        store = self.layer.held()
        if "mass" not in store.channels:
            raise ValueError("the scorer asks for attention mass it did not declare in `needs`")
        return store.get("mass").transpose(2, 3)

    @property
    def output_norms(self) -> Tensor:
        if self.projection is None:
            raise ValueError("the scorer asks for projected values it did not declare in `needs`")
        weight = self.projection.weight
        assert isinstance(weight, Tensor)
        return projected_norms(self.view.values, weight, self.view.group)


def projected_norms(values: Tensor, weight: Tensor, group: int) -> Tensor:
    """L1 norms of values after each query head's part of the output projection; a block of them at a time.

    Args:
        values: `[B, H_kv, P, D]`.
        weight: `[hidden, H_kv x group x D]`.

    Returns:
        float32 `[B, H_kv, group, P]`, summed in float32.
    """
    batch, heads, slots, dim = values.shape
    if weight.shape[1] != heads * group * dim:
        raise ValueError(
            f"the output projection has {weight.shape[1]} columns, not {heads * group} heads x {dim} numbers of a value"
        )
    parts = weight.to(values.device, values.dtype).view(-1, heads, group, dim)
    norms = values.new_empty((batch, heads, group, slots), dtype=torch.float32)
    size = max(1, (CPU_ELEMENTS if values.device.type == "cpu" else ELEMENTS) // (batch * weight.shape[0]))
    for head in range(heads):
        for member in range(group):
            part = parts[:, head, member].t()
            for start in range(0, slots, size):
                projected = (values[:, head, start : start + size] @ part).abs_()
                norms[:, head, member, start : start + size] = projected.sum(-1, dtype=torch.float32)
    return norms
