"""`docs/configuration.md`: every key of a command line, made from the classes and the yaml files that define it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kvcompress.method import Schedule
from kvcompress.sweep.components import PARTS, method_classes, part_classes, table
from kvcompress.sweep.config import ModelConfig, folder, options
from kvcompress.sweep.schemas import Schema
from kvcompress.tasks import TASKS

PLAIN_LINE = re.compile(r"^(?P<key>\w+): *(?P<value>[^#\n]*?) *(?:# (?P<about>.*))?$")
HEAD = """# Configuration

Made by `python scripts/method_table.py` from the classes and from `conf/`.

`key=value` on the command line of `kvcompress run`; `key=a,b` with `-m` is a sweep over both. `group=name` chooses, `group.key=value`
sets a value of what was chosen. A mistyped key ends the command in one line that names the nearest.
"""


def page() -> str:
    """The text of the page."""
    found = table(within="kvcompress.").groups
    classes: dict[str, Mapping[str, type]] = {
        "method": method_classes(),
        "task": TASKS,
        **{group: part_classes(base, "kvcompress.") for group, base in PARTS.items()},
        "schedule": {"schedule": Schedule},
    }
    text = [HEAD, "## Top level\n", top_level(folder() / "config.yaml"), "## Groups\n", groups()]
    text += ["## model\n", models()]
    for group in ("method", "allocator", "codec", "reader", "prefill", "schedule", "task"):
        text += [f"## {group}\n", GROUPS[group] + "\n"]
        text += [settings(group, name, schema, classes[group].get(name)) for name, schema in found[group].items()]
    return "\n".join(text).rstrip() + "\n"


GROUPS = {
    "method": "`method.preset` is a setting of every method: `paper`, and where sources differ `code` and `kvpress` ([table](methods.md)).",
    "allocator": "Who gets how much of the budget.",
    "codec": "In what form what is kept is held.",
    "reader": "What a decode step reads of what is held.",
    "prefill": "How a prompt is run.",
    "schedule": "When a method compresses. Names: `prompt`, `step`, `interval`, `newline`, `thinking`; all have these settings.",
    "task": "Suites (`task=ruler`) are folders of tasks, one record each.",
}


def row(*cells: str) -> str:
    """A line of a markdown table."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def top_level(file: Path) -> str:
    """Keys of `config.yaml` with their defaults and the remarks beside them."""
    lines = [row("key", "default", "meaning"), row("---", "---", "---")]
    for line in file.read_text(encoding="utf-8").splitlines():
        found = PLAIN_LINE.match(line)
        if found and found["value"]:
            lines.append(row(f"`{found['key']}`", f"`{found['value']}`", found["about"] or ""))
    return "\n".join(lines) + "\n"


def groups() -> str:
    """What may be chosen of each group, from its yaml files."""
    lines = [row("group", "names"), row("---", "---")]
    for group in ("method", "allocator", "codec", "reader", "prefill", "schedule", "task", "logger", "experiment"):
        named = [name for name in options(group, folder()) if not name.startswith("base")]
        lines.append(row(f"`{group}`", ", ".join(f"`{name}`" for name in named)))
    return "\n".join(lines) + "\n"


def models() -> str:
    """Settings of `model`."""
    lines = [row("setting", "default"), row("---", "---")]
    for item in fields(ModelConfig):
        if item.name != "name":
            default = "{}" if item.default is MISSING else shown(item.default)
            lines.append(row(f"`model.{item.name}`", f"`{default}`"))
    return "\n".join(lines) + "\n"


def settings(group: str, name: str, schema: Schema, cls: type | None) -> str:
    """One choice of a group: what it is, and its settings."""
    about = described(cls) if cls is not None else {}
    doc = (inspect.getdoc(cls) or "") if cls is not None else ""
    lines = [
        f"### {group}={name}" if group != "schedule" else "### settings",
        "",
        " ".join(doc.split("\n\n")[0].split()),
        "",
    ]
    values = [item for item in schema.settings if item[0] != "name"]
    if values:
        lines += [row("setting", "type", "default", "meaning"), row("---", "---", "---", "---")]
        for key, kind, default in values:
            lines.append(row(f"`{group}.{key}`", typed(kind), f"`{shown(default)}`", about.get(key, "")))
        lines.append("")
    return "\n".join(lines)


def described(cls: type) -> dict[str, str]:
    """What docstrings of a class and its parents say of each attribute: `name: text` under `Attributes:` or `Args:`."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        doc = inspect.cleandoc(one.__doc__ or "")
        for block in re.findall(r"^(?:Attributes|Args):\n((?:[ ]{4}.*\n?|\n)+)", doc, re.MULTILINE):
            for names, text in re.findall(r"^ {4}([\w, ]+): ((?:.*\n?)(?:^ {5,}.*\n?)*)", block, re.MULTILINE):
                found |= dict.fromkeys((part.strip() for part in names.split(",")), " ".join(text.split()))
    return found


def typed(kind: Any) -> str:
    """A kind of `Schema.settings` in words."""
    if isinstance(kind, str):
        return {"str": "text", "none": "null"}.get(kind, kind)
    name, *parts = kind
    return {"list": "list of {}", "dict": "table of {}", "union": "{}"}[name].format(" or ".join(map(typed, parts)))


def shown(value: Any) -> str:
    """A default as yaml has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value) if not value or "\n" in value else value
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
