"""Records as lines of a figure: series per method and setting, families, colours, labels that do not collide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompress.report.run_index import named
from kvcompress.report.styles import COLOURS
from kvcompress.sweep.baseline import is_baseline
from kvcompress.sweep.record import FINISHED

Record = dict[str, Any]

CONTEXT = "#d9d9d9"  # lines of other families, to compare with
KEYS = ("method", *(f"parts.{part}" for part in "scorer allocator codec prefill reader schedule preset".split(" ")))


@dataclass
class Series:
    """Comparable runs of one method that differ in their budget, the largest first."""

    name: str
    family: str
    records: list[Record] = field(default_factory=list)

    @property
    def ordered(self) -> bool:
        """False where a budget comes twice: runs differ in what a record does not say, so no line joins them.

        A method without a budget has a line by the bytes that its settings hold.
        """
        budgets, held = {r["budget"] for r in self.records}, {r.get("kv.ratio") for r in self.records}
        return len(budgets) == len(self.records) or (len(budgets) == 1 and len(held) == len(self.records))

    def points(self, x: Callable[[Record], Any], y: Callable[[Record], Any]) -> list[tuple[float, float, Record]]:
        """Points at which both values are known."""
        found = [(x(record), y(record), record) for record in self.records]
        return [(float(a), float(b), r) for a, b, r in found if _known(a) and _known(b)]


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def family(record: Record) -> str:
    """What kind of method a record is of, read off its parts."""
    if record.get("parts.scorer") in (None, "none") and is_plain(record):
        return "full cache"
    if not is_plain(record):
        return "another form or reading of the cache"
    if any(when in str(record.get("parts.schedule")) for when in ("every", "newline")):
        return "evict in decode as well"
    if str(record.get("parts.allocator")).lower() not in ("uniform", "none"):
        return "evict at the prompt's end, layers or heads get different shares"
    return "evict at the prompt's end"


def is_plain(record: Record) -> bool:
    usual = {"codec": "plain", "reader": "all"}
    return all(record.get(f"parts.{part}") in (None, value) for part, value in usual.items())


def series(records: Iterable[Record]) -> list[Series]:
    """Finished runs that compress, as series with names that differ; the baseline is left out."""
    found: dict[tuple[Any, ...], Series] = {}
    scored = (record for record in records if record["status"] in FINISHED and record["status"] != "unscored")
    kept = [record for record in scored if not is_baseline(record)]
    for record in kept:
        key = tuple(record.get(name) for name in KEYS)
        found.setdefault(key, Series(str(record["method"]), family(record))).records.append(record)
    for key, one in list(found.items()):  # settings that share a budget are lines of their own
        if not one.ordered and len({record.get("variant") for record in one.records}) > 1:
            del found[key]
            for record in one.records:
                found.setdefault((named(record), *key[1:]), Series("", one.family)).records.append(record)
    for one in found.values():
        settings = [str(record.get("variant") or "").split() for record in one.records]
        common = [word for word in settings[0] if all(word in others for others in settings)]
        one.name = " ".join([str(one.records[0]["method"]), *common])
    same = Counter(one.name for one in found.values())
    for key, one in [(key, one) for key, one in found.items() if same[one.name] > 1]:
        # records that do not say it: in what parts runs of the same name differ
        others = [other for other, line in found.items() if line.records[0]["method"] == one.records[0]["method"]]
        differ = [i for i in range(1, len(KEYS)) if len({other[i] for other in others}) > 1]
        one.name += " " + " ".join(str(key[i]) for i in differ)
    for one in found.values():
        one.records.sort(key=lambda record: -float(record.get("kv.ratio") or record["budget"]))
    return sorted(found.values(), key=lambda one: (one.family, one.name))


def unlimited(record: Record) -> bool:
    """True for a run at which nothing is compressed, so that its divergence is rounding."""
    return isinstance(record.get("budget"), float) and record["budget"] >= 1.0 and is_plain(record)


def by_family(lines: Sequence[Series]) -> list[tuple[str, list[Series]]]:
    """Families with at most as many series as there are colours; larger ones in parts of about equal size."""
    found: list[tuple[str, list[Series]]] = []
    for name in dict.fromkeys(one.family for one in lines):
        members = [one for one in lines if one.family == name]
        parts = math.ceil(len(members) / len(COLOURS))
        size = math.ceil(len(members) / parts)
        for part in range(parts):
            title = name if parts == 1 else f"{name} ({part + 1} of {parts})"
            found.append((title, members[part * size : (part + 1) * size]))
    return found


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart within [low, high], in the order of and near to the wanted ones."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    places = [0.0] * len(wanted)
    at = low - gap
    for i in order:  # push up
        at = places[i] = max(wanted[i], at + gap)
    at = high + gap
    for i in reversed(order):  # and down again from the top
        at = places[i] = min(places[i], at - gap)
    return places
