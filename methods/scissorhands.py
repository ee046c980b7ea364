"""Scissorhands: what was rarely attended to stays unimportant (Liu et al., NeurIPS 2023, arXiv 2305.17118)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import (
    GroupReduce,
    LayerView,
    Method,
    Needs,
    Observed,
    Schedule,
    Scorer,
    State,
    Tensor,
    reduce_group,
)

SLACK = 1e-5  # attention this close to even counts as even, so that rounding does not decide
SHARE_DROP = 128  # tokens dropped at once where the budget is a share, as its half is not known beforehand


@dataclass(frozen=True)
class PersistenceScorer(Scorer):
    """How many of the last `history` queries found a key unimportant; the fewer the better, of equals the later token.

    A query finds a key unimportant if it gives it less than an even share, 1/t over the t tokens held that it sees.
    Attention is that of the remembered queries over what is held now. "sum" adds attention up instead.
    """

    history: int = 400
    recent: int = 10
    rule: str = "below"
    group_reduce: GroupReduce = "mean"

    @property
    def needs(self) -> Needs:
        return Needs(window=self.history)

    def window(self, kept: Tensor) -> Tensor:
        return torch.full_like(kept, self.recent)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        positions = view.positions
        held = positions >= 0
        total = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
        for attention, at in observed.window_parts(self.history):
            seen = held[:, :, None] & (positions[:, :, None] <= at[:, None, :, None])
            total += self._votes(attention, seen).sum(2)
        if self.rule == "sum":
            return total
        rank = held.cumsum(-1)
        return total + rank / (rank[..., -1:] + 1)

    def _votes(self, attention: Tensor, seen: Tensor) -> Tensor:
        """What each query says of each slot `[B, H_kv, n, P]`, from its attention `[B, H_kv, G, n, P]`.

        A query that nothing is left of which it saw says nothing.
        """
        share = reduce_group(attention, self.group_reduce)
        if self.rule == "sum":
            return share.masked_fill(~seen, 0.0)
        low = share * seen.sum(-1, keepdim=True) < 1 - SLACK
        return -(low & seen).float() if self.rule == "below" else (~low & seen).float()


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Method):
    """Keep the tokens that most of the last queries found important (paper section 4), at prompt end and in decode.

    Many tokens go at once: heads hold between `budget` and `budget + drop` tokens in decode. The paper's buffer is
    the larger of these, of which it drops half. No code of the authors is public; the paper has no grouped queries.

    Attributes:
        history: queries that vote, in tokens (paper: 400). As many are remembered in every layer, which weighs as much
            as history x H / (2 x H_kv) tokens' keys and values and is reported as `bytes_scores`.
        recent: last tokens that are always kept (paper: 10). They have seen too few queries to be judged.
        drop: tokens dropped at once. None is as many as the budget where that is in tokens, so half of the buffer;
            128 where it is a share.
        rule: "below" drops what most queries gave less than an even share, as the paper does; "above" keeps what most
            gave at least that, which a new token has had less chance of; "sum" adds the attention up, as
            KVCache-Factory does.
        group_reduce: how the attention of the query heads of a KV head is combined before it votes.
    """

    family = "attention"
    keeps = "what most of the last 400 queries gave at least an even share, and the last 10 tokens"
    source = "arXiv 2305.17118"
    differences = (
        "no author code; heads of a group are averaged before they vote; the buffer's drop is a field of its own"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"history": 400, "recent": 10, "rule": "below"},
    }

    history: int | None = None
    recent: int | None = None
    drop: int | None = None
    rule: str | None = None
    group_reduce: str = "mean"

    def check(self) -> None:
        assert self.history is not None and self.recent is not None
        if self.history < 1:
            raise ValueError(f"history={self.history}; at least 1 query must vote")
        if self.recent < 0:
            raise ValueError(f"recent={self.recent}; at least 0")
        if self.drop is not None and self.drop < 1:
            raise ValueError(f"drop={self.drop}; at least 1 token, or None for half of the buffer")
        if self.rule not in ("below", "above", "sum"):
            raise ValueError(f"rule={self.rule!r}; valid: below, above, sum")
        reduce_group(torch.zeros(1, 1, 1), self.group_reduce)  # type: ignore[arg-type]

    def reserved(self) -> int:
        assert self.recent is not None
        return self.recent

    def make_scorer(self) -> PersistenceScorer:
        assert self.history is not None and self.recent is not None and self.rule is not None
        return PersistenceScorer(self.history, self.recent, self.rule, self.group_reduce)  # type: ignore[arg-type]

    def make_schedule(self) -> Schedule:
        own = self.budget if isinstance(self.budget, int) else SHARE_DROP
        return Schedule(every=self.drop if self.drop is not None else own)
