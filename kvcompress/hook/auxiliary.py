"""Auxiliary forwards: a scorer's extra inputs, run against the un-evicted cache when a prompt is in (KVzip).

They are observed and not stored. Each row of the batch has inputs of its own, run alone, so that it gets what it gets
without its neighbours. An input sees the cache through layers that hold one row's copy, with the input's tokens behind
it, while that layer's attention runs and nothing afterwards: the cache itself is never written, and memory grows by a
layer, not by a cache. What is kept is the strongest attention each key got, beside the keys.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.encoding import BESIDE
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore, Store
from kvcompress.cache.sequence import SequenceState
from kvcompress.hook.run_stats import RunStats
from kvcompress.hook.runner import ForwardRequest, ForwardRunner
from kvcompress.kernels.blockwise import ALL, AttentionParams, blocks, softmax_block, units, visible
from kvcompress.method import Method, Needs
from kvcompress.method.parts import Parts
from kvcompress.method.view import Pass
from kvcompress.models import compat

Tensor = torch.Tensor

LEAST = torch.finfo(torch.float32).tiny  # an attention that rounds to nothing: 0 says that no pass has observed the key


class AuxiliaryLayer(CompressedLayer):
    """One row of a layer as a pass sees it; holds a copy while attention runs, then notes what it saw and lets go."""

    observing_only = True

    def __init__(self, cache: CompressedCache, source: CompressedLayer, row: int, of: Pass):
        super().__init__(cache, source.index)
        self.source, self.row, self.of, self.seen = source, row, of, source.seen
        self.device = source.device

    @property
    def length(self) -> int:
        return self.source.length if self.store is None else self.store.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.store = one_row(self.source.held(), self.row)
        self.encoding = self.source.encoding.select(self.context, torch.tensor([self.row]))
        return super().update(key_states, value_states, *args, **kwargs)

    def observe(self, q: Tensor, features: AttentionParams, forward: Forward) -> None:
        """Raise what the observed keys have got to their strongest attention in this pass, `q [1, H, n, D]`."""
        asked = forward.on("positions", q.device)
        got, inside = strongest(q, self.keys_values()[0], self.positions(), asked, self.of, features)
        store, heads = self.source.held(), got.shape[1]
        if "passes" not in store.channels:
            store.put("passes", got.new_zeros(store.counts.shape[0], heads, store.length, 1))
        noted = store.get("passes")
        mine = noted[self.row, :, store.length - got.shape[2] :, 0]  # empty slots of a ragged row are at the left
        mine.copy_(torch.where(inside[0], torch.maximum(mine, got[0].clamp(min=LEAST)), mine))
        if not isinstance(store, DenseStore):
            store.put("passes", noted)
        self.store = self.current_kv = self.encoding.groups = None


def one_row(store: Store, row: int) -> Store:
    """A store of one row's keys, values and positions: views of a dense one until something is appended."""
    channels = {name: store.channels[name] for name in store.channels if name == "positions" or name not in BESIDE}
    if isinstance(store, DenseStore):
        return DenseStore({name: store.get(name)[row : row + 1] for name in channels}, store.counts[row : row + 1])
    chosen = store.sharing(channels)
    chosen.select_rows(torch.tensor([row]))
    return chosen


def strongest(
    q: Tensor, keys: Tensor, positions: Tensor, asked: Tensor, of: Pass, features: AttentionParams
) -> tuple[Tensor, Tensor]:
    """The strongest attention that held keys get from the queries of a pass, over query heads and queries, in float32.

    The softmax runs over the keys that the pass observes, the first `of.beside` ones and the pass's own up to the
    query. Blocks of queries one after the other: no more than a block's logits exist at a time.

    Args:
        q: `[1, H, n, D]`; keys `[1, H_kv, P + n, D]`, the pass's own last.
        positions: int `[1, H_kv or 1, P + n]`; asked: int `[1, n]`, of the queries.

    Returns:
        `[1, H_kv, P]`, 0 at keys that are not observed, and the bool `[1, H_kv, P]` that says which are.
    """
    heads, n = keys.shape[1], q.shape[2]
    held = keys.shape[2] - n
    old = positions[..., :held]
    inside = (old >= of.first) & (old < of.last)
    taken = inside | ((old >= 0) & (old < of.beside))
    columns = taken.any(1)[0].nonzero().squeeze(1)
    number = len(columns)
    columns = torch.cat([columns, torch.arange(held, held + n, device=columns.device)])
    at = torch.cat([old.masked_fill(~taken, -1), positions[..., held:]], dim=2).index_select(2, columns)
    keys = keys.index_select(2, columns)
    top = torch.zeros(1, heads, number, device=q.device)
    for batch, kv, query_heads in units(q, keys):
        part = replace(features, sinks=features.sinks[query_heads]) if features.sinks is not None else features
        k, seen_at = keys[batch, kv], at[:, kv if at.shape[1] > 1 else ALL[1]]
        for rows in blocks(n, q[batch, query_heads], k):
            allowed = visible(seen_at, asked[:, rows], features.window)
            _, p = softmax_block(q[batch, query_heads, rows], k, k[..., :1], allowed, part)
            top[batch, kv] = torch.maximum(top[batch, kv], p[..., :number].amax((2, 3)))
    found = torch.zeros(1, heads, held, device=q.device)
    found[:, :, columns[:number]] = top
    inside = inside.expand(-1, heads, -1)
    return found.masked_fill(~inside, 0.0), inside


