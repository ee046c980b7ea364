"""The leaderboard of the documentation: ranges of ranks at equal bytes, with intervals, marks and what a rank rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcompress.common.text import for_markdown
from kvcompress.report.averages import ranked
from kvcompress.report.frame import measured
from kvcompress.report.run_index import Loaded, flags
from kvcompress.report.table import MISSING, heading, title, with_interval
from kvcompress.sweep.baseline import is_baseline

BEGIN = "<!-- leaderboard: made by scripts/leaderboard.py -->"
END = "<!-- end of leaderboard -->"
STAR = "✱"
HEAD = ("rank", "method", "score", "Δ full", "KV bytes", "KL", "n", "marks")


def tables(found: Loaded) -> str:
    """A section per setting and in it a table per share of bytes: methods by rank, those that were not measured there left out.

    Raises:
        ValueError: there is no record.
    """
    rows = measured(found)
    if not rows:
        raise ValueError("no records: a leaderboard is made of the records of a sweep")
    scores = {row["run_id"]: entry.scores for row, entry in zip(rows, found.entries, strict=True)}
    settings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        settings.setdefault((row["sweep"], str(row.get("protocol.pair"))), []).append(row)
    text: list[str] = []
    for members in sorted(settings.values(), key=lambda members: title(members[0])):
        base = next((row for row in members if is_baseline(row) and row["on_board"]), None)
        text += [f"## {for_markdown(title(members[0]))}", ""]
        if base is not None:
            text += [f"Full cache: {_score(base)}, n = {base['n_samples']}.", ""]
        for target in sorted(
            {r["budget"] for r in members if isinstance(r["budget"], float) and r["budget"] < 1}, reverse=True
        ):
            lines = [_line(one, members, target) for one in ranked(members, target, lambda row: scores[row["run_id"]])]
            if lines := [line for line in lines if line is not None]:
                text += [f"### {target:.0%} of the bytes", "", _row([heading(name) for name in HEAD])]
                text += [_row([":---" if name in ("method", "marks") else "---:" for name in HEAD]), *lines, ""]
    return "\n".join(text)


def _line(one: Mapping[str, Any], members: Sequence[Mapping[str, Any]], target: float) -> str | None:
    if one["score"] is None:
        return None
    same = [r for r in members if (r["method"], r.get("variant")) == (one["method"], one["variant"]) and r["on_board"]]
    near = [r for r in same if r.get("kv.ratio") is not None and abs(r["kv.ratio"] - target) <= 0.02]
    run = None if one["interpolated"] or not near else min(near, key=lambda r: abs(r["kv.ratio"] - target))
    low, high = one["rank_low"], one["rank_high"]
    rank = str(one["rank"]) if low is None else str(low) if low == high else f"{low}–{high}"
    name = " ".join(str(part) for part in (one["method"], one["variant"]) if part)
    if run is None:
        return _row(
            [rank, for_markdown(name), f"{one['score']:.3f}", *[MISSING] * 3, str(one["n"] or MISSING), "interpolated"]
        )
    kl = run.get("metrics.kl")
    marks = ", ".join(flags(dict(run)))
    cells = [rank, for_markdown(name), _score(run), _delta(run), f"{run['kv.ratio']:.1%}"]
    return _row([*cells, MISSING if kl is None else f"{kl:.3g}", str(run["n_samples"]), for_markdown(marks)])


def _score(row: Mapping[str, Any]) -> str:
    return with_interval(row["score"], row.get("score_low"), row.get("score_high"))


def _delta(row: Mapping[str, Any]) -> str:
    """The difference with its interval, and a star where it is significant."""
    if row.get("delta_full") is None:
        return MISSING
    star = f" {STAR}" if row.get("significant") else ""
    span = "" if row.get("delta_low") is None else f" [{row['delta_low']:+.2f}, {row['delta_high']:+.2f}]"
    return f"{row['delta_full']:+.3f}{span}{star}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
