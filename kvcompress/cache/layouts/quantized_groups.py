"""Quantised groups of one layer (KIVI): codes of whole groups, in front of the most recent tokens at full precision.

Keys and values have boundaries of their own between codes and exact tokens. A `GroupSegment` holds rows and heads of equal
counts, without padding; where rows or heads hold different numbers of tokens they are units of their own, so that no
code depends on another row or on padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvcompress.cache.layouts.dense import exact, gather_slots
from kvcompress.kernels.triton_groups import PackedTokens
from kvcompress.method.codec import GroupedCodec

Tensor = torch.Tensor

READ = 1024  # coded tokens that are decoded at a time
LEAST = 16  # spare entries of a buffer that grows by one


class GrowingBuffer:
    """A tensor `[b, h, capacity, ...]` that grows along dim 2; the first `length` are held."""

    def __init__(self, first: Tensor):
        self.tensor, self.length = exact(first), first.shape[2]

    @property
    def held(self) -> Tensor:
        return self.tensor[:, :, : self.length]

    def append(self, new: Tensor) -> None:
        n = new.shape[2]
        if self.length + n > self.tensor.shape[2]:
            shape = list(self.tensor.shape)
            shape[2] = self.length + n + max(n, LEAST if n == 1 else 0, self.length // 8)
            larger = self.tensor.new_empty(shape)
            larger[:, :, : self.length] = self.held
            self.tensor = larger
        self.tensor[:, :, self.length : self.length + n] = new
        self.length += n

    def map(self, change: Callable[[Tensor], Tensor]) -> GrowingBuffer:
        return GrowingBuffer(change(self.held))


class GroupSegment:
    """Rows and heads that hold equally many tokens: coded keys and values by channel, and the rest as it is."""

    def __init__(self, codec: GroupedCodec, keys: Tensor, values: Tensor):
        """Hold `keys` and `values [b, h, n, D]` exactly until `flush`."""
        self.codec = codec
        self.coded: dict[str, dict[str, GrowingBuffer]] = {"keys": {}, "values": {}}
        self.counts = {"keys": 0, "values": 0}  # coded tokens
        self.left = {"keys": exact(keys), "values": exact(values)}

    @property
    def length(self) -> int:
        return self.counts["keys"] + self.left["keys"].shape[2]

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.left["keys"] = torch.cat([self.left["keys"], keys], dim=2)
        self.left["values"] = torch.cat([self.left["values"], values], dim=2)

    def flush(self) -> None:
        """Encode what is due of the oldest exact tokens."""
        for kind, encode in (("keys", self.codec.encode_keys), ("values", self.codec.encode_values)):
            left = self.left[kind]
            due = self.codec.due(kind, left.shape[2])
            if not due:
                continue
            for name, value in encode(left[:, :, :due]).items():
                if name in self.coded[kind]:
                    self.coded[kind][name].append(value)
                else:
                    self.coded[kind][name] = GrowingBuffer(value)
            self.counts[kind] += due
            self.left[kind] = exact(left[:, :, due:])

    def pieces(self, kind: str) -> Iterator[Tensor]:
        """Keys or values in order, `[b, h, m, D]` at a time: decoded ones in the model's type, then the exact ones."""
        size = max(1, READ // self.codec.group) * self.codec.group
        decode = self.codec.decode_keys if kind == "keys" else self.codec.decode_values
        for start in range(0, self.counts[kind], size):
            stop = min(start + size, self.counts[kind])
            channels = {}
            for name, buffer in self.coded[kind].items():
                per = self.counts[kind] // buffer.length  # tokens to an entry: scales of keys stand for a group
                channels[name] = buffer.held[:, :, start // per : -(-stop // per)]
            yield decode(channels).to(self.left[kind].dtype)
        if self.left[kind].shape[2] or not self.counts[kind]:
            yield self.left[kind]

    def tail(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens whose values are exact, `[b, h, m, D]`: keys partly decoded."""
        start, coded, group = self.counts["values"], self.counts["keys"], self.codec.group
        if start >= coded:
            return self.left["keys"][:, :, start - coded :], self.left["values"]
        first = start // group
        channels = {}
        for name, buffer in self.coded["keys"].items():
            per = coded // buffer.length
            channels[name] = buffer.held[:, :, first * group // per :]
        near = self.codec.decode_keys(channels)[:, :, start - first * group :].to(self.left["keys"].dtype)
        return torch.cat([near, self.left["keys"]], dim=2), self.left["values"]

    def packed(self) -> PackedTokens:
        """The buffers of a packed codec as a kernel reads them."""
        keys, values = ({name: b.tensor for name, b in self.coded[kind].items()} for kind in ("keys", "values"))
        bits: int = self.codec.bits  # type: ignore[attr-defined]  # which a packed codec has
        return PackedTokens(keys, values, self.counts["values"], bits, self.codec.group, self.tail())

    def whole(self, kind: str) -> Tensor:
        return torch.cat(list(self.pieces(kind)), dim=2)

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupSegment:
        """A unit whose every tensor is what `change` makes of this one's; changes of dims 0 and 1 only."""
        twin = object.__new__(GroupSegment)
        twin.codec, twin.counts = self.codec, dict(self.counts)
        twin.coded = {k: {name: b.map(change) for name, b in held.items()} for k, held in self.coded.items()}
        twin.left = {kind: exact(change(value)) for kind, value in self.left.items()}
        return twin

    def keep(self, index: dict[tuple[str, bool], Tensor]) -> None:
        """Keep only some tokens: by kind and whether coded, indices `[b, h, m]`; whole groups of coded keys."""
        for (kind, coded), chosen in index.items():
            if not coded:
                self.left[kind] = gather_slots(self.left[kind], chosen)
                continue
            for name, buffer in self.coded[kind].items():
                per = self.counts[kind] // buffer.length
                mine = chosen if per == 1 else torch.div(chosen[..., ::per], per, rounding_mode="floor")
                self.coded[kind][name] = GrowingBuffer(gather_slots(buffer.held, mine))
            self.counts[kind] = chosen.shape[2]
            if not self.counts[kind]:
                self.coded[kind] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Kind (codes, scales, residual), tensor and bytes that hold something, of all that is stored."""
        for held in self.coded.values():
            for name, buffer in held.items():
                kind = "scales" if name in self.codec.scales else "codes"
                yield kind, buffer.tensor, buffer.held.numel() * buffer.tensor.element_size()
        for value in self.left.values():
            yield "residual", value, value.numel() * value.element_size()


class QuantizedGroups:
    """The units of one layer: all rows and heads as one, or by row, or by row and head."""

    def __init__(self, units: list[list[GroupSegment]], batch: int, heads: int):
        """`units[r][h]`: one or `batch` lists of one or `heads` units."""
        self.units, self.batch, self.heads = units, batch, heads

    @classmethod
    def of(
        cls, codec: GroupedCodec, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor
    ) -> QuantizedGroups:
        """What slots `[B, H, P, D]` with a position hold, `positions [B, H or 1, P]`, `counts [B, H]` on the CPU."""
        batch, heads, slots, _ = keys.shape
        if int(counts.min()) == slots:
            return cls([[GroupSegment(codec, keys, values)]], batch, heads)
        held = (positions >= 0).expand(batch, heads, slots)
        even = bool((counts == counts[:, :1]).all())
        units = []
        for b in range(batch):
            if even:
                n = int(counts[b, 0])
                mine = [x[b][held[b]].view(1, heads, n, x.shape[3]) for x in (keys, values)]
                units.append([GroupSegment(codec, *mine)])
            else:
                parts = [[x[b, h][held[b, h]][None, None] for x in (keys, values)] for h in range(heads)]
                units.append([GroupSegment(codec, *part) for part in parts])
        return cls(units, batch, heads)

    @property
    def packed(self) -> bool:
        """True if a kernel can read the codes as they lie."""
        return self.units[0][0].codec.packed

    def each(self) -> Iterator[tuple[slice, slice, GroupSegment]]:
        """(rows, heads, unit)."""
        by_row, by_head = len(self.units) > 1, len(self.units[0]) > 1
        for b, row in enumerate(self.units):
            for h, unit in enumerate(row):
                rows = slice(b, b + 1) if by_row else slice(None)
                yield rows, slice(h, h + 1) if by_head else slice(None), unit

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Add new tokens `[B, H, n, D]` as they are; `real` bool `[B, n]`, None if all are."""
        if real is not None and len(self.units) == 1 and self.batch > 1 and not bool((real == real[:1]).all()):
            self.split_rows()
        for rows, heads, unit in self.each():
            k, v = keys[rows, heads], values[rows, heads]
            if real is not None:
                mine = real[rows][0].to(k.device)
                k, v = k[:, :, mine], v[:, :, mine]
            if k.shape[2]:
                unit.append(k, v)

    def flush(self) -> None:
        for _, _, unit in self.each():
            unit.flush()

    def keys_values(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """All of it decoded, `[B, H, P, D]` in the slots that have a position; 0 elsewhere."""
        (_, _, first), *others = self.each()
        slots = positions.shape[2]
        if not others and first.length == slots:
            return first.whole("keys"), first.whole("values")
        held = (positions >= 0).expand(self.batch, self.heads, slots)
        found = []
        for kind in ("keys", "values"):
            padded = first.left[kind].new_zeros(self.batch, self.heads, slots, first.left[kind].shape[3])
            for rows, heads, unit in self.each():
                padded[rows, heads][held[rows, heads]] = unit.whole(kind).flatten(0, 2)
            found.append(padded)
        return found[0], found[1]

    def whole_groups(self, mask: Tensor, must: Tensor, held: Tensor) -> Tensor:
        """What can be kept of `mask [B, H, P]`: of coded tokens whole groups only, never more tokens than marked.

        The groups with most marked tokens stay, those with a `must` token first; what their number leaves free goes to
        the most recent exact tokens that were not marked.

        Args:
            held: bool `[B, H, P]`, slots that hold something.
        """
        mask, found = mask & held, torch.zeros_like(mask)
        for rows, heads, unit in self.each():
            for b in range(*rows.indices(self.batch)):
                for h in range(*heads.indices(self.heads)):
                    slots = held[b, h].nonzero().squeeze(1)
                    chosen = unit_groups(unit, mask[b, h, slots].cpu(), must[b, h, slots].cpu())
                    found[b, h, slots] = chosen.to(found.device)
        return found

    def keep(self, mask: Tensor, held: Tensor) -> None:
        """Keep the marked tokens, `mask` and `held` bool `[B, H, P]`; whole groups of coded keys."""
        marks = [[mask[b, h][held[b, h]].cpu() for h in range(self.heads)] for b in range(self.batch)]
        shares = {unit_shares(unit, marks[b][h]) for rows, heads, unit in self.each()
                  for b in range(*rows.indices(self.batch)) for h in range(*heads.indices(self.heads))}  # fmt: skip
        if len(shares) > 1:
            self.split_heads()
        for rows, heads, unit in self.each():
            these = [[marks[b][h] for h in range(*heads.indices(self.heads))] for b in range(*rows.indices(self.batch))]
            stacked = torch.stack([torch.stack(row) for row in these])
            index = {}
            for kind, count in dict(unit.counts).items():
                for coded, part in ((True, stacked[..., :count]), (False, stacked[..., count:])):
                    chosen = part.nonzero()[:, 2].view(*part.shape[:2], -1) if part.shape[2] else None
                    if chosen is not None:
                        index[kind, coded] = chosen.to(mask.device)
            unit.keep(index)

    def split_rows(self) -> None:
        """One list of units per row."""
        if len(self.units) < self.batch:
            row = self.units[0]
            self.units = [[u.map(lambda x, b=b: x[b : b + 1]) for u in row] for b in range(self.batch)]  # type: ignore[misc]

    def split_heads(self) -> None:
        """One unit per row and head."""
        self.split_rows()
        if len(self.units[0]) < self.heads:
            self.units = [[row[0].map(lambda x, h=h: x[:, h : h + 1]) for h in range(self.heads)] for row in self.units]  # type: ignore[misc]

    def select_rows(self, index: Tensor) -> QuantizedGroups:
        """Rows chosen by number, copied."""
        if len(self.units) == 1 and self.batch > 1:
            units = [[u.map(lambda x: x.index_select(0, index.to(x.device))) for u in self.units[0]]]
        elif self.batch == 1 and len(index) != 1:
            units = [[u.map(lambda x: x.expand(len(index), *x.shape[1:])) for u in self.units[0]]]
        else:
            units = [[u.map(lambda x: x) for u in self.units[b]] for b in index.tolist()]
        return QuantizedGroups(units, len(index), self.heads)

    def fork(self) -> QuantizedGroups:
        return QuantizedGroups([[u.map(lambda x: x) for u in row] for row in self.units], self.batch, self.heads)


def unit_shares(unit: GroupSegment, marked: Tensor) -> tuple[int, ...]:
    """How many of one segment's marked tokens lie in coded and exact keys and values."""
    k, v = unit.counts["keys"], unit.counts["values"]
    return tuple(int(part.sum()) for part in (marked[:k], marked[k:], marked[:v], marked[v:]))


def unit_groups(unit: GroupSegment, marked: Tensor, must: Tensor) -> Tensor:
    """`QuantizedGroups.whole_groups` for one segment: bool `[n]` on the CPU."""
    coded, size = unit.counts["keys"], unit.codec.group
    if not coded:
        return marked
    inside, outside = marked[:coded].view(-1, size), marked[coded:].clone()
    needed = must[:coded].view(-1, size).any(1)
    weight = inside.sum(1) + needed.long() * (size + 1)
    number = max(int(inside.sum()) // size, int(needed.sum()))
    best = torch.sort(weight, descending=True, stable=True).indices[:number]
    groups = torch.zeros(len(weight), dtype=torch.bool)
    groups[best] = True
    spare = int(inside.sum()) - number * size
    free = (~outside).nonzero().squeeze(1)
    if spare > 0:
        outside[free[-spare:]] = True
    return torch.cat([groups[:, None].expand(-1, size).flatten(), outside])
