"""Rules for moving KV bytes between tiers: copies, layer-wise overlap, load or recompute, codecs before a link.

Every time here is modelled. Bandwidths are bytes per second, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ATTENTION, LINEAR = 4, 22  # operations of a prefill per layer: 4 p² d + 22 p d² (Mooncake, FAST'25)


@dataclass(frozen=True)
class TierPath:
    """The way between two tiers.

    Attributes:
        bandwidth: what is reached, the slower of link and far memory.
        latency: seconds that each copy takes beside its bytes.
        granule: bytes that a copy is rounded up to.
        sync: seconds for each object published or fetched, where memory is not coherent.
        unified: both tiers are one memory: nothing is moved.
    """

    bandwidth: float
    latency: float = 0.0
    granule: int = 1
    sync: float = 0.0
    unified: bool = False

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or self.latency < 0 or self.granule < 1 or self.sync < 0:
            raise ValueError(f"{self}: bandwidth above 0, latency and sync from 0, granule from 1")

    def copies(self, nbytes: float, piece: float | None = None) -> int:
        """Copies of `nbytes` in pieces of at most `piece` contiguous bytes; None: one piece.

        Raises:
            ValueError: a negative number of bytes, or a piece that is not above 0.
        """
        if nbytes < 0 or (piece is not None and not piece > 0):
            raise ValueError(f"{nbytes} bytes in pieces of {piece}: at least 0, in pieces above 0")
        return 0 if nbytes == 0 else 1 if piece is None else math.ceil(nbytes / piece)

    def seconds(self, nbytes: float, piece: float | None = None, objects: int = 0) -> float:
        """Seconds to move `nbytes` that lie in pieces of `piece` bytes and make up `objects`."""
        copies = self.copies(nbytes, piece)
        if self.unified or not copies:
            return 0.0
        return self.timed(copies, self._rounded(nbytes, copies, piece), objects)

    def timed(self, copies: int, nbytes: float, objects: int = 0) -> float:
        """Seconds of so many copies of `nbytes` in all."""
        return 0.0 if self.unified else copies * self.latency + nbytes / self.bandwidth + objects * self.sync

    def effective(self, nbytes: float, piece: float | None = None) -> float:
        """Bytes of payload per second."""
        taken = self.seconds(nbytes, piece)
        return nbytes / taken if taken else math.inf

    def _rounded(self, nbytes: float, copies: int, piece: float | None) -> float:
        if self.granule == 1:
            return nbytes
        last = nbytes if piece is None else nbytes - (copies - 1) * piece
        each = 0 if piece is None else math.ceil(piece / self.granule) * self.granule
        return (copies - 1) * each + math.ceil(last / self.granule) * self.granule


def piece_bytes(page: int, head_dim: int, itemsize: float, heads: int = 1, layers: int = 1) -> float:
    """Contiguous bytes of a layout: a page of one head's keys; of all heads of a layer; or of a chunk of all layers."""
    return page * head_dim * itemsize * heads * layers


@dataclass(frozen=True)
class LayerWise:
    """Loads of L layers that run ahead of their computation, one layer at a time.

    Attributes:
        layers: L; load, compute: seconds of one layer.
    """

    layers: int
    load: float
    compute: float

    @property
    def total(self) -> float:
        """The first layer's load is waited for, then the longer of the two, then the last layer's computation."""
        return self.load + (self.layers - 1) * max(self.load, self.compute) + self.compute

    @property
    def exposed(self) -> float:
        """Seconds of loading that computation does not hide."""
        return self.load + (self.layers - 1) * max(0.0, self.load - self.compute)

    @property
    def in_turn(self) -> float:
        """If each waits for the other."""
        return self.layers * (self.load + self.compute)


def prefill_seconds(tokens: float, layers: float, width: float, flops: float) -> float:
    """Modelled seconds of a prompt: layers x (4 p² d + 22 p d²) operations at `flops` per second."""
    return layers * (ATTENTION * tokens**2 * width + LINEAR * tokens * width**2) / flops


def threshold(tokens: float, width: float, gqa: float, itemsize: float, flops: float, ratio: float = 1.0) -> float:
    """Bandwidth above which loading a prefix of `tokens` beats computing it (Mooncake's inequality).

    Args:
        width: hidden size; gqa: query heads per KV head; itemsize: bytes of a number; flops: operations per second;
            ratio: bytes of the method over those of the full cache.
    """
    per_token = 2 * width * itemsize * ratio / gqa
    return flops * per_token / (ATTENTION * tokens * width + LINEAR * width**2)


def load_pays(nbytes: float, path: TierPath, recompute: float, piece: float | None = None, decode: float = 0.0) -> bool:
    """True if loading a prefix, its codec's `decode` seconds included, takes less than `recompute` seconds."""
    return path.seconds(nbytes, piece) + decode < recompute


def codec_pays(nbytes: float, ratio: float, path: TierPath, encode: float, decode: float) -> bool:
    """True if a codec of `ratio` saves more on the link than the seconds it takes."""
    return nbytes * (1 - ratio) / path.bandwidth > encode + decode


def speculative(read: float, hit: float, miss_latency: float, layers: int) -> tuple[float, float]:
    """Prefetch of predicted pages: bytes moved for `read` needed ones, and seconds exposed, at a hit rate.

    Raises:
        ValueError: a hit rate outside (0, 1].
    """
    if not 0 < hit <= 1:
        raise ValueError(f"hit={hit}: a rate above 0 and at most 1")
    return read / hit, (1 - hit) * miss_latency * layers


def tokens_that_fit(capacity: float, token_bytes: float, ratio: float = 1.0, copies: int = 1) -> int:
    """Tokens whose cache fits into `capacity` bytes.

    Args:
        copies: 2 where a unified memory holds a reader's pages and its copy of them on the host.
    """
    return int(capacity // (token_bytes * ratio * copies))


def fit_link(points: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Least squares of `seconds = a · copies + bytes / b`, each point weighed by its seconds.

    Args:
        points: (copies, bytes, seconds).

    Returns:
        `latency` a, `bandwidth` b, `r2`, `points`.

    Raises:
        ValueError: fewer than two points, or times that do not grow with bytes.
    """
    if len(points) < 2:
        raise ValueError(f"{len(points)} points: a fit of latency and bandwidth needs at least 2")
    table = np.array(points, dtype=float)
    weights = 1 / table[:, 2:]
    (a, per_byte), *_ = np.linalg.lstsq(table[:, :2] * weights, np.ones(len(table)), rcond=None)
    if a < 0:  # copies cost nothing that could be seen
        a, per_byte = 0.0, float((table[:, 1] / table[:, 2]).sum() / ((table[:, 1] / table[:, 2]) ** 2).sum())
    if per_byte <= 0:
        raise ValueError("seconds do not grow with bytes: measure larger copies")
    said = table[:, 0] * a + table[:, 1] * per_byte
    spread = float(((table[:, 2] - table[:, 2].mean()) ** 2).sum())
    r2 = 1 - float(((table[:, 2] - said) ** 2).sum()) / spread if spread else 1.0
    return {"latency": float(a), "bandwidth": float(1 / per_byte), "r2": r2, "points": len(points)}
