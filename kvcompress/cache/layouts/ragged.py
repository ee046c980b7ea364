"""Ragged layout: each row and head holds its own number of slots, without padding waste."""

from __future__ import annotations

import torch

from kvcompress.cache.layouts.dense import BLOCK, exact
from kvcompress.common.transfer import upload

Tensor = torch.Tensor

SMALLEST_LANE = 16


def lane_size(extents: Tensor) -> int:
    """Slots per lane, 16 to 64: what half a lane per segment wastes stays near an eighth of what is held."""
    size = BLOCK
    while size > SMALLEST_LANE and size * 4 > int(extents.sum()) / max(1, extents.numel()):
        size //= 2
    return size


def few(n: int) -> int:
    """A number not below `n`, and at most an eighth (or 7) above it, of which there are few."""
    unit = max(8, 2 ** (n.bit_length() - 4))
    return -(-n // unit) * unit


class RaggedStore:
    """Named channels `[N, ...]`; segment `b * H + h` holds the slots of row b and head h, in positional order.

    Two forms. Packed, after an eviction: segments one after the other, exactly as large as what they hold. In lanes,
    as soon as a token is appended: the buffer is cut into lanes of equal size, each owned by one segment, and a segment
    grows by a lane. Lanes in use come first in the buffer, so that attention reads them as one batch of equal pieces,
    and growing moves nothing until the spare lanes are used up.

    `get` shows a channel padded to `[B, H, P, ...]` with empty slots (position -1) at the left; attention over single
    tokens reads the lanes directly. Slots emptied in decode stay as holes until the layer is compacted.
    """

    kind = "ragged"

    def __init__(self, channels: dict[str, Tensor], counts: Tensor):
        """Hold packed `channels` whose segments lie one after the other, `counts` LongTensor `[B, H]` on the CPU."""
        self.channels = channels
        self._sum: Tensor | None
        self._recount(counts)
        self._holes = torch.zeros_like(counts)
        self._pack()

    def _pack(self) -> None:
        self.lane = 0  # slots per lane; 0 while packed
        self._lanes: list[list[int]] = []  # of each segment, in order
        self._room = 0  # appends of one token until some segment needs another lane
        self._next: Tensor | None = None  # [S] flat slot each segment appends to, on the device
        self._owner: Tensor | None = None
        self._table: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        self._length = int(self.extents.max())

    # ------------------------------------------------------------------ what is held

    @property
    def counts(self) -> Tensor:
        """Non-empty slots, LongTensor `[B, H]` on the CPU."""
        if self._sum is None:
            self._sum = self._counts + self._appended
        return self._sum

    def _recount(self, counts: Tensor) -> None:
        self._counts, self._appended, self._sum = counts, 0, counts

    @property
    def spare(self) -> int:
        """Tokens to append at once: lanes are handed out token by token."""
        return 1

    @property
    def extents(self) -> Tensor:
        """Slots from a segment's first to its last, holes included, LongTensor `[B, H]` on the CPU."""
        return self.counts + self._holes

    @property
    def heads(self) -> int:
        return self._counts.shape[1]

    def part(self, row: int, after: Tensor, n: int) -> dict[str, Tensor]:
        """`n` slots of one row's heads, those after the first `after [H]`: channels `[1, H, n, ...]`, copied."""
        segments = row * self.heads + torch.arange(self.heads)
        index = self._slots(segments[:, None], after[:, None] + torch.arange(n)).to(self.device)
        return {name: flat[index][None] for name, flat in self.channels.items()}

    @property
    def length(self) -> int:
        """Slots of the longest segment."""
        return self._length

    @property
    def full(self) -> bool:
        return int(self.counts.min()) == self._length

    @property
    def holes(self) -> int:
        """Most slots emptied in one segment."""
        return int(self._holes.max())

    @property
    def device(self) -> torch.device:
        return self.channels["positions"].device

    def places(self) -> tuple[Tensor, Tensor]:
        """Flat slot of each padded place, LongTensor `[B, H, length]`, and whether it is one of the segment's, bool."""
        if self._places is not None:
            return self._places
        batch, heads = self._counts.shape
        extents = self.extents.flatten()[:, None]
        offset = torch.arange(self._length)[None] - (self._length - extents)
        held = upload((offset >= 0).view(batch, heads, self._length), self.device)
        index = self._slots(torch.arange(batch * heads)[:, None], offset.clamp_(min=0))
        # a segment without slots may start past the end of the buffer
        index.clamp_(max=max(len(self.channels["positions"]) - 1, 0))
        places = upload(index.view(held.shape), self.device), held
        if self.lane:  # what is packed is held exactly, and seldom looked at
            self._places = places
        return places

    def _slots(self, segments: Tensor, offsets: Tensor) -> Tensor:
        """Flat slots of offsets within segments (broadcasting LongTensors on the CPU)."""
        if not self.lane:
            extents = self.extents.flatten()
            return (extents.cumsum(0) - extents)[segments] + offsets
        most = max(1, max(len(lanes) for lanes in self._lanes))
        table = torch.tensor([lanes + [0] * (most - len(lanes)) for lanes in self._lanes])
        return table[segments, (offsets // self.lane).clamp(max=most - 1)] * self.lane + offsets % self.lane

    def get(self, name: str) -> Tensor:
        """A channel padded to `[B, H, length, ...]`: a transient copy."""
        padded = self._padded(self.channels[name])
        return padded.masked_fill_(~self.places()[1], -1) if name == "positions" else padded

    def padded(self, lanes: Tensor) -> Tensor:
        """What was worked out in lanes `[lanes in use, slots per lane, ...]`, as `[B, H, length, ...]`; else 0."""
        padded = self._padded(lanes.flatten(0, 1))
        held = self.places()[1]
        return padded.masked_fill_(~held.view(*held.shape, *([1] * (padded.dim() - 3))), 0)

    def _padded(self, flat: Tensor) -> Tensor:
        index, _ = self.places()
        return flat.index_select(0, index.flatten()).view(*index.shape, *flat.shape[1:])

    def put(self, name: str, value: Tensor) -> None:
        """Set or add a channel from its padded form `[B, H or 1, length, ...]`."""
        index, held = self.places()
        flat = value.new_zeros((len(self.channels["positions"]), *value.shape[3:]))
        flat[index[held]] = value.expand(*index.shape, *value.shape[3:])[held]
        self.channels[name] = flat

    def drop_channel(self, name: str) -> None:
        self.channels.pop(name, None)

    def packed(self, mask: Tensor) -> dict[str, Tensor]:
        """Copies of the slots marked in `mask [B, H, length]`, segment after segment."""
        index, held = self.places()
        chosen = index[mask & held]
        return {name: flat.index_select(0, chosen) for name, flat in self.channels.items()}

    # ------------------------------------------------------------------ lanes

    @property
    def used(self) -> int:
        """Lanes that belong to a segment: the first of the buffer."""
        return sum(len(lanes) for lanes in self._lanes)

    def in_lanes(self, name: str) -> Tensor:
        """A channel as `[lanes in use, slots per lane, ...]`; a view. Slots that hold nothing have position -1."""
        flat, used = self.channels[name], len(self.owners())
        return flat[: used * self.lane].view(used, self.lane, *flat.shape[1:])

    def owners(self) -> Tensor:
        """Segment of each lane in use, LongTensor `[lanes]` on the device."""
        if self._owner is None:
            if not self.lane:
                self._provide(self.extents.flatten().tolist())
            owner = torch.empty(self.used, dtype=torch.long)
            for segment, lanes in enumerate(self._lanes):
                owner[lanes] = segment
            self._owner = upload(owner, self.device)
        return self._owner

    def table(self) -> Tensor:
        """Lanes of each segment in order, int32 `[B * H, most]` on the device, -1 past a segment's last."""
        if self._table is None:
            self.owners()
            most = max(1, max(len(lanes) for lanes in self._lanes))
            rows = [lanes + [-1] * (most - len(lanes)) for lanes in self._lanes]
            self._table = upload(torch.tensor(rows, dtype=torch.int32), self.device)
        return self._table

    def _provide(self, wanted: list[int], grow: bool = True) -> None:
        """Lanes for segments of `wanted` slots, and the buffer they need."""
        size = self.lane or lane_size(self.extents)
        lanes = [list(own) for own in self._lanes] or [[] for _ in wanted]
        used = self.used
        for own, slots in zip(lanes, wanted, strict=True):
            while len(own) * size < slots:
                own.append(used)
                used += 1
        if not self.lane or used * size > len(self.channels["positions"]):
            spare = max(1, used // 16, len(lanes) if size < BLOCK else 0)
            self._move((used + (spare if grow else 0)) * size, lanes, size)
        self.lane, self._lanes = size, lanes
        self._owner = self._table = self._next = None

    def _move(self, slots: int, lanes: list[list[int]], size: int) -> None:
        """A larger buffer. From the packed form segments go to their lanes, which lie one after the other."""
        extents = self.extents.flatten().tolist()
        for name, old in self.channels.items():
            buffer = old.new_full((slots, *old.shape[1:]), -1 if name == "positions" else 0)
            if self.lane:
                buffer[: len(old)] = old
            else:
                start = 0
                for own, extent in zip(lanes, extents, strict=True):
                    if extent:
                        first = own[0] * size
                        buffer[first : first + extent] = old[start : start + extent]
                    start += extent
            self.channels[name] = buffer

    # ------------------------------------------------------------------ changes

    def append(self, new: dict[str, Tensor], real: Tensor | None, added: Tensor, grow: bool = True) -> None:
        """Add the real tokens of `new` channels `[B, H or 1, n, ...]`; `real` bool `[B, n]`, None if all are.

        `grow=False` makes room for these and no more.
        """
        batch, heads = self._counts.shape
        n = new["positions"].shape[2]
        if real is None and n == 1:
            if not self._room:
                self._make_room()
            assert self._next is not None
            for name, flat in self.channels.items():
                if name in new:
                    value = new[name].expand(batch, heads, *new[name].shape[2:])
                    flat.index_copy_(0, self._next, value.reshape(-1, *flat.shape[1:]))
                else:
                    flat.index_fill_(0, self._next, 0)
            self._next += 1
            self._room -= 1
            self._appended, self._sum = self._appended + 1, None
            self._length += 1
            self._places = None
            return
        mask = torch.ones(batch, n, dtype=torch.bool) if real is None else real.cpu()
        extents = self.extents
        self._provide((extents + added[:, None]).flatten().tolist(), grow)
        offset = extents[:, :, None] + (mask.long().cumsum(1) - 1)[:, None, :]
        chosen = mask[:, None, :].expand(batch, heads, n)
        segments = torch.arange(batch * heads).view(batch, heads, 1).expand_as(offset)
        slots, chosen = self._slots(segments[chosen], offset[chosen]).to(self.device), chosen.to(self.device)
        for name, flat in self.channels.items():
            if name in new:
                flat[slots] = new[name].expand(batch, heads, *new[name].shape[2:])[chosen]
            else:
                flat[slots] = 0
        self._recount(self.counts + added[:, None])
        self._room, self._next, self._places = 0, None, None
        self._length = int(self.extents.max())

    def reserve(self, tokens: int) -> None:
        """Lanes for `tokens` more in each segment, in a buffer of one of few sizes: steps are made for one."""
        self._provide((self.extents + tokens).flatten().tolist(), grow=False)
        lanes = few(max(self.used, len(self.channels["positions"]) // self.lane))
        if lanes * self.lane != len(self.channels["positions"]):
            self._move(lanes * self.lane, self._lanes, self.lane)
        self._room, self._places = 0, None

    def holds_room(self, tokens: int) -> bool:
        """True if the lanes of each segment take `tokens` more."""
        extents = self.extents.flatten().tolist()
        return bool(self.lane) and all(
            len(lanes) * self.lane >= extent + tokens for lanes, extent in zip(self._lanes, extents, strict=True)
        )

    def written(self, added: Tensor) -> None:
        """Hold the slots behind each segment's last, which a step has filled: `added [B]` tokens per row, 0 or 1."""
        self._recount(self.counts + added[:, None])
        self._room, self._next, self._places = 0, None, None
        self._length = int(self.extents.max())

    def _make_room(self) -> None:
        """Know where each segment's next tokens go, with a new lane for those whose last is full."""
        extents = self.extents.flatten()
        self._provide((extents + 1).tolist())
        self._next = upload(self._slots(torch.arange(len(extents)), extents), self.device)
        self._room = self.lane - int((extents % self.lane).max())

    def mark_empty(self, slots: Tensor, drop: Tensor | None = None) -> None:
        """Empty one slot per row and head without moving the others.

        Args:
            slots: padded places `[B, H, 1]`.
            drop: bool `[B, H]` on the CPU, the heads to do it in; None for all.
        """
        flat = self.places()[0].gather(2, slots).flatten()
        if drop is None or bool(drop.all()):
            self._holes = self._holes + 1
            self._appended -= 1
            self._sum = self._counts if self._appended == 0 else None
        else:
            flat = flat[drop.flatten().to(flat.device)]
            self._recount(self.counts - drop.long())
            self._holes = self._holes + drop.long()
        self.channels["positions"].index_fill_(0, flat, -1)

    def settle(self) -> Tensor:
        """Take the present counts as those to start from, and return them."""
        self._recount(self.counts)
        return self._counts

    def grown_by_one(self, counts: Tensor) -> bool:
        """True if nothing happened since `settle` gave `counts` but that every head got one token."""
        return self._counts is counts and self._appended == 1

    def select_rows(self, index: Tensor) -> None:
        """Reorder, repeat or drop batch rows."""
        places, held = (x.index_select(0, index.to(x.device)) for x in self.places())
        chosen = places[held]
        self.channels = {name: flat.index_select(0, chosen) for name, flat in self.channels.items()}
        self._recount(self.counts.index_select(0, index.cpu()))
        self._holes = self._holes.index_select(0, index.cpu())
        self._pack()

    def sharing(self, channels: dict[str, Tensor]) -> RaggedStore:
        """A store of other channels that lie as these do."""
        copy = RaggedStore.__new__(RaggedStore)
        copy.channels = channels
        copy._recount(self.counts.clone())
        copy._holes = self._holes.clone()
        copy._pack()
        copy.lane, copy._lanes = self.lane, [list(lanes) for lanes in self._lanes]
        return copy

    def fork(self) -> RaggedStore:
        return self.sharing({name: exact(value) for name, value in self.channels.items()})
