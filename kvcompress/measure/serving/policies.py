"""Which leaf of a prefix tree goes first: the key by which leaves are ordered, the smallest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

NEVER = float("inf")


class Policy:
    """Order of eviction.

    Attributes:
        future: it looks at requests that have not come yet: a bound on what a policy can do, not a result.
        bypasses: a block that is needed later than the leaf it would displace is not kept.
    """

    name: ClassVar[str]
    future: bool = False
    bypasses: ClassVar[bool] = False

    def key(self, node: Any) -> Any:
        """A sort key of a node (`prefix_tree.Node`)."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The name on boards and figures; says where it is a bound."""
        return f"{self.name} (bound)" if self.future else self.name


class FIFO(Policy):
    """First in, first out."""

    name = "fifo"

    def key(self, node):
        return node.born


class LRU(Policy):
    """Least recently used."""

    name = "lru"

    def key(self, node):
        return node.tick


class LFU(Policy):
    """Least frequently used, then least recently; uses are forgotten on eviction."""

    name = "lfu"

    def key(self, node):
        return (node.uses, node.tick)


class Belady(Policy):
    """Farthest next use first, known from the future: a bound."""

    name = "belady"
    future = True
    bypasses = True

    def key(self, node):
        return (-node.due, node.tick)


@dataclass
class KVFlow(Policy):
    """Most steps until the agent is run again first; blocks that belong to no agent's fixed prefix before all others.

    KVFlow (arXiv 2507.07400). A node's steps are the fewest of the agents whose fixed prefix it is part of.

    Attributes:
        expects: how steps are known: "oracle" from the trace's future (a bound), "think" from the mean of the agent's
            returns so far.
    """

    name: ClassVar[str] = "kvflow"  # type: ignore[misc]
    expects: str = "think"

    def __post_init__(self) -> None:
        if self.expects not in ("oracle", "think"):
            raise ValueError(f"kvflow expects={self.expects!r}; valid: oracle, think")
        self.future = self.expects == "oracle"

    def key(self, node):
        return (-node.due, node.tick)


POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (FIFO, LRU, LFU, Belady, KVFlow)}


def policy(name: str) -> Policy:
    """A policy by its name; "kvflow-oracle" is KVFlow that knows when each agent comes back.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if name == "kvflow-oracle":
        return KVFlow("oracle")
    if name not in POLICIES:
        raise ValueError(f"policy={name!r}; valid: {', '.join((*POLICIES, 'kvflow-oracle'))}")
    return POLICIES[name]()
