"""Command lines that repeat a run, from the configuration in its folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcompress.sweep import stored_config

PROGRAM = "kvcompress run"
PARTS = ("allocator", "codec", "reader", "prefill", "schedule")
# where it runs and what is done with the result: not part of what a run is
ELSEWHERE = ("logger", "paths", "resume", "dry", "sweep")
ABSENT = object()


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted path; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{name}.")
        else:
            found[name] = value
    return found


def shown(value: Any) -> str:
    """A value as Hydra's override grammar reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(shown, value)) + "]"
    text = str(value)
    if (
        text
        and all(c.isascii() and c.isalnum() or c in "_-./" for c in text)
        and text.lower() not in ("null", "true", "false", "nan")
    ):
        return text if not _number(text) else f"'{text}'"
    # Hydra escapes quotes, and of backslashes only those before a quote
    return "'" + re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text) + "'"


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Commands:
    """Commands for run folders; what a choice of groups brings with it is composed once.

    Args:
        compose: from overrides to the composed configuration as plain data, or None where Hydra's configuration is not
            to be had: then every setting is written out, which is longer and as good.
        options: valid names of a group.
    """

    def __init__(
        self,
        compose: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
        options: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self._compose, self._options = compose, options
        self._known: dict[str, dict[str, Any]] = {}

    def overrides(self, folder: Path, record: Mapping[str, Any]) -> list[str] | None:
        """Overrides that compose the configuration in `folder`, or None where it left none that can be read."""
        config = stored_config.read(folder / "config.yaml")
        if config is None or not all(isinstance(config.get(k), dict) for k in ("model", "task", "method")):
            return None
        chosen = self._chosen(config, record)
        usual = self._usual(chosen)
        wanted = {
            key: value
            for key, value in leaves(config).items()
            if key.split(".")[0] not in ELSEWHERE and not key.endswith(".name")
        }
        # a part that is not set at all is what leaving it out gives
        wanted = {key: value for key, value in wanted.items() if not (key in PARTS and value is None)}
        always = ("budget", "seed")
        return chosen + [
            f"{key}={shown(value)}"
            for key, value in wanted.items()
            if key in always
            or usual.get(key, ABSENT) != value
            or isinstance(usual.get(key), bool) != isinstance(value, bool)
        ]

    def line(self, folder: Path, record: Mapping[str, Any]) -> str | None:
        """The same as a line for a shell."""
        found = self.overrides(folder, record)
        return None if found is None else " ".join([PROGRAM, *map(shlex.quote, found)])

    def _chosen(self, config: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
        found = []
        for group in ("model", "task", "method", *PARTS):
            part = config.get(group)
            if isinstance(part, Mapping) and part.get("name"):
                name = str(part["name"])
                # tasks of a suite go by the record's name where that is a file
                if group == "task" and self._options is not None and record.get("task") in self._options("task"):
                    name = str(record["task"])
                found.append(f"{group}={name}")
        return found

    def _usual(self, chosen: Sequence[str]) -> dict[str, Any]:
        """What these choices bring with them, each composed by itself: of many methods and tasks, not of every pair."""
        found = dict(self._composed(""))
        for choice in chosen:
            group = choice.partition("=")[0]
            found = {key: value for key, value in found.items() if key.split(".")[0] != group}
            found |= {key: v for key, v in self._composed(choice).items() if key.split(".")[0] == group}
        return found

    def _composed(self, choice: str) -> dict[str, Any]:
        if choice not in self._known:
            try:
                made = self._compose([choice] if choice else []) if self._compose is not None else {}
                self._known[choice] = leaves(made)
            except Exception:  # whatever Hydra says: a choice that is gone since, a model that is a path
                self._known[choice] = {}
        return self._known[choice]


def from_hydra() -> Commands:
    """Commands in terms of this version's configuration groups."""
    from kvcompress.sweep.config import check_overrides, composing, folder, options

    def compose(chosen: Sequence[str]) -> Mapping[str, Any]:
        check_overrides(chosen, folder())  # makes Hub ids known
        with composing() as made:
            return stored_config.plain(made(chosen))

    valid: dict[str, Sequence[str]] = {}
    return Commands(compose, lambda group: valid.setdefault(group, options(group, folder())))
