"""GQAPool: groups of KV heads are held as their mean, as when a model is converted to fewer of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from kvcompress.method import Codec, Method, Slots, Tensor
from kvcompress.models import compat

POOL = 2  # KV heads, where that divides a model's


@dataclass(frozen=True)
class GQAPoolCodec(Codec):
    """Means of `pool` neighbouring KV heads, held for all of them: keys as rotated, which are the rotated means.

    Attributes:
        pool: KV heads that are held as one.
        fits: `pool` gives way to the smallest number above 1 that divides a model's KV heads where it does not.
    """

    name: ClassVar[str] = "gqapool"

    pool: int = POOL
    fits: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.pool, bool) or not isinstance(self.pool, int) or self.pool < 1:
            raise ValueError(f"pool={self.pool!r}; at least 1 KV head, an int")

    @property
    def joint(self) -> bool:
        return self.pool > 1

    def bind(self, model: Any) -> Codec:
        heads = compat.kv_heads(model)
        if heads % self.pool == 0:
            return self
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        if self.fits:
            return replace(self, pool=divisors[min(1, len(divisors) - 1)])
        raise ValueError(
            f"pool={self.pool} does not divide the model's {heads} KV heads; valid: {', '.join(map(str, divisors))}"
        )

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        return {"key_means": self._means(keys), "value_means": self._means(values)}

    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        keys, values = self.read(channels, slots)
        return keys.repeat_interleave(self.pool, dim=1), values.repeat_interleave(self.pool, dim=1)

    def read(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        """The means as fewer heads, `[B, H_kv / pool, n, D]`, each of which more query heads share."""
        count = slots.heads // self.pool
        if self.pool == 1:
            return channels["key_means"], channels["value_means"]
        keys, values = (
            channels[name].squeeze(1).unflatten(-1, (count, -1)).transpose(1, 2)
            for name in ("key_means", "value_means")
        )
        return keys, values

    def _means(self, x: Tensor) -> Tensor:
        """`[B, H_kv, n, D]` → `[B, 1, n, H_kv / pool x D]`, which heads with the same tokens share."""
        if self.pool == 1:
            return x
        means = x.unflatten(1, (-1, self.pool)).mean(2, dtype=torch.float32).to(x.dtype)
        return means.transpose(1, 2).flatten(2)[:, None]


@dataclass(frozen=True, kw_only=True)
class GQAPool(Method):
    """Hold groups of KV heads as their mean (Ainslie et al., 2023, arXiv 2305.13245, section 2.1), without training.

    The paper converts a checkpoint this way and trains on; without that the heads of a model differ too much for their
    mean to stand for them, which is what this method shows. `budget` has no effect.

    Attributes:
        pool: KV heads that are held as one; with eviction only 1. None: 2, or where a model's KV heads are odd the
            smallest number above 1 that divides them (3 of 3; a single head is held as it is).
    """

    family = "low rank"
    keeps = "every token, groups of KV heads as their mean"
    source = "arXiv 2305.13245"
    differences = "applied to what is held, not to weights; no training after it"

    budget_kind: ClassVar[Literal["none"]] = "none"

    pool: int | None = None

    def check(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        return GQAPoolCodec(POOL, fits=True) if self.pool is None else GQAPoolCodec(self.pool)

    def describe(self) -> dict[str, Any]:
        """As of `Method`; the default is named by its number, so that runs with it keep their id."""
        return super().describe() | ({"pool": POOL} if self.pool is None else {})
