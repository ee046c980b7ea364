"""Leaderboards from records, the same as `kvcompress report`: python scripts/report.py results/"""

from kvcompress.commands.report import main

if __name__ == "__main__":
    raise SystemExit(main())