class MethodInUse(Protocol):
    """The runtime of a session's method, as far as auxiliary forwards depend on it."""

    method: Method
    parts: Parts
    needs: Needs
    stats: RunStats


class AuxiliaryForwards:
    """Plans a scorer's extra inputs when a prompt is fed, and runs them when it is in."""

    def __init__(self, model: PreTrainedModel, in_use: MethodInUse, tokenizer: Any, runner: ForwardRunner) -> None:
        self._model, self._in_use, self._tokenizer, self._runner = model, in_use, tokenizer, runner

    def plan(self, cache: CompressedCache, forward: Forward, tokens: Tensor) -> None:
        """Note the ids that are fed, and the inputs that follow when they are in: `forward.pending.passes`.

        Args:
            tokens: what is fed, ids `[B, n]` or embeddings `[B, n, hidden]`.

        Raises:
            ValueError: embeddings instead of ids, or inputs that do not fit the model's positions.
        """
        in_use = self._in_use
        if not in_use.needs.extra_passes or forward.phase == "pass":
            return
        name = type(in_use.method).__name__
        if tokens.dim() != 2:
            raise ValueError(f"{name} repeats the prompt to the model: give input_ids, not inputs_embeds")
        state, known = cache.sequence, tokens.long()
        if forward.real is not None:
            known = known.masked_fill(~forward.on("real", tokens.device), -1)
        if state.fed is not None:
            known = torch.cat([state.fed, known.to(state.fed.device)], dim=1)
        passed = torch.zeros(len(known), 1, dtype=torch.long) if state.passed is None else state.passed
        if forward.phase == "prompt" and cache.cap is not None and in_use.parts.schedule.prompt:
            assert cache.real is not None and in_use.parts.scorer is not None
            passed, limit = passed.clone(), compat.max_positions(self._model)
            for row in (cache.real > cache.cap).nonzero().squeeze(1).tolist():
                ids = known[row][known[row] >= 0].cpu()
                for of in in_use.parts.scorer.passes(ids, self._tokenizer, int(passed[row])):
                    if limit is not None and len(ids) + len(of.ids) > limit:
                        raise ValueError(
                            f"{name} needs {len(of.ids)} positions behind a prompt of {len(ids)} tokens for a pass over "
                            f"{of.last - of.first} of them, and the model has {limit}: shorten the prompt, or lower `chunk`"
                        )
                    forward.pending.passes.append((row, of))
                passed[row] = len(ids)
        cache.note_fed(known, passed)

    @torch.no_grad()
    def run(self, cache: CompressedCache, forward: Forward) -> None:
        """Run the inputs that were planned for this prompt. Their time is time spent compressing."""
        if not forward.pending.passes:
            return
        following = _next_rotation(forward, len(cache.real) if cache.real is not None else 1)
        base, device = compat.base_model(self._model), self._model.device
        try:
            with self._runner.requesting(ForwardRequest("pass")), self._in_use.stats.clock.running(device):
                for row, of in forward.pending.passes:
                    ids = of.ids.to(device)[None]
                    at = torch.arange(ids.shape[1], device=device)[None] + following[row]
                    base(input_ids=ids, cache=_seen_by_row(cache, row, of), position_ids=at, use_cache=True)
        finally:
            self._runner.cache = cache


def _next_rotation(forward: Forward, batch: int) -> list[int]:
    """The position id that follows a row's last real token, as the model counted them in this forward."""
    rotated = forward.rotated.cpu().expand(batch, -1)
    if forward.real is not None:
        rotated = rotated.masked_fill(~forward.real, -1)
    return [int(last) + 1 for last in rotated.amax(1)]


def _seen_by_row(cache: CompressedCache, row: int, of: Pass) -> CompressedCache:
    """A cache that reads one row of another and keeps nothing."""
    chosen = torch.tensor([row])

    def layers(reading: CompressedCache) -> list[Any]:
        found: list[Any] = []
        for layer in cache.layers:
            if isinstance(layer, CompressedLayer):
                found.append(AuxiliaryLayer(reading, layer, row, of))
            else:  # sliding window: a copy of the row, whose own keys the pass pushes out
                windowed: Any = copy.copy(layer)
                windowed.batch_select_indices(chosen.to(windowed.keys.device))
                found.append(windowed)
        return found

    one, spec = cache.sequence.select(chosen), replace(cache.spec, limited=True)
    return CompressedCache(spec, layers, SequenceState(real=one.real, columns=one.columns, shift=one.shift))
