"""KIVI: keys quantised per channel over groups of tokens, values per token (Liu et al., ICML 2024, arXiv 2402.02750).

Outliers of keys sit in a few channels, so a channel's numbers share a scale; those of values do not, so a token's do.
The most recent tokens stay exact (section 3.2): keys until a block of `residual` is full, of values always the last
`residual`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvcompress.kernels.coded_rows import numbers
from kvcompress.method import Codec, GroupedCodec, Method, Tensor
from kvcompress.method.packing import check_bits, dequantise, pack, quantise
from kvcompress.models.compat import head_sizes


@dataclass(frozen=True)
class KIVICodec(GroupedCodec):
    """Codes of 2, 4 or 8 bits, scale and zero in float16, packed along the channels.

    Attributes:
        bits: per number, of keys and values.
        group: tokens that share a scale in each channel of a key; channels that share one in each value.
        residual: keys are encoded in blocks of so many tokens; the last so many values stay exact.
    """

    name: ClassVar[str] = "kivi"
    scales: ClassVar[tuple[str, ...]] = ("scale", "zero")
    packed: ClassVar[bool] = True
    said: ClassVar[tuple[str, ...]] = ("bits",)

    bits: int = 2
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        check_bits(self.bits, (2, 4, 8))
        if self.group < 1:
            raise ValueError(f"group={self.group}; at least 1 number shares a scale, and the paper takes 32")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(
                f"residual={self.residual} is no multiple of group={self.group}: keys are encoded in blocks of "
                f"`residual` tokens, in whole groups; try residual={max(1, -(-self.residual // self.group)) * self.group}"
            )

    def bind(self, model: Any) -> KIVICodec:
        for layer, sizes in enumerate(head_sizes(model)):
            for what, size in zip(("keys", "values"), sizes, strict=True):
                if what == "values" and size % self.group:
                    fits = [n for n in range(self.group, 0, -1) if size % n == 0]
                    raise ValueError(
                        f"group={self.group} does not divide the {size} channels of a value in layer {layer}: "
                        f"groups of {fits[0]} do (group={fits[0]})"
                    )
                if size * self.bits % 8:
                    raise ValueError(f"{size} codes of {self.bits} bits do not fill bytes in layer {layer}: bits=8 do")
        return self

    def due(self, kind: str, held: int) -> int:
        return held // self.residual * self.residual if kind == "keys" else max(0, held - self.residual)

    def encode_keys(self, keys: Tensor) -> dict[str, Tensor]:
        codes, scale, zero = quantise(keys.unflatten(2, (-1, self.group)), self.bits, dim=3)
        return {"codes": pack(codes.flatten(2, 3), self.bits), "scale": scale.squeeze(3), "zero": zero.squeeze(3)}

    def decode_keys(self, channels: dict[str, Tensor]) -> Tensor:
        codes = numbers(channels["codes"], self.bits).unflatten(2, (-1, self.group))
        return dequantise(codes, channels["scale"][:, :, :, None], channels["zero"][:, :, :, None]).flatten(2, 3)

    def encode_values(self, values: Tensor) -> dict[str, Tensor]:
        codes, scale, zero = quantise(values.unflatten(3, (-1, self.group)), self.bits, dim=4)
        return {"codes": pack(codes.flatten(3), self.bits), "scale": scale.squeeze(4), "zero": zero.squeeze(4)}

    def decode_values(self, channels: dict[str, Tensor]) -> Tensor:
        codes = numbers(channels["codes"], self.bits).unflatten(3, (-1, self.group))
        return dequantise(codes, channels["scale"][..., None], channels["zero"][..., None]).flatten(3)


@dataclass(frozen=True, kw_only=True)
class KIVI(Method):
    """Hold everything, in `bits` per number but for the last `residual` tokens. `budget` has no effect.

    Attributes:
        bits: 2, 4 or 8; the authors recommend 4 for models with grouped queries.
        group: numbers that share a scale and a zero.
        residual: most recent tokens held exactly; a multiple of `group`.
    """

    family = "quantised"
    keeps = "every token in 2, 4 or 8 bits, keys per channel and values per token; the last ones as they are"
    source = "arXiv 2402.02750; jy-yuan/KIVI"
    differences = (
        "zeros are rounded down to float16 and scales up, so that no number lies outside its codes; half rounds to even; "
        "a constant group has scale 0; codes are packed along channels; rows of a batch have blocks of their own"
    )

    said: ClassVar[tuple[str, ...]] = ("bits",)
    budget_kind: ClassVar[Literal["none"]] = "none"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"group": 32, "residual": 128},  # section 4.1 and the LongBench page of the repository
        "code": {"group": 128, "residual": 128},  # the argument parser's defaults
        "example": {"group": 32, "residual": 32},  # example.py of the repository
    }

    bits: int = 2
    group: int | None = None
    residual: int | None = None

    def check(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        assert self.group is not None and self.residual is not None
        return KIVICodec(self.bits, self.group, self.residual)
