"""One colour and marker per method, in every figure and on the page.

A method keeps its look whatever else a figure shows. Settings of a method (`snapkv codec=kivi`) have its colour and hollow markers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

# Okabe and Ito's palette, told apart with every kind of colour vision, without its yellow, too pale for a line, and its black,
# which is the full cache's; olive is Paul Tol's
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999933")
MARKERS = ("o", "s", "^", "P", "X", "v", "p", "*")
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 2, 1, 2)))
FULL = "full"
INK = "#000000"

# method → place of its colour and its marker; methods that are often in one panel differ in colour
TABLE: dict[str, tuple[int, str]] = {
    # evict at the prompt's end
    "snapkv": (0, "o"), "criticalkv": (1, "o"), "chunkkv": (2, "o"), "expectedattention": (3, "o"), "random": (6, "o"),
    # layers or heads get different shares
    "knorm": (0, "^"), "kvzip": (1, "^"), "duoattention": (2, "^"), "cake": (3, "^"), "adakv": (4, "^"), "pyramidkv": (5, "^"),
    # evict in decode as well
    "keydiff": (0, "s"), "h2o": (1, "s"), "streamingllm": (2, "s"), "tova": (3, "s"), "lagkv": (4, "s"), "rkv": (5, "s"),
    "scissorhands": (6, "s"), "qfilters": (0, "v"),
    # another form
    "turboquant": (0, "P"), "gqapool": (1, "P"), "lowrank": (2, "P"), "int8": (3, "P"), "kivi": (5, "P"), "think": (6, "P"),
    # readers of pages, and chunks reused
    "flexicache": (0, "X"), "quest": (1, "X"), "indexer": (2, "X"), "shadowkv": (4, "X"), "cacheblend": (5, "X"),
}  # fmt: skip
# what is left for methods that the table does not name
FREE = [(c, m) for m in reversed(MARKERS) for c in range(len(COLOURS)) if (c, m) not in TABLE.values()]


class Style(NamedTuple):
    """A look: place of the colour in `COLOURS` (None: ink), marker, hollow or filled, place of the dash in `DASHES`."""

    place: int | None
    marker: str
    hollow: bool = False
    dash: int = 0

    @property
    def colour(self) -> str:
        return INK if self.place is None else COLOURS[self.place]

    def line(self) -> dict[str, Any]:
        """Arguments of matplotlib's `plot` but for widths and sizes."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markerfacecolor": "white" if self.hollow else self.colour,
            "linestyle": DASHES[self.dash],
        }


BASE = Style(None, "D")


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A look for each name of a line, which begins with its method's; no two are alike while there are looks left.

    Of names that the table does not know, and of settings, the look follows from the name unless another has it already.
    """
    found: dict[str, Style] = {}
    for name in sorted(set(names), key=lambda name: (name not in TABLE, name)):
        method, _, setting = name.partition(" ")
        if method == FULL:
            found[name] = BASE if not setting else _next(name, [Style(None, m, True) for m in MARKERS], found)
        elif method in TABLE and not setting:
            place, marker = TABLE[method]
            found[name] = Style(place, marker, dash=_dash(marker))
        elif method in TABLE:
            place = TABLE[method][0]
            found[name] = _next(name, [Style(place, m, True, _dash(m)) for m in MARKERS], found)
        else:
            looks = [Style(c, m, hollow, _dash(m)) for hollow in (False, True) for c, m in FREE]
            found[name] = _next(name, looks, found, len(FREE))
    return found


def _dash(marker: str) -> int:
    return MARKERS.index(marker) % len(DASHES)


def _next(name: str, looks: list[Style], taken: dict[str, Style], first: int | None = None) -> Style:
    """The look that a name's hash points at, or the next that is free; of more names than looks, a look again."""
    count = first or len(looks)
    start = crc32(name.encode()) % count
    order = [*looks[start:count], *looks[:start], *looks[count:]]
    used = set(taken.values())
    return next((look for look in order if look not in used), order[0])
