"""Start a method, the same as `kvcompress new-method`: python scripts/new_method.py LongKeys"""

from kvcompress.commands.new_method import main

if __name__ == "__main__":
    raise SystemExit(main())
