"""Write the generated pages: docs/methods.md, the table in docs/method_parts.md, and docs/configuration.md.

python scripts/method_table.py            write them
python scripts/method_table.py --check    exit code 1 if one is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(arguments)

    from kvcompress.sweep import configuration_page, method_table

    short, full, keys = (ROOT / "docs" / name for name in ("method_parts.md", "methods.md", "configuration.md"))
    try:
        texts = {
            short: method_table.inserted(short.read_text(encoding="utf-8"), method_table.short_table()),
            full: method_table.page(),
            keys: configuration_page.page(),
        }
    except ValueError as error:
        print(f"method_table: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not args.check:
            path.write_text(texts[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'not current; run scripts/method_table.py' if args.check else 'written'}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
