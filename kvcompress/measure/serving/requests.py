"""A request of a trace, and what is done to a list of them before it is replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

MAIN = "main"


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        at: arrival, seconds from the start of the trace.
        input, output: tokens of the prompt and of the answer.
        blocks: ids of the prompt's blocks in order; an id stands for its block and everything before it. Empty where
            the trace says nothing of contents. The last block may be partial; tokens behind the last id have none.
        block_size: tokens to a block, 0 where there are none.
        line: of the file, 0 if there is no file.
        parent: index of the request that this one follows in its session: in a closed loop it arrives `think` seconds after
            that one is done, and `at` is not looked at. None: it arrives at `at`.
        agent: who sends it; requests of one agent share their first `fixed` tokens (tools, system prompt).
    """

    at: float
    input: int
    output: int
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    line: int = 0
    parent: int | None = None
    think: float = 0.0
    agent: str = MAIN
    fixed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.input + self.output

    @property
    def whole_blocks(self) -> int:
        """Number of its blocks that are full."""
        return min(len(self.blocks), self.input // self.block_size) if self.block_size else 0

    @property
    def fixed_blocks(self) -> int:
        """Number of blocks that lie in the agent's fixed prefix."""
        return min(len(self.blocks), self.fixed // self.block_size) if self.block_size else 0


def first(requests: Iterable[Request], count: int | None) -> list[Request]:
    """The first `count` requests, or all. A parent always comes before its child, so none is cut off.

    Raises:
        ValueError: a count below 1, or a trace without requests.
    """
    if count is not None and count < 1:
        raise ValueError(f"requests={count}; at least 1, or null for the whole trace")
    found = list(islice(requests, count))
    if not found:
        raise ValueError("the trace holds no request")
    return found


def scaled(requests: Sequence[Request], length: float | None = None, rate: float = 1.0) -> list[Request]:
    """Lengths and block sizes divided by `length` (rounded up, at least 1), arrival times by `rate`.

    Think times stay: they are people's. What was shared before stays shared, as blocks shrink with the prompts.

    Raises:
        ValueError: a factor that is not above 0, or a block size that it does not divide.
    """
    if not rate > 0 or (length is not None and not length > 0):
        raise ValueError(f"length_scale={length}, rate_scale={rate}: above 0, or length_scale=null for none")
    divide = length or 1

    def shrink(tokens: int) -> int:
        return max(1, int(-(-tokens // divide))) if tokens else 0

    for size in {request.block_size for request in requests}:
        if size % divide:
            raise ValueError(
                f"length_scale={length} does not divide the trace's blocks of {size} tokens: take a divisor of {size}"
            )
    return [
        replace(
            one,
            at=one.at / rate,
            input=shrink(one.input),
            output=shrink(one.output),
            block_size=int(one.block_size // divide),
            fixed=int(one.fixed // divide),
        )
        for one in requests
    ]


def next_uses(requests: Sequence[Request]) -> Iterator[list[float]]:
    """For each request in order, by block, the index of the next request that has this block; infinite where none does."""
    upcoming: list[list[float]] = [[]] * len(requests)
    seen: dict[int, int] = {}
    for index in range(len(requests) - 1, -1, -1):
        blocks = requests[index].blocks
        upcoming[index] = [seen.get(block, float("inf")) for block in blocks]
        seen.update(dict.fromkeys(blocks, index))
    return iter(upcoming)
