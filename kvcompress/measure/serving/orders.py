"""Which waiting request is taken next, asked anew at every pick."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

ORDERS = ("fcfs", "lpm", "klpm", "priority")
STAY = 0.9  # of a request's priority from one drawing to the next, where drawings are a Markov chain


class Waiting(Protocol):
    """What an order looks at."""

    number: int
    rank: float


@dataclass
class Order:
    """Picks among waiting requests, which are given in order of arrival.

    Attributes:
        name: "fcfs" the first; "lpm" the longest cached prefix (SGLang); "klpm" the first, then `k - 1` times the
            longest cached prefix, and so on (arXiv 2502.04677); "priority" the highest drawn rank (FastSwitch).
        k: of "klpm".
        update_every: iterations after which ranks are drawn anew; pattern: "random", or "markov" where a rank mostly stays.
    """

    name: str = "fcfs"
    k: int = 4
    update_every: int = 25
    pattern: str = "random"
    seed: int = 0
    _picks: int = 0
    _rng: random.Random = field(default_factory=random.Random, repr=False)

    def __post_init__(self) -> None:
        if self.name not in ORDERS:
            raise ValueError(f"order={self.name!r}; valid: {', '.join(ORDERS)}")
        if self.k < 1 or self.update_every < 1:
            raise ValueError(f"k={self.k}, update_every={self.update_every}: at least 1")
        if self.pattern not in ("random", "markov"):
            raise ValueError(f"pattern={self.pattern!r}; valid: random, markov")
        self._rng = random.Random(f"serving:{self.seed}")

    @property
    def asks_cache(self) -> bool:
        """True if the next pick looks at cached prefixes."""
        return self.name == "lpm" or (self.name == "klpm" and self._picks % self.k != 0)

    def pick(self, waiting: Sequence[Waiting], cached: Callable[[Waiting], int]) -> int:
        """Index of the next request; ties go to the earlier arrival."""
        if self.name == "priority":
            return min(range(len(waiting)), key=lambda index: (-waiting[index].rank, waiting[index].number))
        if not self.asks_cache:
            return min(range(len(waiting)), key=lambda index: waiting[index].number)
        return min(range(len(waiting)), key=lambda index: (-cached(waiting[index]), waiting[index].number))

    def picked(self) -> None:
        """The pick was taken in."""
        self._picks += 1

    def redraw(self, live: Sequence[Waiting]) -> None:
        """New ranks."""
        for one in live:
            if self.pattern == "random" or self._rng.random() >= STAY:
                one.rank = self._rng.random()
