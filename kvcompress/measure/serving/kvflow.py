"""When an agent will be run again: steps along a workflow (KVFlow, arXiv 2507.07400), or what a trace lets expect."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvcompress.measure.serving.policies import NEVER
from kvcompress.measure.serving.requests import Request


@dataclass(frozen=True)
class After:
    """What an agent waits for: the agents before it, all of them or any one."""

    before: tuple[str, ...]
    wait: Literal["all", "any"] = "any"


def steps_to_execution(workflow: Mapping[str, After], running: Collection[str]) -> dict[str, float]:
    """Steps until each agent is run: 0 for those that are running.

    A successor of "all" has the most of the agents before it and one more, of "any" the fewest and one more. An agent
    behind itself in a loop has the steps to its next turn; one that is never reached has infinitely many.

    Raises:
        ValueError: an agent that runs, or that another waits for, is not part of the workflow.
    """
    named = set(running).union(*(after.before for after in workflow.values()))
    if unknown := sorted(named - set(workflow)):
        raise ValueError(f"agent {unknown[0]!r} is not in the workflow; known: {', '.join(workflow)}")
    steps = {agent: 0.0 if agent in running else NEVER for agent in workflow}
    for _ in workflow:
        for agent, after in workflow.items():
            if agent in running or not after.before:
                continue
            ahead = [steps[one] for one in after.before]
            steps[agent] = (max(ahead) if after.wait == "all" else min(ahead)) + 1
    return steps


@dataclass
class Claims:
    """By block the agents whose fixed prefix it is part of, with when each is expected back.

    A block is due when the first of them is; one that is in nobody's fixed prefix never is.

    Attributes:
        requests: the whole trace; for "oracle" an agent is due at the index of its next request.
        expects: as of `policies.KVFlow`. For "think" an agent is due after the mean of its returns so far, or of
            everybody's where it has not returned yet.
    """

    requests: Sequence[Request]
    expects: str = "think"
    _claims: dict[Hashable, dict[str, float]] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _gaps: dict[str, tuple[int, float]] = field(default_factory=dict)
    _next: list[float] = field(default_factory=list)
    _fixed: dict[str, tuple[float, Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: dict[str, float] = {}
        for index in range(len(self.requests) - 1, -1, -1):
            agent = self.requests[index].agent
            self._next.append(seen.get(agent, NEVER))
            seen[agent] = index
        self._next.reverse()

    def due(self, index: int, now: float) -> list[float]:
        """When each block of a request that arrives `now` is needed next, as far as is known then."""
        request = self.requests[index]
        agent, fixed = request.agent, request.fixed_blocks
        mine = self._next[index] if self.expects == "oracle" else now + self._expected(agent, now)
        self._fixed[agent] = mine, request.blocks[:fixed]
        found = []
        for block in request.blocks[:fixed]:
            claims = self._claims.setdefault(block, {})
            claims[agent] = mine
            found.append(min(claims.values()))
        return found + [NEVER] * (len(request.blocks) - fixed)

    def soonest(self) -> list[tuple[float, str, Sequence[int]]]:
        """Agents with the blocks of their fixed prefix, the one that is due first at the head."""
        known = ((due, agent, blocks) for agent, (due, blocks) in self._fixed.items() if blocks and due < NEVER)
        return sorted(known, key=lambda entry: entry[:2])

    def _expected(self, agent: str, now: float) -> float:
        """Seconds until an agent returns; takes note of its return now."""
        for name in (agent, ""):
            if agent in self._last:
                count, total = self._gaps.get(name, (0, 0.0))
                self._gaps[name] = count + 1, total + max(0.0, now - self._last[agent])
        self._last[agent] = now
        count, total = self._gaps.get(agent) or self._gaps.get("", (0, 0.0))
        return total / count if count else 0.0
