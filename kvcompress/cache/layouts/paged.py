"""Paged layout: pages of equal size per row and KV head, summarised by bounds on their keys, in one tier or two.

What is held lies in blocks of a device pool; a table says which block holds which page. Heads that are offloaded have
a copy of every page that is full in host memory, written once, and on the device only the pages they are told to hold.
"""

from __future__ import annotations

import torch

from kvcompress.cache.layouts.host import HostPages
from kvcompress.cache.layouts.low_rank_pages import LowRankKeyPages
from kvcompress.common.transfer import upload

Tensor = torch.Tensor

SPARE = 4  # least spare blocks and pages of what grows


def room(wanted: int) -> int:
    """Blocks or pages of a buffer that is to hold `wanted` and grow."""
    return wanted + max(SPARE, wanted // 16)


class PagedStore:
    """Named channels in pages; page p of a row and head holds its tokens p * size to (p + 1) * size - 1, in order.

    Every channel is `[blocks, size, ...]`. `table [B, H, pages]` on the CPU is the block of each page, -1 where the
    page is not on the device. `bounds [B, H, pages, 2D]` are the largest key and the largest negated key of each page,
    by channel. `get` shows a channel as `[B, H, P, ...]` with empty slots at the right.
    """

    kind = "paged"
    holes = 0

    def __init__(
        self,
        packed: dict[str, Tensor],
        counts: Tensor,
        keys: Tensor,
        size: int,
        shared: bool,
        host: tuple[int, ...],
        rebuilt: LowRankKeyPages | None = None,
    ):
        """Hold slots that lie one segment after the other.

        Args:
            packed: channels `[N, ...]`, `positions` among them.
            counts: LongTensor `[B, H]` on the CPU, slots of each segment.
            keys: `[N, D]`, as attention sees them; of no channel (`[N, 0]`) where no bounds are wanted.
            size: tokens to a page.
            shared: positions are the same for all heads.
            host: heads that are offloaded.
            rebuilt: what keys of offloaded pages are made from on the device, instead of a copy on the host.
        """
        self.size, self.counts = size, counts
        batch, heads = counts.shape
        pages = self.pages().flatten()
        first, capacity, device = pages.cumsum(0) - pages, room(int(pages.max())), keys.device
        blocks, flat = room(int(pages.sum())), counts.flatten()
        at = torch.arange(int(flat.sum())) - (flat.cumsum(0) - flat).repeat_interleave(flat)
        slots = upload(first.repeat_interleave(flat) * size + at, device)
        self.pool = {}
        for name, value in packed.items():
            if name != "positions":
                buffer = value.new_zeros(blocks * size, *value.shape[1:])
                self.pool[name] = buffer.index_copy_(0, slots, value).view(blocks, size, *value.shape[1:])
        owner = torch.arange(batch * heads).repeat_interleave(flat)
        places = upload(owner * capacity * size + at, device)
        positions = torch.full((batch * heads * capacity * size,), -1, dtype=torch.int32, device=device)
        positions = positions.index_copy_(0, places, packed["positions"]).view(batch, heads, -1)
        self.positions = positions[:, :1].clone() if shared else positions
        self.table = torch.full((batch, heads, capacity), -1)
        held = torch.arange(capacity) < self.pages()[..., None]
        self.table[held] = torch.arange(int(pages.sum()))
        self._free = list(range(int(pages.sum()), blocks))
        lowest = torch.finfo(keys.dtype).min
        self.bounds = torch.full((batch, heads, capacity, 2 * keys.shape[1]), lowest, dtype=keys.dtype, device=device)
        both = torch.cat([keys, -keys], -1)
        page = torch.div(places, size, rounding_mode="floor")[:, None].expand_as(both)
        self.bounds.flatten(0, 2).scatter_reduce_(0, page, both, "amax")
        self.host = HostPages(host, self.pool, batch, capacity, rebuilt) if host else None
        self._reset()
        self.write_back()

    def _reset(self) -> None:
        self._room = 0  # appends of one token until some segment needs another page
        self._next: Tensor | None = None  # flat slot of the pool each segment appends to, on the device
        self._page: Tensor | None = None  # flat page it lies in
        self._column: Tensor | None = None
        self._on_device: Tensor | None = None

    # ------------------------------------------------------------------ what is held

    @property
    def heads(self) -> int:
        return self.counts.shape[1]

    @property
    def length(self) -> int:
        """Slots of the longest segment."""
        return int(self.counts.max())

    @property
    def full(self) -> bool:
        return False

    @property
    def channels(self) -> dict[str, Tensor]:
        return self.pool | {"positions": self.positions}

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def pages(self) -> Tensor:
        """Pages of each segment, LongTensor `[B, H]` on the CPU."""
        return torch.div(self.counts + self.size - 1, self.size, rounding_mode="floor")

    @property
    def most(self) -> int:
        """Pages of the longest segment."""
        return -(-self.length // self.size)

    def tiers(self) -> Tensor:
        """Where each slot lies, `[B, H, P]` on the CPU: 0 on the device, 1 on the host only."""
        away = (self.table < 0).long().repeat_interleave(self.size, dim=2)[:, :, : self.length]
        return away.masked_fill(torch.arange(self.length) >= self.counts[..., None], 0)

    def get(self, name: str) -> Tensor:
        """A channel as `[B, H, P, ...]`, of both tiers: a transient copy, or a view of `positions`."""
        if name == "positions":
            return self.positions[:, :, : self.length]
        self._wait()
        pool, table = self.pool[name], self.table[:, :, : self.most]
        found = pool.index_select(0, upload(table.clamp(min=0).flatten(), self.device))
        found = found.view(*table.shape, *pool.shape[1:])
        if self.host is not None:
            self.host.fill(found, name, table < 0, self.pages())
        return found.flatten(2, 3)[:, :, : self.length]

    def packed(self, mask: Tensor) -> dict[str, Tensor]:
        """Copies of the slots marked in `mask [B, H, P]`, segment after segment."""
        found = {name: self.get(name)[mask] for name in self.pool}
        return found | {"positions": self.get("positions").expand(mask.shape)[mask]}

    def on_device(self) -> Tensor:
        """`table` on the device."""
        if self._on_device is None:
            self._on_device = upload(self.table, self.device)
        return self._on_device

    def read(self, name: str, chosen: Tensor) -> Tensor:
        """Pages `chosen [B, H or G * H, n]` of a channel, `[B * H' * n, size, ...]`; anything where it is -1.

        They have to be on the device.
        """
        self._wait()
        table = self.on_device()
        if chosen.shape[1] != table.shape[1]:
            table = table.repeat_interleave(chosen.shape[1] // table.shape[1], dim=1)
        return self.pool[name].index_select(0, table.gather(2, chosen.clamp(min=0)).clamp_(min=0).flatten())

    def block_table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values `[blocks, size, ...]`, `positions` and the table on the device, once pages under way are in."""
        self._wait()
        return self.pool["keys"], self.pool["values"], self.positions, self.on_device()

    def _wait(self) -> None:
        """Have what follows on the device wait for pages that are being promoted."""
        if self.host is not None:
            self.host.arrived(self.device)

    def shown_bounds(self) -> Tensor:
        """`bounds` of the pages that there are, `[B, H, P, 2D]`; a view."""
        return self.bounds[:, :, : self.most]

    # ------------------------------------------------------------------ growing

    def append(
        self,
        new: dict[str, Tensor],
        real: Tensor | None,
        added: Tensor,
        grow: bool = True,
        seen: Tensor | None = None,
    ) -> None:
        """Add the real tokens of `new` channels `[B, H or 1, n, ...]`; `real` bool `[B, n]`, None if all are.

        Args:
            seen: keys `[B, H, n, D]` as attention sees them; by default the channel `keys`.
        """
        batch, heads = self.counts.shape
        n, seen = new["positions"].shape[2], new["keys"] if seen is None else seen
        seen = seen[..., : self.bounds.shape[-1] // 2]
        both = torch.cat([seen, -seen], -1).to(self.bounds.dtype)
        if real is None and n == 1:
            if not self._room:
                self._make_room()
            assert self._next is not None and self._page is not None and self._column is not None
            for name, pool in self.pool.items():
                value = new[name].expand(batch, heads, *new[name].shape[2:]) if name in new else None
                flat = pool.flatten(0, 1)
                if value is None:
                    flat.index_fill_(0, self._next, 0)
                else:
                    flat.index_copy_(0, self._next, value.reshape(-1, *pool.shape[2:]))
            self.positions.scatter_(2, self._column, new["positions"].expand_as(self._column))
            bounds, page, fresh = self.bounds.flatten(0, 2), self._page, both.flatten(0, 2)
            bounds.index_copy_(0, page, torch.maximum(bounds.index_select(0, page), fresh))
            self._next += 1
            self._column += 1
            self._room -= 1
            self.counts = self.counts + 1
            return
        mask = torch.ones(batch, n, dtype=torch.bool) if real is None else real.cpu()
        self._provide(self.counts + added[:, None])
        offset = self.counts[:, :, None] + (mask.long().cumsum(1) - 1)[:, None, :]
        chosen = mask[:, None, :].expand(batch, heads, n)
        b, h, _ = chosen.nonzero(as_tuple=True)
        at, marked = offset[chosen], chosen.to(self.device)
        page = torch.div(at, self.size, rounding_mode="floor")
        slots = (self.table[b, h, page] * self.size + at % self.size).to(self.device)
        for name, pool in self.pool.items():
            flat = pool.flatten(0, 1)
            if name in new:
                flat[slots] = new[name].expand(batch, heads, *new[name].shape[2:])[marked]
            else:
                flat[slots] = 0
        mine = h < self.positions.shape[1]
        shown = new["positions"].expand(batch, heads, n)[marked]
        self.positions[b[mine].to(self.device), h[mine].to(self.device), at[mine].to(self.device)] = shown[
            mine.to(self.device)
        ]
        index = ((b * heads + h) * self.table.shape[2] + page).to(self.device)[:, None]
        fresh = both.expand(batch, heads, n, -1)[marked]
        self.bounds.flatten(0, 2).scatter_reduce_(0, index.expand_as(fresh), fresh, "amax")
        self.counts = self.counts + added[:, None]
        self._room = 0
        self.write_back()

    def _make_room(self) -> None:
        """Know where each segment's next token goes, with a new page for those whose last is full."""
        self.write_back()
        self._provide(self.counts + 1)
        batch, heads = self.counts.shape
        page, at = torch.div(self.counts, self.size, rounding_mode="floor"), self.counts % self.size
        block = self.table.gather(2, page[..., None]).squeeze(2)
        self._next = upload((block * self.size + at).flatten(), self.device)
        segments = torch.arange(batch * heads).view(batch, heads)
        self._page = upload((segments * self.table.shape[2] + page).flatten(), self.device)
        self._column = upload(self.counts[:, : self.positions.shape[1], None].clone(), self.device)
        self._room = self.size - int(at.max())

    def _provide(self, counts: Tensor) -> None:
        """Blocks for segments of `counts` slots."""
        pages = torch.div(counts + self.size - 1, self.size, rounding_mode="floor")
        if int(pages.max()) > self.table.shape[2]:
            self._widen(room(int(pages.max())))
        index = torch.arange(self.table.shape[2])
        missing = (index >= self.pages()[..., None]) & (index < pages[..., None])
        wanted = int(missing.sum())
        if wanted:
            self.table[missing] = torch.tensor(self._take(wanted))
            self._on_device = None

    def _widen(self, capacity: int) -> None:
        extra = capacity - self.table.shape[2]
        pad = torch.nn.functional.pad
        self.table = pad(self.table, (0, extra), value=-1)
        self.positions = pad(self.positions, (0, extra * self.size), value=-1)
        self.bounds = pad(self.bounds, (0, 0, 0, extra), value=torch.finfo(self.bounds.dtype).min)
        if self.host is not None:
            self.host.widen(capacity)
        self._on_device = None

    def _take(self, wanted: int) -> list[int]:
        """Free blocks, of a larger pool if there are too few."""
        if len(self._free) < wanted:
            self._wait()  # pages under way go into the pool that is copied
            before = len(next(iter(self.pool.values())))
            blocks = room(before - len(self._free) + wanted)
            for name, old in self.pool.items():
                larger = old.new_zeros(blocks, *old.shape[1:])
                larger[:before] = old
                self.pool[name] = larger
            self._free += range(before, blocks)
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    # ------------------------------------------------------------------ two tiers

    def write_back(self) -> None:
        """Copy the pages of offloaded heads that are full and have no copy yet to the host."""
        if self.host is not None:
            self.host.write(self.pool, self.table, torch.div(self.counts, self.size, rounding_mode="floor"))

    def missing(self, chosen: Tensor) -> Tensor:
        """Which of the pages `chosen [B, H', n]` are not on the device, bool on the CPU."""
        chosen, table = chosen.cpu(), self.table
        if chosen.shape[1] != table.shape[1]:
            table = table.repeat_interleave(chosen.shape[1] // table.shape[1], dim=1)
        return (table.gather(2, chosen.clamp(min=0)) < 0) & (chosen >= 0)

    def bring(self, chosen: Tensor) -> None:
        """Have pages `chosen [B, H', n]` on the device as well."""
        if self.host is None:
            return
        away = self.missing(chosen)
        if not bool(away.any()):
            return
        b, h, n = away.nonzero(as_tuple=True)
        want = self.table >= 0
        want[b, torch.div(h * self.heads, chosen.shape[1], rounding_mode="floor"), chosen.cpu()[b, h, n]] = True
        self._install(want)

    def hold(self, chosen: Tensor) -> None:
        """Of offloaded heads keep pages `chosen [B, H, n]` (-1 = none) on the device, and what has no copy yet.

        Promoted pages go into the blocks of demoted ones.
        """
        if self.host is None:
            return
        self.write_back()
        want, heads = self.table >= 0, list(self.host.heads)
        mine = torch.zeros_like(want[:, heads])
        chosen = chosen.cpu()[:, heads]
        b, h, n = (chosen >= 0).nonzero(as_tuple=True)
        mine[b, h, chosen[b, h, n]] = True
        index = torch.arange(self.table.shape[2])
        exists = index < self.pages()[:, heads, None]
        mine |= index >= self.host.written[..., None]
        want[:, heads] = mine & exists
        self._install(want)

    def _install(self, want: Tensor) -> None:
        """Make the pages in `want [B, H, pages]` those on the device."""
        assert self.host is not None
        held = self.table >= 0
        promoted, demoted = want & ~held, held & ~want
        self._free = self.table[demoted].tolist() + self._free
        self.table[demoted] = -1
        if bool(promoted.any()):
            blocks = torch.tensor(self._take(int(promoted.sum())))
            self.table[promoted] = blocks
            self.host.promote(self.pool, promoted, blocks)
        self._room, self._on_device = 0, None
        used = int((self.table >= 0).sum())
        if len(next(iter(self.pool.values()))) > room(room(used)):
            self._repack(self.table)

    # ------------------------------------------------------------------ rows and copies

    def select_rows(self, index: Tensor) -> None:
        """Reorder, repeat or drop batch rows; the pool becomes as small as what is on the device allows."""
        index = index.cpu()
        self._repack(self.table.index_select(0, index))
        self.counts = self.counts.index_select(0, index)
        self.positions, self.bounds = (x.index_select(0, index.to(x.device)) for x in (self.positions, self.bounds))
        self.host = None if self.host is None else self.host.rows(index)

    def _repack(self, table: Tensor) -> None:
        """A pool of the blocks in `table [B, H, pages]` alone."""
        held = table >= 0
        blocks, used = table[held], int(held.sum())
        self._wait()
        for name, old in self.pool.items():
            fresh = old.new_zeros(room(used), *old.shape[1:])
            fresh[:used] = old.index_select(0, upload(blocks, old.device))
            self.pool[name] = fresh
        self.table = torch.full_like(table, -1)
        self.table[held] = torch.arange(used)
        self._free = list(range(used, room(used)))
        self._reset()

    def fork(self) -> PagedStore:
        copy = PagedStore.__new__(PagedStore)
        copy.size, copy.counts = self.size, self.counts.clone()
        self._wait()
        copy.pool = {name: value.clone() for name, value in self.pool.items()}
        copy.positions, copy.bounds, copy.table = self.positions.clone(), self.bounds.clone(), self.table.clone()
        copy._free = list(self._free)
        copy.host = None if self.host is None else self.host.rows(torch.arange(len(self.counts)))
        copy._reset()
        return copy

    # ------------------------------------------------------------------ bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one head, without its position."""
        return sum(x[0, 0].numel() * x.element_size() for x in self.pool.values())

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key of one head; of all that it holds where keys have no channels of their own."""
        keys = [x for name, x in self.pool.items() if name.startswith("key")] or list(self.pool.values())
        return sum(x[0, 0].numel() * x.element_size() for x in keys)

    def note_full_read(self) -> None:
        """Note that a forward reads all that is held, for which host pages have to be brought in."""
        if self.host is not None:
            away = (self.table < 0) & (torch.arange(self.table.shape[2]) < self.pages()[..., None])
            self.host.moved["fetched"] += away.sum((1, 2)) * self.host.page_bytes

    def resident(self) -> Tensor:
        """Slots that hold a token on the device, LongTensor `[B, H]` on the CPU."""
        blocks = (self.table >= 0).sum(2) * self.size
        return blocks - (self.pages() * self.size - self.counts)  # a last page is on the device until it is full
