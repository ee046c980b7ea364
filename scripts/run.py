"""Run one cell, or with -m a sweep: python scripts/run.py model=smollm2 task=needle method=h2o budget=0.25"""

from kvcompress.commands.run import main

if __name__ == "__main__":
    raise SystemExit(main())
