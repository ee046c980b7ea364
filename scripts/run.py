"""Run one cell, or with -m a sweep, the same as `kvcompress run`: python scripts/run.py method=h2o budget=0.25"""

from kvcompress.commands.run import main

if __name__ == "__main__":
    raise SystemExit(main())
