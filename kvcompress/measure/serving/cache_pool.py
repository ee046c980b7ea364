"""Cache pool of one serving instance: what running requests hold, and what is kept of earlier prompts for reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompress.measure.serving.costs import MethodCosts
from kvcompress.measure.serving.policies import Policy
from kvcompress.measure.serving.prefix_tree import PrefixTree
from kvcompress.measure.serving.requests import Request
from kvcompress.measure.serving.whole_store import Entry, WholeStore


@dataclass
class Admission:
    """A request that has its memory.

    Attributes:
        hit: prompt tokens that need not be computed; lower: bytes of them by tier below the device, to be loaded.
        private: bytes that are its own while it runs; transient: until its prompt is done.
    """

    request: Request
    hit: int
    lower: list[float]
    private: float
    transient: float
    path: list[Any] = field(default_factory=list)
    entry: Entry | None = None
    own: float = 0.0
    made: Entry | None = None
    due: Sequence[float] | None = None

    @property
    def loads(self) -> float:
        return sum(self.lower)


class CachePool:
    """Device memory, shared by running requests and the cache of earlier prompts, with tiers below.

    Args:
        memory: bytes for caches; lower: bytes of the tiers below (host, disk).
        policy: None keeps nothing of earlier prompts.
        whole_prompt: a prompt's exact keys and values are held until all of it is computed (chunked prefill); else one
            layer at a time, as each is compressed when it ends.

    Attributes:
        down: bytes that left each tier downwards, tiers from the device on; up: bytes brought up from each.
    """

    def __init__(
        self,
        costs: MethodCosts,
        block_size: int,
        memory: float,
        policy: Policy | None,
        lower: Sequence[float] = (),
        whole_prompt: bool = False,
    ) -> None:
        self.costs, self.size, self.memory = costs, block_size, memory
        self.private = 0.0
        self.up = [0.0] * (1 + len(lower))
        exact = costs.store == "exact"
        self.exact_share = 1.0 if whole_prompt else 1.0 / costs.layers
        self.block_bytes = block_size * (costs.token_bytes if exact else costs.held.per_prompt)
        self.tree: PrefixTree | None = None
        self.store: WholeStore | None = None
        self.first = 1 if exact else 0  # the fastest tier that keeps anything for reuse
        if policy is None or not block_size or (exact and not any(lower)):
            return
        if exact or costs.reuse == "prefix":
            rooms = [*([] if exact else [memory]), *lower]
            self.tree = PrefixTree([int(room // self.block_bytes) for room in rooms], policy)
        else:
            self.store = WholeStore([memory, *lower], policy)

    # ------------------------------------------------------------------ what a request needs

    def need(self, request: Request) -> float:
        """Bytes that a request needs at most, with nothing shared."""
        private, transient, shared = self._bytes(request)
        return private + transient + shared

    def _bytes(self, request: Request) -> tuple[float, float, float]:
        """Bytes of its own to its end, until its prompt is done, and of blocks or an entry that others may use."""
        held = self.costs.held
        transient = max(0.0, self.costs.token_bytes - held.per_prompt) * request.input * self.exact_share
        growth = held.per_output * request.output
        if self.tree is not None and not self.first:
            left = max(0, request.input - len(request.blocks) * self.size)
            return held.fixed + held.per_prompt * left + growth, transient, len(request.blocks) * self.block_bytes
        if self.store is not None:
            return growth, transient, held.at(request.input)
        return held.at(request.input) + growth, transient, 0.0

    def lookup(self, request: Request) -> int:
        """Prompt tokens that would hit now, in whatever tier; at least the last one is computed."""
        if self.tree is not None:
            count = len(self.tree.match(request.blocks))
        elif self.store is not None:
            entry = self.store.match(request.blocks[: request.whole_blocks])
            count = 0 if entry is None else entry.blocks
        else:
            return 0
        return min(count * self.size, request.input - 1)

    # ------------------------------------------------------------------ coming and going

    def admit(self, request: Request, due: Sequence[float] | None = None) -> Admission | None:
        """Give a request its memory until its end; None where running requests leave too little."""
        private, transient, shared = self._bytes(request)
        if self.tree is not None and not self.first:
            return self._admit_blocks(request, private, transient, due)
        if self.store is not None:
            return self._admit_entry(request, private, transient, shared, due)
        if self.private + private + transient > self.memory:
            return None
        self.private += private + transient
        made = Admission(request, 0, [0.0] * (len(self.up) - 1), private, transient, due=due)
        if self.tree is not None:  # exact caches below: all hits are loaded
            path = self.tree.match(request.blocks)
            self.tree.lock(path)
            made.path, made.hit = path, min(len(path) * self.size, request.input - 1)
            for node in path:
                made.lower[node.tier] += self.block_bytes
                self.up[node.tier + 1] += self.block_bytes
        return made

    def _admit_blocks(
        self, request: Request, private: float, transient: float, due: Sequence[float] | None
    ) -> Admission | None:
        tree = self.tree
        assert tree is not None
        path = tree.match(request.blocks)
        fresh = sum(not node.locks for node in path) + len(request.blocks) - len(path)
        room = int((self.memory - self.private - private - transient) // self.block_bytes)
        if tree.locked + fresh > room:
            return None
        lower = [0.0] * (len(self.up) - 1)
        tree.lock(path)
        for node in path:
            if node.tier:
                lower[node.tier - 1] += self.block_bytes
                self.up[node.tier] += self.block_bytes
        self.private += private + transient
        tree.shrink(room)
        hit = min(len(path) * self.size, request.input - 1)
        tree.promote(path)
        tree.touch(path, due)
        tree.insert(request.blocks, path, due, must=True)
        return Admission(request, hit, lower, private, transient, path, due=due)

    def _admit_entry(
        self, request: Request, private: float, transient: float, own: float, due: Sequence[float] | None
    ) -> Admission | None:
        store = self.store
        assert store is not None
        entry = store.match(request.blocks[: request.whole_blocks])
        fresh = entry.size if entry is not None and not entry.locks else 0.0
        room = self.memory - self.private - private - transient - own
        if store.locked + fresh > room:
            return None
        made = Admission(request, 0, [0.0] * (len(self.up) - 1), private, transient, own=own, due=due)
        if entry is not None:
            if entry.tier:
                made.lower[entry.tier - 1] = entry.size
                self.up[entry.tier] += entry.size
            store.lock(entry)
        self.private += private + transient + own
        store.shrink(room)
        if entry is not None:
            store.promote(entry)
            store.touch(entry, entry.due)
            made.entry, made.hit = entry, min(entry.blocks * self.size, request.input - 1)
        return made

    def prefilled(self, admitted: Admission) -> None:
        """The prompt is done: what it needed beside its cache is free, and its cache can be used by others."""
        self.private -= admitted.transient
        admitted.transient = 0.0
        request = admitted.request
        if self.store is not None:
            if admitted.entry is not None:
                self.store.unlock(admitted.entry)
                admitted.entry = None
            blocks = request.blocks[: request.whole_blocks]
            self.private -= admitted.own
            self.store.shrink(self.memory - self.private)
            due = admitted.due
            when = due[len(blocks) - 1] if due and blocks else float("inf")
            admitted.made = self.store.insert(blocks, admitted.own, when, must=True)
            if admitted.made is None:
                self.private += admitted.own
            else:
                admitted.own = 0.0
        elif self.tree is not None and self.first:
            self.tree.touch(admitted.path, admitted.due)
            self.tree.insert(request.blocks, admitted.path, admitted.due)
            self.tree.unlock(admitted.path)
            admitted.path = []
        self._room()

    def release(self, admitted: Admission) -> None:
        """The request is over, or gives way."""
        self.private -= admitted.private + admitted.transient + admitted.own
        admitted.private = admitted.transient = admitted.own = 0.0
        if self.tree is not None:
            self.tree.unlock(admitted.path)
            admitted.path = []
        if self.store is not None:
            for entry in (admitted.entry, admitted.made):
                if entry is not None:
                    self.store.unlock(entry)
            admitted.entry = admitted.made = None
        self._room()

    def _room(self) -> None:
        left = max(0.0, self.memory - self.private)
        if self.tree is not None and not self.first:
            self.tree.rooms[0] = int(left // self.block_bytes)
        elif self.store is not None:
            self.store.rooms[0] = left

    @property
    def down(self) -> list[float]:
        """Bytes that left each tier, from the device on."""
        if self.tree is not None:
            return [0.0] * self.first + [count * self.block_bytes for count in self.tree.moved]
        return [0.0] * len(self.up) if self.store is None else list(self.store.moved)
