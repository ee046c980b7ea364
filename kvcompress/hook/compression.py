"""Compressor: eviction pipeline, once per layer after attention: observe, score, allocate, select, evict, encode."""

from __future__ import annotations

import torch

from kvcompress.cache.attention_mass import add_lane_mass, add_mass
from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import RaggedStore
from kvcompress.hook.budget_sharing import BudgetSharing
from kvcompress.hook.evictor import Evictor
from kvcompress.hook.model_facts import ModelFacts
from kvcompress.hook.recording import PrefillRecording
from kvcompress.hook.run_stats import RunStats
from kvcompress.hook.scoring import LayerScoring, LayerStep, evicts, needs_of
from kvcompress.hook.trigger import Trigger
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method import Method
from kvcompress.method.parts import Reader

Tensor = torch.Tensor

KERNELS = ("auto", "blockwise")


class Compressor:
    """Runtime of one method in one session: told of each layer's attention, it has the layer evict and encode.

    State of a sequence lives in the cache and its layers. Here are the method taken apart, and statistics of what ran.

    Attributes:
        limited: tokens may be dropped.
        needs: what scorer, allocator and codec want to observe.
        blockwise: the kernel that yields probabilities runs everywhere.
        stats: kernels that ran, and time.
    """

    def __init__(
        self,
        method: Method,
        n_layers: int,
        kernel: str = "auto",
        facts: ModelFacts | None = None,
        recording: PrefillRecording | None = None,
    ):
        """Args:
            n_layers: full-attention layers, which share the budget.
            kernel: one of `KERNELS`.
            facts: of the model, as far as scorers need them.
            recording: observe a full prefill for other methods, and drop nothing.

        Raises:
            ValueError: an unknown kernel, a schedule without its tokens, or needs that are not served.
        """
        if kernel not in KERNELS:
            raise ValueError(f"kernel={kernel!r}; valid: {', '.join(KERNELS)}")
        self.method, self.parts = method, method.parts()
        if self.parts.schedule.unresolved:
            raise ValueError(
                f"the schedule {self.parts.schedule} speaks of tokens and needs the model's tokenizer: "
                "compress(model, method, tokenizer=tokenizer), or a model that comes from kvcompress.load"
            )
        self.limited = evicts(method, self.parts)
        self.recording = recording
        self.needs = needs_of(method) if recording is None else recording.needs
        if self.needs.hidden:
            raise ValueError(
                f"{type(method).__name__} needs 'hidden', which this version's hook layer does not observe"
            )
        self.blockwise = kernel == "blockwise"
        self.stats = RunStats()
        self.scoring = LayerScoring(self.parts, n_layers, facts or ModelFacts())
        self.trigger = Trigger(self.parts)
        self.evictor = Evictor(self.parts, self.scoring, self.trigger.every_step)
        self.sharing = BudgetSharing(self.parts, self.scoring, self.evictor, n_layers)

    # ------------------------------------------------------------------ what attention asks

    @property
    def wants_mass(self) -> bool:
        return self.needs.mass

    @property
    def mass_decay(self) -> float:
        return self.needs.decay

    @property
    def wants_probabilities(self) -> bool:
        """True if the attention weights of decode steps are used."""
        return self.wants_weights("decode")

    def wants_weights(self, phase: str) -> bool:
        evicts = self.parts.schedule.in_decode
        mass = self.needs.mass and (evicts or phase != "decode")  # what nobody will ask for is not summed
        return self.blockwise or mass or (self.needs.window == 1 and evicts)

    @property
    def reader(self) -> Reader:
        return self.parts.reader

    @property
    def acts_in_decode(self) -> bool:
        """True if a decode step does more than attend to all that is held and store: known tokens then go one by one."""
        scheduled = self.limited and self.parts.schedule.in_decode
        return scheduled or not self.parts.reader.reads_all or self.parts.codec.name != "plain"

    def select(self, layer: CompressedLayer, q: Tensor) -> Tensor | None:
        """Slots the reader lets a decode query attend to, `[B, H_kv or H, n]`, or None for all."""
        view = self.scoring.view(layer, layer.positions(), "decode", layer.counts[:, 0])
        return self.parts.reader.select(q, view, layer.reader_state)

    def add_mass(self, layer: CompressedLayer, mass: Tensor, forward: Forward) -> None:
        """Add a forward's attention mass `[B, H_kv, G, P]` to the slots' sums, which fade with every new query."""
        add_mass(layer.held(), mass, self._fading(forward))

    def add_lane_mass(self, layer: CompressedLayer, mass: Tensor, forward: Forward) -> None:
        """`add_mass` for a ragged layout, `[lanes, G, slots]`."""
        store = layer.held()
        assert isinstance(store, RaggedStore)
        add_lane_mass(store, mass, self._fading(forward))

    def _fading(self, forward: Forward) -> Tensor | None:
        """Factor of each row's sums for a forward's queries, float32 `[B]`; None where nothing fades."""
        decay = self.needs.decay
        return None if decay == 1.0 else (decay ** forward.added.double()).float()

    # ------------------------------------------------------------------ the pipeline

    @torch.no_grad()
    def after_attention(
        self,
        layer: CompressedLayer,
        q: Tensor,
        probabilities: Tensor | None,
        params: AttentionParams,
        forward: Forward,
    ) -> None:
        """Record queries, observe, decide or defer, and encode, in one layer of a forward."""
        if self.recording is not None:
            self.recording.note(layer, q, params, forward)
            return
        if layer.temporary:
            return
        if layer.observing_only and self.limited:
            layer.observe(q, params, forward)
            return
        self._record_queries(layer, q, forward)
        if not self.limited:
            self.encode(layer)
            layer.forget_queries()
            return
        cache = layer.context()
        assert isinstance(cache, CompressedCache)
        step = LayerStep(layer, probabilities, params, forward, cache, q)
        self._observe(step)
        if forward.pending.passes:  # their attention is part of the decision
            forward.pending.attention[layer.index] = params
        else:
            self.decide(step)
        if forward.phase != "prompt" or not (forward.pending.passes or self.parts.allocator.scope != "layer"):
            self.encode(layer)

    def _record_queries(self, layer: CompressedLayer, q: Tensor, forward: Forward) -> None:
        window = self.needs.window
        if not self.limited:  # for the codec, once
            wanted = forward.phase == "prompt" and not layer.encoding.is_encoded
        else:  # a decode step's own attention is known already, so a window of one needs no queries there
            wanted = forward.phase == "prompt" or (self.parts.schedule.in_decode and window > 1)
        if window and wanted:
            layer.remember_queries(q, forward, window)
        elif self.limited:
            layer.forget_queries()

    def _observe(self, step: LayerStep) -> None:
        scorer = self.parts.scorer
        if scorer is None or not scorer.observes:
            return
        if step.forward.phase != "prompt" and not self.parts.schedule.in_decode:
            self._forget_prompt(step.layer)
            return
        with self.stats.clock.running(step.layer.device):
            self.scoring.observe(step)

    def decide(self, step: LayerStep) -> None:
        """Score, allocate and evict in one layer that has observed this forward, if the schedule says so."""
        layer, decoding = step.layer, step.forward.phase == "decode"
        if self.evictor.goes_on(step):
            with self.stats.clock.running(layer.device):
                self.evictor.evict_in_step(step)
            return
        rows = self.trigger.due(step)
        if rows is None:
            return
        layer.evict_by(None)
        with self.stats.clock.running(layer.device):
            if not decoding and self.parts.allocator.scope != "layer":
                self.sharing.defer(step)
                return
            scores = self.scoring.score(step)
            counts = layer.target if decoding else self.sharing.counts_of_one(step, scores)
            assert counts is not None
            self.evictor.retain(layer, scores, counts, rows, step.forward, step.cache)

    def encode(self, layer: CompressedLayer) -> None:
        """Have a layer whose selection is final hold what it kept in the codec's form."""
        if self.parts.codec.name != "plain" and (not layer.encoding.is_encoded or layer.encoding.groups is not None):
            with self.stats.clock.running(layer.device):
                layer.encode()

    # ------------------------------------------------------------------ when all layers have run

    @torch.no_grad()
    def end_of_forward(self, cache: CompressedCache) -> None:
        """Called when all layers have run: decisions that waited for auxiliary forwards or for all scores."""
        forward = cache.forward
        if not self.limited or forward is None or forward.phase != "prompt":
            return
        in_one = self.parts.allocator.scope == "layer"
        for layer in cache.full_layers:
            if layer.index in forward.pending.attention:
                self.decide(LayerStep(layer, None, forward.pending.attention[layer.index], forward, cache))
                if in_one:
                    self.encode(layer)
        if in_one:
            return
        with self.stats.clock.running(cache.full_layers[-1].device):
            self.sharing.end_of_prompt(cache, forward)
        for layer in cache.full_layers:
            if layer.store is not None:
                self.encode(layer)

    def end_of_prompt(self, cache: CompressedCache) -> None:
        """Called when a prompt with all its chunks is in: what was seen of it is only of use to a decode schedule."""
        if self.recording is not None:  # the methods to come want to see it
            return
        if not self.parts.schedule.in_decode or self.needs.window == 1:
            for layer in cache.full_layers:
                layer.forget_queries()
        if not self.parts.schedule.in_decode:
            for layer in cache.full_layers:
                self._forget_prompt(layer)

    def _forget_prompt(self, layer: CompressedLayer) -> None:
        for name in self.parts.scorer.prompt_state if self.parts.scorer else ():
            layer.state.pop(name, None)
