"""The import contract holds, and is broken by an import up the wings or in a circle wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import load_script

pytest.importorskip("importlinter")
lint = load_script("lint_imports")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package as it is installed, with the contract."""
    return lint.lay_out(tmp_path_factory.mktemp("installed"))


def test_the_contract_holds(copy):
    done = lint.check(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "says"),
    [
        (
            "common/hashing.py",
            "from kvcompress.sweep import record",
            "common is not allowed to import kvcompress.sweep",
        ),
        ("sweep/record.py", "if False:\n    from kvcompress import tracking", "kvcompress.tracking"),
        ("report/table.py", "def late():\n    import kvcompress.commands.run", "kvcompress.commands"),
        (
            "sweep/config.py",
            "from kvcompress.sweep.launcher import options",
            "No cycles are allowed in kvcompress.sweep",
        ),
    ],
    ids=["upward", "never run", "in a function", "circle"],
)
def test_an_import_up_the_wings_or_in_a_circle_breaks_the_contract(copy, module, line, says):
    path = copy / "kvcompress" / module
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    try:
        done = lint.check(copy)
    finally:
        path.write_text(before)
    assert done.returncode != 0 and says in " ".join(done.stdout.split())
