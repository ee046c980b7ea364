"""Schema index: the table of schemas, kept in the cache folder so that a command line need not import torch to have it.

An index is good for exactly the sources it was made from: its name is their hash, with that of the task's tables and the
installed packages. A new, changed or removed file in `methods/` or `tasks/` is another hash, so that the classes are
imported and the index is written anew. `python -m kvcompress.sweep.schema_index` writes it.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from kvcompress.common.atomic_files import replacing
from kvcompress.common.cache_folder import cache_dir
from kvcompress.common.hashing import digest, source_hash
from kvcompress.sweep.schemas import Schema, Table

FORMAT = 1  # of the file
CLASSES = "kvcompress.method"  # imported: torch is, and a caller may have classes of its own
KEEP = 8  # indices of other sources: several checkouts may be in use


def load() -> Table:
    """The table of schemas: of the classes of this process where they are imported, else from the index."""
    here = CLASSES in sys.modules
    found = None if here else _read(path())
    if found is not None:
        return found
    from kvcompress.sweep import components

    if not here:
        with suppress(OSError, TypeError):  # a default that JSON cannot hold; the next command takes as long
            _write(path(), components.table(within="kvcompress."))
    return components.table()


def path() -> Path:
    """File of the index for the present sources."""
    return cache_dir() / "schemas" / f"{key()}.json"


@lru_cache(maxsize=1)
def key() -> str:
    """Hash of all that schemas depend on: sources, tables of the tasks, Python, installed packages."""
    tables = []
    for package in ("kvcompress.methods", "kvcompress.tasks"):
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        tables += [[str(file.relative_to(folder)), file.read_text("utf-8")] for file in sorted(folder.rglob("*.yaml"))]
    return digest([FORMAT, source_hash(), tables, sys.version, installed_packages()])


def installed_packages() -> list[str]:
    """Names and versions of installed packages, as their folders say."""
    folder = Path(sysconfig.get_path("purelib"))
    return sorted(file.name for file in folder.glob("*.dist-info"))


@lru_cache(maxsize=2)
def _read(file: Path) -> Table | None:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        groups = {
            str(group): {str(name): Schema.read(schema) for name, schema in schemas.items()}
            for group, schemas in stored["groups"].items()
        }
        return Table(groups, tuple(map(str, stored["models"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none there, or a damaged one
        return None


def _write(file: Path, table: Table) -> None:
    text = json.dumps(
        {
            "groups": {
                group: {name: list(asdict(schema).values()) for name, schema in schemas.items()}
                for group, schemas in table.groups.items()
            },
            "models": list(table.models),
        }
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    others = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in others[KEEP:]:
        old.unlink(missing_ok=True)


if __name__ == "__main__":
    load()
    print(path())
