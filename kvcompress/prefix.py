"""Prefix reuse, public name: `from kvcompress.prefix import PrefixReuse`. The code is in `kvcompress/reuse/prefix.py`."""

from kvcompress.reuse.prefix import PrefixReuse

__all__ = ["PrefixReuse"]
