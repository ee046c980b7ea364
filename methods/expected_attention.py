"""Expected Attention: what queries to come are expected to attend to (Devoto et al., 2025, arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import LayerView, Method, Needs, Observed, Schedule, Scorer, State, Tensor


@dataclass(frozen=True)
class ExpectedAttentionScorer(Scorer):
    """Expected exp(q·k) of a key under a Gaussian of the queries to come, normalised over keys, times its value's norm.

    The Gaussian is that of the queries seen so far, before rotation, turned by the mean rotation of the next positions
    (section 3). `state` holds its moments per query head, so that chunks and decode steps add up without the queries.
    """

    prompt_state: ClassVar[tuple[str, ...]] = ("count", "mean", "spread")

    sinks: int = 4
    ahead: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    @property
    def needs(self) -> Needs:
        return Needs(prerope=True)

    def observe(self, view: LayerView, observed: Observed, state: State) -> None:
        queries, positions = observed.prerope
        counted = positions >= self.sinks  # the first queries are outliers; -1 is padding
        first = int(counted.any(0).float().argmax())
        queries, counted = queries[..., first:, :], counted[:, first:]
        new = counted.sum(1).float()
        weights = counted.float()[:, None, None, None]  # [B, 1, 1, 1, n]
        mean = (weights @ queries).squeeze(-2) / new.clamp(min=1)[:, None, None, None]
        old = state["count"] if "count" in state else torch.zeros_like(new)
        total = (old + new).clamp(min=1)
        shift = mean - state["mean"] if "mean" in state else mean
        if self.covariance:  # sums of squares around the mean, joined as Chan, Golub and LeVeque do
            centred = queries - mean[..., None, :]
            if not bool(counted.all()):
                centred.mul_(weights.transpose(-1, -2))
            spread = centred.transpose(-1, -2) @ centred
            if "spread" in state:
                between = (old * new / total)[:, None, None, None, None]
                spread += state["spread"] + between * shift[..., :, None] * shift[..., None, :]
            state["spread"] = spread
        part = (new / total)[:, None, None, None]
        state["mean"] = state["mean"] + shift * part if "mean" in state else mean
        state["count"] = old + new

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        keys = view.keys.float()
        turn = observed.mean_rotation(self.ahead)[:, None]  # [B, 1, D, D]
        mean = (state["mean"] @ turn.transpose(-1, -2)).mul_(observed.scaling)  # [B, H_kv, G, D]
        logits = mean @ keys.transpose(-1, -2)
        if self.covariance:
            turn, count = turn[:, None], state["count"].clamp(min=1)
            covariance = turn @ state["spread"] @ turn.transpose(-1, -2)  # [B, H_kv, G, D, D]
            covariance *= 0.5 * observed.scaling**2 / count[:, None, None, None, None]
            for g in range(view.group):  # one query head at a time stays in a CPU's cache
                logits[:, :, g] += (keys @ covariance[:, :, g]).mul_(keys).sum(-1)
        rest = (view.positions >= self.sinks)[:, :, None]
        scores = logits.masked_fill(~rest, float("-inf")).softmax(-1).nan_to_num(0.0).mean(2)
        if self.value_norm:
            scores = (scores + self.epsilon) * torch.linalg.vector_norm(view.values.float(), dim=-1)
        top = scores.masked_fill(~rest[:, :, 0], 0.0).amax((1, 2), keepdim=True) + 1
        return torch.where(rest[:, :, 0], scores, top)


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Method):
    """Keep the tokens that queries to come are expected to attend to, and the sinks, per KV head; at prompt end.

    kvpress is its authors' code. It needs a rotation that does not depend on the length; logits are scaled as the model
    scales them, where kvpress always divides by the root of the head size.

    Attributes:
        sinks: first tokens that are always kept, whose queries and keys take no part.
        ahead: positions after the last token over which the rotation is averaged.
        covariance: use the queries' covariance, not their mean alone.
        value_norm: weigh by the norm of the values, plus `epsilon` in the attention. kvpress's class has 0, its
            benchmarks 0.01 (preset "kvpress"), with the budget shared among heads as well (`allocator=ada`).
        interval: compress again whenever a row holds this many tokens beyond the budget. kvpress's decoding press does
            with 512, from the queries of the last 256 tokens; here all queries since the prompt began count.
    """

    family = "expected attention"
    keeps = "tokens that queries to come are expected to attend to, and sinks"
    reads = "keys, values"
    source = "arXiv 2510.00636; kvpress"
    differences = "float32; the model's own scaling of logits; in decode all queries count, not the last 256"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epsilon": 0.0},
        "code": {"epsilon": 0.0},
        "kvpress": {"epsilon": 0.01},
    }

    sinks: int = 4
    ahead: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float | None = None
    interval: int | None = None

    def check(self) -> None:
        assert self.epsilon is not None
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks}; at least 0")
        if self.ahead < 1:
            raise ValueError(f"ahead={self.ahead}; at least 1 position to come")
        if self.epsilon < 0:
            raise ValueError(f"epsilon={self.epsilon}; at least 0")

    def reserved(self) -> int:
        return self.sinks

    def make_scorer(self) -> ExpectedAttentionScorer:
        assert self.epsilon is not None
        return ExpectedAttentionScorer(self.sinks, self.ahead, self.covariance, self.value_norm, self.epsilon)

    def make_schedule(self) -> Schedule:
        return Schedule(every=self.interval)
