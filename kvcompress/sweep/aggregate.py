"""Keys of a record that follow from its samples: score, shares, bytes, times, protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, quantiles, stdev
from typing import Any

from kvcompress.sweep.record_keys import TIMES


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Record keys that follow from the samples: score, shares, `kv.*`, `memory.*`, `time.*`, `protocol.*`.

    Samples for which memory ran out (they have no report of their end) count in number and score alone.
    """
    if not rows:
        return {"n_samples": 0}
    scores = [float(row["score"]) for row in rows]
    found: dict[str, Any] = {
        "n_samples": len(rows),
        "score": fmean(scores),
        "score_stderr": stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
    }
    rows = [row for row in rows if row["out"].get("end") is not None]
    if not rows:
        return found
    outs = [row["out"] for row in rows]
    found |= {
        "share_inactive": fmean(not out["end"]["active"] for out in outs),
        "share_clamped": fmean(bool(out["end"]["clamped"]) for out in outs),
        "notes": sorted({note for out in outs for note in out["end"].get("notes", ())}),
    }
    moments, standing = zip(*map(held_at, outs), strict=True)
    found["kv.moment"] = ",".join(sorted(set(moments)))
    after, end = [out["compressed"]["kv"] for out in outs], [out["end"]["kv"] for out in outs]
    for key in (
        "bytes_held",
        "bytes_allocated",
        "bytes_full",
        "ratio",
        "bytes_host",
        "bytes_summaries",
        "bytes_tables",
        "bytes_scores",
        "kept_tokens_mean",
    ):
        found[f"kv.{key}"] = _mean(kv.get(key) for kv in standing)
    # along the decode: sampled by the task, or what its two ends say
    held = [
        out.get("held") or [a.get("bytes_held"), b.get("bytes_held")]
        for out, a, b in zip(outs, after, end, strict=True)
    ]
    known = [values for values in held if None not in values]
    found["kv.bytes_peak"] = _mean(max(values) for values in known)
    # what goes into pages leaves the form the prompt had with the first step
    found["kv.bytes_mean"] = _mean(
        fmean(values[1:] or values if moment == "decode" else values)
        for values, moment in zip(held, moments, strict=True)
        if None not in values
    )
    for key in ("read_bytes_per_token", "moved_bytes_per_token"):
        found[f"kv.{key}"] = _mean(kv.get(key) for kv in end)
    found["kv.kept_tokens_max"] = max((kv["kept_tokens_max"] for kv in end if kv.get("kept_tokens_max")), default=None)
    found["kv.storage"] = _all_of(kv.get("storage") for kv in end)
    for key in ("prefill_peak", "decode_peak"):
        found[f"memory.{key}"] = max((out[key] for out in outs if out.get(key) is not None), default=None)
    for key in TIMES:
        values: list[float] = []
        for out in outs:
            value = out.get(key.removeprefix("time."))
            values += value if isinstance(value, list) else [] if value is None else [value]
        found |= _quartiles(key, values)
    protocols = [row.get("protocol", {}) for row in rows]
    for key in sorted({key for protocol in protocols for key in protocol}):
        kinds = sorted({str(protocol[key]) for protocol in protocols if key in protocol})
        found[f"protocol.{key}"] = kinds[0] if len(kinds) == 1 else ",".join(kinds)
    found["protocol.kernel"] = _all_of(out["end"].get("kernel") for out in outs)
    steps = [out["end"].get("step") or {} for out in outs]
    found["protocol.step"] = "+".join(sorted({step["how"] for step in steps if "how" in step})) or None
    found["protocol.step_why"] = _all_of((step.get("why") for step in steps), "; ")
    found["time.step_ready_s"] = max((step["ready_s"] for step in steps if "ready_s" in step), default=None)
    found["protocol.truncated_share"] = fmean((row.get("meta") or {}).get("truncated_tokens", 0) > 0 for row in rows)
    found["protocol.unfinished_share"] = fmean(row.get("unfinished", 0.0) for row in rows)
    found["protocol.hit_max_share"] = fmean("length" in out.get("finished", ()) for out in outs)
    return found


def held_at(out: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """When a sample's bytes held say what its method holds, and the `kv` of its report then.

    "prompt": when the compression has ended, before the question. "decode": at the end, where what is held lies in
    pages by then, which begin with the first step of decode; what grows or moves later is always of the end.
    """
    compressed, end = ((out.get(report) or {}).get("kv") or {} for report in ("compressed", "end"))
    return ("decode", end) if end.get("bytes_summaries") else ("prompt", compressed)


def _all_of(values: Iterable[str | None], mark: str = ",") -> str | None:
    """What samples say, each thing once: those of before a resume may have run otherwise. None where none says anything."""
    return mark.join(sorted({value for value in values if value})) or None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _quartiles(key: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {key: None, f"{key}.q1": None, f"{key}.q3": None}
    first, _, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {key: median(values), f"{key}.q1": first, f"{key}.q3": third}
