"""Command line of hit rates of a request trace (`kvcompress/measure/serving/hits.py`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvcompress.measure.serving import __main__ as serving


def main(arguments: Sequence[str] | None = None) -> int:
    """Print hit rates; returns the exit code."""
    return serving.main(["hits", *(sys.argv[1:] if arguments is None else arguments)])
