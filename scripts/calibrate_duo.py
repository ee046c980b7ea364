"""Head classes for DuoAttention, the same as `kvcompress calibrate-duo`: python scripts/calibrate_duo.py --model smollm2"""

from kvcompress.commands.calibrate_duo import main

if __name__ == "__main__":
    raise SystemExit(main())
