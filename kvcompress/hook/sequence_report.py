"""Sequence report: bytes and tokens held, evictions, kernels and times, under the keys of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.retention_map import retention_map
from kvcompress.cache.traffic import per_token, skipped
from kvcompress.hook.compression import Compressor


class SequenceReport:
    """Builds reports on caches that one method filled.

    Args:
        compressor: the method's runtime, which knows the kernels that ran and the time spent compressing.
        notes: warnings about the method on this model.
    """

    def __init__(self, compressor: Compressor, notes: list[str]) -> None:
        self._compressor, self._notes = compressor, notes

    def build(
        self, cache: CompressedCache, step: Mapping[str, Any], prefill_s: float | None, kept_map: bool = False
    ) -> dict[str, Any]:
        """The report as `Session.report` documents it.

        Args:
            step: how decode steps are taken.
            prefill_s: seconds of the last prompt, None where they are not known.
            kept_map: add the positions of the tokens that the first row holds.
        """
        held, kept = cache.nbytes(), cache.kept_tokens()
        evicted = sum(layer.evicted for layer in cache.full_layers)
        batch = max(1, kept.shape[1])
        if kept.numel() == 0 and cache.real is not None:  # every layer slides: all that is known is what was seen
            kept = cache.real.view(1, -1, 1)
        # sliding-window layers hold the same with and without compression: part of both sides of the ratio
        valid, full = held["valid"] + held["other_layers"], held["full"] + held["other_layers"]
        return {
            "kv": {
                "bytes_held": valid,
                "bytes_allocated": held["allocated"] + held["other_allocated"],
                "bytes_full": full,
                "ratio": valid / full if full else 1.0,
                "bytes_host": held["host"],
                "bytes_summaries": held["summaries"],
                "bytes_tables": held["tables"],
                "bytes_scores": held["scores"],
                "kept_tokens_mean": float(kept.double().mean()),
                "kept_tokens_max": max(cache.sequence.kept_max, int(kept.max())),
                **per_token(cache, batch),
                "storage": "real",
            },
            "nbytes": held,
            "active": evicted > 0
            or any(layer.encoding.is_encoded or skipped(layer) for layer in cache.full_layers)
            or bool(cache.sequence.reuse and cache.sequence.reuse["tokens_reused"] > 0),
            "evicted": evicted,
            "clamped": cache.sequence.clamped,
            "notes": [*self._notes, *self._reuse_notes(cache)],
            "kept_per_layer": kept.double().mean(dim=(1, 2)).tolist(),
            "kernel": "+".join(sorted(self._compressor.stats.kernels)),
            "step": dict(step),
            "time": {"prefill_s": prefill_s, "compress_s": self._compressor.stats.seconds},
            "moments": list(cache.sequence.moments),
            **({} if cache.sequence.reuse is None else {"reuse": dict(cache.sequence.reuse)}),
            **(retention_map(cache) if kept_map else {}),
        }

    def _reuse_notes(self, cache: CompressedCache) -> list[str]:
        prefill = self._compressor.parts.prefill
        if not prefill.needs_segments or cache.sequence.reuse is not None:
            return []
        return [f"prefill={prefill.name} had nothing to reuse: a prompt of one segment is all question"]


def nan_notes(logits: Tensor, row: int | None = None) -> list[str]:
    """A note that names the rows whose last logits `[B, V]` are NaN, if there are any; of one row only if it is given."""
    bad = logits.isnan().any(-1).nonzero().squeeze(1).tolist()
    if not bad or row not in (None, *bad):
        return []
    where = (
        ""
        if len(logits) == 1 or row is not None
        else f" in {'row' if len(bad) == 1 else 'rows'} {', '.join(map(str, bad))}"
    )
    return [f"the last logits are NaN{where}: what was kept and generated there means nothing"]
