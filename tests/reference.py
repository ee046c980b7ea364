"""Slow references, written without looking at the library: they know transformers and the papers' definitions only.

`MaskedReference` runs the model's own eager attention over a cache that never forgets, with a keep mask per layer and
KV head on top. The `Loop*` classes decide with plain Python loops over captured queries and keys what a method keeps,
and drive the masked reference with it, step by step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

NAME = "test_masked_reference"
_active: dict[int, MaskedReference] = {}  # id(attention module) -> the reference that runs it


@dataclass
class AttentionParams:
    """What a layer's attention does beside softmax(q k): its scaling, soft-cap and sinks."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None


def _masked_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any):
    """The model's own eager attention, with the reference's keep mask added for this layer."""
    reference = _active[id(module)]
    layer = module.layer_idx
    features = AttentionParams(kwargs["scaling"], kwargs.get("softcap"), kwargs.get("s_aux"))
    reference.captured[layer] = (query.detach().clone(), key.detach().clone(), features)
    reference.values[layer] = value.detach().clone()
    keep = reference.keep.get(layer)
    assert attention_mask is not None and attention_mask.dim() == 4, "the reference needs eager's 4D mask"
    if keep is not None:
        batch, heads, length = key.shape[:3]
        visible = torch.ones(batch, heads, length, dtype=torch.bool)
        visible[:, :, : keep.shape[-1]] = keep
        visible = visible.repeat_interleave(query.shape[1] // heads, dim=1)[:, :, None]
        lowest = torch.finfo(attention_mask.dtype).min
        attention_mask = torch.where(visible, attention_mask.expand(batch, query.shape[1], -1, -1), lowest)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NAME, _masked_attention)
AttentionMaskInterface.register(NAME, eager_mask)


class MaskedReference:
    """A model over a full-length cache, in which `keep[layer]` `[B, H_kv, T]` marks what is seen of T columns.

    Columns past T are visible. Columns are physical: padding included. Use as a context manager; inside, the model
    answers through `forward`. `captured[layer]` holds the last forward's queries, all keys and its features.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.keep: dict[int, Tensor] = {}
        self.captured: dict[int, tuple[Tensor, Tensor, AttentionParams]] = {}
        self.values: dict[int, Tensor] = {}
        self.cache = DynamicCache()  # no config: every layer, sliding ones too, holds everything
        self.mask: Tensor | None = None

    def __enter__(self) -> MaskedReference:
        self._before = self.model.config._attn_implementation
        self._modules = [id(m) for m in self.model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
        _active.update(dict.fromkeys(self._modules, self))
        self.model.set_attn_implementation(NAME)
        assert self.model.config._attn_implementation == NAME
        return self

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self._before)
        for module in self._modules:
            del _active[module]

    @torch.no_grad()
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits `[B, n, V]` of the next `n` columns; `mask` `[B, n]` says which are real."""
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(
            ids, attention_mask=self.mask, position_ids=positions, cache=self.cache, use_cache=True
        ).logits

    @property
    def seen(self) -> int:
        """Columns seen, padding included."""
        return 0 if self.mask is None else self.mask.shape[1]


@torch.no_grad()
def stock_logits(model: Any, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Logits of the model as it is, in one forward, with positions counted over real tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, position_ids=positions, use_cache=False, **kwargs).logits


# ---------------------------------------------------------------------------------------------- what methods keep


def share_or_tokens(budget: float | int, real: int) -> int:
    """The cap of a row with `real` tokens: Python's rounding, at least 1."""
    return budget if isinstance(budget, int) else max(1, round(budget * real))


def best(scores: dict[int, float], count: int) -> set[int]:
    """The `count` columns with the highest score; of equals the earlier."""
    return set(sorted(scores, key=lambda column: (-scores[column], column))[: max(count, 0)])


@dataclass
class Choice:
    """One decision: what was kept of which scores, and what was protected. To compare as a valid top-k."""

    kept: set[int]
    scores: dict[int, float]  # of the columns that were ranked
    protected: set[int]

    def allows(self, kept: set[int], tolerance: float = 1e-5) -> bool:
        """True if `kept` equals the choice up to columns whose scores are equal within rounding."""
        if kept == self.kept:
            return True
        if len(kept) != len(self.kept) or not self.protected <= kept or not kept <= self.protected | set(self.scores):
            return False
        inside = [self.scores[c] for c in kept - self.protected]
        outside = [self.scores[c] for c in set(self.scores) - kept - self.protected]
        return not inside or not outside or min(inside) >= max(outside) - tolerance


