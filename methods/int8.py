"""Int8: every token's key and value as 8-bit integers with one scale per token and head. The plain baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvcompress.kernels.coded_rows import CodedRows
from kvcompress.method import Codec, Method, Slots, Tensor

LEVELS = 127


@dataclass(frozen=True)
class Int8Codec(Codec):
    """x ~ code x scale, codes in -127..127, scale = largest |x| of the token / 127 in float16."""

    name: ClassVar[str] = "int8"
    scales: ClassVar[tuple[str, ...]] = ("key_scale", "value_scale")

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        (k, k_scale), (v, v_scale) = self._coded(keys), self._coded(values)
        return {"key_codes": k, "key_scale": k_scale, "value_codes": v, "value_scale": v_scale}

    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        keys, values = self.rows(channels, slots)
        return keys.whole().to(slots.dtype), values.whole().to(slots.dtype)

    def rows(self, channels: dict[str, Tensor], slots: Slots) -> tuple[CodedRows, CodedRows]:
        keys = CodedRows(channels["key_codes"], channels["key_scale"])
        return keys, CodedRows(channels["value_codes"], channels["value_scale"])

    @staticmethod
    def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes `[..., D]` int8 and scales `[..., 1]` float16. The rounded scale is the one that codes are made with."""
        x = x.float()
        scale = (x.abs().amax(-1, keepdim=True) / LEVELS).half()
        divisor = scale.float().masked_fill(scale == 0, 1.0)
        return (x / divisor).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


@dataclass(frozen=True, kw_only=True)
class Int8(Method):
    """Hold everything, in 8 bits per number. `budget` has no effect; a sweep's budgets collapse to one cell."""

    family = "quantised"
    keeps = "every token, in 8 bits per number"
    source = "the baseline that quantised caches are compared with"
    differences = "none released: absolute maximum per token and head, round half to even"

    budget_kind: ClassVar[Literal["none"]] = "none"

    def make_codec(self) -> Codec:
        return Int8Codec()
