"""Attention of single queries over codes: products with keys and sums of values, of which only a block is made at a time.

Scales of a token leave the products: a key's is multiplied into its logit, a value's into its probability, so that codes
are turned into numbers and no more. Logits of one query are few and are all there before the first value is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from kvcompress.common.constants import Constant, constant
from kvcompress.kernels.blockwise import AttentionParams, capped, group_queries, probabilities

Tensor = torch.Tensor
Block = tuple[slice, slice]  # KV heads or lanes, slots

BLOCK_NUMBERS = 1 << 17  # made at a time: 512 KiB in float32, what a CPU core's own cache holds
GPU_NUMBERS = 1 << 25  # the same on a GPU, where each block costs launches
LEAST_SLOTS = 64
ALL = slice(None)


class Rows(Protocol):
    """Keys or values of slots `[b, h, n, W]`, whatever they are held as; h may also count lanes."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    def dot(self, q: Tensor) -> Tensor:
        """Products `[b, h, G, n]` float32 with queries `[b, h, G, W]` float32."""
        ...

    def weigh(self, p: Tensor) -> Tensor:
        """Sums `[b, h, G, W]` float32 of rows by weights `[b, h, G, n]` float32."""
        ...

    def whole(self) -> Tensor:
        """All of them, `[b, h, n, W]` float32."""
        ...


@dataclass(frozen=True, eq=False)
class Levels:
    """What codes of few bits stand for.

    Attributes:
        bits: of a code, 1 to 4.
        values: float32 `[2^bits]`.
        bytes: float32 `[256, 8 / bits]`, the numbers of a byte of codes; of 3 bits `[4096, 4]`, those of a byte of lower
            bits and half a byte of highest ones.
    """

    bits: int
    values: Constant
    bytes: Constant


@cache
def levels_of(make: Callable[..., Tensor], bits: int, *arguments: float) -> Levels:
    """Levels of codes of `bits` that `make(bits, *arguments)` gives, float32 `[2^bits]`."""
    values = constant(make, bits, *arguments)
    return Levels(bits, values, Constant(_bytes(values.value, bits)))


def whole_numbers(bits: int) -> Tensor:
    """For `levels_of`: codes that stand for themselves."""
    return torch.arange(2**bits, dtype=torch.float32)


