"""Filters for Q-Filters, the same as `kvcompress calibrate-qfilters`: python scripts/calibrate_qfilters.py --model smollm2"""

from kvcompress.commands.calibrate_qfilters import main

if __name__ == "__main__":
    raise SystemExit(main())
