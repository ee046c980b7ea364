"""Ragged layout: each row and head holds its own number of slots, in one flat buffer, without padding waste."""

from __future__ import annotations

import torch

from kvcompress.layouts.dense import exact, headroom

Tensor = torch.Tensor


class RaggedStore:
    """Named channels `[N, ...]`; segment `b * H + h` holds `counts[b, h]` slots from `starts`, in positional order.

    `get` shows a channel padded to `[B, H, P, ...]` with empty slots (position -1) at the left; attention over single
    tokens reads the segments directly.
    """

    kind = "ragged"

    def __init__(self, channels: dict[str, Tensor], counts: Tensor):
        """Hold flat `channels` whose segments lie one after the other, `counts` LongTensor `[B, H]` on the CPU."""
        self.channels = channels
        self.counts = counts
        self.capacities = counts.flatten().clone()

    @property
    def length(self) -> int:
        return int(self.counts.max())

    @property
    def full(self) -> bool:
        return int(self.counts.min()) == self.length

    @property
    def starts(self) -> Tensor:
        """First flat slot of each segment, LongTensor `[B * H]` on the CPU."""
        return torch.cumsum(self.capacities, 0) - self.capacities

    def segments(self) -> list[tuple[int, int]]:
        """(first, past-the-last) flat slot of each segment."""
        return [(s, s + c) for s, c in zip(self.starts.tolist(), self.counts.flatten().tolist(), strict=True)]

    def _padded_index(self) -> tuple[Tensor, Tensor]:
        batch, heads = self.counts.shape
        length, counts = self.length, self.counts.flatten()[:, None]
        offset = torch.arange(length)[None] - (length - counts)
        held = offset >= 0
        index = self.starts[:, None] + offset.clamp(min=0)
        return index.view(batch, heads, length), held.view(batch, heads, length)

    def get(self, name: str) -> Tensor:
        """A channel padded to `[B, H, length, ...]`: a transient copy."""
        flat = self.channels[name]
        index, held = self._padded_index()
        # a segment without slots may start past the end of the buffer
        index = index.clamp(max=max(flat.shape[0] - 1, 0)).to(flat.device)
        padded = flat.index_select(0, index.flatten()).view(*index.shape, *flat.shape[1:])
        if name == "positions":
            return padded.masked_fill(~held.to(flat.device), -1)
        return padded

    def put(self, name: str, value: Tensor) -> None:
        """Set or add a channel from its padded form `[B, H or 1, length, ...]`."""
        reference = self.channels["positions"]
        index, held = self._padded_index()
        flat = value.new_zeros((reference.shape[0], *value.shape[3:]))
        held = held.to(flat.device)
        flat[index.to(flat.device)[held]] = value.expand(*index.shape, *value.shape[3:])[held]
        self.channels[name] = flat

    def drop_channel(self, name: str) -> None:
        self.channels.pop(name, None)

    def append(self, new: dict[str, Tensor], real: Tensor | None, added: Tensor, grow: bool = True) -> None:
        """Add the real tokens of `new` channels `[B, H or 1, n, ...]`; `real` bool `[B, n]`, None if all are.

        `grow=False` makes room for these and no more.
        """
        batch, heads = self.counts.shape
        n = new["positions"].shape[2]
        wanted = (self.counts + added[:, None]).flatten()
        if bool((wanted > self.capacities).any()):
            self._reallocate(wanted, grow)
        mask = torch.ones(batch, n, dtype=torch.bool) if real is None else real.cpu()
        offset = (mask.long().cumsum(1) - 1)[:, None, :].expand(batch, heads, n)
        slots = self.starts.view(batch, heads, 1) + self.counts[:, :, None] + offset
        chosen = mask[:, None, :].expand(batch, heads, n)
        device = self.channels["positions"].device
        slots, chosen = slots[chosen].to(device), chosen.to(device)
        for name, flat in self.channels.items():
            if name in new:
                flat[slots] = new[name].expand(batch, heads, *new[name].shape[2:])[chosen]
            else:
                flat[slots] = 0
        self.counts = wanted.view(batch, heads)

    def _reallocate(self, wanted: Tensor, grow: bool) -> None:
        old_segments = self.segments()
        self.capacities = torch.tensor([w + headroom(w) for w in wanted.tolist()]) if grow else wanted
        starts = self.starts.tolist()
        total = int(self.capacities.sum())
        for name, old in self.channels.items():
            buffer = old.new_zeros((total, *old.shape[1:]))
            for start, (first, last) in zip(starts, old_segments, strict=True):
                buffer[start : start + last - first] = old[first:last]
            self.channels[name] = buffer

    def select_rows(self, index: Tensor) -> None:
        """Reorder, repeat or drop batch rows."""
        heads = self.counts.shape[1]
        segments, chosen = self.segments(), index.tolist()
        picks = [segments[b * heads + h] for b in chosen for h in range(heads)]
        self.channels = {
            name: torch.cat([flat[first:last] for first, last in picks]) for name, flat in self.channels.items()
        }
        self.counts = self.counts.index_select(0, index.cpu())
        self.capacities = self.counts.flatten().clone()

    def fork(self) -> RaggedStore:
        copy = RaggedStore.__new__(RaggedStore)
        copy.counts, copy.capacities = self.counts.clone(), self.capacities.clone()
        copy.channels = {name: exact(value) for name, value in self.channels.items()}
        return copy
