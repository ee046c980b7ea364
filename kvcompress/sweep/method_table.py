"""The tables of methods, allocators and codecs, made from what their classes say of themselves.

`scripts/method_table.py` writes them to `docs/methods.md` and, shorter, into `docs/method_parts.md`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvcompress.method import Allocator, Codec, Method, Needs
from kvcompress.sweep.components import method_classes, part_classes

REQUIRED = ("family", "keeps", "source", "differences")
BEGIN = "<!-- method table: made by scripts/method_table.py -->"
END = "<!-- end of method table -->"
COMMON = {item.name for item in fields(Method)}


def check(cls: type[Method]) -> None:
    """Refuse a method that does not describe itself.

    Raises:
        ValueError: names the method, its file and the class variables it must set itself (inherited ones are another's).
    """
    missing = [name for name in REQUIRED if vars(cls).get(name, "TODO") in ("", "TODO")]
    if missing:
        raise ValueError(
            f"{cls.__name__} ({cls.__module__}) does not say its {', '.join(missing)}: set these class variables in the "
            'class itself, such as family = "attention" (see kvcompress.method.Method)'
        )


def when(cls: type[Method]) -> str:
    """When a method compresses, as its default parts say."""
    parts = cls().parts()
    if parts.scorer is None:
        return "never" if parts.codec.name == "plain" else "prompt end, then as tokens come"
    found = []
    if parts.schedule.prompt:
        chunk = getattr(parts.prefill, "chunk", None)
        layerwise = parts.allocator.scope == "cascade"
        found.append(f"blocks of {chunk}" if chunk else "prompt, layer by layer" if layerwise else "prompt end")
    every = parts.schedule.every
    if every is not None:
        found.append("every step" if every == 1 else f"every {every} steps")
    return ", ".join(found) or "never"


def needs(cls: type[Method]) -> str:
    """What a method's scorer and allocator observe, read and must know of the model."""
    parts = cls().parts()
    wanted = (parts.scorer.needs if parts.scorer else Needs()) | parts.allocator.needs
    found = ["attention mass"] if wanted.mass else []
    if wanted.window:
        found.append("last query" if wanted.window == 1 else f"{wanted.window} queries")
    if wanted.hidden:
        found.append("hidden states")
    if wanted.prerope:
        found.append("queries before rotation")
    if wanted.extra_passes:
        found.append(f"{wanted.extra_passes} more {'pass' if wanted.extra_passes == 1 else 'passes'}")
    return ", ".join([*found, *filter(None, (cls.reads, cls.needs_data))]) or "–"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    text = isinstance(value, str) and not value.isidentifier()  # prompts, with their line breaks
    return f"{name}={value!r}" if text else f"{name}={value}"


def settings(cls: type[Method], preset: str) -> dict[str, Any]:
    """A method's own hyper-parameters under a preset."""
    made = cls(preset=preset)
    return {item.name: getattr(made, item.name) for item in fields(cls) if item.name not in COMMON and item.repr}


def defaults(cls: type[Method]) -> str:
    """Hyper-parameters where nothing is set."""
    return ", ".join(_shown(*item) for item in settings(cls, Method.preset).items()) or "–"


def presets(cls: type[Method]) -> str:
    """What the other presets set otherwise; sources that agree are named together."""
    base = settings(cls, Method.preset)
    found: dict[str, list[str]] = {}
    for preset in cls.presets:
        if preset != Method.preset:
            other = settings(cls, preset)
            text = ", ".join(_shown(name, value) for name, value in other.items() if value != base[name])
            found.setdefault(text or "the same", []).append(f"`{preset}`")
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in found.items()) or "–"


def _linked(source: str) -> str:
    source = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
    return re.sub(r"(?<![\w/.\[])([A-Za-z][\w-]+/[A-Za-z][\w.-]+)(?![\w/\]])", r"[\1](https://github.com/\1)", source)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def ordered() -> dict[str, type[Method]]:
    """Methods by command-line name, by family, baselines first.

    Raises:
        ValueError: a method does not describe itself.
    """
    classes = method_classes()
    for cls in classes.values():
        check(cls)
    return dict(sorted(classes.items(), key=lambda item: (item[1].family != "baseline", item[1].family, item[0])))


def short_table() -> str:
    """The table of `docs/method_parts.md`."""
    header = ("method", "keeps", "compresses", "needs", "other presets", "source")
    rows = [
        (f"`{name}`", cls.keeps, when(cls), needs(cls), presets(cls), cls.source.split(";")[0])
        for name, cls in ordered().items()
    ]
    return _table(header, rows)


def page() -> str:
    """`docs/methods.md`."""
    header = (
        "method|family|keeps|compresses|needs|budget|defaults|other presets|source|differences from the released code"
    )
    rows = [
        (f"`{name}`", cls.family, cls.keeps, when(cls), needs(cls), cls.budget_kind.replace("_", " "), defaults(cls))
        + (presets(cls), _linked(cls.source), cls.differences)
        for name, cls in ordered().items()
    ]
    allocators = [
        (f"`{name}`", _summary(part), ", ".join(_shown(f.name, f.default) for f in fields(part) if f.repr) or "–")
        for name, part in part_classes(Allocator, within="kvcompress.").items()
    ]
    codecs = [
        (f"`{name}`", _summary(part), ", ".join(_shown(f.name, f.default) for f in fields(part) if f.repr) or "–")
        for name, part in part_classes(Codec, within="kvcompress.").items()
    ]
    return (
        "# Methods\n\nMade by `python scripts/method_table.py` from what the classes say of themselves.\n\n"
        "`method=NAME` on the command line, the class of that name in `kvcompress.methods`. A method compresses when its\n"
        "column says so unless `prefill` or `schedule` is replaced. *budget*: what a budget counts. *defaults*: settings of\n"
        "the preset `paper` (`method.SETTING=…` changes one); *other presets*: where `method.preset=code` or `kvpress`\n"
        "differs from it.\n\n"
        + _table(header.split("|"), rows)
        + "\n## Allocators\n\nWho gets how much of the budget: `allocator=NAME` with any method that ranks tokens.\n\n"
        + _table(("allocator", "how", "defaults"), allocators)
        + "\n## Codecs\n\nIn what form the kept is held: `codec=NAME` with any method; `codec=KIVI(bits=4)` in Python.\n\n"
        + _table(("codec", "how", "defaults"), codecs)
    )


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def inserted(text: str, table: str) -> str:
    """`text` with what stands between the markers replaced by `table`.

    Raises:
        ValueError: the markers are missing or not in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for the method table: it goes between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{table}{END}{after}"