@dataclass
class Loop:
    """Runs a method by loops: `step` feeds tokens, attends to what is kept, then decides anew. Columns are physical.

    Subclasses implement `decide`. `kept[layer][row][head]` is the set of columns still held.
    """

    model: Any
    budget: float | int
    layers: list[int] | None = None
    in_decode: bool = True
    shares: dict[tuple[int, int], float] | None = None  # (layer, head) -> share of the cap of the whole row, summed
    caps: list[int] | None = None
    kept: dict[int, list[list[set[int]]]] = field(default_factory=dict)
    choices: dict[tuple[int, int, int], Choice] = field(default_factory=dict)
    mass: dict[tuple[int, int, int], list[dict[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reference = MaskedReference(self.model)

    def __enter__(self) -> Loop:
        self.reference.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.reference.__exit__(*exception)

    def step(
        self, ids: Tensor, mask: Tensor | None = None, *, prompt: bool | None = None, compress: bool = True
    ) -> Tensor:
        """Feed `[B, n]` ids; a prompt (default: more than one token) fixes the caps anew. Logits `[B, n, V]`."""
        prompt = ids.shape[1] > 1 if prompt is None else prompt
        before = self.reference.seen
        logits = self.reference.forward(ids, mask)
        real = self.reference.mask.bool()
        new = range(before, self.reference.seen)
        if prompt and compress:
            self.caps = [share_or_tokens(self.budget, int(real[b].sum())) for b in range(len(ids))]
        for layer in self.layers if self.layers is not None else sorted(self.reference.captured):
            query, key, features = self.reference.captured[layer]
            heads = key.shape[1]
            rows = self.kept.setdefault(layer, [[set() for _ in range(heads)] for _ in range(len(ids))])
            for b in range(len(ids)):
                for h in range(heads):
                    rows[b][h] |= {c for c in new if real[b, c]}
                self.observe(layer, b, query[b], key[b], features, rows[b], [c for c in new if real[b, c]], before)
                if compress and (prompt or self.in_decode):
                    self.decide(layer, b, query[b], key[b], features, rows[b])
            self._write(layer)
        return logits

    def _write(self, layer: int) -> None:
        rows = self.kept[layer]
        keep = torch.zeros(len(rows), len(rows[0]), self.reference.seen, dtype=torch.bool)
        for b, row in enumerate(rows):
            for h, columns in enumerate(row):
                keep[b, h, sorted(columns)] = True
        self.reference.keep[layer] = keep

    def adopt(self, layer: int, b: int, h: int, columns: set[int]) -> None:
        """Go on from an equally good choice."""
        self.kept[layer][b][h] = set(columns)
        self._write(layer)

    def real_index(self, b: int, columns: set[int]) -> list[int]:
        """Columns of row `b` counted over its real tokens."""
        offset = int((self.reference.mask[b] == 0).sum())
        return sorted(c - offset for c in columns)

    def cap(self, layer: int, b: int, h: int) -> int:
        """Tokens that a head may keep: the row's cap, or its part of the row's whole budget."""
        if self.shares is None:
            return self.caps[b]
        return int(self.caps[b] * len(self.shares) * self.shares[layer, h] + 1e-9)

    def probabilities(
        self, query: Tensor, key: Tensor, features: AttentionParams, h: int, columns: list[int], offset: int, at: int
    ):
        """Softmax of the query at column `at` over `columns` (those up to itself), per query head of KV head `h`."""
        group = query.shape[0] // key.shape[0]
        visible = [c for c in columns if c <= at]
        for g in range(group):
            q = query[h * group + g, at - offset]
            logits = ((q * key[h, visible]).sum(-1) * features.scaling).float()
            if features.softcap is not None:
                logits = features.softcap * torch.tanh(logits / features.softcap)
            if features.sinks is not None:
                logits = torch.cat([logits, features.sinks[h * group + g].float().view(1)])
            yield dict(zip(visible, torch.softmax(logits, 0).tolist(), strict=False))

    def observe(self, layer, b, query, key, features, row, new, offset) -> None:
        """See the new columns' attention. `row[h]` holds what is visible, the new columns included."""

    def decide(self, layer, b, query, key, features, row) -> None:
        """Reduce `row[h]` to what the method keeps, and note the choice."""
        raise NotImplementedError


@dataclass
class LoopH2O(Loop):
    recent_share: float = 0.5
    group_reduce: str = "mean"

    def observe(self, layer, b, query, key, features, row, new, offset):
        group = query.shape[0] // key.shape[0]
        for h in range(key.shape[0]):
            mass = self.mass.setdefault((layer, b, h), [{} for _ in range(group)])
            columns = sorted(row[h])
            for at in new:
                for g, probabilities in enumerate(self.probabilities(query, key, features, h, columns, offset, at)):
                    for c, p in probabilities.items():
                        mass[g][c] = mass[g].get(c, 0.0) + p

    def decide(self, layer, b, query, key, features, row):
        for h in range(len(row)):
            cap = self.cap(layer, b, h)
            recent_count = int(cap * self.recent_share)
            if len(row[h]) <= cap:
                continue
            columns = sorted(row[h])
            recent = set(columns[len(columns) - recent_count :])
            per_head = self.mass[layer, b, h]
            reduce = max if self.group_reduce == "max" else lambda values: sum(values) / len(values)
            scores = {c: reduce([m.get(c, 0.0) for m in per_head]) for c in columns if c not in recent}
            row[h] = best(scores, cap - recent_count) | recent
            self.choices[layer, b, h] = Choice(set(row[h]), scores, recent)


@dataclass
class LoopTOVA(Loop):
    def decide(self, layer, b, query, key, features, row):
        cap, columns = self.caps[b], sorted(row[0])
        assert all(sorted(r) == columns for r in row), "TOVA keeps the same set in every head"
        if len(columns) <= cap:
            return
        last = self.reference.seen - 1
        offset = self.reference.seen - query.shape[1]
        scores = dict.fromkeys(columns, 0.0)
        for h in range(len(row)):
            for probabilities in self.probabilities(query, key, features, h, columns, offset, last):
                for c, p in probabilities.items():
                    scores[c] += p / query.shape[0]
        for h in range(len(row)):
            row[h] = best(scores, cap)
            self.choices[layer, b, h] = Choice(set(row[h]), scores, set())


@dataclass
class LoopSnapKV(Loop):
    """The last `window` queries observe; where the cap is too small, fewer of their tokens are protected."""

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    group_reduce: str = "mean"
    reduce_first: bool = True
    in_decode: bool = False

    def _pool(self, values: list[float]) -> list[float]:
        half = self.kernel // 2
        pooled = []
        for j in range(len(values)):
            near = values[max(0, j - half) : j + half + 1]
            pooled.append(max(near) if self.pooling == "max" else sum(near) / self.kernel)
        return pooled

    def _reduce(self, lists: list[list[float]]) -> list[float]:
        if self.group_reduce == "max":
            return [max(values) for values in zip(*lists, strict=True)]
        return [sum(values) / len(values) for values in zip(*lists, strict=True)]

    def decide(self, layer, b, query, key, features, row):
        cap = self.caps[b]
        offset = self.reference.seen - query.shape[1]
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) <= cap:
                continue
            prefix, recent = columns[: len(columns) - window], columns[len(columns) - window :]
            per_head = [[0.0] * len(prefix) for _ in range(query.shape[0] // key.shape[0])]
            for at in [c for c in range(offset, self.reference.seen) if self.reference.mask[b, c]][-self.window :]:
                for g, probabilities in enumerate(self.probabilities(query, key, features, h, columns, offset, at)):
                    for j, c in enumerate(prefix):
                        per_head[g][j] += probabilities.get(c, 0.0)
            if self.reduce_first:
                pooled = self._pool(self._reduce(per_head))
            else:
                pooled = self._reduce([self._pool(values) for values in per_head])
            scores = dict(zip(prefix, pooled, strict=True))
            row[h] = best(scores, cap - window) | set(recent)
            self.choices[layer, b, h] = Choice(set(row[h]), scores, set(recent))


@dataclass
class LoopStreamingLLM(Loop):
    sinks: int = 4

    def decide(self, layer, b, query, key, features, row):
        cap = self.caps[b]
        sinks = self.sinks if cap >= self.sinks + 1 else cap - 1
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) > cap:
                row[h] = set(columns[:sinks]) | set(columns[len(columns) - (cap - sinks) :])
                self.choices[layer, b, h] = Choice(set(row[h]), {}, set(row[h]))
