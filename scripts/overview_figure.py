"""Draw docs/overview.png, the picture of the README, from results/reference/equal_bytes.csv.

python scripts/overview_figure.py
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "results" / "reference" / "equal_bytes.csv"
FAMILIES = {
    "eviction": "evicted",
    "eviction and another form": "evicted and quantised",
    "quantisation": "quantised",
    "low rank": "low rank",
    "low rank and quantisation": "low rank and quantised",
    "pages": "pages read",
}


def records(path: Path) -> list[dict[str, Any]]:
    """Rows of a report's csv that have a divergence, with their numbers as numbers."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            made: dict[str, Any] = {key: value or None for key, value in row.items()}
            for key in ("kv.ratio", "metrics.kl", "score"):
                made[key] = float(row[key]) if row[key] else None
            made["budget"] = float(row["budget"]) if "." in row["budget"] else int(row["budget"])
            made["n_samples"] = int(row["n_samples"])
            if made["metrics.kl"] is not None:
                found.append(made)
    return found


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Divergence over bytes held on logarithmic axes; each line's name stands at its right end."""
    from kvcompress.report.curves import End, label_ends
    from kvcompress.report.figure import light_axes, plotting
    from kvcompress.report.iso_bytes import TICKS, kind
    from kvcompress.report.series import series, unlimited
    from kvcompress.report.styles import styles

    plt = plotting()
    height = 4.6
    figure, axes = plt.subplots(figsize=(8.6, height), layout="constrained")
    axes.set_xscale("log")
    axes.set_yscale("log")
    lines = [(one, [r for r in one.records if not unlimited(r)]) for one in series(rows)]
    looks = styles(one.name for one, _ in lines)
    ends = []
    for one, members in lines:
        xs, ys = [r["kv.ratio"] for r in members], [r["metrics.kl"] for r in members]
        axes.plot(xs, ys, ms=5, **looks[one.name].line() | {"lw": 1.6 if one.ordered else 0})
        label = f"{one.name.replace('codec=', '+ ').replace(' codec.bits=4', ' 4 bits').replace(' bits=4', ' 4 bits')}"
        ends.append(End(f"{label} ({FAMILIES[kind(members[0])]})", looks[one.name], xs[-1], ys[-1], sum(ys) / len(ys)))
    shares = [r["kv.ratio"] for _, members in lines for r in members]
    axes.set_xlim(1.08 * max(shares), min(shares) / 1.1)
    axes.set_xticks([tick for tick in TICKS if min(shares) / 1.1 < tick < 1.08 * max(shares)])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.4g}%")
    label_ends(axes, ends, height, True)
    axes.set_xlabel(
        "bytes held on the device, measured, as a share of the full cache's (less to the right)", fontsize=9
    )
    axes.set_ylabel("KL(full ‖ compressed), nats per token ↓", fontsize=9)
    first = rows[0]
    axes.set_title(
        f"{first['model']}, {first['dtype']}: divergence from the full cache, n = {first['n_samples']} texts",
        fontsize=10,
        loc="left",
    )
    light_axes(axes, 9)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> int:
    path = ROOT / "docs" / "overview.png"
    draw(path, records(SOURCE))
    print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
