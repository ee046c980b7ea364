"""Counts of a KV store: hits, bytes, seconds, and what was not used."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """What a store has done so far.

    Attributes:
        hits, misses: entries that were asked for, and how many of the hits were in memory (`memory_hits`).
        bytes_loaded: bytes of keys and values handed out, `bytes_from_disk` of them read from files, in `load_s` seconds.
        stored, bytes_stored: entries put, and their bytes.
        damaged, foreign: entries not used, since they were not what was stored, or not of this model.
        evicted: entries that left memory for want of room.
    """

    hits: int = 0
    misses: int = 0
    memory_hits: int = 0
    bytes_loaded: int = 0
    bytes_from_disk: int = 0
    load_s: float = 0.0
    stored: int = 0
    bytes_stored: int = 0
    damaged: int = 0
    foreign: int = 0
    evicted: int = 0

    def since(self, before: Stats) -> dict[str, float]:
        """What was added since a copy was taken."""
        then = asdict(before)
        return {name: value - then[name] for name, value in asdict(self).items()}

    def copy(self) -> Stats:
        return Stats(**asdict(self))
