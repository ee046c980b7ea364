"""Decide, then apply in one place: what a session does with a method's parts after each layer's attention.

Observes what the scorer needs, asks scorer and allocator when the schedule says so, turns scores and counts into a set
of slots with sinks and window in it by construction, and has the layer keep that set.
"""

from __future__ import annotations

import torch

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import RankedStore
from kvcompress.common.clock import Clock
from kvcompress.hook.auxiliary import AuxiliaryLayer
from kvcompress.hook.incremental_evictor import steady
from kvcompress.hook.observed import remember_queries
from kvcompress.hook.scoring import Attended, Judge
from kvcompress.kernels.blockwise import Features
from kvcompress.method import Method
from kvcompress.method.parts import Reader
from kvcompress.method.selection import candidates, lowest_slot, top_slots

Tensor = torch.Tensor

KERNELS = ("auto", "blockwise")
MAX_HOLES = 32  # slots emptied in place, one per decode step, before a layer is compacted


class Compressor(Judge):
    """The runtime of one method in one session: no state of a sequence, which lives in the cache's layers."""

    def __init__(self, method: Method, n_layers: int, kernel: str = "auto"):
        if kernel not in KERNELS:
            raise ValueError(f"kernel={kernel!r}; valid: {', '.join(KERNELS)}")
        super().__init__(method, n_layers)
        self.blockwise = kernel == "blockwise"
        self.kernels: set[str] = set()
        self.clock = Clock()

    # ------------------------------------------------------------------ what attention asks

    @property
    def wants_mass(self) -> bool:
        return self.needs.mass

    @property
    def wants_probabilities(self) -> bool:
        """True if a decode step's attention weights are used: then they are computed once, with the output."""
        return self.blockwise or self.needs.mass or (self.needs.window == 1 and self.parts.schedule.in_decode)

    @property
    def _every_step(self) -> bool:
        return self.parts.schedule.every == 1 and self.parts.schedule.align == "row"

    @property
    def seconds(self) -> float:
        """Time spent compressing since the last prompt began."""
        return self.clock.seconds

    @property
    def reads_all(self) -> bool:
        return self.parts.reader.reads_all

    @property
    def reader(self) -> Reader:
        return self.parts.reader

    def kernel(self, name: str) -> None:
        """Note which attention kernel ran."""
        self.kernels.add(name)

    def select(self, layer: CompressedLayer, q: Tensor) -> Tensor | None:
        """Slots the reader lets a decode query attend to, `[B, H_kv or H, n]`, or None for all."""
        view = self._view(layer, layer.positions(), "decode", layer.counts[:, 0])
        return self.parts.reader.select(q, view, layer.state)

    @property
    def acts_in_decode(self) -> bool:
        """True if a decode step does more than attend to all that is held and store: known tokens then go one by one."""
        scheduled = self.limited and self.parts.schedule.in_decode
        return scheduled or not self.parts.reader.reads_all or self.parts.codec.name != "plain"

    # ------------------------------------------------------------------ observing

    def add_mass(self, layer: CompressedLayer, mass: Tensor, forward: Forward) -> None:
        """Add a forward's attention mass `[B, H_kv, G, P]` to the slots' sums, which fade with every new query."""
        layer.add_mass(mass, self._fading(forward))

    def add_lane_mass(self, layer: CompressedLayer, mass: Tensor, forward: Forward) -> None:
        """The same for what is held in lanes, `[lanes, G, slots]`."""
        layer.add_lane_mass(mass, self._fading(forward))

    def _fading(self, forward: Forward) -> Tensor | None:
        """What each row's sums fade to with a forward's queries, float32 `[B]`; None where nothing fades."""
        decay = self.needs.decay
        return None if decay == 1.0 else (decay ** forward.added.double()).float()

    @staticmethod
    def _forget_queries(layer: CompressedLayer) -> None:
        for name in ("queries", "query_positions"):
            layer.state.pop(name, None)

    def end_of_prompt(self, cache: CompressedCache) -> None:
        """Called when a prompt with all its chunks is in: what was seen of it is only of use to a decode schedule."""
        if not self.parts.schedule.in_decode or self.needs.window == 1:
            for layer in cache.full_layers:
                self._forget_queries(layer)
        if not self.parts.schedule.in_decode:
            for layer in cache.full_layers:
                self._forget_prompt(layer)

    def _forget_prompt(self, layer: CompressedLayer) -> None:
        for name in self.parts.scorer.prompt_state if self.parts.scorer else ():
            layer.state.pop(name, None)

    def _observe(self, at: Attended) -> None:
        """Show the scorer this forward."""
        assert self.parts.scorer is not None
        view, observed = self._shown_layer(at)
        self.parts.scorer.observe(view, observed, at.layer.state)

    # ------------------------------------------------------------------ deciding and applying

    @torch.no_grad()
    def after_attention(
        self, layer: CompressedLayer, q: Tensor, probabilities: Tensor | None, features: Features
    ) -> None:
        """Called once per layer and forward, when the output that used the un-evicted keys is computed."""
        if layer.temporary:
            return
        cache = layer.holder()
        assert isinstance(cache, CompressedCache) and cache.forward is not None
        forward, schedule = cache.forward, self.parts.schedule
        if not self.limited:
            if self.needs.window and forward.phase == "prompt" and not layer.sealed:
                remember_queries(layer, q, forward, self.needs.window)
            self.seal(layer)
            self._forget_queries(layer)
            return
        if isinstance(layer, AuxiliaryLayer):
            layer.observe(q, features, forward)
            return
        # a decode step's own attention is known already, so a window of one needs no queries there
        beyond = schedule.in_decode and self.needs.window > 1
        if self.needs.window and (forward.phase == "prompt" or beyond):
            remember_queries(layer, q, forward, self.needs.window)
        elif "queries" in layer.state:
            self._forget_queries(layer)
        layer.queries = q
        at = Attended(layer, probabilities, features, forward, cache)
        try:
            if self.observing:
                if forward.phase == "prompt" or schedule.in_decode:
                    with self.clock.running(q.device):
                        self._observe(at)
                else:
                    self._forget_prompt(layer)
            if forward.passes:  # their attention is part of the decision
                forward.deferred[layer.index] = features
            else:
                self.decide(at)
        finally:
            layer.queries = None
        if forward.phase != "prompt" or not (forward.passes or self.parts.allocator.scope != "layer"):
            self.seal(layer)

    def seal(self, layer: CompressedLayer) -> None:
        """Have a layer whose selection is final hold what it kept in the codec's form."""
        if self.parts.codec.name != "plain" and (not layer.sealed or layer.blocks is not None):
            with self.clock.running(layer.held().get("positions").device):
                layer.seal()

    def decide(self, at: Attended) -> None:
        """Score, allocate and apply in one layer that has observed this forward, if the schedule says so."""
        layer, decoding = at.layer, at.forward.phase == "decode"
        steadily = decoding and layer.steady is not None and at.cache.closed is None
        if steadily and layer.steady.holds(layer.held(), layer.target):
            with self.clock.running(layer.held().get("positions").device):
                layer.drop_one(layer.steady.pick(self._score(at)[0]))
            return
        rows = self._due(at)
        if rows is None:
            return
        layer.steady = None
        with self.clock.running(layer.positions().device):
            if decoding or self.parts.allocator.scope == "layer":
                self._compress(at, rows)
            else:
                self._score_later(at)

    def _due(self, at: Attended) -> Tensor | None:
        """Rows to compress in this layer now, bool `[B]` on the CPU, or None."""
        layer, cache, forward = at.layer, at.cache, at.forward
        schedule, counts = self.parts.schedule, layer.counts
        if forward.phase == "prompt":
            if cache.cap is None:
                return None
            layer.target = cache.cap[:, None].expand_as(counts).clone()
            if not schedule.prompt:
                return None
            if self.parts.allocator.scope != "layer":
                rows = torch.ones(len(counts), dtype=torch.bool)
            elif self.parts.allocator.uniform:
                rows = (counts > layer.target).any(1)
            else:  # a layer may get less than the cap
                assert cache.real is not None
                rows = cache.real > cache.cap
        elif forward.phase == "decode" and schedule.in_decode and layer.target is not None:
            over = (counts - layer.target).amax(1)
            if schedule.every is None:
                rows = torch.zeros(len(counts), dtype=torch.bool)
            elif schedule.align == "row":
                rows = over >= schedule.every
            else:
                assert cache.real is not None
                rows = (over > 0) & (cache.real % schedule.every == 0)
            if forward.fires is not None:
                rows |= (over > 0) & forward.fires
            if cache.closed is not None:
                rows &= ~cache.closed
            rows &= forward.added > 0
        else:
            return None
        return rows if bool(rows.any()) else None

    def _compress(self, at: Attended, rows: Tensor) -> None:
        layer, cache = at.layer, at.cache
        assert cache.cap is not None
        scores, second, positions = self._score(at)
        if at.forward.phase == "decode":
            assert layer.target is not None
            counts = layer.target
        else:
            total = cache.cap * scores.shape[1] * self.n_layers
            seen = cache.full_layers.index(layer) + 1
            shown = [self._shown(scores, positions, cache)]
            counts = self.parts.allocator.allocate(shown, [layer.stat], seen, self.n_layers, total)[0]
            layer.stat = None
        self._apply(layer, scores, second, positions, counts, rows, at.forward, cache)

    def _apply(
        self,
        layer: CompressedLayer,
        scores: Tensor,
        second: Tensor | None,
        positions: Tensor,
        counts: Tensor,
        rows: Tensor,
        forward: Forward,
        cache: CompressedCache,
    ) -> None:
        """Keep `counts` slots per head in the given rows, all of them elsewhere."""
        held, wanted = layer.counts, counts.cpu()
        counts = torch.where(rows[:, None], torch.minimum(wanted, held), held)
        protection = self._protection(counts, cache)
        cache.note_clamped((protection.clamped & rows[:, None] & (counts < held)).any(1))
        scores = self._staged(scores, second, positions, counts, protection)
        decode, drop = forward.phase == "decode", held - counts
        if decode and layer.held().holes < MAX_HOLES and int(drop.max()) == 1:
            layer.drop_one(lowest_slot(scores, positions, protection), drop > 0)
            if bool((drop == 1).all()) and second is None and self._every_step:
                assert layer.target is not None
                layer.steady = steady(layer.held(), layer.target, protection, MAX_HOLES)
            return
        must = ~candidates(positions, protection) & (positions >= 0) if layer.blocks is not None else None
        layer.keep(top_slots(scores, positions, counts, protection), grow=decode, must=must)
        if not decode:
            assert layer.target is not None
            assert cache.real is not None
            # in decode a head may grow to what it was given
            layer.target = torch.where(rows[:, None], self.parts.allocator.limit(wanted, cache.real), layer.target)

    # ------------------------------------------------------------------ allocators that look at several layers

    def _score_later(self, at: Attended) -> None:
        layer = at.layer
        scores, second, positions = self._score(at)
        layer.held().put("score", torch.stack([scores] if second is None else [scores, second], dim=-1))
        layer.shown = self._shown(scores, positions, at.cache)
        if self.parts.allocator.scope == "cascade":
            self._allocate_scored(at.cache, at.forward)

    def _allocate_scored(self, cache: CompressedCache, forward: Forward) -> None:
        """Share the budget among the layers scored so far and trim each to its new count."""
        scored = [layer for layer in cache.full_layers if layer.shown is not None]
        if not scored or cache.cap is None:
            return
        shown = [x.store.shown if isinstance(x.store, RankedStore) else x.shown for x in scored if x.shown is not None]
        total = cache.cap * scored[0].held().heads * self.n_layers
        stats = [layer.stat for layer in scored]
        counts = [c.cpu() for c in self.parts.allocator.allocate(shown, stats, len(scored), self.n_layers, total)]
        # an allocator that leaves a prompt whole beyond the budget has decode go on at the cap
        whole = torch.stack([c.sum(1) for c in counts]).sum(0) > total
        whole &= torch.stack([(c >= layer.counts).all(1) for c, layer in zip(counts, scored, strict=True)]).all(0)
        for layer, wanted in zip(scored, counts, strict=True):
            if bool((layer.counts > wanted).any()):
                self._trim(layer, wanted, forward, cache)
            assert cache.real is not None
            wanted = torch.where(whole[:, None], torch.minimum(wanted, cache.cap[:, None]), wanted)
            layer.target = self.parts.allocator.limit(wanted, cache.real)

    def _trim(self, layer: CompressedLayer, wanted: Tensor, forward: Forward, cache: CompressedCache) -> None:
        """Cut a scored layer to its new count: by rank as long as what is protected stays the same, else anew."""
        held = layer.counts
        counts, protected = torch.minimum(wanted, held), self._protected(layer.held().heads, cache)
        protection = self._protection(counts, cache)
        one_stage = isinstance(layer.store, RankedStore) or self._held_scores(layer)[1] is None
        one_stage &= layer.blocks is None
        if (
            one_stage
            and torch.equal(protection.sinks, protected.sinks)
            and torch.equal(protection.window, protected.window)
        ):
            cache.note_clamped((protection.clamped & (counts < held)).any(1))
            layer.cut(counts)
            return
        layer.finish()
        scores, second = self._held_scores(layer)
        everyone = torch.ones(len(wanted), dtype=torch.bool)
        self._apply(layer, scores, second, layer.positions(), wanted, everyone, forward, cache)
        layer.shown = self._shown(self._held_scores(layer)[0], layer.positions(), cache)

    @staticmethod
    def _held_scores(layer: CompressedLayer) -> tuple[Tensor, Tensor | None]:
        """Scores of both stages that travel with a layer's slots."""
        scores = layer.held().get("score")
        return scores[..., 0], scores[..., 1] if scores.shape[-1] > 1 else None

    @torch.no_grad()
    def end_of_forward(self, cache: CompressedCache) -> None:
        """Called when all layers have run: allocators that needed all scores decide now."""
        forward = cache.forward
        if not self.limited or forward is None or forward.phase != "prompt":
            return
        for layer in cache.full_layers:
            if layer.index in forward.deferred:
                self.decide(Attended(layer, None, forward.deferred[layer.index], forward, cache))
                if self.parts.allocator.scope == "layer":
                    self.seal(layer)
        if self.parts.allocator.scope == "layer":
            return
        with self.clock.running(cache.full_layers[-1].device):
            if self.parts.allocator.scope == "all":
                self._allocate_scored(cache, forward)
            for layer in cache.full_layers:
                layer.stat = layer.shown = None
                if layer.store is not None:
                    layer.finish()
                    layer.held().drop_channel("score")
                    self.seal(layer)
