"""Offload cost model as a command: python -m kvcompress.tiers results/read/*/record.json

The code is in `kvcompress/measure/offload_cost_model.py`.
"""

from kvcompress.measure.offload_cost_model import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
