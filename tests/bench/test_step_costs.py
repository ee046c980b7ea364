"""What docs/device.md says of a decode step is at least what is counted: its numbers may fall, not rise."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, grid

from kvcompress.bench import step_costs
from kvcompress.bench.step_costs import SPECS, Costs

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="counted where there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
PAGE = Path(ROOT) / "docs" / "device.md"
QUICK = ("full", "h2o", "quest")


@pytest.mark.parametrize("name", grid(SPECS, short=lambda name: name in QUICK))
def test_no_number_of_a_decode_step_has_risen(name):
    said = step_costs.stated(PAGE.read_text())
    if (name, "eager") not in said:
        pytest.skip(f"{name} is not on the page yet: scripts/bench.py device makes it whole")
    for found in step_costs.all_costs([name], [step for step in ("eager", "static") if (name, step) in said]):
        assert not step_costs.risen(found, said[name, found.step]), f"{name}, {found.step}"


def test_a_page_says_what_was_counted_and_a_number_that_rises_is_named():
    row = Costs("h2o", "eager", 55.0, 15.2, 0.0, 1.0, 1.04, "sdpa+triton")
    none = Costs("h2o", "static", why="it evicts | while decoding".replace(" | ", " "))
    said = step_costs.stated(step_costs.markdown([row, none]))
    assert said == {("h2o", "eager"): row, ("h2o", "static"): none}
    assert step_costs.risen(row, row) == [] and step_costs.risen(replace(row, launches=54.0), row) == []
    assert step_costs.risen(replace(row, waits=0.2, reads=1.2), row) == ["waits: 0.2, was 0", "reads: 1.2, was 1.04"]
    assert step_costs.risen(none, replace(none, why=None))[0].startswith("there is no static step any more")


def test_the_page_names_methods_that_there_are_and_plain_beside_them():
    told = {name for name, _ in step_costs.stated(PAGE.read_text())}
    assert {"stock", "full"} <= told <= set(SPECS)
