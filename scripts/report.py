"""The leaderboard of a results folder: python scripts/report.py results/ [--markdown F] [--csv F] [--png FOLDER]"""

from kvcompress.commands.report import main

if __name__ == "__main__":
    raise SystemExit(main())
