"""Values of the wrong kind in parts and methods are refused by name, whatever the part."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from small_models import small_model

from kvcompress import compress
from kvcompress.method import Allocator, Chunked, Codec, Method, Prefill, Reader, Schedule, Scorer
from kvcompress.method.field_kinds import CheckedFields
from kvcompress.methods import KIVI, METHODS, Quest, SnapKV

WRONG = {"int": [2.5, "7", True], "float": ["0.5", True, float("nan")], "bool": ["no", 1, 0.0], "str": [3, None]}


def parts_of_all():
    """Every class of a part or method that is a dataclass and comes with the package."""
    found, left = [], [Scorer, Allocator, Codec, Reader, Prefill, Schedule, Method]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        if dataclasses.is_dataclass(cls) and cls.__module__.startswith("kvcompress."):
            found.append(cls)
    return sorted(found, key=lambda cls: cls.__qualname__)


CASES = [
    (cls, item.name, value)
    for cls in parts_of_all()
    for item in dataclasses.fields(cls)
    if item.init and item.repr and item.name != "budget"
    for kind, values in WRONG.items()
    if str(item.type).split(" | ")[0] == kind
    for value in values
    if not (value is None and "None" in str(item.type))
]


def test_every_part_and_method_of_the_package_is_tried():
    assert len(CASES) > 300 and {"Chunked", "Schedule", "ShadowReader", "KIVICodec"} <= {c[0].__name__ for c in CASES}
    assert len(METHODS) <= len({cls for cls, _, _ in CASES if issubclass(cls, Method)})


def test_a_value_of_the_wrong_kind_is_named_with_its_field():
    for cls, name, value in CASES:
        required = {
            item.name: typing.cast(typing.Any, object())
            for item in dataclasses.fields(cls)
            if item.init and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        }
        try:
            cls(**(required | {name: value}))
        except ValueError as error:
            text = str(error)
        else:
            pytest.fail(f"{cls.__name__}({name}={value!r}) was taken")
        assert required or (name in text and repr(value) in text), (cls.__name__, name, value, text)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Chunked(chunk=2.5), r"chunk=2\.5 is a float: Chunked takes an int for chunk"),
        (lambda: Schedule(every="x"), "every='x' is a str: Schedule takes an int or nothing"),
        (lambda: Schedule(align="column"), "align='column'; valid: row, total"),
        (lambda: Schedule(align=1), "align=1 is an int: Schedule takes one of row, total"),
        (lambda: SnapKV(budget=0.5, window="all"), "window='all' is a str: SnapKV takes an int"),
        (lambda: SnapKV(budget=0.5, allocator="ada"), "allocator='ada' is a str: SnapKV takes an Allocator"),
        (lambda: SnapKV(budget=0.5, codec=Chunked()), "codec=.* is a Chunked: SnapKV takes a Codec or a Method"),
        (lambda: Quest(budget=32, page_size=True), "page_size=True is a bool"),
        (lambda: KIVI(bits="2"), "bits='2' is a str"),
        (lambda: SnapKV(budget="half"), "budget='half' is a str"),
    ],
)
def test_the_message_says_what_is_taken(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_whole_numbers_are_good_where_numbers_are_wanted_and_parts_of_users_are_checked_too():
    @dataclasses.dataclass(frozen=True)
    class Mine(Scorer):
        weight: float = 1.0
        deep: typing.Sequence[int] = ()

        def __post_init__(self):
            assert self.weight >= 0

        def score(self, view, observed, state):
            raise NotImplementedError

    assert Mine(2).weight == 2 and Mine(deep=[1]).deep == [1]
    with pytest.raises(ValueError, match="weight='heavy' is a str: Mine takes a number"):
        Mine("heavy")
    assert issubclass(Mine, CheckedFields)
    with compress(small_model(), SnapKV(budget=20, window=4)):
        pass
