"""Command line of the demonstration: the embedded model, a sweep of scores, a few cells that are timed, and their page."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from kvcompress.commands.fetch import fetch
from kvcompress.commands.program import program

MODEL = "smollm2"
SWEEPS = ("demo", "demo_speed")  # experiments; both write to a sweep of their name


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what is missing, run both sweeps, write the board; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(prog=program("demo"), description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of sweeps; default: results")
    options = parser.parse_args(arguments)
    code = fetch(MODEL)
    run, report = (importlib.import_module(f"kvcompress.commands.{name}") for name in ("run", "report"))
    for sweep in SWEEPS if code == 0 else ():
        code = code or run.main(["-m", f"experiment={sweep}", f"paths.results={options.results}"])
    if code:
        return code
    folders = [str(options.results / sweep) for sweep in SWEEPS]
    return int(report.main([*folders, "--all", str(options.results / "demo" / "board"), "--quiet"]))
