"""How a command is called, for its help."""

from __future__ import annotations

import os
import sys

PROGRAM = "kvcompress"


def program(name: str) -> str:
    """`kvcompress report`, or `report.py` where it was started from `scripts/`."""
    called = os.path.basename(sys.argv[0])
    return called if called.endswith(".py") and called != "__main__.py" else f"{PROGRAM} {name}"
