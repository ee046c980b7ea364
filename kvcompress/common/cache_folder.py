"""Cache folder: where converted models, calibrations and schemas are kept for this user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`KVCOMPRESS_CACHE`, else `~/.cache/kvcompress`. All in it can be made again."""
    return Path(os.environ.get("KVCOMPRESS_CACHE") or Path.home() / ".cache" / "kvcompress").expanduser()
