"""Budgets in words, for who writes them as another program has them. Imports nothing."""

from __future__ import annotations

RATIO = "compression_ratio"  # as kvpress and others have it


def kept_of(ratio: object) -> str:
    """What to write in place of a compression ratio, which says in kvpress and elsewhere what is removed."""
    text = str(ratio)
    try:
        kept = round(1.0 - float(text), 6)
    except ValueError:
        kept = 0.0
    share = f"{kept:g}" if 0.0 < kept < 1.0 else "1.0" if kept == 1.0 else "0.25"
    return f"{RATIO}={text} says what is removed; budget is what is kept: budget={share}"
