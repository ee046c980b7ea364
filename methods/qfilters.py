"""Q-Filters: one direction per head says which keys are attended to (Godey et al., 2025, arXiv 2503.02812)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvcompress.calibrate import calibration
from kvcompress.method import LayerView, Method, Observed, Schedule, Scorer, State, Tensor

KIND = "qfilters"
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, eq=False)
class FilterScorer(Scorer):
    """Projection of keys on their head's filter, `filters [layers, H_kv, D]`, which points where its queries do."""

    filters: Tensor
    recent: int = 0

    def window(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, self.recent)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        direction = self.filters[view.layer].to(view.keys.device, torch.float32)
        return (view.keys.float() @ direction[..., None]).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class QFilters(Method):
    """Keep the tokens whose keys reach furthest in the direction of their head's queries, per KV head (section 3).

    The directions are the model's, not the prompt's: `scripts/calibrate_qfilters.py` computes them once and stores them
    in a file that is found by the model's weights; SmolLM2's ships with the package. The released code and kvpress
    store them with the opposite sign and take minus the projection.

    Attributes:
        window: most recent tokens that are always kept. The released cache takes it as an argument, 64 in its example;
            kvpress has none.
        decode: evict after every decoded token, as the released cache does.
        filters: `[layers, H_kv, D]` to use instead of the model's file, one row per layer of the model.
    """

    family = "keys and values"
    keeps = "keys that reach furthest in the direction of their head's queries, and a window"
    reads = "keys"
    needs_data = "filters of the model"
    source = "arXiv 2503.02812; NathanGodey/qfilters and kvpress"
    differences = "filters computed here, from all queries of a text the model writes itself; sign as in the paper"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 64, "decode": True},
        "code": {"window": 64, "decode": True},
        "kvpress": {"window": 0, "decode": False},
    }

    window: int | None = None
    decode: bool | None = None
    filters: Tensor | None = field(default=None, repr=False, compare=False)

    def check(self) -> None:
        assert self.window is not None
        if self.window < 0:
            raise ValueError(f"window={self.window}; at least 0")

    def reserved(self) -> int:
        assert self.window is not None
        return self.window

    def bind(self, model: Any) -> Method:
        bound = super().bind(model)
        if self.filters is not None or not self.limited:
            return bound
        found = calibration.find(model, calibration.folders(KIND, DATA))
        if found is None:
            name = model.config.name_or_path or model.config.model_type
            raise ValueError(
                f"QFilters has no filters for {name!r}: compute them once with "
                f"`python scripts/calibrate_qfilters.py --model {name}`, or pass filters=calibrate(model, ids)"
            )
        return bound.replace(filters=found["filters"])

    def make_scorer(self) -> FilterScorer:
        filters = torch.zeros(0) if self.filters is None else self.filters  # bind() fills them in
        return FilterScorer(filters, self.window or 0)

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)


class QueryMoments(Scorer):
    """Sums over all real queries, after rotation, and over their squares, in `state`; scores nothing."""

    def observe(self, view: LayerView, observed: Observed, state: State) -> None:
        queries, positions = observed.queries
        queries = queries * (positions >= 0)[:, None, None, :, None]  # padding counts for nothing
        for name, new in (("sum", queries.sum(-2)), ("square", queries.transpose(-1, -2) @ queries)):
            state[name] = state[name] + new.cpu().double() if name in state else new.cpu().double()

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        return torch.zeros(view.positions.shape, device=view.positions.device)


@dataclass(frozen=True, kw_only=True)
class _Calibration(Method):
    """Looks at prompts and keeps everything."""

    budget: float = 0.5

    def make_scorer(self) -> QueryMoments:
        return QueryMoments()

    def make_schedule(self) -> Schedule:
        return Schedule(prompt=False)


def calibrate(model: Any, texts: Iterable[Tensor]) -> Tensor:
    """Filters of a model from its queries over token ids `[B, n]` each, `[layers, H_kv, D]` float32.

    Per query head the first right singular vector of its queries, not centred, with the sign that makes their sum of
    projections positive (section 3.2); a KV head takes the mean of its query heads' (as the released code does, which
    draws 3,000 queries; all count here). Layers without full attention have zeros.
    """
    from kvcompress.hook.session import compress

    total: dict[tuple[int, str], Tensor] = {}
    with compress(model, _Calibration()) as session:
        for ids in texts:
            session.prefill(ids)
            assert session.cache is not None
            for layer in session.cache.full_layers:
                for name in ("sum", "square"):
                    found = layer.state[name].sum(0).cpu()
                    total[layer.index, name] = total.get((layer.index, name), torch.zeros_like(found)) + found
        layers = len(session.cache.layers) if session.cache is not None else 0
    if not total:
        raise ValueError("no text to calibrate on: give at least one `[B, n]` tensor of token ids")
    filters = {}
    for index in sorted({index for index, _ in total}):
        # eigenvector of the largest eigenvalue, `[H_kv, G, D]`
        direction = torch.linalg.eigh(total[index, "square"]).eigenvectors[..., -1]
        sign = (total[index, "sum"] * direction).sum(-1, keepdim=True).sign()
        filters[index] = (direction * sign).mean(1).float()
    zero = torch.zeros_like(next(iter(filters.values())))
    return torch.stack([filters.get(i, zero) for i in range(layers)])
