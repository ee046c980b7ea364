"""Starts of methods and tasks of one's own: a file, its yaml and its test, written from templates under a new name."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvcompress
from kvcompress.commands.program import program

YAML = """\
defaults:
  - base_LOWER
  - _self_
"""


@dataclass(frozen=True)
class Scaffold:
    """What is written for a new member of a group.

    Attributes:
        kind: "method" or "task"; example: of a name.
        templates: texts by path, relative to the repository; in both, NAME and LOWER stand for the name.
        taken: names that are in use, in lower case, and what has them.
        reserved: names that the file imports.
        advice: what to do next, with NAME and LOWER.
    """

    kind: str
    example: str
    templates: Mapping[str, str]
    taken: Callable[[], Mapping[str, str]]
    reserved: Callable[[str], bool]
    advice: str

    def files(self, name: str) -> dict[str, str]:
        """Contents by path, relative to the repository."""
        return {_named(path, name): _named(text, name) for path, text in self.templates.items()}

    def check(self, name: str, root: Path) -> None:
        """Refuse a name that cannot be a class and a file, or that is taken.

        Raises:
            ValueError: names the name, what is allowed and what it collides with.
        """
        if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) or keyword.iskeyword(name):
            raise ValueError(
                f"{name!r} cannot name a {self.kind}: a class name such as {self.example} (letters and digits, a capital "
                "first)"
            )
        taken = self.taken()
        if name.lower() in taken:
            raise ValueError(f"{name!r} is taken by {taken[name.lower()]}: names differ in more than capitals")
        if self.reserved(name):
            raise ValueError(f"{name!r} is a name that every {self.kind}'s file imports: choose another")
        for path in self.files(name):
            if (root / path).exists():
                raise ValueError(f"{name!r} is taken: {path} is there; remove it or choose another name")

    def main(self, arguments: Sequence[str] | None, about: str | None) -> int:
        """Write the files of the name that a command line gives; returns the exit code.

        Args:
            about: what the command's help says.
        """
        parser = argparse.ArgumentParser(
            prog=program(f"new-{self.kind}"), description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        lower = self.example.lower()
        parser.add_argument(
            "name", help=f"of the class, such as {self.example}; on the command line it is {self.kind}={lower}"
        )
        parser.add_argument(
            "--root", type=Path, default=None, help="clone to write into; default: this folder's, or the installed one"
        )
        args = parser.parse_args(arguments)
        try:
            root = clone() if args.root is None else args.root
            self.check(args.name, root)
        except ValueError as error:
            print(f"new-{self.kind}: {error}", file=sys.stderr)
            return 1
        for path, text in self.files(args.name).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
            print(path)
        print(_named(self.advice, args.name))
        return 0


def clone() -> Path:
    """The clone to write into: the current folder, else the one that the package is imported from.

    Raises:
        ValueError: the package is installed without its repository, whose files methods and tasks are.
    """
    for place in (Path.cwd(), Path(kvcompress.__file__).resolve().parent.parent):
        if all((place / name).is_dir() for name in ("kvcompress", "methods", "tasks", "conf")):
            return place
    raise ValueError(
        "methods and tasks are files of a clone, and none is here: git clone it, pip install -e . in it, and give this "
        "command there, or --root CLONE"
    )


def _named(text: str, name: str) -> str:
    return text.replace("NAME", name).replace("LOWER", name.lower())
