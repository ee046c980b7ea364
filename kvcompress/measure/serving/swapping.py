"""Swapping a request's cache out and in: how many copies it takes and how long (FastSwitch, arXiv 2411.18424)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcompress.measure.transfers import TierPath

PAGE = 16  # tokens
GROUP = 60  # pages at most
MODES, GRANULARITIES = ("swap", "recompute"), ("block", "group", "whole")


@dataclass(frozen=True)
class Swap:
    """How a request gives way, and how caches come up from lower tiers.

    Attributes:
        mode: "swap" copies its cache to the host and back, "recompute" drops it and computes it anew.
        granularity: what is copied at once: a "block" of 16 tokens of a layer's keys or values, a "group" of up to 60
            blocks, or the "whole" cache.
        overlap: copies run beside the steps of others; else everything waits for them.
        keep_copy: what was copied to the host stays there, so that the next time only what is new is written.
        path: the link.
    """

    path: TierPath
    mode: str = "swap"
    granularity: str = "block"
    overlap: bool = True
    keep_copy: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES or self.granularity not in GRANULARITIES:
            raise ValueError(
                f"swap mode={self.mode!r}, granularity={self.granularity!r}; valid: {', '.join(MODES)}; "
                f"{', '.join(GRANULARITIES)}"
            )

    def copies(self, tokens: float, layers: int) -> int:
        """Copies that the cache of so many tokens takes."""
        if tokens <= 0:
            return 0
        pages = math.ceil(tokens / PAGE)
        if self.granularity == "whole":
            return 1
        return (pages if self.granularity == "block" else math.ceil(pages / GROUP)) * layers * 2

    def seconds(self, tokens: float, nbytes: float, layers: int) -> float:
        """Seconds to copy the cache of so many tokens."""
        return self.path.timed(self.copies(tokens, layers), nbytes)

    def written(self, nbytes: float, copied: float) -> float:
        """Bytes to write for a cache of `nbytes` of which `copied` were written before."""
        return max(0.0, nbytes - copied) if self.keep_copy else nbytes
