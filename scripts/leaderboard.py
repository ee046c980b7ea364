"""Write the leaderboard of docs/leaderboard.md from the records of its sweep.

python scripts/leaderboard.py results/board
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "leaderboard.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="folders with records")
    parser.add_argument("--page", type=Path, default=PAGE, help="markdown file with the place for the tables")
    args = parser.parse_args(arguments)

    from kvcompress.report.leaderboard_page import BEGIN, END, tables
    from kvcompress.report.run_index import gather

    found = gather(args.results)
    for damaged in found.damaged:
        print(f"skipped {damaged}", file=sys.stderr)
    text = args.page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    try:
        if not begin or not end:
            raise ValueError(f"{args.page}: no place for the leaderboard; it goes between {BEGIN!r} and {END!r}")
        made = tables(found)
    except ValueError as error:
        print(f"leaderboard: {error}", file=sys.stderr)
        return 1
    args.page.write_text(f"{before}{BEGIN}\n{made}{END}{after}", encoding="utf-8")
    print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
