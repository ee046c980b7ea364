"""Small integers packed into bytes, and the asymmetric quantisation of groups that makes them.

`pack` puts 8 / bits codes into each byte along the last dimension, the first one lowest. A group of numbers becomes
codes 0 .. 2^bits - 1, a scale and a zero (the group's minimum), both float16: x ~ code x scale + zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

BITS = (1, 2, 4, 8)
LARGEST = 65504.0  # float16


def check_bits(bits: int, valid: Sequence[int] = BITS) -> None:
    """Refuse a width that is not among the valid ones.

    Raises:
        ValueError: names the value and the valid ones.
    """
    if bits not in valid:
        raise ValueError(f"bits={bits}; valid: {', '.join(map(str, valid))}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers `[..., n]` below 2^bits → uint8 `[..., n * bits / 8]`; n a multiple of 8 / bits."""
    check_bits(bits)
    per = 8 // bits
    if codes.shape[-1] % per:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill bytes: give a multiple of {per}")
    codes = codes.to(torch.uint8)
    if per == 1:
        return codes.clone()
    parts = codes.unflatten(-1, (-1, per))
    packed = parts[..., 0].clone()
    for i in range(1, per):
        packed |= parts[..., i] << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`: uint8 `[..., m]` → uint8 `[..., m * 8 / bits]`."""
    if bits == 8:
        return packed
    per, mask = 8 // bits, (1 << bits) - 1
    return torch.stack([(packed >> (i * bits)) & mask for i in range(per)], dim=-1).flatten(-2)


def quantise(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups that lie along one dimension.

    The zero is rounded down to float16 and the scale up, so that every number lies within the range of its codes:
    |x - dequantised| <= scale / 2, whatever the model's precision and however far a channel lies from 0. A constant
    group has scale 0 and codes 0. Rounding is half to even.

    Args:
        x: `[..., g, ...]`, the group along `dim`.

    Returns:
        codes uint8 as `x`; scale and zero float16 with 1 along `dim`.
    """
    x, levels = x.float().clamp(-LARGEST, LARGEST), 2**bits - 1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero = _not_above(low)
    scale = _not_below((high - zero.float()) / levels)
    constant = (high == low) & (zero.float() == low)
    scale = scale.masked_fill(constant, 0.0)
    divisor = scale.float().masked_fill(scale == 0, 1.0)
    codes = ((x - zero.float()) / divisor).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale, zero


def dequantise(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Float32 numbers of codes, scale and zero as `quantise` gives them."""
    return torch.addcmul(zero.float(), codes.float(), scale.float())


def _not_above(x: Tensor) -> Tensor:
    """The nearest float16 that is not above `x`, or the one below."""
    near = x.half()
    return torch.where(near.float() > x, (x - x.abs() * 2.0**-10 - 2.0**-24).clamp(min=-LARGEST).half(), near)


def _not_below(x: Tensor) -> Tensor:
    return -_not_above(-x)
