"""Query filters (Q-Filters): per KV head the main direction of its queries, measured once and kept in a file.

Godey et al., 2025, arXiv 2503.02812, section 3.2. `scripts/calibrate_qfilters.py` makes the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompress.calibrate import calibration
from kvcompress.hook.session import compress
from kvcompress.method import LayerView, Method, Observed, Schedule, Scorer, State, Tensor

KIND = "qfilters"
DATA = Path(__file__).parent / "data"
COMMAND = "kvcompress calibrate-qfilters --model"


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


def stored(model: Any) -> Tensor:
    """A model's filters `[layers, H_kv, D]` from the user's folder or the package's.

    Raises:
        ValueError: there are none; names the command that makes them.
    """
    found = calibration.find(model, calibration.folders(KIND, DATA))
    if found is None:
        name = model.config.name_or_path or model.config.model_type
        raise ValueError(
            f"QFilters has no filters for {name!r}{calibration.adapters_noted(model)}: compute them once with "
            f"`{COMMAND} {name}`, or pass filters=calibrate(model, ids)"
        )
    return found["filters"]
