"""Check the import contract of pyproject.toml: wings in a total order, no circles.

methods/ and tasks/ lie beside kvcompress/ and are installed into it, so the contract is checked on a copy laid out as
installed: python scripts/lint_imports.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lay_out(target: Path, root: Path = ROOT) -> Path:
    """Copy the package into `target` as a wheel would install it, with the contract beside it; returns `target`."""
    skip = shutil.ignore_patterns("__pycache__", "data", "page")
    shutil.copytree(
        root / "kvcompress", target / "kvcompress", ignore=lambda folder, names: {"__pycache__"} & set(names)
    )
    for name in ("methods", "tasks", "conf"):
        shutil.copytree(root / name, target / "kvcompress" / name, ignore=skip)
    shutil.copy(root / "pyproject.toml", target / "pyproject.toml")
    return target


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter in `folder`; its text is in `stdout`, its return code is not 0 where a contract is broken."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return subprocess.run([*command, "--no-cache"], cwd=folder, env=environment, text=True, capture_output=True)


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = check(lay_out(Path(folder)))
    text = done.stdout[max(done.stdout.find("\nContracts"), 0) :] if done.returncode == 0 else done.stdout
    print(text.strip(), done.stderr.strip(), sep="\n", file=sys.stderr if done.returncode else sys.stdout)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
