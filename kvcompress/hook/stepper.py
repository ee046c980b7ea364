"""How a session takes decode steps: through the hooked model, or with fixed shapes where it was asked for and goes."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.hook import static_decode
from kvcompress.hook.model_hooks import Hooks
from kvcompress.hook.static_decode import DECODES, Compiling, FixedStep
from kvcompress.method import Method

Tensor = torch.Tensor

AHEAD = 64  # tokens that room is made for where nobody says how many will come


class Stepping(Hooks):
    """A session's forwards in a stated phase, and its decode steps."""

    def __init__(
        self, model: PreTrainedModel, method: Method, kernel: str = "auto", tokenizer: Any = None, decode: str = "eager"
    ):
        """Raises:
        ValueError: an unknown `decode`, or one that this model or method does not go with; see also `Hooks`.
        """
        super().__init__(model, method, kernel, tokenizer)
        if decode not in DECODES:
            raise ValueError(f"decode={decode!r}; valid: {', '.join(DECODES)}")
        self.decode = decode
        self._fixed: FixedStep | None = None
        self._eager_for: CompressedCache | None = None  # found not to go, so that it is not tried at every step
        self.stepped: dict[str, Any] = {"how": "eager", "why": None, "ready_s": 0.0}
        if decode == "graph" and model.device.type != "cuda":
            self._refuse(f"a CUDA graph needs a CUDA device, the model is on {model.device.type}")
        reason = None if decode == "eager" else static_decode.refusal(model, self.compressor)
        if reason is not None:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Note why steps are eager.

        Raises:
            ValueError: fixed shapes were asked for by name.
        """
        if self.decode != "auto":
            raise ValueError(f"decode={self.decode}: {reason}; use decode=eager, or decode=auto, which falls back")
        self.stepped.update(how="eager", why=reason)

    def _must_be_open(self) -> None:
        if not self._open:
            raise ValueError("the session is closed: use it inside `with compress(model, method) as session`")

    # ------------------------------------------------------------------ with fixed shapes

    @torch.no_grad()
    def prepare(self, tokens: int) -> None:
        """Make room for `tokens` decode steps of the current cache and have its step ready, compiled if it is to be.

        generate() does so by itself, before anything is timed. Nothing to do for decode=eager. The longest that it took
        this session is in `report()["step"]["ready_s"]`: compiling, where it did.

        Raises:
            ValueError: what is held does not go with the `decode` that was asked for by name.
        """
        if self.decode == "eager":
            return
        self._must_be_open()
        cache = self._current()
        layers, start = cache.full_layers, time.perf_counter()
        if self._fixed is not None and self._fixed.serves(layers, tokens):
            return
        self._fixed = None  # which may be another cache's
        if cache is self._eager_for:
            return
        reason = static_decode.refusal(self.model, self.compressor) or static_decode.unfit(cache)
        if reason is None:
            graph = self.decode == "auto" and self.model.device.type == "cuda"
            how = "graph" if graph else "compiled" if self.decode == "auto" else self.decode
            for layer in layers:
                layer.held().fix(max(1, tokens))  # type: ignore[union-attr]  # which `unfit` found to be dense
            try:
                self._fixed = FixedStep(self.model, layers, how)
            except Compiling as error:
                reason = str(error)
        if reason is not None:
            self._refuse(reason)
            self._eager_for = cache
        else:
            self.compressor.stats.note_kernel("sdpa")
            self.stepped.update(how=how, why=None)
        self._synchronise()
        self.stepped["ready_s"] = max(self.stepped["ready_s"], time.perf_counter() - start)

    def _detach(self) -> None:
        self._fixed = self._eager_for = None  # a closed session holds no buffers but its cache's
        super()._detach()

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """One decode forward on the current cache: `ids [B, 1]` → logits `[B, V]`; rows not `real [B]` add nothing."""
        if self.decode != "eager" and ids.shape[1] == 1:
            if self._fixed is None or not self._fixed.serves(self._current().full_layers):
                self.prepare(AHEAD)
            if self._fixed is not None:
                return self._fixed_step(self._fixed, ids, real)
        return self._forward("decode", ids, None if real is None else real[:, None])

    @torch.no_grad()
    def _fixed_step(self, fixed_step: FixedStep, ids: Tensor, real: Tensor | None) -> Tensor:
        cache = self._adopt(self._current())
        rows = torch.ones(len(ids), dtype=torch.bool) if real is None else real.bool().cpu()
        previous = cache.logits
        self._phase, self._real = "decode", rows[:, None]
        try:
            forward = self._describe(cache, ids, None)
        finally:
            self._phase = self._real = None
        cache.begin(forward)  # an interrupt leaves it half written
        logits = fixed_step(ids, forward)
        if previous is not None and not bool(rows.all()):  # a row that got nothing keeps what it had
            logits = torch.where(rows.to(logits.device)[:, None], logits, previous)
        for layer in cache.full_layers:
            layer.seen += 1
        cache.note_kept()
        cache.keep_logits(logits)
        cache.end()
        return logits

    # ------------------------------------------------------------------ through the model

    def _forward(self, phase: str, ids: Tensor, mask: Tensor | None, every: bool = False) -> Tensor:
        """One forward in a stated phase → logits `[B, V]` after each row's last real token, kept on the cache.

        With `every`, the logits after each of the tokens, `[B, n, V]`.
        """
        cache = self._current()
        mask = self._new_columns(cache, ids, mask)
        real = mask.bool().cpu() if mask is not None else torch.ones(ids.shape, dtype=torch.bool)
        before = cache.real if cache.real is not None else torch.zeros(ids.shape[0], dtype=torch.long)
        position_ids = (before[:, None] + real.long().cumsum(1) - 1).clamp(min=0)
        if self._fixed is not None and not self._fixed.serves(cache.full_layers, ids.shape[1]):
            self._fixed = None  # so that buffers that are about to be replaced can be freed
        any_real, last = real.any(1), ids.shape[1] - 1 - real.flip(1).long().argmax(1)
        first_kept = int(last[any_real].min()) if bool(any_real.any()) else ids.shape[1] - 1
        previous, device = cache.logits, self.model.device
        self._phase, self._real = phase, real
        try:
            output = self.model(
                input_ids=ids.to(device),
                attention_mask=None,
                position_ids=position_ids.to(device),
                cache=cache,
                use_cache=True,
                logits_to_keep=ids.shape[1] - (0 if every else first_kept),
            )
        finally:
            self._phase = self._real = None
        logits = output.logits[:, -1]
        if bool((last != ids.shape[1] - 1).any()):  # padding to the right of a row's last token
            rows = torch.arange(len(last), device=output.logits.device)
            first = 0 if every else first_kept
            logits = output.logits[rows, (last - first).clamp(min=0).to(rows.device)]
        if previous is not None and not bool(any_real.all()):  # a row that got nothing keeps what it had
            logits = torch.where(any_real.to(logits.device)[:, None], logits, previous)
        cache.keep_logits(logits)
        return output.logits if every else logits

    @staticmethod
    def _new_columns(cache: CompressedCache, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """The part of a mask that speaks of `ids [B, n]`, `[B, n]`; ValueError if it does not fit."""
        seen, new = cache.get_seq_length(), ids.shape[1]
        if cache.real is not None and len(cache.real) != ids.shape[0]:
            raise ValueError(f"the cache holds {len(cache.real)} rows, the input has {ids.shape[0]}")
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] not in (new, seen + new):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}: it needs {ids.shape[0]} rows and covers the {new} new ids, or "
                f"these and the {seen} seen before"
            )
        return mask[:, -new:]

    def _current(self) -> CompressedCache:
        if self.cache is None:
            raise ValueError("no sequence yet: call prefill() first")
        return self.cache
