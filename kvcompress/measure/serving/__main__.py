"""`python -m kvcompress.serving hits TRACE`: hit rates of a trace, without any model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompress.measure.serving import hits, traces
from kvcompress.measure.serving.requests import first


def add_hits(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hits`."""
    parser.add_argument("trace", help=f"a file, or one of {', '.join(traces.FILES)}")
    parser.add_argument("--data", type=Path, default=None, help="folder of data sets (paths.data)")
    parser.add_argument("--requests", type=int, default=None, help="the first so many; default: all")
    parser.add_argument(
        "--blocks", default="1000,10000,100000", help="room of the device in blocks of the full cache, comma-separated"
    )
    parser.add_argument("--tokens", default=None, help="the same in tokens, instead of --blocks")
    parser.add_argument("--host", type=float, default=0.0, help="room of the host, as a multiple of the device's")
    parser.add_argument(
        "--policies", default="lru", help="comma-separated: fifo, lru, lfu, belady, kvflow, kvflow-oracle, fifo-flat"
    )
    parser.add_argument("--reuse", default="prefix", choices=hits.REUSES, help="whole: caches of eviction methods")
    parser.add_argument("--ratio", type=float, default=1.0, help="bytes of the method over those of the full cache")
    parser.add_argument("--last-half", action="store_true", help="count the last half of the requests only")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")


def run_hits(args: argparse.Namespace) -> int:
    """Print a table of hit rates; 0."""
    path = traces.find(args.trace, args.data)
    requests = first(traces.read(path), args.requests)
    start = len(requests) // 2 if args.last_half else 0
    size = max(request.block_size for request in requests)
    rooms = _numbers("--tokens", args.tokens) if args.tokens else _numbers("--blocks", args.blocks)
    rooms = [room // max(1, size) for room in rooms] if args.tokens else rooms
    best = hits.replay(requests, None, count_from=start)
    names = [name for name in args.policies.split(",") if name]
    print(
        f"{path.name}: {len(requests)} requests, {best.requests} counted, {best.input} prompt tokens in blocks of {size}; "
        f"an unlimited cache of prefixes hits {best.rate:.4f} ({best.hit} tokens)"
    )
    print(f"{'policy':>16} {'blocks':>9} {'hit tokens':>12} {'rate':>7} {'of unlimited':>12} {'1/(1-h)':>8}")
    rows: list[dict[str, Any]] = []
    for name in names:
        for room in rooms:
            lower = [int(args.host * room)] if args.host else []
            found = hits.replay(requests, room, name, args.reuse, args.ratio, lower, start)
            share = found.hit / best.hit if best.hit else 0.0
            label = f"{name} (bound)" if found.bound else name
            print(f"{label:>16} {room:>9} {found.hit:>12} {found.rate:>7.4f} {share:>12.3f} {found.speedup:>8.2f}")
            rows.append(
                {
                    "policy": name,
                    "bound": found.bound,
                    "blocks": room,
                    "hit": found.hit,
                    "rate": found.rate,
                    "share": share,
                }
            )
    if args.json is not None:
        content = {
            "trace": path.name,
            "requests": best.requests,
            "input": best.input,
            "unlimited": best.rate,
            "rows": rows,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(float(part)) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{name} {text!r}: one or more numbers of at least 1, comma-separated")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcompress", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(dest="command", required=True)
    add_hits(commands.add_parser("hits", help="hit rates of a trace by policy and room"))
    args = parser.parse_args(arguments)
    try:
        return run_hits(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
