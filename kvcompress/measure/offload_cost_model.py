"""A model of what bytes read and moved would cost on other hardware, beside the measurements and never in their place.

    python -m kvcompress.tiers results/read/*/record.json

Bytes are measured (a record's `kv.read_bytes_per_token` and `kv.moved_bytes_per_token`, means over its decode steps;
`kv.bytes_held` and `kv.bytes_host`; the full cache reads `kv.bytes_full` per token), bandwidths are data-sheet figures
of `tiers.yaml` times a common share. What a step does beside reading keys and values is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("tiers.yaml")


@dataclass(frozen=True)
class Modelled:
    """Seconds per decoded token that a model gives; `label` says so wherever they are shown.

    Attributes:
        read: keys, values and page bounds from the device's memory.
        moved: pages between the tiers.
        overlapped: if copies run beside the reading of other layers: the longer of the two.
        in_turn: if each waits for the other: their sum.
    """

    read: float
    moved: float
    label: str = "modelled"

    @property
    def overlapped(self) -> float:
        return max(self.read, self.moved)

    @property
    def in_turn(self) -> float:
        return self.read + self.moved


@cache
def figures(path: Path = FILE) -> dict[str, Any]:
    """What `tiers.yaml` says."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def bandwidth(kind: str, name: str) -> float:
    """Bytes per second that a device or link is taken to reach; `kind` "devices" or "links".

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    known = figures()[kind]
    if name not in known:
        raise ValueError(f"{name!r} is none of the {kind} in {FILE.name}: {', '.join(known)}; add it there")
    return float(known[name]["bandwidth"]) * float(figures()["share"])


def modelled(read_bytes: float, moved_bytes: float, device: str, link: str) -> Modelled:
    """Time per token for bytes read on `device` and moved over `link`.

    Raises:
        ValueError: an unknown device or link, or a negative number of bytes.
    """
    if read_bytes < 0 or moved_bytes < 0:
        raise ValueError(f"{read_bytes} bytes read and {moved_bytes} moved: neither can be negative")
    return Modelled(read_bytes / bandwidth("devices", device), moved_bytes / bandwidth("links", link))


def break_even(read_bytes: float, moved_bytes: float, full_bytes: float, device: str, overlap: bool = True) -> float:
    """Bandwidth of the link, bytes per second, below which offloading is slower than reading the full cache.

    0 where nothing is moved, infinity where reading alone takes as long as the full cache.

    Args:
        full_bytes: what the full cache reads per token.
        overlap: copies run beside reading.
    """
    if moved_bytes == 0:
        return 0.0
    per_second = bandwidth("devices", device)
    left = full_bytes / per_second - (0.0 if overlap else read_bytes / per_second)
    return moved_bytes / left if left > 0 and read_bytes <= full_bytes else float("inf")


def table(records: Sequence[Mapping[str, Any]], device: str, links: Sequence[str]) -> str:
    """Markdown: measured bytes of each record, modelled times for each link, and the bandwidth from which offloading pays.

    Args:
        records: flat keys as in `record.json`; those without read bytes are left out.
    """
    head = ["method", "budget", "device MiB", "host MiB", "read KiB/token", "moved KiB/token", f"read on {device}, µs"]
    head += [*(f"with {link}, µs" for link in links), "pays above, GB/s"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for record in records:
        read, moved = record.get("kv.read_bytes_per_token"), record.get("kv.moved_bytes_per_token") or 0
        if read is None:
            continue
        name = " ".join(str(record[key]) for key in ("method", "variant") if record.get(key))
        times = [modelled(read, moved, device, link) for link in links]
        full = record.get("kv.bytes_full")
        pays = break_even(read, moved, full, device) / 1e9 if full and moved else None
        cells = [
            name,
            str(record.get("budget")),
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


def _shown(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcompress.tiers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, help="record.json files")
    parser.add_argument("--device", default="h100-sxm", help=", ".join(figures()["devices"]))
    parser.add_argument("--link", action="append", help=", ".join(figures()["links"]) + "; default: all")
    args = parser.parse_args(arguments)
    records, code = [], 0
    for path in args.records:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"tiers: {path} is left out: {error}", file=sys.stderr)
            code = 1
            continue
        if record.get("kv.read_bytes_per_token") is None:
            print(
                f"tiers: {path} is left out: no bytes were read, its status is {record.get('status')}", file=sys.stderr
            )
            continue
        records.append(record)
    records.sort(
        key=lambda record: (str(record.get("method")), str(record.get("variant")), -float(record["budget"] or 0))
    )
    try:
        print(table(records, args.device, args.link or list(figures()["links"])))
    except ValueError as error:
        print(f"tiers: {error}", file=sys.stderr)
        return 1
    return code
