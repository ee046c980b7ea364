"""Hit rates of a trace without any model: requests replayed one after another, as if each were over before the next.

    python -m kvcompress.serving hits TRACE --blocks 1000,10000 --policies lru,belady

Counted are tokens of prompts that need not be computed again. Answers have no ids in these traces: what an answer adds
is a miss in the next turn, so that a real system hits more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvcompress.measure.serving.kvflow import Claims
from kvcompress.measure.serving.policies import NEVER, KVFlow, Policy, policy
from kvcompress.measure.serving.prefix_tree import PrefixTree
from kvcompress.measure.serving.requests import Request, next_uses
from kvcompress.measure.serving.whole_store import WholeStore

Reuse = Literal["prefix", "whole"]
REUSES = ("prefix", "whole")
FLAT = "fifo-flat"


@dataclass(frozen=True)
class Hits:
    """What a cache saved.

    Attributes:
        input: tokens of the counted requests' prompts; hit: those found in the cache; by_tier: the same by tier.
        rates: hit share of each counted request, whose mean is not the share by token.
        bound: the policy knew the future.
        down: blocks that left each tier.
    """

    requests: int
    input: int
    hit: int
    by_tier: tuple[int, ...]
    rates: tuple[float, ...]
    bound: bool
    down: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Share of prompt tokens that hit."""
        return self.hit / self.input

    @property
    def speedup(self) -> float:
        """`1 / (1 - rate)`: how much faster prompts would be if computing tokens were all they cost."""
        return float("inf") if self.hit == self.input else 1 / (1 - self.rate)


class Index(Protocol):
    """A cache that is asked once per request."""

    def visit(self, request: Request, due: Sequence[float] | None) -> tuple[int, ...]:
        """Blocks that hit, by tier; takes the request in."""
        ...

    @property
    def down(self) -> Sequence[float]: ...


class _Tree:
    def __init__(self, rooms: Sequence[int | None], chosen: Policy) -> None:
        self.tree = PrefixTree(rooms, chosen)

    def visit(self, request: Request, due: Sequence[float] | None) -> tuple[int, ...]:
        tree = self.tree
        path = tree.match(request.blocks)
        tree.lock(path)
        if len(tree.rooms) == 1:
            found: tuple[int, ...] = (len(path),)
        else:
            counts = [0] * len(tree.rooms)
            for node in path:
                counts[node.tier] += 1
            found = tuple(counts)
            tree.promote(path)
        tree.touch(path, due)
        tree.insert(request.blocks, path, due)
        tree.unlock(path)
        return found

    @property
    def down(self) -> Sequence[float]:
        return self.tree.moved


class _Whole:
    """Entries of whole prompts, in blocks of the full cache times `ratio`."""

    def __init__(self, rooms: Sequence[float | None], chosen: Policy, ratio: float) -> None:
        self.store, self.ratio = WholeStore(rooms, chosen), ratio

    def visit(self, request: Request, due: Sequence[float] | None) -> tuple[int, ...]:
        store, blocks = self.store, request.blocks[: request.whole_blocks]
        counts, when = [0] * len(store.rooms), due[len(blocks) - 1] if due and blocks else NEVER
        entry = store.match(blocks)
        if entry is not None:
            counts[entry.tier] = entry.blocks
            store.lock(entry)
            store.promote(entry)
            store.touch(entry, when if entry.blocks == len(blocks) else entry.due)
        made = store.insert(blocks, self.ratio * len(blocks), when) if blocks else None
        for one in (entry, made):
            if one is not None:
                store.unlock(one)
        return tuple(counts)

    @property
    def down(self) -> Sequence[float]:
        return self.store.moved


class _Flat:
    """A queue of blocks without a tree: the oldest goes, whatever hangs below it. One tier."""

    def __init__(self, room: float) -> None:
        self.room, self.held, self.queue, self.down = room, set[Hashable](), deque[Hashable](), [0.0]

    def visit(self, request: Request, due: Sequence[float] | None) -> tuple[int, ...]:
        held = self.held
        count = next((i for i, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        for block in request.blocks:
            if block in held:
                continue
            if len(held) >= self.room and self.queue:
                held.discard(self.queue.popleft())
                self.down[0] += 1
            if len(held) < self.room:
                held.add(block)
                self.queue.append(block)
        return (count,)


def replay(
    requests: Sequence[Request],
    blocks: int | None,
    chosen: str = "lru",
    reuse: Reuse = "prefix",
    ratio: float = 1.0,
    lower: Sequence[int | None] = (),
    count_from: int = 0,
) -> Hits:
    """Replay a trace.

    Args:
        blocks: of the full cache that the device has room for; None: no limit.
        chosen: a policy of `policies`, or "fifo-flat".
        reuse: "prefix": any run of blocks from the start of a prompt; "whole": only what an earlier prompt is, as a whole.
        ratio: bytes that the method holds over those of the full cache.
        lower: room of the tiers below, likewise.
        count_from: index of the first request that is counted.

    Raises:
        ValueError: a trace without ids, or settings that mean nothing.
    """
    if reuse not in REUSES:
        raise ValueError(f"reuse={reuse!r}; valid: {', '.join(REUSES)}")
    if not ratio > 0:
        raise ValueError(f"ratio={ratio}; above 0: bytes held over those of the full cache")
    if not any(request.blocks for request in requests):
        raise ValueError(
            "this trace has no hash_ids: it says when requests come and how long they are, but nothing of hits"
        )
    if not 0 <= count_from < len(requests):
        raise ValueError(f"count_from={count_from}; from 0 to {len(requests) - 1}")
    rooms = [blocks, *lower]
    index: Index
    dues: Any = None
    if chosen == FLAT:
        if reuse == "whole" or lower:
            raise ValueError(f"policy={FLAT} goes with reuse=prefix and one tier")
        index, future = _Flat(NEVER if blocks is None else blocks / ratio), False
    else:
        rule = policy(chosen)
        future = rule.future
        if isinstance(rule, KVFlow):
            claims = Claims(requests, rule.expects)
            dues = (claims.due(number, request.at) for number, request in enumerate(requests))
        elif future:
            dues = next_uses(requests)
        if reuse == "prefix":
            index = _Tree([None if room is None else int(room / ratio) for room in rooms], rule)
        else:
            index = _Whole(rooms, rule, ratio)
    hit = total = 0
    by_tier, rates = [0] * len(rooms), []
    for number, request in enumerate(requests):
        found = index.visit(request, None if dues is None else next(dues))
        if number < count_from:
            continue
        left, mine = request.input, 0
        for tier, count in enumerate(found):
            tokens = min(left, count * request.block_size)
            by_tier[tier] += tokens
            left -= tokens
            mine += tokens
        hit += mine
        total += request.input
        rates.append(mine / request.input)
    return Hits(len(rates), total, hit, tuple(by_tier), tuple(rates), future, tuple(index.down))
