"""Options of a launcher: which work cells share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How a launcher has its cells run.

    Attributes:
        share: one prefill for all cells that can start from it.
        together: cells that share a prefill take their decode steps in one forward where they can.
        check: also decode each cell alone, and fail it where the tokens differ without a close call.
        memory: bytes that the caches of a shared prefill and its cells may take, None = no limit. Cells take turns to
            fit; one at a time beside the full cache is the least.
    """

    share: bool = True
    together: bool = True
    check: bool = False
    memory: int | None = None
