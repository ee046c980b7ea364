"""Made records with samples, for tests of boards: every number in them is said by the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcompress.common import hashing
from kvcompress.sweep import record

BASELINE = {"parts.scorer": "none", "parts.allocator": "uniform"}
MB = 1_000_000


def sample(
    identity: str, score: float, text: str = "an answer", *, depth: float = 0.5, length: int = 1000, **out: Any
) -> dict:
    """One line of samples.jsonl, with bytes that grow from 10 MB to 12 MB over 5 tokens."""
    kept = out.pop("kept", {})
    meta = {
        "length": length,
        "depth": depth,
        "prompt_tokens": length,
        "needle_offsets": [int(length * depth)],
        "prompt_hash": f"hash of {identity}",
        "prompt_first": f"start of {identity}",
        "prompt_last": f"end of {identity}",
    }
    made = {
        "tokens": [[1, 2, 3, 4, 5]],
        "finished": ["stop"],
        "text": [text],
        "compressed": {"kv": {"bytes_held": 10 * MB}, "kept_per_layer": [3.0, 5.0], **kept},
        "end": {"kv": {"bytes_held": 12 * MB}, "active": True, "clamped": False},
        "held": [10 * MB, 10.5 * MB, 11 * MB, 11.5 * MB, 12 * MB],
    }
    return {"id": identity, "score": score, "references": [["gold"]], "meta": meta, "out": made | out}


def run(
    results: Path,
    method: str,
    budget: float | int,
    scores: list[float] | list[dict],
    *,
    sweep: str = "board",
    pair: str = "p",
    task: str = "needle",
    **more: Any,
) -> str:
    """Write a finished run; its id. `scores`: one per sample, at depths from 0 to 1, or the samples themselves."""
    run_id = hashing.digest([sweep, pair, task, method, budget, str(more.get("variant"))])
    rows: list[dict] = [
        s if isinstance(s, dict) else sample(f"s{i}", s, depth=i / max(1, len(scores) - 1))
        for i, s in enumerate(scores)
    ]
    folder = record.RunFolder(results, sweep, run_id)
    config = {
        "model": {"name": "tiny"},
        "task": {"name": task},
        "method": {"name": method},
        "budget": budget,
        "seed": 0,
    }
    folder.open(json.dumps(config))  # JSON is YAML, and plain ASCII
    for row in rows:
        folder.append(row)
    values = [row["score"] for row in rows]
    base = BASELINE if method == "full" else {"parts.scorer": "Scorer", "parts.allocator": "uniform"}
    share = budget if isinstance(budget, float) else 0.3
    made = (
        dict.fromkeys(record.KEYS)
        | base
        | {
            "run_id": run_id,
            "status": "ok",
            "model": "tiny",
            "task": task,
            "method": method,
            "budget": budget,
            "seed": 0,
            "dtype": "float32",
            "device": "cpu",
            "metric": "match/1",
            "n_samples": len(values),
            "score": sum(values) / len(values) if values else None,
            "parts.codec": "plain",
            "parts.reader": "all",
            "parts.prefill": "oneshot",
            "parts.schedule": "prompt",
            "parts.preset": "paper",
            "kv.ratio": share,
            "kv.bytes_held": share * 100 * MB,
            "kv.bytes_full": 100 * MB,
            "kv.read_bytes_per_token": share * 90 * MB,
            "kv.storage": "real",
            "memory.prefill_peak": 300 * MB,
            "memory.decode_peak": 200 * MB,
            "time.ttft_s": 1.25,
            "time.tpot_s": 0.02 + share / 100,
            "protocol.pair": pair,
            "protocol.question": "seen",
            "versions.source": hashing.source_hash(),
        }
    )
    folder.finish(made | more)
    return run_id
