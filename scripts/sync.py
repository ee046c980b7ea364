"""Build or upload tracker runs from records alone, once or again: python scripts/sync.py results/ --mode online"""

from kvcompress.commands.sync import main

if __name__ == "__main__":
    raise SystemExit(main())
