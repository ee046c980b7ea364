"""Tracker runs from records, the same as `kvcompress sync`: python scripts/sync.py results/ --mode online"""

from kvcompress.commands.sync import main

if __name__ == "__main__":
    raise SystemExit(main())
