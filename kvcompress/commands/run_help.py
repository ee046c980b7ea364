"""Help of `kvcompress run`: what may be chosen and set, without the names that configuration files use among themselves."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from kvcompress.commands.program import program
from kvcompress.sweep.config import GROUPS, check_overrides, composing, folder, options
from kvcompress.sweep.hydra_errors import HYDRA_ERRORS, one_line

FLAGS = (
    ("-m", "a sweep: every combination of comma-separated values is a cell"),
    ("--cfg job", "show the configuration that the settings come to, and run nothing"),
    ("--hydra-help", "flags of Hydra, which composes the configuration"),
    ("--shell-completion install=bash", "print what completes settings in a shell (bash, zsh, fish): eval it"),
)
EXAMPLES = (
    "model=smollm2 task=needle method=h2o budget=0.25",
    "-m method=full,snapkv budget=0.5,0.25 task=needle sweep.name=study",
    "experiment=quick dry=true              what would be done, and how long it takes",
    "status=study                           what is done, running, failed or missing",
)


def asks_help(arguments: Sequence[str]) -> bool:
    """True for a command line that asks for help."""
    return bool({"-h", "--help"} & set(arguments))


def show_help(arguments: Sequence[str]) -> int:
    """Print it, with the configuration that the other arguments come to; returns 0, or 2 where these are refused."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    place = folder()
    try:
        check_overrides(overrides, place)
        with composing() as compose:
            config = OmegaConf.to_yaml(compose(overrides))
    except HYDRA_ERRORS as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    name = program("run")
    lines = [f"usage: {name} [-m] [key=value ...]", "", *(f"  {name} {example}" for example in EXAMPLES), ""]
    lines += [f"  {flag:32} {about}" for flag, about in FLAGS]
    lines += ["", "Choices, as group=name; another one's settings show with it, as in: method=snapkv --help", ""]
    for group in GROUPS:
        lines += textwrap.wrap(
            f"{group}: {', '.join(short(options(group, place), place / group))}",
            width=110,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    lines += ["", f"Settings{f' with {chr(32).join(overrides)}' if overrides else ''}, as group.key=value:", ""]
    print("\n".join(lines))
    print(textwrap.indent(config, "  "))
    return 0


def short(names: Sequence[str], place: Path) -> list[str]:
    """Names as help lists them: those of a folder once, as `longbench/… (21)`; a folder of tasks is itself a choice."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("/")[0] if (place / name.partition("/")[0]).is_dir() else name, []).append(name)
    return [head if members == [head] else f"{head}/… ({len(members)})" for head, members in found.items()]
