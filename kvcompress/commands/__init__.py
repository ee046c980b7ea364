"""Command lines: `run`, `report`, `sync`. The top wing: it joins scheduler, trackers and boards, and nothing imports it.

Each module has a `main(arguments) -> exit code`; `scripts/` calls them."""
