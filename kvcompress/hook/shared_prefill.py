"""Shared prefill: one full prefill, computed once with all that the scorers of several methods observe of it.

`prefill_once(model, ids, needs)` runs a prompt without eviction and remembers the union of what is needed. A session
given the result takes a prompt of the same ids from it: layer by layer its own compressor observes, scores, allocates
and applies as it would have done in the model's forward, and copies what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward, PendingDecisions
from kvcompress.cache.layer import CompressedLayer
from kvcompress.hook.compression import Compressor
from kvcompress.hook.recording import PrefillRecording
from kvcompress.hook.scoring import LayerStep, needs_of
from kvcompress.hook.session import Session
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method import Method, Needs
from kvcompress.method.parts import Prefilled
from kvcompress.models.model_hash import model_state

Tensor = torch.Tensor


def unsupported_reason(method: Method) -> str | None:
    """Why this method cannot start from a prefill made for several, or None if it can."""
    parts = method.parts()
    if parts.prefill.name != "oneshot":
        return f"prefill={parts.prefill.name} is its own"
    if method.compact_positions and method.limited:
        return "compact positions hold keys that are not rotated"
    needs, scorer = needs_of(method), parts.scorer
    known = Needs(window=needs.window, mass=needs.mass, decay=needs.decay, output=needs.output)
    observing = method.limited and scorer is not None and scorer.observes
    if observing or needs != known:
        return "it observes more than windows of queries and attention mass"
    return None


@dataclass(frozen=True)
class SharedPrefill:
    """A full prefill of `ids [1, n]`, read-only from here on.

    Attributes:
        cache: every token of it, with the queries and the attention mass that `needs` asked for.
        features: what the model asks of each layer's attention.
        forward: the forward that made it.
        kernels: which attention kernels it ran.
        model_state: of the model when it was made (`kvcompress.models.model_hash.model_state`).
    """

    ids: Tensor
    cache: CompressedCache
    features: dict[int, AttentionParams]
    forward: Forward
    kernels: frozenset[str]
    needs: Needs
    model_state: tuple[Any, ...]

    @property
    def windows_bytes(self) -> int:
        """What the attention of windows that is remembered for all takes, at most."""
        layers = self.cache.full_layers
        return sum(_window_bytes(self.cache, window) for window in layers[0].shared_window_attention) if layers else 0

    def serves(self, cache: CompressedCache, segments: Sequence[Tensor], mask: Tensor | None) -> bool:
        """True if this is what a prompt of `segments` on `cache` would compute."""
        if cache.real is not None or (mask is not None and not bool(mask.bool().all())):
            return False
        model = None if cache.spec.model is None else cache.spec.model()
        if model is None or model_state(model) != self.model_state:  # another adapter is active, or weights changed
            return False
        return torch.equal(torch.cat([s.cpu() for s in segments], dim=1), self.ids)

    def hand_over(self, compressor: Compressor, cache: CompressedCache) -> Prefilled:
        """Fill an empty `cache` as the prompt forward of a session with this `compressor` would fill and compress it.

        Raises:
            ValueError: the session's method cannot start from this prefill, and why.
        """
        self._check(compressor)
        forward = replace(self.forward, pending=PendingDecisions(), observer=compressor)
        assert self.cache.real is not None and self.cache.logits is not None
        cache.advance(None, self.cache.real.clone())
        cache.begin_prompt(compressor.method.cap(self.cache.real) if compressor.limited else None)
        cache.begin(forward)  # until all layers are in
        if cache.spec.codec_rope is not None:
            cache.note_shift(forward)
        compressor.stats.merge(self.kernels)
        at_once = compressor.parts.allocator.scope == "layer"
        for index, base in enumerate(self.cache.layers):
            layer = cache.layers[index]
            if not isinstance(layer, CompressedLayer) or not isinstance(base, CompressedLayer):
                cache.replace_layer(index, self.cache.fork_other(index))
                continue
            layer.share_from(base, compressor.needs.mass, compressor.needs.window)
            if compressor.limited:
                compressor.decide(LayerStep(layer, None, self.features[index], forward, cache))
            if at_once or not compressor.limited:
                compressor.encode(layer)
                layer.materialise()
        compressor.end_of_forward(cache)
        for layer in cache.full_layers:
            layer.materialise()
        cache.note_moment(forward.phase)
        cache.end()
        logits = self.cache.logits.clone()
        cache.keep_logits(logits)
        return Prefilled(cache, logits, self.cache.real.clone())

    def _check(self, compressor: Compressor) -> None:
        reason = unsupported_reason(compressor.method)
        wanted = compressor.needs
        more = wanted.window > self.needs.window or wanted.mass > self.needs.mass
        if reason is None and (more or (wanted.mass and wanted.decay != self.needs.decay)):
            reason = f"it needs {wanted}, the prefill observed {self.needs}"
        if reason is not None:
            raise ValueError(f"{type(compressor.method).__name__} cannot start from this prefill: {reason}")


def prefill_once(
    model: PreTrainedModel, ids: Sequence[int] | Tensor, needs: Needs, kernel: str = "auto"
) -> SharedPrefill:
    """Prefill one prompt for several methods.

    Args:
        ids: token ids `[n]` or `[1, n]`.
        needs: the union of what the methods' scorers and allocators want to observe. With attention mass in it the
            blockwise kernel runs, whose output differs from SDPA's in the last digits: to get what a method gets
            alone, share only among methods that all want mass or all want none.
        kernel: as in `compress`.
    """
    prompt = torch.as_tensor(ids, dtype=torch.long).view(1, -1)
    recording = PrefillRecording(needs)
    with Session(model, Method(), kernel, recording=recording) as session:
        cache = session.prefill(prompt.to(model.device), cache=session.new_cache(headroom=False)).cache
    forward = recording.forward or Forward(*_plain_forward(prompt.shape[1]))
    if needs.window and _window_bytes(cache, needs.window) <= cache.nbytes()["allocated"]:
        for layer in cache.full_layers:
            layer.share_window_attention(needs.window)
    kernels, state = frozenset(session.compressor.stats.kernels), model_state(model)
    return SharedPrefill(prompt.cpu(), cache, recording.attention, forward, kernels, needs, state)


def _window_bytes(cache: CompressedCache, window: int) -> int:
    """What the attention of a window takes in all layers: it is computed once, if that is no more than the cache."""
    return sum(4 * window * layer.gqa_group * int(layer.counts.sum()) for layer in cache.full_layers)


def _plain_forward(length: int) -> tuple[Any, ...]:
    """What a forward of one row looks like, for a model without a layer of ours."""
    columns = torch.arange(length)[None]
    return "prompt", length, None, columns.int(), torch.full((1,), length), columns
