"""A prefix tree of KV blocks over one or more tiers of memory (RadixAttention, arXiv 2312.07104), block by block.

A block's id stands for it and everything before it, so that a flat table of ids is the tree. Leaves are evicted, in a
policy's order, and go one tier down (device, host, disk) until they fall off the last.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

from kvcompress.measure.serving.policies import LRU, NEVER, Policy

DEVICE, HOST, DISK = 0, 1, 2
TIERS = ("device", "host", "disk")


class Node:
    """A block that is held.

    Attributes:
        tier: where it lies; a parent is never in a lower tier than its child.
        born, tick: when it was inserted and last used; uses: how often.
        due: when it is needed next, for policies that ask (smaller is sooner).
        children: how many it has in each tier; locks: requests that run on it.
    """

    __slots__ = ("id", "parent", "tier", "born", "tick", "uses", "due", "children", "locks")

    def __init__(self, id: Hashable, parent: Node | None, tick: int, due: float, tiers: int) -> None:
        self.id, self.parent, self.tier = id, parent, 0
        self.born = self.tick = tick
        self.uses, self.due, self.locks = 1, due, 0
        self.children = [0] * tiers


class PrefixTree:
    """Blocks held, at most `rooms[t]` of them in tier t.

    Args:
        rooms: blocks per tier, the fastest first; None: unlimited. May be changed afterwards, see `shrink`.
        policy: which leaf goes first.

    Attributes:
        held: blocks in each tier; moved: blocks that went down from each tier to the next, or off the last.
        locked: blocks on which requests run.
    """

    def __init__(self, rooms: Sequence[int | None], policy: Policy | None = None) -> None:
        if not rooms or any(room is not None and room < 0 for room in rooms):
            raise ValueError(f"rooms={list(rooms)}: blocks of one tier or more, at least 0 each, or None for no limit")
        self.rooms: list[float] = [NEVER if room is None else room for room in rooms]
        self.policy = policy or LRU()
        self.nodes: dict[Hashable, Node] = {}
        self.held = [0] * len(rooms)
        self.moved = [0] * len(rooms)
        self.locked = 0
        self._heaps: list[list[tuple[Any, int, Node]]] = [[] for _ in rooms]
        self._clock = 0

    def match(self, blocks: Sequence[Hashable]) -> list[Node]:
        """The longest run of held blocks from the root."""
        nodes, found = self.nodes, []
        for block in blocks:
            node = nodes.get(block)
            if node is None:
                break
            found.append(node)
        return found

    def lock(self, path: Sequence[Node]) -> None:
        """Keep nodes where they are until they are unlocked as often."""
        for node in path:
            if not node.locks:
                self.locked += 1
            node.locks += 1

    def unlock(self, path: Sequence[Node]) -> None:
        for node in path:
            node.locks -= 1
            if not node.locks:
                self.locked -= 1
                if not self._below(node):
                    self._offer(node)

    def touch(self, path: Sequence[Node], due: Sequence[float] | None = None) -> None:
        """A request uses a path, from the root to the leaf: each block has a new tick."""
        clock = self._clock
        for index, node in enumerate(path):
            clock += 1
            node.tick = clock
            node.uses += 1
            if due is not None:
                node.due = due[index]
            if not node.locks and not self._below(node):
                self._offer(node)
        self._clock = clock

    def promote(self, path: Sequence[Node]) -> int:
        """Bring a locked path into the fastest tier, root first; returns how many blocks were moved up.

        Stops where nothing can make way.
        """
        count = 0
        for node in path:
            if node.tier == 0:
                continue
            if not self._make_way(0):
                break
            self._move(node, 0)
            count += 1
        return count

    def insert(
        self, blocks: Sequence[Hashable], path: list[Node], due: Sequence[float] | None = None, must: bool = False
    ) -> int:
        """Insert behind a locked path the blocks that follow it, in order, until nothing can make way.

        Args:
            blocks: all of the request's; `path` the nodes of the first of them, extended here with locked new nodes.
            due: as many as blocks.
            must: a request runs on them, so that none is passed over for being needed late.

        Returns:
            how many were inserted.
        """
        start, tiers = len(path), len(self.rooms)
        bypasses = self.policy.bypasses and not must
        parent = path[-1] if path else None
        if parent is not None and parent.tier:
            return 0  # it could not be promoted, so there is no room
        nodes, held, rooms = self.nodes, self.held, self.rooms
        for index in range(start, len(blocks)):
            when = NEVER if due is None else due[index]
            if held[0] >= rooms[0] and not self._make_way(0, when if bypasses else None):
                return index - start
            self._clock += 1
            node = Node(blocks[index], parent, self._clock, when, tiers)
            node.locks = 1
            self.locked += 1
            nodes[node.id] = node
            held[0] += 1
            if parent is not None:
                parent.children[0] += 1
            path.append(node)
            parent = node
        return len(blocks) - start

    def shrink(self, room: float) -> bool:
        """Set the room of the fastest tier and evict down to it; False if what is locked does not fit."""
        self.rooms[0] = room
        while self.held[0] > room:
            if not self._evict(0, None):
                return False
        return True

    def evict(self, tier: int = 0) -> Hashable | None:
        """Evict the first leaf of a tier; returns its id, or None where none can go."""
        node = self._evict(tier, None)
        return None if node is None else node.id

    # ------------------------------------------------------------------ inside

    def _below(self, node: Node) -> int:
        """Children in the node's own tier or a faster one: those that keep it from leaving."""
        children = node.children
        return children[0] if not node.tier else sum(children[: node.tier + 1])

    def _offer(self, node: Node) -> None:
        heapq.heappush(self._heaps[node.tier], (self.policy.key(node), node.tick, node))

    def _make_way(self, tier: int, due: float | None = None) -> bool:
        while self.held[tier] >= self.rooms[tier]:
            if self._evict(tier, due) is None:
                return False
        return True

    def _evict(self, tier: int, due: float | None) -> Node | None:
        """Evict a leaf of a tier; none that is needed sooner than `due`."""
        heap = self._heaps[tier]
        while heap:
            key, tick, node = heap[0]
            if (
                node.tick != tick
                or node.tier != tier
                or node.locks
                or self._below(node)
                or self.nodes.get(node.id) is not node
                or key != self.policy.key(node)
            ):
                heapq.heappop(heap)  # what it became since is offered anew
                continue
            if due is not None and due >= node.due:
                return None
            heapq.heappop(heap)
            self._leave(node)
            return node
        return None

    def _leave(self, node: Node) -> None:
        tier = node.tier
        self.moved[tier] += 1
        for lower in range(tier + 1, len(self.rooms)):
            if self.rooms[lower] > 0 and self._make_way(lower):
                self._move(node, lower)
                return
        self._drop(node)

    def _move(self, node: Node, tier: int) -> None:
        parent, before = node.parent, node.tier
        self.held[before] -= 1
        self.held[tier] += 1
        node.tier = tier
        if parent is not None:
            parent.children[before] -= 1
            parent.children[tier] += 1
            if not parent.locks and not self._below(parent):
                self._offer(parent)
        if not node.locks and not self._below(node):
            self._offer(node)

    def _drop(self, node: Node) -> None:
        """Forget a node, and what hangs below it in lower tiers, which could not be reached any more."""
        if any(node.children):
            for child in [one for one in self.nodes.values() if one.parent is node]:
                self._drop(child)
        del self.nodes[node.id]
        self.held[node.tier] -= 1
        parent = node.parent
        if parent is not None:
            parent.children[node.tier] -= 1
            if not parent.locks and not self._below(parent):
                self._offer(parent)
