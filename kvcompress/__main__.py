"""`python -m kvcompress COMMAND`: the same as the console command `kvcompress`."""

from kvcompress.commands.door import main

if __name__ == "__main__":
    raise SystemExit(main())
