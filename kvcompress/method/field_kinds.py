"""CheckedFields: dataclass fields are checked against their annotations when an object is made."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import sys
import types
import typing
from typing import Any, Literal

SIMPLE: dict[type, str] = {int: "an int", float: "a number", bool: "true or false", str: "a text"}


class CheckedFields:
    """Base of parts and methods. Where a subclass is a dataclass, values of the wrong kind are refused.

    The check runs before the subclass's own `__post_init__`, which may then compare values without asking for their kind.

    Raises:
        ValueError: a field's value is not what its annotation says, by name.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__.get("__post_init__")
        if own is None:
            return

        @functools.wraps(own)
        def checked(self: Any, *values: Any) -> None:
            check_kinds(self)
            own(self, *values)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_kinds(self)


def check_kinds(thing: Any) -> None:
    """Check the fields of a dataclass object against their annotations: numbers, texts, choices, parts.

    An int is good where a float is wanted, a bool nowhere but where a bool is. Annotations of other kinds are not checked.

    Raises:
        ValueError: a value of the wrong kind, or a number that is NaN.
    """
    if not dataclasses.is_dataclass(thing):
        return
    cls: type = type(thing)
    for name, kind in _kinds(cls).items():
        value = getattr(thing, name)
        if not _fits(value, kind):
            choices = _choices(kind)
            if any(type(value) is type(choice) for choice in choices):
                raise ValueError(f"{name}={value!r}; valid: {', '.join(map(str, choices))}")
            raise ValueError(
                f"{name}={value!r} is {_a(type(value))}: {type(thing).__name__} takes {_said(kind)} for {name}"
            )
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name}=nan is no number: {type(thing).__name__} takes {_said(kind)} for {name}")


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """Annotations of a dataclass's fields that can be told; those that name what is not imported are left out."""
    found: dict[str, Any] = {}
    names = {item.name for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
    for owner in reversed(cls.__mro__):
        scope = {**vars(sys.modules.get(owner.__module__, typing)), **vars(owner)}
        for name, text in owner.__dict__.get("__annotations__", {}).items():
            found.pop(name, None)
            if name not in names or text == "Budget":  # `check_budget` says more of these
                continue
            try:
                found[name] = eval(text, scope) if isinstance(text, str) else text
            except Exception:  # a name that is there for type checkers alone
                continue
    return found


def _fits(value: Any, kind: Any) -> bool:
    """False only where a value is surely of another kind."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is None or kind is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in options)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in options)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(options) == 2 and options[1] is Ellipsis:
            return all(_fits(item, options[0]) for item in value)
        return len(value) == len(options) and all(map(_fits, value, options))
    if kind in (int, float):
        wanted = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, wanted) and not isinstance(value, bool)
    if isinstance(kind, type) and (kind in SIMPLE or issubclass(kind, CheckedFields)):
        return isinstance(value, kind)
    return True


def _choices(kind: Any) -> list[Any]:
    """Values that an annotation lists, those of its alternatives included."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [choice for option in typing.get_args(kind) for choice in _choices(option)]
    return []


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"


def _said(kind: Any) -> str:
    """What is allowed, in words."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is None or kind is type(None):
        return "nothing (null)"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_said(option) for option in options))
    if origin is Literal:
        return "one of " + ", ".join(map(str, options))
    if origin is tuple:
        return "a tuple"
    return SIMPLE.get(kind) or _a(kind)
