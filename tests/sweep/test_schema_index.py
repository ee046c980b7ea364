"""The index of schemas says what the classes say, of exactly the sources it was made from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from kvcompress.sweep import components, schema_index
from kvcompress.sweep.schemas import decoded, derive, encoded


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    schema_index._read.cache_clear()
    yield tmp_path
    schema_index._read.cache_clear()


def test_an_index_read_back_equals_the_table_of_the_classes(cache):
    table = components.table(within="kvcompress.")
    schema_index._write(schema_index.path(), table)
    found = schema_index._read(schema_index.path())
    assert found is not None and (found.groups, found.models) == (table.groups, table.models)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"groups": {}}', '{"groups": {"method": {"x": 1}}, "models": []}'])
def test_a_damaged_index_is_made_again(cache, text):
    schema_index.path().parent.mkdir(parents=True)
    schema_index.path().write_text(text)
    assert schema_index._read(schema_index.path()) is None
    assert schema_index.load().groups["method"]["snapkv"].of == "SnapKV"


def test_other_sources_tables_or_packages_have_another_index(cache, monkeypatch, tmp_path):
    names = {schema_index.path()}
    for name in ("source_hash", "installed_packages"):
        schema_index.key.cache_clear()
        monkeypatch.setattr(schema_index, name, lambda: "other")
        names.add(schema_index.path())
        monkeypatch.undo()
        monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    schema_index.key.cache_clear()
    assert len(names) == 3 and schema_index.path() in names


def test_a_process_that_has_the_classes_asks_them_and_not_the_index(cache):
    stored = {"groups": {"method": {}}, "models": []}
    schema_index.path().parent.mkdir(parents=True)
    schema_index.path().write_text(json.dumps(stored))
    assert "snapkv" in schema_index.load().groups["method"], "a caller may have parts of its own"


@pytest.mark.parametrize(
    "kind", [int, bool, str | None, list[int], dict[str, Any], int | float | None, list[str] | None]
)
def test_a_type_survives_its_way_through_the_index(kind):
    assert decoded(json.loads(json.dumps(encoded(kind)))) == kind


@dataclass
class Settings:
    mode: Literal["a", "b"] = "a"
    lengths: tuple[int, ...] = (1, 2)
    needed: int = field(kw_only=True)
    data: Any = field(default=None, repr=False)


def test_literals_become_strings_tuples_lists_and_data_of_a_model_is_left_out():
    found = derive(Settings, "it").settings
    assert found == (
        ("name", "str", "it"),
        ("mode", "str", "a"),
        ("lengths", ["list", "int"], [1, 2]),
        ("needed", "int", "???"),
    )
    assert vars(derive(Settings, "it").dataclass()(needed=1)) == {
        "name": "it",
        "mode": "a",
        "lengths": [1, 2],
        "needed": 1,
    }


def test_a_type_that_no_configuration_can_hold_names_class_and_field():
    @dataclass
    class Odd:
        what: complex = 1j

    with pytest.raises(TypeError, match=r"Odd.what: .* is no type of a setting"):
        derive(Odd, "odd")


def test_the_first_process_writes_the_index_and_the_next_reads_it(cache, monkeypatch):
    """As in a process that has imported no class yet."""
    table = components.table(within="kvcompress.")
    monkeypatch.setattr(schema_index, "CLASSES", "imported.by.nobody")
    schema_index.load()
    assert schema_index.path().is_file()
    monkeypatch.setattr(components, "table", lambda **_: pytest.fail("the classes were asked"))
    schema_index._read.cache_clear()
    found = schema_index.load()
    assert (found.groups, found.models) == (table.groups, table.models)
