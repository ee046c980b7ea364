"""Console command `kvcompress`: finds the command that is asked for, and completes command lines. Imports no torch."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from kvcompress.commands.program import PROGRAM

COMMANDS = {  # in the order of help: module with a `main(arguments) -> exit code`, and what it does
    "run": ("run", "run one cell, or with -m a sweep; settings are key=value"),
    "report": ("report", "leaderboards, figures and the page of results"),
    "status": ("status", "which cells of a sweep are done, running, failed or missing"),
    "demo": ("demo", "fetch the embedded model, run a small sweep, write its page"),
    "submit": ("submit", "check results and write the file that a submission to the board is; --check FILE"),
    "doctor": ("doctor", "what is installed, which device and kernels, and what is missing"),
    "fetch": ("fetch", "install the package of an embedded model, without what it would compile"),
    "sync": ("sync", "send runs to a tracker from records"),
    "bench": ("bench", "benchmarks of the library itself"),
    "tiers": ("tiers", "modelled times of caches on devices, hosts and disks, from records"),
    "hits": ("hits", "hit rates of a request trace by policy and room"),
    "new-method": ("new_method", "start a method: its file, its yaml and its test"),
    "new-task": ("new_task", "start a task likewise"),
    "calibrate-duo": ("calibrate_duo", "measure which heads of a model retrieve, for DuoAttention"),
    "calibrate-qfilters": ("calibrate_qfilters", "compute the filters of a model for Q-Filters"),
    "profile-heads": ("profile_heads", "measure which heads of a model change their pages fast, for FlexiCache"),
}
HELP = ("-h", "--help", "help")
VERSION = ("-V", "--version", "version")
COMPLETION = ("-sc", "--shell-completion")
INTERNAL = "=base_"  # options that yaml files start from


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 where there is no such command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(usage(), file=sys.stderr)
        return 2
    name, *rest = given
    if name in HELP and not rest:
        print(usage())
        return 0
    if name in VERSION:
        print(f"{PROGRAM} {metadata.version(PROGRAM)}")
        return 0
    if name in COMPLETION:
        return complete(rest)
    if name in HELP:  # help run
        name, rest = rest[0], ["--help"]
    if name not in COMMANDS:
        print(f"{PROGRAM}: {unknown(name)}", file=sys.stderr)
        return 2
    before, sys.argv = sys.argv, [PROGRAM, *rest]  # what Hydra and argparse look at
    try:
        code: int = import_module(f"kvcompress.commands.{COMMANDS[name][0]}").main(rest)
        return code
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        sys.argv = before


def usage() -> str:
    """Help of the program."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND ...        {PROGRAM} COMMAND --help says more",
            "",
            *lines,
            "",
            f"  {PROGRAM} run -m model=smollm2 task=needle method=full,snapkv budget=0.25",
            f"  {PROGRAM} report results/default --all board",
            f'  eval "$({PROGRAM} --shell-completion install=bash)"      completes commands and settings (zsh, fish likewise)',
        ]
    )


def unknown(name: str) -> str:
    """Why `name` is no command, and what may be meant."""
    if "=" in name or name in ("-m", "--multirun"):
        return f"{name} belongs to a run: {PROGRAM} run {name} ..."
    near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{name!r} is no command{hint} Valid: {', '.join(COMMANDS)}"


def complete(arguments: Sequence[str]) -> int:
    """Hydra's completion for a program with commands: `install=SHELL`, `uninstall=SHELL`, or `query=SHELL` of `COMP_LINE`."""
    from kvcompress.commands import run

    if not any(argument.startswith(("install=", "uninstall=", "query=")) for argument in arguments):
        print(f"{PROGRAM} --shell-completion: give install=bash, zsh or fish (or uninstall=, query=)", file=sys.stderr)
        return 2
    before, sys.argv = sys.argv, [PROGRAM]  # the name that Hydra installs the completion for
    line = os.environ.get("COMP_LINE", "")
    try:
        if not any(argument.startswith("query=") for argument in arguments):
            return run.main(["-sc", *arguments])
        words, new = line.split()[1:], line.endswith(" ")
        if not words or (len(words) == 1 and not new):
            print(" ".join(name for name in COMMANDS if name.startswith(words[0] if words else "")))
            return 0
        if words[0] != "run":  # paths, which the shell completes
            return 0
        os.environ["COMP_LINE"] = f"{PROGRAM} {' '.join(words[1:])}" + " " * new
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            run.main(["-sc", *arguments])
        print(" ".join(word for word in said.getvalue().split() if INTERNAL not in word))
        return 0
    finally:
        sys.argv = before
        os.environ["COMP_LINE"] = line
