"""Decode steps of a session: through the hooked model, or with fixed shapes where they were asked for and possible."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.hook import static_decode
from kvcompress.hook.cache_factory import CacheFactory
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed import choice
from kvcompress.hook.planner import ForwardPlanner
from kvcompress.hook.runner import ForwardRequest, ForwardRunner, kept_where_idle
from kvcompress.hook.static_decode import DECODES, CompileError, StaticDecodeStep

Tensor = torch.Tensor

AHEAD = 64  # tokens that room is made for where nobody says how many will come


class DecodeStepper:
    """Takes decode steps on the runner's current cache: eager, static, compiled or as a CUDA graph.

    Attributes:
        decode: what was asked for, one of `DECODES`.
        how: for reports: `how` steps are taken, `why` they are eager, `ready_s` that getting ready took at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compressor: Compressor,
        runner: ForwardRunner,
        planner: ForwardPlanner,
        caches: CacheFactory,
        decode: str = "eager",
    ) -> None:
        """Raises:
        ValueError: an unknown `decode`, or one that this model or method does not go with.
        """
        if decode not in DECODES:
            raise ValueError(f"decode={decode!r}; valid: {', '.join(DECODES)}")
        self.model, self.decode, self._compressor = model, decode, compressor
        self._runner, self._planner, self._caches = runner, planner, caches
        self._fixed: StaticDecodeStep | None = None
        self._eager_for: CompressedCache | None = None  # found not to go, so that it is not tried at every step
        self.how: dict[str, Any] = {"how": "eager", "why": None, "ready_s": 0.0}
        if decode == "graph" and model.device.type != "cuda":
            self._fall_back(f"a CUDA graph needs a CUDA device, the model is on {model.device.type}")
        reason = None if decode == "eager" else static_decode.unsupported_reason(model, compressor)
        if reason is not None:
            self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        """Note why steps are eager.

        Raises:
            ValueError: fixed shapes were asked for by name.
        """
        if self.decode != "auto":
            raise ValueError(f"decode={self.decode}: {reason}; use decode=eager, or decode=auto, which falls back")
        self.how.update(how="eager", why=reason)

    def reset(self) -> None:
        """Let go of the buffers of the sequence that was stepped."""
        self._fixed = self._eager_for = None

    def begin_prompt(self) -> None:
        """A prompt comes: let go of the last one's buffers, unless a graph was captured on them.

        Its steps go on with that graph if what is held then fits into its buffers, and nothing else is held there.
        """
        self._eager_for = None
        if self._fixed is not None and self._fixed.how != "graph":
            self._fixed = None

    def release_unusable(self, tokens: int) -> None:
        """Let go of buffers that a forward of `tokens` on the current cache is about to replace."""
        fixed, layers = self._fixed, self._runner.current().full_layers
        if fixed is None or fixed.serves(layers, tokens):
            return
        if fixed.how != "graph" or fixed.is_of(layers):
            self._fixed = None

    @torch.no_grad()
    def prepare(self, tokens: int) -> None:
        """Make room for `tokens` steps of the current cache and have its step ready, compiled if it is to be.

        Raises:
            ValueError: what is held does not go with the `decode` that was asked for by name.
        """
        if self.decode == "eager":
            return
        cache = self._runner.current()
        layers, start = cache.full_layers, time.perf_counter()
        if self._fixed is not None and self._fixed.serves(layers, tokens):
            return
        before, self._fixed = self._fixed, None  # which may be another cache's
        if cache is self._eager_for:
            return
        reason = static_decode.unsupported_reason(self.model, self._compressor) or static_decode.unsupported_cache(
            cache, self._compressor
        )
        if reason is None:
            graph = self.decode == "auto" and self.model.device.type == "cuda"
            how = "graph" if graph else "compiled" if self.decode == "auto" else self.decode
            if before is not None and before.how == how and before.adopt(layers, tokens):
                self._fixed = before
            else:
                before = None  # whose buffers may go
                try:
                    forms = choice.forms(layers, self._compressor, tokens)
                    self._fixed = StaticDecodeStep(self.model, forms, how)
                except CompileError as error:
                    reason = str(error)
        if self._fixed is None:
            assert reason is not None
            self._fall_back(reason)
            self._eager_for = cache
        else:
            self._compressor.stats.note_kernel(*{form.kernel for form in self._fixed.forms})
            self.how.update(how=how, why=None)
        synchronize(self.model)
        self.how["ready_s"] = max(self.how["ready_s"], time.perf_counter() - start)

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """One decode forward: `ids [B, 1]` → logits `[B, V]`; rows not `real [B]` add nothing."""
        if self.decode != "eager" and ids.shape[1] == 1:
            if self._fixed is None or not self._fixed.serves(self._runner.current().full_layers):
                self.prepare(AHEAD)
            if self._fixed is not None:
                logits = self._fixed_step(self._fixed, ids, real)
                if logits is not None:
                    return logits
        self.release_unusable(ids.shape[1])
        return self._runner.run("decode", ids, None if real is None else real[:, None])

    @torch.no_grad()
    def _fixed_step(self, fixed_step: StaticDecodeStep, ids: Tensor, real: Tensor | None) -> Tensor | None:
        """Logits `[B, V]`; None, and nothing done, where the schedule fires and drops many: that is an eager step."""
        cache = self._caches.adopt(self._runner.current())
        rows = torch.ones(len(ids), dtype=torch.bool) if real is None else real.bool().cpu()
        previous, unchanged = cache.logits, cache.sequence
        before = torch.zeros(len(ids), dtype=torch.long) if cache.real is None else cache.real
        at = (before + rows.long() - 1).clamp(min=0)[:, None]  # position ids, as of an eager step
        forward = self._planner.plan(cache, ids, request=ForwardRequest("decode", rows[:, None]), position_ids=at)
        if fixed_step.due(forward):
            cache.restore(unchanged)
            return None
        cache.begin(forward)  # an interrupt leaves it half written
        logits = kept_where_idle(fixed_step(ids, forward, cache), previous, rows)
        for layer in cache.full_layers:
            layer.seen += 1
        cache.note_kept()
        cache.keep_logits(logits)
        cache.end()
        return logits


def synchronize(model: PreTrainedModel) -> None:
    """Wait for the model's device."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
