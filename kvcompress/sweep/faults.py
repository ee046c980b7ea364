"""Fault record: a traceback cut to this library, without paths or secrets of the machine it ran on."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Collection
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

# two components or more, after no word: neither a URL nor task=suite/name
_PATH = re.compile(r"(?<![\w.~…/:\\-])(?:/[^\s/'\"`:;,()<>\[\]{}|*?]+){2,}|\b[A-Za-z]:\\[^\s'\":]+")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8  # characters of a secret that is looked for: "1" is in every text


def text_of(fault: BaseException, typed: Collection[str] = ()) -> str:
    """The traceback of `fault`: frames of this library and of the user's own files, and the one that raised.

    Args:
        typed: paths that the user gave, which stay as they are.
    """
    told = traceback.TracebackException.from_exception(fault, compact=True)
    _cut(told)
    return without_paths("".join(told.format()), typed)


def _cut(told: traceback.TracebackException) -> None:
    frames = [f for number, f in enumerate(told.stack, 1) if number == len(told.stack) or not _foreign(f.filename)]
    told.stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(_place(f.filename), f.lineno, f.name, line=f.line) for f in frames]
    )
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _cut(other)


@lru_cache(maxsize=1)
def _roots() -> dict[str, str]:
    """Folders of this library by their place in it, those of others' by nothing; the innermost first."""
    found = {}
    for name in ("kvcompress.methods", "kvcompress.tasks", "kvcompress.conf", "kvcompress"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            found[str(Path(spec.origin).parent)] = name.replace(".", "/") + "/"
    for name in ("purelib", "platlib", "stdlib"):
        found.setdefault(sysconfig.get_path(name), "")
    return found


def _foreign(path: str) -> bool:
    """True for a file of Python or of another package."""
    return (
        path.startswith("<")
        or ("site-packages" in path or _within(path, sysconfig.get_path("stdlib")))
        and not any(_within(path, root) for root, place in _roots().items() if place)
    )


def _within(path: str, root: str) -> bool:
    return path.startswith(root + os.sep)


def _place(path: str) -> str:
    """A file as it is named inside its package; the name alone of one that is in none."""
    for root, place in _roots().items():
        if _within(path, root):
            return place + path[len(root) + 1 :].replace(os.sep, "/")
    if "site-packages" + os.sep in path:
        return path.rpartition("site-packages" + os.sep)[2].replace(os.sep, "/")
    return path if path.startswith("<") else Path(path).name


def without_paths(text: str, typed: Collection[str] = ()) -> str:
    """`text` with absolute paths cut to their last part, but for those that begin as one in `typed`; without secrets of
    the environment, and such that it can be written as UTF-8."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, f"${{{name}}}")

    kept = [one.rstrip("/") for one in typed]
    known = {str(Path.cwd()): ".", str(Path.home()): "~", tempfile.gettempdir(): "…", sys.prefix: "…"}
    for folder, short in sorted(known.items(), key=lambda item: -len(item[0])):  # one may lie in another
        if len(folder) > 1 and not any(one.startswith(folder) for one in kept):
            text = text.replace(folder, short)

    def cut(found: re.Match[str]) -> str:
        path = found[0]
        if any(path == one or path.startswith(f"{one}/") for one in kept):
            return path
        place = _place(path)
        return place if "/" in place else f"…/{place}"

    return _PATH.sub(cut, text).encode("utf-8", "backslashreplace").decode("utf-8")
