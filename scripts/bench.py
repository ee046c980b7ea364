"""Benchmarks of the library itself, the same as `kvcompress bench`: python scripts/bench.py --help"""

from kvcompress.commands.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
