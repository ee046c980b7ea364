"""One look per method, whatever else a figure shows."""

from __future__ import annotations

from kvcompress.report.page import asset
from kvcompress.report.styles import COLOURS, FREE, FULL, MARKERS, TABLE, styles
from kvcompress.sweep.components import method_classes


def test_every_method_has_a_place_in_the_table_and_none_another_s():
    assert set(TABLE) | {FULL} == set(method_classes())
    assert len(set(TABLE.values())) == len(TABLE) and len(FREE) == len(COLOURS) * len(MARKERS) - len(TABLE)


def test_a_method_looks_the_same_beside_any_others():
    alone, crowd = styles(["snapkv"]), styles([*TABLE, "full", "snapkv codec=kivi", "new"])
    assert alone["snapkv"] == crowd["snapkv"] and crowd["full"].place is None


def test_forty_names_have_forty_looks():
    assert len(set(styles([f"m{number}" for number in range(40)]).values())) == 40
    assert len(set(styles([*TABLE, "full", *(f"m{number}" for number in range(9))]).values())) == 40


def test_settings_of_a_method_have_its_colour_and_hollow_markers():
    found = styles(["snapkv", "snapkv codec=kivi", "snapkv allocator=ada"])
    assert {look.place for look in found.values()} == {TABLE["snapkv"][0]}
    assert [found[name].hollow for name in sorted(found)] == [False, True, True] and len(set(found.values())) == 3


def test_the_page_has_the_colours_and_markers_of_the_table():
    text = asset("plots.js")
    assert all(f'"{colour}"' in text for colour in COLOURS)
    assert all(f'"{mark}": "M' in text or f'{mark}: "M' in text for mark in (*MARKERS, "D"))
