"""Names that README and docs print can be imported as they are printed."""

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OLD_PAGES = {"LOG.md"}  # tells what was, under the names of its day
MADE_THERE = {"LongKeys", "LastBox"}  # docs/new_method.md and docs/new_task.md write them first


def printed() -> list[str]:
    """`module:name` of every import that a page shows, and every dotted module that it names."""
    found = {"kvcompress:CompressedCache", "kvcompress:Session"}
    for page in PAGES:
        if page.name in OLD_PAGES:
            continue
        text = page.read_text(encoding="utf-8")
        for module, names in re.findall(r"from (kvcompress[\w.]*) import ([\w, ]+)", text):
            found |= {f"{module}:{name.split(' as ')[0].strip()}" for name in names.split(",")}
        found |= {
            f"{module}:" for module in re.findall(r"(?:import |python -m |`)(kvcompress(?:\.[a-z_]+)+)\b(?!\()", text)
        }
    return sorted(name for name in found if name.partition(":")[2] not in MADE_THERE)


@pytest.mark.parametrize("name", printed())
def test_a_name_that_a_page_prints_can_be_imported(name):
    module, _, attribute = name.partition(":")
    if attribute:
        assert hasattr(importlib.import_module(module), attribute)
        return
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # its parent is a module, and no package
        found = None
    if found is None:  # a function or constant of a module
        parent, _, last = module.rpartition(".")
        assert hasattr(importlib.import_module(parent), last)


def test_the_command_of_the_tier_model_is_a_module():
    assert find_spec("kvcompress.tiers") is not None
