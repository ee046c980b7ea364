"""What scorers and allocators may see of one layer's attention, computed when they ask."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.kernels.blockwise import Features, blocks, logits_block, softmax_block, visible
from kvcompress.method.view import LayerView, Observed
from kvcompress.models.compat import Rotation
from kvcompress.models.projections import effective_weight

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
        rotation: Rotation | None = None,
        projection: torch.nn.Module | None = None,
    ):
        self.layer, self.view, self.positions = layer, view, positions
        self.probabilities, self.features, self.forward = probabilities, features, forward
        self._rotation, self.projection = rotation, projection
        self._prerope: tuple[Tensor, Tensor] | None = None
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}  # a scorer and an allocator may ask for the same

    def window(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._windows:
            common = self.layer.windows
            self._windows[size] = common.get(size) or self._window(size)
            if size in common:
                common[size] = self._windows[size]
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

    def logits(self, size: int) -> tuple[Tensor, Tensor]:
        queries, at = self._queries(size)
        allowed = visible(self.positions, at, self.features.window)
        return logits_block(queries, self.view.keys, allowed, self.features), at >= 0

    def _queries(self, size: int) -> tuple[Tensor, Tensor]:
        """The last `size` queries `[B, H, size, D]` and their positions `[B, size]`."""
        if "queries" not in self.layer.state:
            raise ValueError("the scorer asks for a window of queries it did not declare in `needs`")
        return self.layer.state["queries"][:, :, -size:], self.layer.state["query_positions"][:, -size:]

    def _attention(self, queries: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of some of the window's queries, `[B, H_kv, G, n, P]`, and which are real, `[B, n]`."""
        seen = self._seen_by_all(at)
        allowed = visible(self.positions[..., seen:], at, self.features.window)
        _, p = softmax_block(queries, self.view.keys, self.view.keys[..., :1], allowed, self.features, seen)
        if seen:
            return p, at >= 0
        blind = ~allowed.any(-1) | (at < 0)[:, None]  # all that a query of an earlier chunk saw may be gone
        return p.masked_fill(blind[:, :, None, :, None], 0.0), at >= 0

    def _seen_by_all(self, at: Tensor) -> int:
        """How many of the first slots hold a key that every one of these queries sees.

        A window at the end of a prompt sees all but its own last slots, and masking is much of its cost on a CPU;
        elsewhere reading the number would wait for the device.
        """
        if self.positions.device.type != "cpu" or self.features.window is not None or bool((at < 0).any()):
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
        return self.features.scaling

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
        if self._rotation is None:
            raise ValueError("the scorer asks for rotation, which it did not declare in `needs` (prerope)")
        return self._rotation

    def _new(self) -> tuple[Tensor, Tensor]:
        queries = self.layer.queries
        assert queries is not None, "queries are there while a forward is looked at"
        positions = self.forward.on("positions", queries.device).expand(queries.shape[0], -1)
        return queries.unflatten(1, (-1, self.view.group)), positions


def remember_queries(layer: CompressedLayer, q: Tensor, forward: Forward, size: int) -> None:
    """Keep the last `size` real queries of each row `[B, H, size, D]` and their positions `[B, size]`, newest last."""
    positions = forward.on("positions", q.device).expand(q.shape[0], -1).long()
    if "queries" in layer.state:
        q = torch.cat([layer.state["queries"], q[:, :, -size:] if forward.real is None else q], dim=2)
        new = positions[:, -size:] if forward.real is None else positions
        positions = torch.cat([layer.state["query_positions"], new], dim=1)
    if forward.real is None and "queries" not in layer.state:
        q, positions = q[:, :, -size:], positions[:, -size:]
    elif positions.shape[1] > size or bool((positions < 0).any()):
        # real queries to the right, in order: the last `size` columns are then the last `size` real ones
        order = torch.sort((positions >= 0).to(torch.uint8), dim=1, stable=True).indices[:, -size:]
        positions = positions.gather(1, order)
        q = q.gather(2, order[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    layer.state["queries"], layer.state["query_positions"] = q.clone(), positions.clone()


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
