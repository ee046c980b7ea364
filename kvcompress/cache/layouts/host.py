"""Host tier of a paged layout: a copy of every full page of offloaded heads, and an account of what was moved."""

from __future__ import annotations

import torch

from kvcompress.cache.layouts.low_rank_pages import LowRankKeyPages
from kvcompress.common.transfer import upload

Tensor = torch.Tensor


def allocate(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Host memory, pinned where what it is a copy of lies on a GPU."""
    return torch.zeros(shape, dtype=dtype, pin_memory=pinned)


def pinned(tensor: Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


class HostPages:
    """Channels `[B, offloaded heads, pages, size, ...]` on the CPU.

    A page is written when it is full, once, and never again: what is demoted later needs no copy. On a GPU promoted
    pages are copied on a stream of their own, so that the copy runs beside the next layers; `arrived` waits for it.
    Keys that can be rebuilt on the device are not copied to the host, and pages whose keys cannot are not written.

    Attributes:
        heads: offloaded heads, ascending.
        written: full pages that have a copy, LongTensor `[B, offloaded heads]`: the first ones.
        moved: bytes per row, LongTensor `[B]` each: `prompt` written when the layout was made, `written` later,
            `promoted`, and `fetched` for forwards that read everything; `rebuilt` did not move: factors read on the device.
    """

    def __init__(
        self,
        heads: tuple[int, ...],
        pool: dict[str, Tensor],
        batch: int,
        pages: int,
        rebuilt: LowRankKeyPages | None = None,
    ):
        self.heads, self.rebuilt = heads, rebuilt
        self.channels = {
            name: allocate((batch, len(heads), pages, *value.shape[1:]), value.dtype, value.device.type == "cuda")
            for name, value in pool.items()
            if rebuilt is None or name != "keys"
        }
        self.written = torch.zeros(batch, len(heads), dtype=torch.long)
        self.moved = {
            name: torch.zeros(batch, dtype=torch.long)
            for name in ("prompt", "written", "promoted", "fetched", "rebuilt")
        }
        self._first = True
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @property
    def page_bytes(self) -> int:
        return sum(x[0, 0, 0].numel() * x.element_size() for x in self.channels.values())

    def widen(self, pages: int) -> None:
        """Room for `pages` pages per head."""
        for name, old in self.channels.items():
            larger = allocate((*old.shape[:2], pages, *old.shape[3:]), old.dtype, pinned(old))
            larger[:, :, : old.shape[2]] = old
            self.channels[name] = larger

    def write(self, pool: dict[str, Tensor], table: Tensor, full: Tensor) -> None:
        """Copy pages that became full: `full [B, H]` pages of each head are; `table [B, H, pages]`."""
        heads, kind = list(self.heads), "prompt" if self._first else "written"
        self._first = False
        full, index = full[:, heads], torch.arange(table.shape[2])
        if self.rebuilt is not None:
            full = torch.minimum(full, self.rebuilt.full[:, None])
        due = (index >= self.written[..., None]) & (index < full[..., None])
        if not bool(due.any()):
            return
        blocks = table[:, heads][due]
        for name, host in self.channels.items():
            host[due] = pool[name].index_select(0, upload(blocks, pool[name].device)).cpu()
        self.written = full.clone()
        self.moved[kind] += due.sum((1, 2)) * self.page_bytes

    def promote(self, pool: dict[str, Tensor], promoted: Tensor, blocks: Tensor) -> None:
        """Copy the pages marked in `promoted [B, H, pages]` into `blocks` of the pool."""
        mine = promoted[:, list(self.heads)]
        self.moved["promoted"] += mine.sum((1, 2)) * self.page_bytes
        device = next(iter(pool.values())).device
        if self.rebuilt is not None:
            pool["keys"].index_copy_(0, upload(blocks, device), self.rebuilt.pages(promoted))
            self.moved["rebuilt"] += mine.sum((1, 2)) * self.rebuilt.page_bytes
        if device.type != "cuda":
            for name, host in self.channels.items():
                pool[name].index_copy_(0, blocks, host[mine])
            return
        stream, event = self._streams or (torch.cuda.Stream(device), torch.cuda.Event())
        self._streams = stream, event
        stream.wait_stream(torch.cuda.current_stream(device))  # the blocks are still being read
        with torch.cuda.stream(stream):
            where = upload(blocks, device)
            for name, host in self.channels.items():
                pool[name].index_copy_(0, where, upload(host[mine], device))
                pool[name].record_stream(stream)
            event.record(stream)

    def arrived(self, device: torch.device) -> None:
        """Have what follows on the device wait for pages under way."""
        if self._streams is not None:
            torch.cuda.current_stream(device).wait_event(self._streams[1])

    def fill(self, found: Tensor, name: str, away: Tensor, pages: Tensor) -> None:
        """Put host pages into `found [B, H, n, size, ...]` where `away [B, H, n]`."""
        mine = list(self.heads)
        exists = torch.arange(away.shape[2]) < pages[:, mine, None]
        wanted = torch.zeros_like(away)
        wanted[:, mine] = away[:, mine] & exists
        if bool(wanted.any()) and self.rebuilt is not None and name == "keys":
            found[wanted.to(found.device)] = self.rebuilt.pages(wanted)
        elif bool(wanted.any()):
            source = self.channels[name][:, :, : away.shape[2]][wanted[:, mine]]
            found[upload(wanted, found.device)] = upload(source, found.device)

    def rows(self, index: Tensor) -> HostPages:
        """A copy that holds the given rows."""
        twin = HostPages.__new__(HostPages)
        twin.heads, twin._first, twin._streams = self.heads, self._first, None
        twin.written = self.written.index_select(0, index)
        twin.rebuilt = None if self.rebuilt is None else self.rebuilt.rows(index)
        twin.moved = {name: value.index_select(0, index) for name, value in self.moved.items()}
        twin.channels = {}
        for name, value in self.channels.items():
            copied = value.index_select(0, index)
            twin.channels[name] = copied.pin_memory() if pinned(value) else copied
        return twin
