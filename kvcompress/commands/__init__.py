"""Command lines of `kvcompress COMMAND`. The top wing: it joins scheduler, trackers and boards, and nothing imports it.

Each module has a `main(arguments) -> exit code`; `door` finds them by name, and `scripts/` leads to the same."""
