"""Forwards in a stated phase: the request that the model's pre-forward hook reads, and the session's current cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Fusing
from kvcompress.common.transfer import upload

Tensor = torch.Tensor


@dataclass(frozen=True)
class ForwardRequest:
    """How the next forward of the model is meant; without one, phase and padding follow from the call itself.

    Attributes:
        phase: as of `Forward`.
        real: bool `[B, n]` on the CPU, which of the new columns are real tokens; None: what the mask says.
        recompute: reused keys and values that take the place of the model's own in this forward.
        position_ids: `[B, n]` on the CPU, those that the model is given; None: what the call says.
    """

    phase: str
    real: Tensor | None = None
    recompute: Fusing | None = None
    position_ids: Tensor | None = None


class ForwardRunner:
    """Runs a hooked model on the current cache. The innermost request holds: extra forwards run inside others.

    Attributes:
        cache: of the last forward, the session's own or a caller's; None before the first.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: CompressedCache | None = None
        self._requests: list[ForwardRequest] = []

    @property
    def request(self) -> ForwardRequest | None:
        return self._requests[-1] if self._requests else None

    @contextmanager
    def requesting(self, request: ForwardRequest) -> Iterator[None]:
        """Forwards inside the block are meant as `request` says."""
        self._requests.append(request)
        try:
            yield
        finally:
            self._requests.pop()

    def current(self) -> CompressedCache:
        """The current cache.

        Raises:
            ValueError: no forward has run yet.
        """
        if self.cache is None:
            raise ValueError("no sequence yet: call prefill() first")
        return self.cache

    def run(
        self,
        phase: str,
        ids: Tensor,
        mask: Tensor | None = None,
        every: bool = False,
        recompute: Fusing | None = None,
    ) -> Tensor:
        """One forward → logits `[B, V]` after each row's last real token, kept on the cache.

        Args:
            ids: LongTensor `[B, n]`.
            mask: `[B, n]` of these ids (or `[B, seen + n]`); zeros are padding.
            every: return the logits after each of the tokens, `[B, n, V]`.
            recompute: see `ForwardRequest`.

        Raises:
            ValueError: rows or mask that do not fit the cache, and what the pre-forward hook refuses.
        """
        check_head(self.model)
        cache = self.current()
        mask = new_columns(cache, ids, mask)
        real = mask.bool().cpu() if mask is not None else torch.ones(ids.shape, dtype=torch.bool)
        position_ids = next_positions(cache, real)
        any_real, last = real.any(1), ids.shape[1] - 1 - real.flip(1).long().argmax(1)
        first_kept = int(last[any_real].min()) if bool(any_real.any()) else ids.shape[1] - 1
        previous, device = cache.logits, self.model.device
        with self.requesting(ForwardRequest(phase, real, recompute, position_ids)):
            output = self.model(
                input_ids=upload(ids, device),
                attention_mask=None,
                position_ids=upload(position_ids, device),
                cache=cache,
                use_cache=True,
                logits_to_keep=ids.shape[1] - (0 if every else first_kept),
            )
        logits = output.logits[:, -1]
        if bool((last != ids.shape[1] - 1).any()):  # padding to the right of a row's last token
            rows = torch.arange(len(last), device=output.logits.device)
            first = 0 if every else first_kept
            logits = output.logits[rows, upload((last - first).clamp(min=0), rows.device)]
        logits = kept_where_idle(logits, previous, any_real)
        cache.keep_logits(logits)
        return output.logits if every else logits


def next_positions(cache: CompressedCache, real: Tensor) -> Tensor:
    """Position ids `[B, n]` of new columns, `real` bool `[B, n]` on the CPU: counted over a row's real tokens."""
    before = cache.real if cache.real is not None else torch.zeros(real.shape[0], dtype=torch.long)
    return (before[:, None] + real.long().cumsum(1) - 1).clamp(min=0)


def kept_where_idle(logits: Tensor, previous: Tensor | None, fed: Tensor) -> Tensor:
    """Logits `[B, V]`, those of before in rows that got no token; `fed` bool `[B]`."""
    if previous is None or bool(fed.all()):
        return logits
    return torch.where(upload(fed, logits.device)[:, None], logits, previous)


def check_head(model: PreTrainedModel) -> None:
    """Check that a model's forward yields logits.

    Raises:
        ValueError: it has no language-modelling head.
    """
    if not model.can_generate():
        raise ValueError(
            f"a {type(model).__name__} has no language-modelling head, so that no logits follow a prompt: load the model by "
            "AutoModelForCausalLM, or call model(...) itself, which is compressed as well"
        )


def new_columns(cache: CompressedCache, ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """The part `[B, n]` of a mask that covers the new `ids [B, n]`.

    Raises:
        ValueError: a mask, or a number of rows, that does not fit the cache.
    """
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


def with_pending(
    cache: CompressedCache, segments: list[Tensor], mask: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """New ids with the last token that generate() picked before them: it belongs to the sequence."""
    if cache.pending is None:
        return segments, mask
    new = sum(s.shape[1] for s in segments)
    if mask is not None and mask.dim() == 2 and mask.shape[1] == new:
        mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
    return [cache.pending.to(segments[0].device), *segments], mask
