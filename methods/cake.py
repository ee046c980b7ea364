"""CAKE: layers share the budget by preference, in a cascade during prefill (Qin et al., ICLR 2025, arXiv 2503.12491)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.method import Allocator, LayerView, Needs, Observed, Schedule, Tensor
from kvcompress.method.apportion import evenly, occupancy, proportional
from kvcompress.method.budget import protect
from kvcompress.methods.snapkv import SnapKV, WindowScorer


def spread(attention: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over the window's queries, `[B, H_kv, G, P]`; 0 variance of a single query."""
    number = valid.sum(1).clamp(min=1)[:, None, None, None]
    mean = attention.sum(3) / number
    apart = (attention - mean[:, :, :, None]).square_()
    if not bool(valid.all()):
        apart *= valid[:, None, None, :, None]
    return mean, apart.sum(3) / (number - 1).clamp(min=1)


def window_spread(observed: Observed, size: int) -> tuple[Tensor, Tensor]:
    """`spread` of a layer's window, worked out once where scorer and allocator both ask."""
    known = vars(observed).setdefault("window_spread", {})
    if size not in known:
        known[size] = spread(*observed.window(size))
    return known[size]


@dataclass(frozen=True)
class IndicatorScorer(WindowScorer):
    """Mean plus `gamma` times the variance of a key's attention over the window.

    In decode it may be the last query's attention alone, where a token is dropped after each.
    """

    gamma: float = 200.0
    last_query: bool = True
    traceable: ClassVar[bool] = True  # where it is asked after each token: then by the last query alone
    in_order: ClassVar[bool] = True

    def votes(self, view: LayerView, observed: Observed) -> Tensor:
        if view.phase == "decode" and self.last_query:
            return observed.window(1)[0].squeeze(3)
        mean, variance = window_spread(observed, self.size)
        return mean + self.gamma * variance


