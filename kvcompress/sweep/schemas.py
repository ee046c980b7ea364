"""Schemas of configuration groups: the settings of methods, tasks and parts, as plain data and as dataclasses.

A schema is derived from the dataclass it configures and leaves out what other groups and top-level keys set. Plain data,
since the classes themselves take torch to import, which a command line that is refused or answered at once does not need.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

PLAIN: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "none": type(None), "any": Any}


@dataclass(frozen=True)
class Schema:
    """Settings of one choice of a group.

    Attributes:
        of: name of the class.
        settings: name, kind and default of each. A kind is a name of `PLAIN`, or `[list, kind]`, `[dict, kind, kind]`,
            `[union, kind, …]`; the default `???` is none.
    """

    of: str
    settings: tuple[tuple[str, Any, Any], ...]

    def dataclass(self) -> type:
        """A dataclass with these settings, in types that OmegaConf knows."""
        specs: list[Any] = []
        for name, kind, default in self.settings:
            made = functools.partial(type(default), default) if isinstance(default, (list, dict)) else None
            value = field(default=default) if made is None else field(default_factory=made)
            specs.append((name, decoded(kind), value))
        return make_dataclass(f"{self.of}Config", specs)

    @classmethod
    def read(cls, stored: Sequence[Any]) -> Schema:
        """A schema from JSON, the pair `of, settings`."""
        of, settings = stored
        schema = cls(str(of), tuple((str(name), kind, default) for name, kind, default in settings))
        for _, kind, _ in schema.settings:
            decoded(kind)
        return schema


@dataclass(frozen=True, eq=False)
class Table:
    """What may be chosen: schemas by group and name, and names of models that need no file.

    Attributes:
        groups: `method`, `task`, the parts and `schedule`.
        models: packaged and random ones.
    """

    groups: Mapping[str, Mapping[str, Schema]]
    models: tuple[str, ...]


def derive(cls: type, name: str, leave_out: Sequence[str] = ()) -> Schema:
    """The schema of a dataclass: its fields but for `leave_out`, after `name`.

    Fields declared with `repr=False` hold data of a model, not settings, and are left out. Literals become strings and
    tuples lists; `cls` itself checks their values when it is built.

    Raises:
        TypeError: a field has a type that no configuration can hold.
    """
    hints = get_type_hints(cls)
    settings: list[tuple[str, Any, Any]] = [("name", "str", name)]
    for item in fields(cls):
        if item.name in leave_out or not item.repr:
            continue
        default = item.default if item.default_factory is NO_DEFAULT else item.default_factory()
        default = MISSING if default is NO_DEFAULT else list(default) if isinstance(default, tuple) else default
        try:
            settings.append((item.name, encoded(hints[item.name]), default))
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.{item.name}: {error}") from None
    return Schema(cls.__name__, tuple(settings))


def encoded(kind: Any) -> Any:
    """A type as plain data, as in `Schema.settings`.

    Raises:
        TypeError: it is none that a setting may have.
    """
    for name, known in PLAIN.items():
        if kind is known:
            return name
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return encoded(type(arguments[0]))
    if origin in (tuple, list):
        return ["list", encoded(arguments[0])]
    if origin is dict:
        return ["dict", *map(encoded, arguments)]
    if origin in (Union, types.UnionType):
        return ["union", *map(encoded, arguments)]
    raise TypeError(
        f"{kind!r} is no type of a setting; valid: int, float, str, bool, None, lists, tables, unions of them"
    )


def decoded(kind: Any) -> Any:
    """The type that `encoded` wrote.

    Raises:
        KeyError, ValueError: it wrote no such thing.
    """
    if isinstance(kind, str):
        return PLAIN[kind]
    name, *arguments = kind
    made = [decoded(argument) for argument in arguments]
    if name == "list":
        return list[made[0]]  # type: ignore[valid-type]
    if name == "dict":
        return dict[made[0], made[1]]  # type: ignore[valid-type]
    if name == "union":
        return functools.reduce(operator.or_, made)
    raise ValueError(f"{name!r} is no kind of setting")