def _bytes(values: Tensor, bits: int) -> Tensor:
    if bits == 3:
        held, place = torch.arange(4096)[:, None], torch.arange(4)
        codes = ((held >> (2 * place)) & 3) | (((held >> (8 + place)) & 1) << 2)
    else:
        codes = (torch.arange(256)[:, None] >> (bits * torch.arange(8 // bits))) & (2**bits - 1)
    return values[codes].contiguous()


def looked_up(codes: Tensor, table: Tensor, high: Tensor | None = None) -> Tensor:
    """Float32 numbers `[..., m * 8 / bits]` of packed codes `[..., m]` (`packing.pack`).

    Args:
        table: `Levels.bytes` where the codes are.
        high: the highest bits of 3, `[..., m / 2]`; `codes` are the lower two.
    """
    index = codes.int()
    if high is not None:
        index = index | (torch.stack([high & 15, high >> 4], dim=-1).flatten(-2).int() << 8)
    per = table.shape[1]
    wide = {2: torch.int64, 4: torch.complex128}.get(per) if codes.device.type == "cpu" else None
    if wide is None:
        return F.embedding(index, table).flatten(-2)
    # one look-up of a wide number for all of a byte's: torch's own of short rows takes several times as long
    found = table.view(wide).flatten().index_select(0, index.flatten())
    return found.view(torch.float32).view(*codes.shape[:-1], codes.shape[-1] * per)


def numbers(packed: Tensor, bits: int) -> Tensor:
    """Codes `[..., n]` of packed ones `[..., n * bits / 8]`, in float32."""
    return packed.float() if bits == 8 else looked_up(packed, levels_of(whole_numbers, bits).bytes.on(packed.device))


# ---------------------------------------------------------------------- rows


@dataclass(frozen=True, eq=False)
class MadeRows:
    """Rows of which a block is made at a time.

    Attributes:
        make: rows `[b, h', m, W]` of a block, in any float type.
        shape: `(b, h, n, W)`.
        device: where they are made.
        by_lane: blocks are of whole lanes, and not of slots of all heads.
    """

    make: Callable[[Block], Tensor]
    shape: tuple[int, int, int, int]
    device: torch.device
    by_lane: bool = False

    def dot(self, q: Tensor) -> Tensor:
        found = [torch.matmul(q[:, at[0]], self.make(at).float().mT) for at in self._blocks()]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1 if self.by_lane else 3)

    def weigh(self, p: Tensor) -> Tensor:
        found = [torch.matmul(p[:, at[0], :, at[1]], self.make(at).float()) for at in self._blocks()]
        if self.by_lane:
            return found[0] if len(found) == 1 else torch.cat(found, dim=1)
        total = found[0]
        for part in found[1:]:
            total += part
        return total

    def whole(self) -> Tensor:
        return self.make((ALL, ALL)).float()

    def _blocks(self) -> list[Block]:
        batch, heads, slots, width = self.shape
        most = BLOCK_NUMBERS if self.device.type == "cpu" else GPU_NUMBERS
        if self.by_lane:
            size = max(1, most // max(1, batch * slots * width))
            return [(slice(at, at + size), ALL) for at in range(0, max(1, heads), size)]
        size = max(LEAST_SLOTS, most // max(1, batch * heads * width))
        return [(ALL, slice(at, at + size)) for at in range(0, max(1, slots), size)]


@dataclass(frozen=True, eq=False)
class CodedRows:
    """Rows that are codes: of a token `number of code x scale + zero`.

    Attributes:
        codes: `[b, h, n, w]`, numbers of any type, or packed bytes where there is a `meaning`.
        scale, zero: `[b, h, n, 1]`, of each token; None for 1 and 0.
        meaning: what packed codes stand for.
        high: `[b, h, n, w / 2]`, the highest bits of codes of 3.
    """

    codes: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    meaning: Levels | None = None
    high: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, slots, width = self.codes.shape
        return batch, heads, slots, width * (1 if self.meaning is None else self.meaning.bytes.value.shape[1])

    def dot(self, q: Tensor) -> Tensor:
        logits = _taken_whole(code_dot, self.codes)(q, self.codes, self._table, self.high)
        if self.scale is not None:
            logits = logits * self.scale.float().mT
        return logits if self.zero is None else torch.addcmul(logits, q.sum(-1, keepdim=True), self.zero.float().mT)

    def weigh(self, p: Tensor) -> Tensor:
        scaled = p if self.scale is None else p * self.scale.float().mT
        total = _taken_whole(code_weigh, self.codes)(scaled, self.codes, self._table, self.high)
        return total if self.zero is None else total + torch.matmul(p, self.zero.float())

    def whole(self) -> Tensor:
        return self.numbers((ALL, ALL))

    def numbers(self, at: Block) -> Tensor:
        """Rows of a block, float32."""
        heads, slots = at
        found = _numbers(self.codes, self._table, self.high, at)
        scale, zero = (None if x is None else x[:, heads, slots].float() for x in (self.scale, self.zero))
        if scale is not None and zero is not None:
            return torch.addcmul(zero, found, scale)
        return found if scale is None else found * scale

    @property
    def _table(self) -> Tensor | None:
        return None if self.meaning is None else self.meaning.bytes.on(self.codes.device)


@dataclass(frozen=True, eq=False)
class RowsBeside:
    """Rows whose numbers are those of several, one behind the other."""

    parts: Sequence[Rows]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return *self.parts[0].shape[:3], sum(self._widths())

    def dot(self, q: Tensor) -> Tensor:
        first, *others = (part.dot(x) for part, x in zip(self.parts, q.split(self._widths(), dim=-1), strict=True))
        for found in others:
            first = first + found
        return first

    def weigh(self, p: Tensor) -> Tensor:
        return torch.cat([part.weigh(p) for part in self.parts], dim=-1)

    def whole(self) -> Tensor:
        return torch.cat([part.whole() for part in self.parts], dim=-1)

    def _widths(self) -> list[int]:
        return [part.shape[3] for part in self.parts]


# ---------------------------------------------------------------------- products with codes alone


def code_dot(q: Tensor, codes: Tensor, table: Tensor | None, high: Tensor | None) -> Tensor:
    """Products `[b, h, G, n]` of queries `[b, h, G, W]` with what codes stand for, without their scales."""
    return _unscaled(codes, table, high).dot(q)


def code_weigh(p: Tensor, codes: Tensor, table: Tensor | None, high: Tensor | None) -> Tensor:
    """Sums `[b, h, G, W]` by weights `[b, h, G, n]` of what codes stand for, without their scales."""
    return _unscaled(codes, table, high).weigh(p)


def _unscaled(codes: Tensor, table: Tensor | None, high: Tensor | None) -> MadeRows:
    batch, heads, slots, width = codes.shape
    shape = batch, heads, slots, width * (1 if table is None else table.shape[1])
    return MadeRows(partial(_numbers, codes, table, high), shape, codes.device, by_lane=heads > slots)


def _numbers(codes: Tensor, table: Tensor | None, high: Tensor | None, at: Block) -> Tensor:
    codes, high = codes[:, at[0], at[1]], None if high is None else high[:, at[0], at[1]]
    return codes.float() if table is None else looked_up(codes, table, high)


# A step that is traced takes each as one operation: a compiler would make all numbers at once where these make a block.
_ops = torch.library.Library("kvcompress", "FRAGMENT")
for _run in (code_dot, code_weigh):
    _ops.define(f"{_run.__name__}(Tensor x, Tensor codes, Tensor? table, Tensor? high) -> Tensor")
    _ops.impl(_run.__name__, _run, "CompositeExplicitAutograd")


def _like_dot(x: Tensor, codes: Tensor, table: Tensor | None, high: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:3], codes.shape[2])


def _like_weigh(x: Tensor, codes: Tensor, table: Tensor | None, high: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:3], codes.shape[3] * (1 if table is None else table.shape[1]))


_ops.impl("code_dot", _like_dot, "Meta")
_ops.impl("code_weigh", _like_weigh, "Meta")


def _taken_whole(run: Callable[..., Tensor], codes: Tensor) -> Callable[..., Tensor]:
    """`run` itself, or as one operation where `codes` is a stand-in for a tensor of a step that is traced."""
    return getattr(torch.ops.kvcompress, run.__name__) if is_stand_in(codes) else run


def is_stand_in(x: Tensor) -> bool:
    """True of what takes a tensor's place while a step is traced."""
    return isinstance(x, FakeTensor)


# ---------------------------------------------------------------------- attention


def attend_rows(
    q: Tensor, keys: Rows, values: Rows, allowed: Tensor | None, features: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Softmax attention of single queries over rows, summed in float32.

    Args:
        q: `[B, H, 1, W]`.
        keys, values: `[B, h, P, ...]`, each with its own number of heads, which divides H.
        allowed: bool `[B, 1 or h, 1, P]`, None for all; its heads may be others yet.

    Returns:
        output `[B, H, 1, W_v]`, probabilities `[B, H, P]` float32.
    """
    batch, all_heads, _, _ = q.shape
    heads, slots = keys.shape[1:3]
    logits = capped(keys.dot(group_queries(q.float() * features.scaling, heads)), features)
    if allowed is not None:
        logits = logits.view(batch, allowed.shape[1], -1, slots).masked_fill(~allowed, float("-inf"))
    p = probabilities(logits.view(batch, heads, -1, 1, slots), features)
    output = values.weigh(p.view(batch, values.shape[1], -1, slots))
    return output.to(q.dtype).view(batch, all_heads, 1, -1), p.view(batch, all_heads, slots)
