"""Offload cost model: time that measured bytes would take on other hardware, beside the measurements.

    python -m kvcompress.tiers results/read/*/record.json

Bytes are measured (a record's `kv.read_bytes_per_token` and `kv.moved_bytes_per_token`, means over its decode steps;
`kv.bytes_held` and `kv.bytes_host`; the full cache reads `kv.bytes_full` per token), bandwidths are data-sheet figures
of `tiers.yaml` times the share that is reached, or, with `--links FILE`, what `scripts/bench.py links` measured. What a
step does beside reading keys and values is not in it: times per token here are no TPOT.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kvcompress.measure.tiers import FILE, Figures, bandwidth, dimensions, entry, figures, path, with_measured
from kvcompress.measure.transfers import LayerWise, prefill_seconds, threshold, tokens_that_fit


@dataclass(frozen=True)
class Modelled:
    """Seconds per decoded token that a model gives; `label` says so wherever they are shown.

    Attributes:
        read: keys, values and page bounds from the device's memory.
        moved: pages between the tiers.
        layers: of the model, if known: copies then run one layer ahead of reading.
    """

    read: float
    moved: float
    label: str = "modelled"
    layers: int | None = None

    @property
    def overlapped(self) -> float:
        """If copies run beside the reading of other layers. The first layer's copy is waited for; where the number of
        layers is not known, it is left out."""
        if self.layers is None:
            return max(self.read, self.moved)
        return LayerWise(self.layers, self.moved / self.layers, self.read / self.layers).total

    @property
    def in_turn(self) -> float:
        """If each waits for the other."""
        return self.read + self.moved


def modelled(
    read_bytes: float,
    moved_bytes: float,
    device: str,
    link: str,
    layers: int | None = None,
    source: Figures | None = None,
) -> Modelled:
    """Time per token for bytes read on `device` and moved over `link`, whatever the number of copies.

    Raises:
        ValueError: an unknown device or link, or a negative number of bytes.
    """
    if read_bytes < 0 or moved_bytes < 0:
        raise ValueError(f"{read_bytes} bytes read and {moved_bytes} moved: neither can be negative")
    over, read = bandwidth("links", link, source), bandwidth("devices", device, source)
    moved = 0.0 if entry("devices", device, source).get("unified") else moved_bytes / over
    return Modelled(read_bytes / read, moved, layers=layers)


def break_even(
    read_bytes: float,
    moved_bytes: float,
    full_bytes: float,
    device: str,
    overlap: bool = True,
    source: Figures | None = None,
) -> float:
    """Bandwidth of the link, bytes per second, below which offloading is slower than reading the full cache.

    0 where nothing is moved, infinity where reading alone takes as long as the full cache. Latencies are left out.

    Args:
        full_bytes: what the full cache reads per token.
        overlap: copies run beside reading.
    """
    if moved_bytes == 0:
        return 0.0
    per_second = bandwidth("devices", device, source)
    left = full_bytes / per_second - (0.0 if overlap else read_bytes / per_second)
    return moved_bytes / left if left > 0 and read_bytes <= full_bytes else float("inf")


def table(
    records: Sequence[Mapping[str, Any]], device: str, links: Sequence[str], source: Figures | None = None
) -> str:
    """Markdown: measured bytes of each record, modelled times for each link, and the bandwidth from which offloading pays.

    Args:
        records: flat keys as in `record.json`; those without read bytes are left out.
    """
    head = ["method", "budget", "device MiB", "host MiB", "read KiB/token", "moved KiB/token", f"read on {device}, µs"]
    head += [*(f"with {link}, µs" for link in links), "pays above, GB/s"]
    lines = _head(head)
    for record in records:
        read, moved = record.get("kv.read_bytes_per_token"), record.get("kv.moved_bytes_per_token") or 0
        if read is None:
            continue
        times = [modelled(read, moved, device, link, source=source) for link in links]
        full = record.get("kv.bytes_full")
        pays = break_even(read, moved, full, device, source=source) / 1e9 if full and moved else None
        cells = [
            *_named(record),
            *(_shown(record.get(f"kv.bytes_{tier}"), 2**20, 2) for tier in ("held", "host")),
            f"{read / 1024:.1f}",
            f"{moved / 1024:.1f}",
            f"{times[0].read * 1e6:.2f}",
        ]
        cells += [*(f"{time.overlapped * 1e6:.2f}" for time in times), _shown(pays, 1, 1)]
        lines.append("| " + " | ".join(cells) + " |")
    share = figures()["share"]
    note = (
        f"Bytes are measured; times are modelled: data-sheet bandwidths of {FILE.name} times {share}, copies beside reading, "
        "nothing but keys, values and page bounds. Pays above: what a link must reach for a step not to take longer than one "
        "that reads the full cache on the device."
    )
    return "\n".join([*lines, "", note])


def prefixes(
    records: Sequence[Mapping[str, Any]],
    device: str,
    links: Sequence[str],
    model: str,
    tokens: int,
    page: int | None = None,
    memories: Sequence[float] = (),
    source: Figures | None = None,
) -> str:
    """Markdown: a prefix of `tokens` of a model held as each record's method holds it: load or compute it again.

    Args:
        model: whose dimensions are taken, a name in `tiers.yaml`; a method's bytes are those of its full cache times
            the record's `kv.ratio`.
        page: tokens to a page that is copied by itself, for keys and values of each layer; None: all in one copy.
        memories: bytes of tiers, for the tokens that fit into each.

    Raises:
        ValueError: a device whose operations per second are not known, or a number below 1.
    """
    if tokens < 1 or (page is not None and page < 1):
        raise ValueError(f"a prefix of {tokens} tokens in pages of {page}: at least 1 each")
    shape, flops = dimensions(model), entry("devices", device, source).get("flops")
    if flops is None:
        raise ValueError(
            f"{device!r} has no `flops` in {FILE.name}, so that computing cannot be modelled: add it there"
        )
    unified = bool(entry("devices", device, source).get("unified"))
    computed = prefill_seconds(tokens, shape.layers, shape.width, float(flops))
    head = ["method", "budget", "ratio", *(f"tokens in {memory / 1e9:g} GB" for memory in memories), "copies"]
    for link in links:
        head += [f"{link}: GB/s", f"load, ms ({link})"]
    lines = _head([*head, "compute, ms", "cheapest", "load pays above, GB/s"])
    for record in records:
        ratio = record.get("kv.ratio")
        if ratio is None:
            continue
        nbytes = tokens * shape.token_bytes * ratio
        piece = None if page is None else page * shape.token_bytes * ratio / (2 * shape.layers)
        ways = {link: path(link, device, source=source) for link in links}
        # a reader's pages and its copy of them lie in the same memory
        twice = 2 if unified and record.get("kv.bytes_host") else 1
        cells = [*_named(record), f"{ratio:.3f}"]
        cells += [str(tokens_that_fit(memory, shape.token_bytes, ratio, twice)) for memory in memories]
        cells.append(str(next(iter(ways.values())).copies(nbytes, piece) if ways else 0))
        taken = {link: way.seconds(nbytes, piece) for link, way in ways.items()}
        for seconds in taken.values():
            cells += [_shown(nbytes / seconds if seconds else None, 1e9, 2), f"{1000 * seconds:.2f}"]
        cheapest = min((computed, "compute"), *((seconds, link) for link, seconds in taken.items()))[1]
        pays = threshold(tokens, shape.width, shape.gqa, shape.itemsize, float(flops), ratio)
        cells += [f"{1000 * computed:.2f}", cheapest, f"{pays / 1e9:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        f"Ratios are measured, times modelled: a prefix of {tokens} tokens of {model}, computed at {float(flops):.3g} "
        f"operations/s ({device}, its peak), loaded at bandwidths and latencies of {FILE.name}, some of them assumed."
    )
    return "\n".join([*lines, "", note])


def page_of(tables: Sequence[str]) -> str:
    """The tables as an HTML page that needs nothing else."""
    parts = ["<!doctype html><meta charset=utf-8><title>Modelled tiers</title>"]
    parts.append(
        "<style>body{font:14px sans-serif}td,th{padding:2px 8px;text-align:right}th{border-bottom:1px solid}</style>"
    )
    parts.append("<h1>Tiers: every time on this page is modelled</h1>")
    for text in tables:
        lines = text.splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        for number, row in enumerate(rows):
            kind = "td" if number else "th"
            cells = "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
            parts.append(("<table>" if not number else "") + f"<tr>{cells}</tr>")
        parts.append(f"</table><p>{escape(lines[-1])}</p>")
    return "\n".join(parts) + "\n"


def _head(titles: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]


def _named(record: Mapping[str, Any]) -> list[str]:
    name = " ".join(str(record[key]) for key in ("method", "variant") if record.get(key))
    return [name, str(record.get("budget"))]


def _shown(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcompress tiers", description=(__doc__ or "").partition("\n")[0])
    known = figures()
    parser.add_argument("records", nargs="+", type=Path, help="record.json files")
    parser.add_argument("--device", default="h100-sxm", help=", ".join(known["devices"]))
    parser.add_argument("--link", action="append", help=", ".join(known["links"]) + "; default: all")
    parser.add_argument("--links", type=Path, default=None, help="file of `kvcompress bench links`: its links by name")
    parser.add_argument("--model", default=None, help=f"load or compute a prefix of it: {', '.join(known['models'])}")
    parser.add_argument("--prefix", type=int, default=8192, help="tokens of that prefix")
    parser.add_argument(
        "--page", type=int, default=None, help="tokens to a page that is copied by itself; default: one copy"
    )
    parser.add_argument(
        "--capacity", default="", help="GB of tiers, comma-separated: tokens of --model that fit into each"
    )
    parser.add_argument("--html", type=Path, default=None, help="also write a page with the tables")
    args = parser.parse_args(arguments)
    records, code = [], 0
    for file in args.records:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"tiers: {file} is left out: {error}", file=sys.stderr)
            code = 1
            continue
        if record.get("kv.read_bytes_per_token") is None:
            print(
                f"tiers: {file} is left out: no bytes were read, its status is {record.get('status')}", file=sys.stderr
            )
            continue
        records.append(record)
    records.sort(
        key=lambda record: (str(record.get("method")), str(record.get("variant")), -float(record["budget"] or 0))
    )
    try:
        source = None if args.links is None else with_measured(args.links)
        links = args.link or list((source or known)["links"])
        tables = [table(records, args.device, links, source)]
        if args.model is not None:
            sizes = [1e9 * float(size) for size in args.capacity.split(",") if size]
            tables.append(prefixes(records, args.device, links, args.model, args.prefix, args.page, sizes, source))
        print("\n\n".join(tables))
        if args.html is not None:
            args.html.write_text(page_of(tables), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"tiers: {error}", file=sys.stderr)
        return 1
    return code
