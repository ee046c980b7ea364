"""TurboQuant: a random rotation, then one fixed scalar codebook (Zandieh et al., 2025, arXiv 2504.19874).

After a rotation the coordinates of any vector are close to independent normals, so that the best codebook is known
beforehand: no scale or zero per group, only the length of each vector. Optionally the sign of a projection of what is
left makes inner products with keys unbiased (section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch

from kvcompress.common.constants import constant
from kvcompress.kernels.coded_rows import CodedRows, Rows, RowsBeside, levels_of
from kvcompress.method import Codec, Method, Slots, Tensor
from kvcompress.method.orthogonal import gaussian, orthogonal
from kvcompress.method.packing import check_bits, pack
from kvcompress.models.compat import head_sizes

ITERATIONS = 2000


@cache
def codebook(bits: int) -> Tensor:
    """Levels `[2^bits]` float32 that lose least of a standard normal (Lloyd-Max)."""
    count = 2**bits
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    levels = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for _ in range(ITERATIONS):
        edges = (levels[1:] + levels[:-1]) / 2
        density = torch.cat([edges.new_zeros(1), normal.log_prob(edges).exp(), edges.new_zeros(1)])
        below = torch.cat([edges.new_zeros(1), normal.cdf(edges), edges.new_ones(1)])
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels.float()


def edges(bits: int) -> Tensor:
    """Where the nearest of the codebook's levels changes, float32 `[2^bits - 1]`."""
    found = codebook(bits)
    return (found[1:] + found[:-1]) / 2


def corrections(bits: int, dim: int) -> Tensor:
    """What the signs of a projection of `dim` numbers stand for, float32 `[2]`."""
    size = math.sqrt(math.pi / 2) / dim
    return torch.tensor([-size, size])


@dataclass(frozen=True)
class TurboQuantCodec(Codec):
    """Length in float16 and `bits` per coordinate of the rotated vector; one rotation for all layers and heads.

    Attributes:
        bits: per number, 1 to 4.
        mode: "mse", or "prod": of a key's bits one is the sign of a projection of what the others leave.
        seed: of the rotation and the projection.
    """

    name: ClassVar[str] = "turboquant"
    scales: ClassVar[tuple[str, ...]] = ("key_norm", "key_rest", "value_norm")

    bits: int = 4
    mode: str = "mse"
    seed: int = 0

    def __post_init__(self) -> None:
        check_bits(self.bits, (1, 2, 3, 4))
        if self.mode not in ("mse", "prod"):
            raise ValueError(f"mode={self.mode!r}; valid: mse, prod")
        if self.mode == "prod" and self.bits == 1:
            raise ValueError("bits=1 leaves no bit beside the sign of mode=prod: bits=2, or mode=mse")

    def bind(self, model: Any) -> TurboQuantCodec:
        for layer, sizes in enumerate(head_sizes(model)):
            if any(size % 8 for size in sizes):
                raise ValueError(
                    f"layer {layer} has heads of {' and '.join(map(str, sizes))} numbers: TurboQuant packs multiples of 8; "
                    "take codec=int8"
                )
        return self

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        if self.mode == "mse":
            return self._coded("key", keys, self.bits) | self._coded("value", values, self.bits)
        found = self._coded("key", keys, self.bits - 1)
        x, norm = self._turned(keys)
        rest = x - replace(self._rows("key", found, self.bits - 1), scale=None).whole()
        found["key_signs"] = pack((rest @ self._projection(rest).T) >= 0, 1)
        found["key_rest"] = (norm * rest.norm(dim=-1, keepdim=True)).half()
        return found | self._coded("value", values, self.bits)

    def rows(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Rows, Rows]:
        """Keys and values in the rotated basis; behind the keys what the signs say, to be met by a projected query."""
        values = self._rows("value", channels, self.bits)
        if self.mode == "mse":
            return self._rows("key", channels, self.bits), values
        signs = levels_of(corrections, 1, values.shape[-1])
        rest = CodedRows(channels["key_signs"], channels["key_rest"], meaning=signs)
        return RowsBeside((self._rows("key", channels, self.bits - 1), rest)), values

    def read(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        keys, values = self.rows(channels, slots)
        return keys.whole().to(slots.dtype), values.whole().to(slots.dtype)

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        turned = q.float() @ self._rotation(q).T
        if self.mode == "prod":
            turned = torch.cat([turned, turned @ self._projection(q).T], dim=-1)
        return turned.to(q.dtype)

    def expand(self, output: Tensor, slots: Slots) -> Tensor:
        return (output.float() @ self._rotation(output)).to(output.dtype)

    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys such that products with them are those of `read`: the projection is taken back."""
        keys, values = (x.float() for x in self.read(channels, slots))
        dim = values.shape[-1]
        if self.mode == "prod":
            keys = keys[..., :dim] + keys[..., dim:] @ self._projection(values)
        back = self._rotation(values)
        return (keys @ back).to(slots.dtype), (values @ back).to(slots.dtype)

    # ------------------------------------------------------------------ one vector

    def _rotation(self, x: Tensor) -> Tensor:
        return constant(orthogonal, x.shape[-1], self.seed).on(x.device)

    def _projection(self, x: Tensor) -> Tensor:
        return constant(gaussian, x.shape[-1], self.seed).on(x.device)

    def _turned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated vectors of length sqrt(D), so that coordinates are close to standard normals; and their lengths."""
        norm = x.float().norm(dim=-1, keepdim=True)
        unit = x.float() / norm.masked_fill(norm == 0, 1.0)
        return unit @ self._rotation(x).T * math.sqrt(x.shape[-1]), norm / math.sqrt(x.shape[-1])

    def _coded(self, kind: str, x: Tensor, bits: int) -> dict[str, Tensor]:
        turned, norm = self._turned(x)
        codes = torch.bucketize(turned, constant(edges, bits).on(x.device))
        found = {f"{kind}_norm": norm.half()}
        if bits == 3:  # in two planes, so that bytes are full
            return found | {f"{kind}_codes": pack(codes & 3, 2), f"{kind}_high": pack(codes >> 2, 1)}
        return found | {f"{kind}_codes": pack(codes, bits)}

    @staticmethod
    def _rows(kind: str, channels: dict[str, Tensor], bits: int) -> CodedRows:
        return CodedRows(
            channels[f"{kind}_codes"],
            channels[f"{kind}_norm"],
            meaning=levels_of(codebook, bits),
            high=channels.get(f"{kind}_high"),
        )


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """Hold everything, rotated and in `bits` per number. `budget` has no effect.

    Attributes:
        bits: per number, 1 to 4.
        mode: "mse" for the nearest vector, "prod" for unbiased products with keys (one of a key's bits is a sign).
        seed: of the rotation.
    """

    family = "quantised"
    keeps = "every token, rotated, in 1 to 4 bits per number and a length"
    source = "arXiv 2504.19874"
    differences = (
        "no code was released; whole bits (the paper's 2.5 and 3.5 give some channels one more); a Hadamard rotation with "
        "random signs where the head size is a power of 2, one for all layers and heads; the codebook is the normal's"
    )

    budget_kind: ClassVar[Literal["none"]] = "none"

    bits: int = 4
    mode: str = "mse"
    seed: int = 0

    def check(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        return TurboQuantCodec(self.bits, self.mode, self.seed)
