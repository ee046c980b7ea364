"""Knorm: keys with a small norm are attended to (Devoto et al., EMNLP 2024, arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import Allocator, LayerView, Method, Observed, Scorer, State, Tensor
from kvcompress.method.apportion import evenly


@dataclass(frozen=True)
class KeyNormScorer(Scorer):
    """Minus the norm of a key, in float32. Rotation keeps norms, so it does not matter where it is taken."""

    traceable: ClassVar[bool] = True

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        return -torch.linalg.vector_norm(view.keys.float(), dim=-1)


@dataclass(frozen=True)
class First(Allocator):
    """The first `layers` layers are kept whole, the others share what is left of the budget evenly.

    Attributes:
        layers: how many.
        totals: "equal" takes the whole layers out of the same total: at most half of it goes to them (so at small
            budgets they are cut as well), and they never get less than the others. "published" leaves the others their
            nominal share and holds the first layers on top of the budget.
    """

    layers: int = 2
    totals: str = "equal"

    def stat(self, view: LayerView, observed: Observed) -> Tensor:
        return view.real

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        heads = scores[0].shape[1]
        counts = []
        for cap, real in zip((total // (n_layers * heads)).tolist(), stats[0].tolist(), strict=True):
            counts.append(self.numbers(cap, real, n_layers)[layers_seen - 1])
        return [torch.tensor(counts)[:, None].expand(-1, heads)]

    def numbers(self, cap: int, real: int, n_layers: int) -> list[int]:
        """Tokens per head of every layer, for a row of `real` tokens that keeps `cap` on average."""
        first = min(self.layers, n_layers)
        if self.totals == "published":
            return [real] * first + [cap] * (n_layers - first)
        if first in (0, n_layers) or real <= cap:
            return [cap] * n_layers
        most = (cap * n_layers - (n_layers - first)) // first  # a token is left for every other layer
        whole = min(real, most, max(cap, cap * n_layers // (2 * first)))
        return [whole] * first + evenly(cap * n_layers - whole * first, n_layers - first)


@dataclass(frozen=True, kw_only=True)
class Knorm(Method):
    """Keep the tokens whose keys have the smallest norm, per KV head, at prompt end (paper section 3).

    Nothing is protected and no attention is read. With query-key norm all keys have nearly the same norm, so the choice
    means little there: a warning says so.

    Attributes:
        skip_layers: first layers that are not compressed, where norms say little (2 in the paper and in the code that
            follows it; none in kvpress).
        totals: whether they count within the budget ("equal") or come on top of it ("published", as in the code).
    """

    family = "keys and values"
    keeps = "keys of small norm; the first 2 layers get up to half of the budget"
    reads = "keys"
    source = "arXiv 2406.11430; its authors' code and kvpress"
    differences = "layers that are not compressed count within the total unless totals=published; norms in float32"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"skip_layers": 2, "totals": "equal"},
        "code": {"skip_layers": 2, "totals": "published"},
        "kvpress": {"skip_layers": 0, "totals": "equal"},
    }

    skip_layers: int | None = None
    totals: str | None = None

    def check(self) -> None:
        assert self.skip_layers is not None
        if self.skip_layers < 0:
            raise ValueError(f"skip_layers={self.skip_layers}; at least 0")
        if self.totals not in ("equal", "published"):
            raise ValueError(f"totals={self.totals!r}; valid: equal, published")

    def notes(self, model: Any) -> list[str]:
        if not any(name.endswith(("k_norm", "k_layernorm", "key_layernorm")) for name, _ in model.named_modules()):
            return []
        return [f"{model.config.model_type} normalises its keys: their norms differ little, and Knorm keeps by them"]

    def make_scorer(self) -> KeyNormScorer:
        return KeyNormScorer()

    def make_allocator(self) -> Allocator:
        assert self.skip_layers is not None and self.totals is not None
        return First(self.skip_layers, self.totals) if self.skip_layers else super().make_allocator()
