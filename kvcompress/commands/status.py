"""Command line of a sweep's status: which cells are done, running, failed or missing. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvcompress.commands.program import program
from kvcompress.common.text import PlainConsole
from kvcompress.sweep.launcher.status import show, sweep_folder, sweeps_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of each sweep.

    Returns:
        0 if every cell is finished, 1 if not, 2 if there is no such sweep.
    """
    parser = argparse.ArgumentParser(prog=program("status"), description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweeps", nargs="*", help="folders, or names under --results; default: every sweep there")
    parser.add_argument("--results", default="results", help="folder of sweeps, as paths.results; default: results")
    options = parser.parse_args(arguments)
    notes = PlainConsole(stderr=True)
    names = options.sweeps or sweeps_of(options.results)
    if not names:
        notes.print(f"no sweep under {options.results}: kvcompress run makes some", style="red")
        return 2
    codes = []
    for name in names:
        if len(names) > 1:
            notes.print(f"sweep {name}", style="bold")
        codes.append(show(sweep_folder(name, options.results), notes))
    return max(codes)
