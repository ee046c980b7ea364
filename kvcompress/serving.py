"""Hit rates of a request trace as a command: python -m kvcompress.serving hits TRACE

The code is in `kvcompress/measure/serving/`.
"""

from kvcompress.measure.serving.__main__ import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
