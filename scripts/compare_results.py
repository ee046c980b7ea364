"""Compare two results folders: run ids, records and samples must be equal, times and machine facts aside.

python scripts/compare_results.py results/before results/after     exit status 0 where they are equal
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# what a clock or the machine says, and what changes with every edit of the sources
MEASURED = ("time.", "memory.", "machine.", "hardware.", "versions.", "run.", "out.time", "out.memory")
ALONE = (
    "source",
    "decode_peak",
    "prefill_peak",
    "started",
    "finished",
    "wall_s",
    "seconds",
    "host",
    "commit",
    "timestamp",
    "duration_s",
)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings and lists with their dotted names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from flat(item, f"{name}[{number}]")
    else:
        # a traceback's files and lines are no result, what it ends with is
        yield name, value.strip().rpartition("\n")[2] if name == "error" and isinstance(value, str) else value


def measured(name: str) -> bool:
    """True for a field that may differ between two runs of the same cell."""
    parts = name.replace("[", ".[").split(".")
    timed = any(part.startswith(("time", "memory")) or part.endswith(("_s", "_s_q1", "_s_q3")) for part in parts)
    return name.startswith(MEASURED) or timed or any(part in ALONE for part in parts)


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal, numbers within a relative tolerance."""
    if isinstance(a, float) or isinstance(b, float):
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
        return numbers and (math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (a != a and b != b))
    return bool(a == b)


def differences(a: Any, b: Any, where: str, tolerance: float) -> list[str]:
    """One line per leaf that differs or that one side alone has."""
    left, right, found = dict(flat(a)), dict(flat(b)), []
    for name in sorted(left.keys() | right.keys()):
        if measured(name):
            continue
        if name not in left or name not in right:
            found.append(f"{where}: {name} is only {'before' if name in left else 'after'}")
        elif not same(left[name], right[name], tolerance):
            found.append(f"{where}: {name} was {left[name]!r}, is {right[name]!r}")
    return found


def rows(path: Path) -> list[Any]:
    """Rows of a `samples.jsonl`; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def compare(before: Path, after: Path, tolerance: float = 1e-6) -> list[str]:
    """Every difference between the runs under two folders, one line each.

    Raises:
        ValueError: a folder holds no record.
    """
    runs = [{p.parent.relative_to(root): p for p in root.rglob("record.json")} for root in (before, after)]
    for root, found in zip((before, after), runs, strict=True):
        if not found:
            raise ValueError(f"no record.json under {root}")
    lines = []
    for run in sorted(runs[0].keys() | runs[1].keys()):
        if run not in runs[0] or run not in runs[1]:
            lines.append(f"{run}: only {'before' if run in runs[0] else 'after'}")
            continue
        old, new = runs[0][run], runs[1][run]
        read = [json.loads(p.read_text(encoding="utf-8")) for p in (old, new)]
        lines += differences(read[0], read[1], f"{run} record", tolerance)
        lines += differences(
            rows(old.with_name("samples.jsonl")), rows(new.with_name("samples.jsonl")), f"{run} samples", tolerance
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-6, help="relative, of numbers that are not whole")
    given = parser.parse_args(argv)
    try:
        lines = compare(given.before, given.after, given.tolerance)
    except ValueError as error:
        parser.error(str(error))
    count = len(list(given.before.rglob("record.json")))
    print("\n".join(lines) if lines else f"{count} runs are equal")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
