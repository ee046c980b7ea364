"""Caches that can only be reused whole: what an eviction method kept of a prompt depends on all of that prompt.

An entry is the compressed cache of one earlier prompt. A later request can go on from it where it begins with all of
that prompt's whole blocks; no part of it is a cache of anything else.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

from kvcompress.measure.serving.policies import LRU, NEVER, Policy


class Entry:
    """The cache of an earlier prompt.

    Attributes:
        id: of its last whole block; blocks: how many it has; size: bytes or whatever the room is counted in.
        Others as of `prefix_tree.Node`.
    """

    __slots__ = ("id", "blocks", "size", "tier", "born", "tick", "uses", "due", "locks")

    def __init__(self, id: Hashable, blocks: int, size: float, tick: int, due: float) -> None:
        self.id, self.blocks, self.size, self.tier = id, blocks, size, 0
        self.born = self.tick = tick
        self.uses, self.due, self.locks = 1, due, 0


class WholeStore:
    """Entries by the end of their prompt, in tiers of limited room.

    Args:
        rooms: per tier, the fastest first, in the unit of sizes; None: unlimited.

    Attributes:
        held, moved: as of `PrefixTree`, in the unit of sizes; locked: size of entries on which requests run.
    """

    def __init__(self, rooms: Sequence[float | None], policy: Policy | None = None) -> None:
        self.rooms: list[float] = [NEVER if room is None else room for room in rooms]
        self.policy = policy or LRU()
        self.entries: dict[Hashable, Entry] = {}
        self.held: list[float] = [0.0] * len(rooms)
        self.moved: list[float] = [0.0] * len(rooms)
        self.locked = 0.0
        self._heaps: list[list[tuple[Any, int, Entry]]] = [[] for _ in rooms]
        self._clock = 0

    def match(self, blocks: Sequence[Hashable]) -> Entry | None:
        """The longest entry that a prompt of these blocks begins with."""
        for count in range(len(blocks), 0, -1):
            found = self.entries.get(blocks[count - 1])
            if found is not None and found.blocks == count:
                return found
        return None

    def lock(self, entry: Entry) -> None:
        if not entry.locks:
            self.locked += entry.size
        entry.locks += 1

    def unlock(self, entry: Entry) -> None:
        entry.locks -= 1
        if not entry.locks:
            self.locked -= entry.size
            self._offer(entry)

    def touch(self, entry: Entry, due: float = NEVER) -> None:
        self._clock += 1
        entry.tick, entry.due = self._clock, due
        entry.uses += 1
        if not entry.locks:
            self._offer(entry)

    def promote(self, entry: Entry) -> bool:
        """Bring a locked entry into the fastest tier; False where nothing can make way."""
        if not entry.tier:
            return True
        if not self._make_way(0, entry.size):
            return False
        self._move(entry, 0)
        return True

    def insert(self, blocks: Sequence[Hashable], size: float, due: float = NEVER, must: bool = False) -> Entry | None:
        """The entry of a prompt of these whole blocks, locked; one that is there is used again. None: no room.

        Args:
            must: a request runs on it, so that it is not passed over for being needed late.
        """
        if not blocks:
            return None
        found = self.entries.get(blocks[-1])
        if found is not None:
            self.lock(found)
            self.touch(found, due)
            if self.promote(found):
                return found
            self.unlock(found)
            return None
        if not self._make_way(0, size, due if self.policy.bypasses and not must else None):
            return None
        self._clock += 1
        entry = Entry(blocks[-1], len(blocks), size, self._clock, due)
        self.lock(entry)
        self.entries[entry.id] = entry
        self.held[0] += size
        return entry

    def shrink(self, room: float) -> bool:
        """Set the room of the fastest tier and evict down to it; False if what is locked does not fit."""
        self.rooms[0] = room
        while self.held[0] > room:
            if not self._evict(0, None):
                return False
        return True

    def _offer(self, entry: Entry) -> None:
        heapq.heappush(self._heaps[entry.tier], (self.policy.key(entry), entry.tick, entry))

    def _make_way(self, tier: int, size: float, due: float | None = None) -> bool:
        if size > self.rooms[tier]:
            return False
        while self.held[tier] + size > self.rooms[tier]:
            if not self._evict(tier, due):
                return False
        return True

    def _evict(self, tier: int, due: float | None) -> bool:
        heap = self._heaps[tier]
        while heap:
            _, tick, entry = heap[0]
            if entry.tick != tick or entry.tier != tier or entry.locks or self.entries.get(entry.id) is not entry:
                heapq.heappop(heap)
                continue
            if due is not None and due >= entry.due:
                return False
            heapq.heappop(heap)
            self.moved[tier] += entry.size
            for lower in range(tier + 1, len(self.rooms)):
                if self._make_way(lower, entry.size):
                    self._move(entry, lower)
                    return True
            del self.entries[entry.id]
            self.held[tier] -= entry.size
            return True
        return False

    def _move(self, entry: Entry, tier: int) -> None:
        self.held[entry.tier] -= entry.size
        self.held[tier] += entry.size
        entry.tier = tier
        if not entry.locks:
            self._offer(entry)
