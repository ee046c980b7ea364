"""GQAPool: groups of KV heads are held as their mean, as when a model is converted to fewer of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from kvcompress.method import Codec, Method, Slots, Tensor
from kvcompress.models import compat


@dataclass(frozen=True)
class GQAPoolCodec(Codec):
    """Means of `pool` neighbouring KV heads, held for all of them: keys as rotated, which are the rotated means.

    Attributes:
        pool: KV heads that are held as one.
    """

    name: ClassVar[str] = "gqapool"

    pool: int = 2

    def __post_init__(self) -> None:
        if self.pool < 1:
            raise ValueError(f"pool={self.pool}; at least 1 KV head")

    @property
    def joint(self) -> bool:
        return self.pool > 1

    def bind(self, model: Any) -> Codec:
        heads = compat.kv_heads(model)
        if heads % self.pool:
            valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(f"pool={self.pool} does not divide the model's {heads} KV heads; valid: {valid}")
        return self

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
        pool: KV heads that are held as one; with eviction only 1.
    """

    family = "low rank"
    keeps = "every token, groups of KV heads as their mean"
    source = "arXiv 2305.13245"
    differences = "applied to what is held, not to weights; no training after it"

    budget_kind: ClassVar[Literal["none"]] = "none"

    pool: int = 2

    def check(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        return GQAPoolCodec(self.pool)
