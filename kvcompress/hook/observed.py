"""LayerObserved: attention of one layer as scorers and allocators see it, computed when they ask."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.kernels.blockwise import AttentionParams, blocks, logits_block, softmax_block, visible
from kvcompress.method.view import LayerView, Observed
from kvcompress.models.compat import Rotation
from kvcompress.models.projections import effective_weight

Tensor = torch.Tensor

CPU_ELEMENTS = 1 << 18  # projected numbers of one block: 1 MiB in float32 stays in a CPU's cache
ELEMENTS = 1 << 24  # elsewhere, where each block costs a launch


class LayerObserved(Observed):
    """What was seen of one layer in this forward and, through its window of queries, before.

    Args:
        probabilities: a decode step's attention `[B, H_kv, G, 1, P]`, where it is known.
        queries: `[B, H, n, D]` of this forward; None where they have gone.
        rope: the layer's rotation, where queries before it are wanted.
        projection: the attention's output projection, where values behind it are.
    """

    def __init__(
        self,
        layer: CompressedLayer,
        view: LayerView,
        positions: Tensor,
        probabilities: Tensor | None,
        params: AttentionParams,
        forward: Forward,
        queries: Tensor | None = None,
        rope: Rotation | None = None,
        projection: torch.nn.Module | None = None,
    ):
        self.layer, self.view, self.positions = layer, view, positions
        self.probabilities, self.params, self.forward = probabilities, params, forward
        self._queries, self._rope, self.projection = queries, rope, projection
        self._prerope: tuple[Tensor, Tensor] | None = None
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}  # a scorer and an allocator may ask for the same

    def window(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._windows:
            common = self.layer.shared_window_attention
            self._windows[size] = common.get(size) or self._window(size)
            if size in common:
                common[size] = self._windows[size]
        return self._windows[size]

    def _window(self, size: int) -> tuple[Tensor, Tensor]:
        if size == 1 and self.probabilities is not None:
            real = self.forward.on("positions", self.probabilities.device) >= 0
            return self.probabilities, real.expand(self.probabilities.shape[0], -1)
        return self._attention(*self._last_queries(size))

    def window_parts(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        if size == 1 and self.probabilities is not None:
            at = self.forward.on("positions", self.probabilities.device)
            yield self.probabilities, at.expand(self.probabilities.shape[0], -1)
            return
        queries, at = self._last_queries(size)
        for part in blocks(queries.shape[2], queries, self.view.keys):
            yield self._attention(queries[:, :, part], at[:, part])[0], at[:, part]

    def logits(self, size: int) -> tuple[Tensor, Tensor]:
        queries, at = self._last_queries(size)
        allowed = visible(self.positions, at, self.params.window)
        return logits_block(queries, self.view.keys, allowed, self.params), at >= 0

    def _last_queries(self, size: int) -> tuple[Tensor, Tensor]:
        """The last `size` queries `[B, H, size, D]` and their positions `[B, size]`."""
        if self.layer.queries is None:
            raise ValueError("the scorer asks for a window of queries it did not declare in `needs`")
        return self.layer.queries.last(size)

    def _attention(self, queries: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of some of the window's queries, `[B, H_kv, G, n, P]`, and which are real, `[B, n]`."""
        seen = self._seen_by_all(at)
        allowed = visible(self.positions[..., seen:], at, self.params.window)
        _, p = softmax_block(queries, self.view.keys, self.view.keys[..., :1], allowed, self.params, seen)
        if seen:
            return p, at >= 0
        blind = ~allowed.any(-1) | (at < 0)[:, None]  # a query of an earlier chunk may have no visible key left
        return p.masked_fill(blind[:, :, None, :, None], 0.0), at >= 0

    def _seen_by_all(self, at: Tensor) -> int:
        """How many of the first slots hold a key that every one of these queries sees.

        A window at the end of a prompt sees all but its own last slots, and masking is much of its cost on a CPU;
        elsewhere reading the number would wait for the device.
        """
        if self.positions.device.type != "cpu" or self.params.window is not None or bool((at < 0).any()):
            return 0
        unseen = ((self.positions < 0) | (self.positions > at.min())).flatten(0, 1).any(0)
        return int(unseen.to(torch.uint8).argmax()) if bool(unseen.any()) else unseen.shape[0]

    @property
    def mass(self) -> Tensor:
        store = self.layer.held()
        if "mass" not in store.channels:
            raise ValueError("the scorer asks for attention mass it did not declare in `needs`")
        return store.get("mass").transpose(2, 3)

    @property
    def passes(self) -> Tensor:
        store, shape = self.layer.held(), self.view.positions.shape
        if "passes" not in store.channels:
            return torch.zeros(shape, device=self.positions.device)
        return store.get("passes").squeeze(-1)

    @property
    def scaling(self) -> float:
        return self.params.scaling

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        queries, positions = self._new()
        return queries.float(), positions

    @property
    def prerope(self) -> tuple[Tensor, Tensor]:
        if self._prerope is None:
            queries, positions = self._new()
            at = self.forward.on("rotated", queries.device)[:, None, None]
            self._prerope = self.rotation.unrotate(queries.float(), at), positions
        return self._prerope

    def mean_rotation(self, ahead: int) -> Tensor:
        queries, positions = self._new()
        # what the model rotates by counts padding where the caller gave no position ids
        shift = torch.where(positions >= 0, self.forward.on("rotated", queries.device) - positions, 0).amax(1)
        start = self.view.real.to(queries.device) + shift
        return self.rotation.mean_matrix(start[:, None] + torch.arange(ahead, device=start.device), queries.shape[-1])

    @property
    def output_norms(self) -> Tensor:
        if self.projection is None:
            raise ValueError("the scorer asks for projected values it did not declare in `needs`")
        values, group = self.view.values, self.view.group
        weight = effective_weight(self.projection, values.shape[1] * group * values.shape[3], values)
        return projected_norms(values, weight, group)

    @property
    def rotation(self) -> Rotation:
        if self._rope is None:
            raise ValueError("the scorer asks for rotation, which it did not declare in `needs` (prerope)")
        return self._rope

    def _new(self) -> tuple[Tensor, Tensor]:
        queries = self._queries
        assert queries is not None, "queries are there while a forward is looked at"
        positions = self.forward.on("positions", queries.device).expand(queries.shape[0], -1)
        return queries.unflatten(1, (-1, self.view.group)), positions


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
