"""Metrics of published benchmarks: plain functions in `scores`, and as modules of `evaluate` through `load`."""

from kvcompress.metrics import loogle, scores, scrolls
from kvcompress.metrics.long_context import EXACT, WITH_LETTER, gold
from kvcompress.metrics.scores import MISSES, VERSIONS, score

__all__ = ["EXACT", "MISSES", "VERSIONS", "WITH_LETTER", "gold", "load", "score"]

for family in (scrolls, loogle):
    scores.add(family.PAIRWISE, family.MISSES)


def __getattr__(name: str) -> object:
    if name == "load":  # evaluate and datasets take seconds to import: only when asked for
        from kvcompress.metrics.modules import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
