"""PyramidKV: lower layers get more of the budget, higher layers less (Cai et al., 2024, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import Allocator, LayerView, Observed, Tensor
from kvcompress.method.apportion import occupancy
from kvcompress.methods.snapkv import SnapKV

TOTALS = ("equal", "published", "rounded")


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Tokens per layer fall in equal steps from the first layer to the last; all heads of a layer get the same.

    Known as soon as a layer is scored, so each layer is cut when it has run. What every head protects comes first and
    the pyramid hands out the rest; where it would give the first layer more than the prompt has, it is flattened.

    Attributes:
        beta: how steep: the last layer gets 1/beta of the mean.
        totals: "equal" makes steps that add up to the budget in whole tokens; "published" rounds the step down as the
            released code does, which holds up to a tenth more than the budget; "rounded" rounds each layer's number by
            itself, as kvpress does, which holds up to half a token per layer more or less.
        share: of a row's tokens, from which totals="rounded" builds the pyramid before anything is rounded; None takes
            the whole tokens that a row keeps on average.
        protected_inside: the pyramid is over all tokens, protected ones included, and flat where the last layer could
            not hold them, as in kvpress.
    """

    beta: int = 20
    totals: str = "equal"
    protected_inside: bool = False
    share: float | None = None

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ValueError(f"beta={self.beta}; at least 1")
        if self.totals not in TOTALS:
            raise ValueError(f"totals={self.totals!r}; valid: {', '.join(TOTALS)}")

    def stat(self, view: LayerView, observed: Observed) -> Tensor:
        return view.real

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        _, protected = occupancy(scores[0])
        heads = protected.shape[1]
        caps, rows = total // (n_layers * heads), protected.amax(1)
        counts = [
            self.numbers(cap, real, window, n_layers)[layers_seen - 1]
            for cap, real, window in zip(caps.tolist(), stats[0].tolist(), rows.tolist(), strict=True)
        ]
        return [torch.tensor(counts)[:, None].expand(-1, heads)]

    def numbers(self, cap: int, real: int, protected: int, n_layers: int) -> list[int]:
        """Tokens per head of every layer, for a row of `real` tokens that keeps `cap` on average."""
        inside = protected if self.protected_inside else 0
        rounded = self.totals == "rounded"
        mean: float = cap if not rounded or self.share is None else self.share * real
        base = mean - protected + inside
        least = base / self.beta if rounded else max(base // self.beta, 0 if protected else 1)
        most = 2 * base - least
        if most > real - protected:
            most = real - protected
            least = 2 * base - most
        flat = most < least or least < inside or (real < 2 * base and not self.protected_inside)
        if n_layers == 1 or real <= cap or flat:
            return [cap] * n_layers
        if rounded:
            step = (most - least) / (n_layers - 1)
            return [max(round(most - layer * step) + protected - inside, protected, 1) for layer in range(n_layers)]
        return [int(n) + protected - inside for n in self._steps(int(most), int(least), int(base), n_layers)]

    def _steps(self, most: int, least: int, base: int, n_layers: int) -> list[int]:
        """Whole numbers from `most` to about `least`, of a mean of `base`."""
        if self.totals == "published":
            return [most - layer * ((most - least) // (n_layers - 1)) for layer in range(n_layers)]
        counts = [most - (layer * (most - least)) // (n_layers - 1) for layer in range(n_layers)]
        for layer in range(n_layers // 2):  # the upper half mirrors the lower one
            counts[n_layers - 1 - layer] = 2 * base - counts[layer]
        if n_layers % 2:
            counts[n_layers // 2] = base
        return counts


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV with a budget that falls from layer to layer (paper section 4), at prompt end.

    Prompts shorter than twice the budget get the same in every layer, as in the released code. Tokens that an earlier
    chunk or turn evicted cannot come back, so a prompt in chunks may hold less than its total.

    Attributes:
        beta: how steep (paper: 20).
        totals: the paper states a mean of `budget` per layer ("equal"); its code exceeds it ("published"); kvpress
            rounds each layer by itself ("rounded").
        protected_inside: the window is part of what the pyramid hands out, as in kvpress.
        window, kernel, pooling: 8, 7 and "max" in the paper's runs; 64, 5 and "avg" as the released class's defaults
            and in kvpress.
    """

    family = "layer budgets"
    keeps = "SnapKV's choice; lower layers get more"
    source = "arXiv 2406.02069; Zefan-Cai/KVCache-Factory"
    differences = (
        "totals are exact unless totals=published (the released code holds up to a tenth more) or rounded (kvpress: each "
        "layer by itself, half a token more or less); layers are counted among those with full attention; one set per KV "
        "head"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 8, "kernel": 7, "pooling": "max", "reduce_first": True}
        | {"totals": "equal", "protected_inside": False},
        "code": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": True}
        | {"totals": "published", "protected_inside": False},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "reduce_first": False}
        | {"totals": "rounded", "protected_inside": True},
    }

    beta: int = 20
    totals: str | None = None
    protected_inside: bool | None = None

    def make_allocator(self) -> Allocator:
        assert self.totals is not None
        share = self.budget if isinstance(self.budget, float) else None
        return Pyramid(self.beta, self.totals, bool(self.protected_inside), share)
