"""Dense layout: every row and head holds the same number of slots in one rectangular buffer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Tensor = torch.Tensor

BLOCK = 64  # slots: the smallest headroom a growing buffer gets


def headroom(length: int) -> int:
    """Spare slots a buffer of `length` slots is given, so that growth costs O(1) copies per token on average."""
    return max(BLOCK, length // 8)


def rounded(slots: int) -> int:
    """A capacity for `slots` slots, at most an eighth (or a block) larger, of which there are few: steps are made for one."""
    unit = max(BLOCK, 2 ** (slots.bit_length() - 4))
    return -(-slots // unit) * unit


def exact(source: Tensor) -> Tensor:
    """A copy that owns exactly its own storage, so that what it was cut from can be freed."""
    return source.clone(memory_format=torch.contiguous_format)


class DenseStore:
    """Named channels `[B, H or 1, capacity, ...]`; slots 0..length-1 are held, in positional order.

    Rows or heads that hold fewer tokens have empty slots (position -1) at the left, so that all append at the same
    column. A channel that is equal for all heads is stored once, with a head dimension of 1.
    """

    kind = "dense"

    def __init__(self, channels: dict[str, Tensor], counts: Tensor, grow: bool = False):
        """Hold `channels` (dim 2 = slots), which the caller gives up.

        Args:
            channels: `positions` and whatever the codec made.
            counts: LongTensor `[B, H]` on the CPU, non-empty slots.
            grow: give the buffer headroom at once, where more tokens are sure to come.
        """
        self._sum: Tensor | None
        self.length = channels["positions"].shape[2]
        self.channels = channels
        self._recount(counts)
        self._full: bool | None = None
        if grow:
            self._reallocate(self.length + headroom(self.length))

    @classmethod
    def of(cls, channels: dict[str, Tensor], counts: Tensor, grow: bool = False) -> DenseStore:
        """A store that owns copies of `channels`, whose storages it does not share."""
        return cls(channels if grow else {name: exact(value) for name, value in channels.items()}, counts, grow)

    @classmethod
    def within(cls, buffers: dict[str, Tensor], length: int, counts: Tensor) -> DenseStore:
        """A store whose first `length` slots of `buffers` are held."""
        store = cls(dict(buffers), counts)
        store.length = length
        return store

    @property
    def capacity(self) -> int:
        return self.channels["positions"].shape[2]

    @property
    def spare(self) -> int:
        """Columns that can be appended before the buffer grows."""
        return self.capacity - self.length

    @property
    def counts(self) -> Tensor:
        """Non-empty slots, LongTensor `[B, H]` on the CPU."""
        if self._sum is None:  # whole columns are only counted up: one addition per look, not per token
            self._sum = self._counts + self._appended
        return self._sum

    def _recount(self, counts: Tensor) -> None:
        self._counts, self._appended, self._sum = counts, 0, counts

    @property
    def heads(self) -> int:
        return self._counts.shape[1]

    @property
    def holes(self) -> int:
        """Empty slots of the fullest row and head."""
        return self.length - int(self.counts.max())

    @property
    def full(self) -> bool:
        """True if no held slot is empty, so that no mask is needed to read them."""
        if self._full is None:
            self._full = int(self.counts.min()) == self.length
        return self._full

    def get(self, name: str) -> Tensor:
        """The held slots of a channel, `[B, H or 1, length, ...]`; a view."""
        return self.channels[name][:, :, : self.length]

    def put(self, name: str, value: Tensor) -> None:
        """Set or add a channel from `[B, H or 1, length, ...]`."""
        if self.capacity == self.length:
            self.channels[name] = value
            return
        buffer = value.new_zeros((*value.shape[:2], self.capacity, *value.shape[3:]))
        buffer[:, :, : self.length] = value
        self.channels[name] = buffer

    def drop_channel(self, name: str) -> None:
        self.channels.pop(name, None)

    def append(self, new: dict[str, Tensor], real: Tensor | None, added: Tensor, grow: bool = True) -> None:
        """Add columns. `new` channels `[B, H or 1, n, ...]`; `added` LongTensor `[B]`: real tokens per row.

        `grow=False` makes room for these and no more: where eviction follows at once.
        """
        n = new["positions"].shape[2]
        if self.length + n > self.capacity:
            self._reallocate(self.length + n + (headroom(self.length + n) if grow else 0))
        for name, buffer in self.channels.items():
            if name in new:
                if new[name].shape[1] > buffer.shape[1]:
                    buffer = self.channels[name] = buffer.expand(-1, new[name].shape[1], *buffer.shape[2:]).clone()
                buffer[:, :, self.length : self.length + n] = new[name]
            else:
                buffer[:, :, self.length : self.length + n].zero_()
        self._grow(n, real, added)

    def fix(self, tokens: int) -> None:
        """Make room for `tokens` columns at a capacity of which there are few; spare slots are empty, and no garbage."""
        if self.spare < tokens or self.capacity != rounded(self.capacity):
            self._reallocate(rounded(self.length + tokens))
        self.clear_spare()

    def spread(self, name: str) -> None:
        """Hold a channel once per head, whether or not it is equal for all."""
        value = self.channels[name]
        if value.shape[1] != self.heads:
            self.channels[name] = value.expand(-1, self.heads, *value.shape[2:]).clone()

    def clear_spare(self) -> None:
        """Nothing in the slots behind the held ones: position -1, zeros elsewhere."""
        for name, buffer in self.channels.items():
            buffer[:, :, self.length :] = -1 if name == "positions" else 0

    def written(self, real: Tensor | None, added: Tensor) -> None:
        """Hold the column behind the held ones, which a step has filled; arguments as of `append`."""
        self._grow(1, real, added)

    def _grow(self, n: int, real: Tensor | None, added: Tensor) -> None:
        self.length += n
        if real is None:
            self._appended, self._sum = self._appended + n, None
        else:
            self._recount(self.counts + added[:, None])
            self._full = None

    def _reallocate(self, capacity: int) -> None:
        for name, old in self.channels.items():
            buffer = torch.empty((*old.shape[:2], capacity, *old.shape[3:]), dtype=old.dtype, device=old.device)
            buffer[:, :, : self.length] = old[:, :, : self.length]
            self.channels[name] = buffer

    def mark_empty(self, slots: Tensor, drop: Tensor | None = None) -> None:
        """Empty one slot per row and head without moving the others.

        Args:
            slots: LongTensor `[B, H, 1]`.
            drop: bool `[B, H]` on the CPU, the heads to do it in; None for all.
        """
        positions = self.channels["positions"]
        if positions.shape[1] != slots.shape[1]:
            positions = self.channels["positions"] = positions.expand(-1, slots.shape[1], -1).clone()
        if drop is None or bool(drop.all()):
            positions.scatter_(2, slots, -1)
            self._appended -= 1
            self._sum = self._counts if self._appended == 0 else None
        else:
            keep = positions.gather(2, slots)
            positions.scatter_(2, slots, torch.where(drop.to(slots.device)[:, :, None], -1, keep))
            self._recount(self.counts - drop.long())
        self._full = False

    def recount(self, counts: Tensor) -> None:
        """Non-empty slots are `counts [B, H]` now, which someone has written or emptied in place."""
        self._recount(counts)
        self._full = None

    def put_in_order(self, index: Tensor) -> None:
        """Hold slots `index [B, H, n]` of the buffers, in that order and in the same buffers; nothing in the others."""
        self.length = index.shape[2]
        for buffer in self.channels.values():
            buffer[:, :, : self.length] = gather_slots(buffer, index)
        self._full = None
        self.clear_spare()

    def settle(self) -> Tensor:
        """Take the present counts as those to start from, and return them."""
        self._recount(self.counts)
        return self._counts

    def grown_by_one(self, counts: Tensor) -> bool:
        """True if nothing happened since `settle` gave `counts` but that every head got one token."""
        return self._counts is counts and self._appended == 1

    def select_rows(self, index: Tensor) -> None:
        """Reorder, repeat or drop batch rows."""
        self.channels = {name: value.index_select(0, index.to(value.device)) for name, value in self.channels.items()}
        self._recount(self.counts.index_select(0, index.cpu()))
        self._full = None

    def fork(self) -> DenseStore:
        copy = DenseStore.__new__(DenseStore)
        copy.length, copy._full = self.length, self._full
        copy._recount(self.counts.clone())
        copy.channels = {name: exact(value) for name, value in self.channels.items()}
        return copy

    def packed(self, mask: Tensor) -> dict[str, Tensor]:
        """Copies of the slots marked in `mask [B, H, length]`, row and head after row and head: channels `[N, ...]`."""
        found = {}
        for name in self.channels:
            value = self.get(name)
            found[name] = value.expand(*mask.shape, *value.shape[3:])[mask]
        return found

    def borrow(self, names: Iterable[str]) -> DenseStore:
        """The held slots of some channels without a copy: to be read, and kept from with `keep_slots`."""
        return DenseStore({name: self.get(name) for name in names}, self.counts.clone())


def gather_slots(value: Tensor, index: Tensor) -> Tensor:
    """Take slots `index [B, H, m]` of a channel `[B, H or 1, P, ...]` → a fresh `[B, H, m, ...]`."""
    batch, heads, m = index.shape
    if value.shape[1] == 1 and heads > 1:
        value = value.expand(-1, heads, *value.shape[2:])
    if value.dim() == 3:
        return value.gather(2, index)
    if value.stride(-1) == 1 and value.dim() == 4 and batch * heads <= 64:
        # one row copy per slot beats gather's one load per number
        return torch.stack([value[b, h].index_select(0, index[b, h]) for b in range(batch) for h in range(heads)]).view(
            batch, heads, m, value.shape[-1]
        )
    tail = value.shape[3:]
    return value.gather(2, index.view(batch, heads, m, *([1] * len(tail))).expand(-1, -1, -1, *tail))