@dataclass(frozen=True)
class Preference(Allocator):
    """Layers get what is not protected in proportion to H^(1/tau1) x V^(1/tau2); heads of a layer get the same.

    H is the entropy of the window's attention over the prefix (how widely it spreads) and V its variance over the
    window's queries (how much it moves), summed over heads, in float32. Decided anew after every layer among those
    seen, so that no more than the budget and one layer is ever held.

    Attributes:
        tau1, tau2: temperatures, infinite for no influence. The released code tunes them per model and budget and falls
            back to 1, 1.
        window: queries that observe.
        repair: "exact" rounds so that budgets add up and never grow from layer to layer (which could not bring evicted
            tokens back); "published" repairs them as the released code does, which loses up to 2% of the total.
        gate: leave a row whole that holds at most its cap plus the window, as the released code does.
    """

    scope: ClassVar = "cascade"
    name: ClassVar[str] = "cake"

    tau1: float = 1.0
    tau2: float = 1.0
    window: int = 32
    repair: str = "exact"
    gate: bool = False

    def __post_init__(self) -> None:
        if not (self.tau1 > 0 and self.tau2 > 0):
            raise ValueError(f"tau1={self.tau1}, tau2={self.tau2}; above 0, inf for no influence")
        if self.window < 2:
            raise ValueError(f"window={self.window}; a variance needs at least 2 queries")
        if self.repair not in ("exact", "published"):
            raise ValueError(f"repair={self.repair!r}; valid: exact, published")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def stat(self, view: LayerView, observed: Observed) -> Tensor:
        """The layer's preference, float64 `[B]` on the CPU."""
        attention, _ = observed.window(self.window)
        held = view.positions >= 0
        window = protect(view.kept, 0, self.window).window.to(held.device)[:, None, None]
        prefix = held & (held.cumsum(-1) <= held.sum(-1, keepdim=True) - window)
        # summed over queries first: the window's columns are then cheap to leave out
        entropy = -(attention + 1e-10).log_().mul_(attention).sum((2, 3)).masked_fill_(~prefix, 0.0).sum((1, 2))
        variance = window_spread(observed, self.window)[1].sum(2).masked_fill_(~prefix, 0.0).sum((1, 2))
        h, v = entropy.double().clamp(min=1e-30), variance.double().clamp(min=1e-30)
        return (h.log() / self.tau1 + v.log() / self.tau2).exp().cpu()

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        occupied = [occupancy(s) for s in scores]
        heads = scores[0].shape[1]
        counts = [torch.empty_like(held) for held, _ in occupied]
        for row, cap in enumerate((total // (n_layers * heads)).tolist()):
            held = [int(h[row].max()) for h, _ in occupied]
            guarded = [int(p[row].max()) for _, p in occupied]
            if self.gate and max(held) <= cap + self.window:
                for layer, n in enumerate(held):
                    counts[layer][row] = n
                continue
            # layers to come protect what this one does
            free = cap * n_layers - sum(guarded) - guarded[-1] * (n_layers - layers_seen)
            row_counts = self.numbers([float(s[row]) for s in stats], held, guarded, max(free, 0))
            if layers_seen == n_layers and sum(held) <= cap * n_layers:  # everything stays, with room to grow
                room = evenly(cap * n_layers - sum(held), n_layers)
                row_counts = [n + more for n, more in zip(held, room, strict=True)]
            for layer, n in enumerate(row_counts):
                counts[layer][row] = n
        return counts

    def numbers(self, preferences: list[float], held: list[int], guarded: list[int], free: int) -> list[int]:
        """Tokens per head of each layer seen, of which `guarded` come first and `free` in all are handed out."""
        room = [h - g for h, g in zip(held, guarded, strict=True)]
        if self.repair == "published":
            handed = published(preferences, room, free)
        else:
            least = [min(max(1 - g, 0), r) for g, r in zip(guarded, room, strict=True)]
            handed = proportional(preferences, least, room, free)
        return [max(n + g, 1) for n, g in zip(handed, guarded, strict=True)]


def published(preferences: list[float], room: list[int], total: int) -> list[int]:
    """The released code's repair: cut down, clip, share the clipped equally, then add or take equally to the total."""
    whole = sum(preferences) or 1.0
    wanted = [int(p / whole * total) for p in preferences]
    counts = [min(n, r) for n, r in zip(wanted, room, strict=True)]

    def equally(amount: int, layers: list[int]) -> None:
        for i, part in zip(layers, evenly(amount, len(layers)) if layers else [], strict=True):
            counts[i] += part

    equally(sum(wanted) - sum(counts), [i for i, n in enumerate(counts) if n < room[i]])
    off = total - sum(counts)
    if off > 0:
        equally(off, [i for i, n in enumerate(counts) if n < room[i]])
    elif off < 0:
        layers = [i for i, n in enumerate(counts) if n > 1]
        for i, part in zip(layers, evenly(-off, len(layers)) if layers else [], strict=True):
            counts[i] -= part
    return [min(max(n, 0), r) for n, r in zip(counts, room, strict=True)]


@dataclass(frozen=True, kw_only=True)
class CAKE(SnapKV):
    """Evict by mean and variance of the window's attention, layer by layer, within budgets that layers compete for.

    At prompt end in a cascade (paper section 4), then in decode one token per head and step, by the last query's
    attention; under a schedule that drops many tokens at once, by the last window's, as at prompt end.

    Attributes:
        gamma: weight of the variance in a token's score.
        tau1, tau2: temperatures of entropy and variance in a layer's preference.
        repair: of budgets that are not whole: "exact", or "published" as in the released code.
        gate: leave a prompt of up to budget plus window whole and come down to the budget in decode, as the released
            code does; else the budget holds.
        decode: evict after every decoded token.
        window, kernel, pooling, group_reduce, reduce_first: as in SnapKV; 32, 5 and "avg" in paper and code.
    """

    family = "layer budgets"
    keeps = "mean and variance of what the last queries attend to; layers compete in a cascade"
    source = "arXiv 2503.12491; antgroup/cakekv"
    differences = (
        "budgets add up and never grow from layer to layer unless repair=published; variances in float32 (half "
        "precision loses most of them); rows of a batch are independent; prompts just above the budget are cut "
        "too unless gate=true; in decode scores are pooled over neighbours in the text (the released code pools in the "
        "order in which its cache holds them, by score)"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"window": 32, "kernel": 5, "pooling": "avg", "reduce_first": True}
        | {"repair": "exact", "gate": False},
        "code": {"window": 32, "kernel": 5, "pooling": "avg", "reduce_first": False}
        | {"repair": "published", "gate": True},
    }

    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    repair: str | None = None
    gate: bool | None = None
    decode: bool = True

    def check(self) -> None:
        super().check()
        if not (math.isfinite(self.gamma) and self.gamma >= 0):
            raise ValueError(f"gamma={self.gamma}; at least 0")
        self.make_allocator()

    def notes(self, model: Any) -> list[str]:
        layers = model.config.get_text_config().num_hidden_layers
        return ["CAKE shares the budget between layers, and this model has one"] if layers == 1 else []

    def make_scorer(self) -> IndicatorScorer:
        assert self.window and self.kernel and self.pooling
        return IndicatorScorer(
            self.window,
            self.kernel,
            self.pooling,
            self.group_reduce,
            bool(self.reduce_first),
            self.gamma,  # type: ignore[arg-type]
            (self.schedule or self.make_schedule()).every == 1,
        )

    def make_allocator(self) -> Allocator:
        assert self.window is not None and self.repair is not None
        return Preference(self.tau1, self.tau2, self.window, self.repair, bool(self.gate))

    def make_schedule(self) -> Schedule:
        return Schedule(every=1 if self.decode else None)
