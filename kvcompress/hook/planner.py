"""Forward planner: phase, padding, positions and budget of new tokens, checked before the model runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.pages import PagedReader, check_host
from kvcompress.hook.auxiliary import AuxiliaryForwards
from kvcompress.hook.compression import Compressor
from kvcompress.hook.runner import ForwardRequest
from kvcompress.models import compat

Tensor = torch.Tensor


class ForwardPlanner:
    """Describes what is fed to a model, for the layers of its cache."""

    def __init__(self, model: PreTrainedModel, compressor: Compressor, auxiliary: AuxiliaryForwards) -> None:
        self.model, self.compressor, self.auxiliary = model, compressor, auxiliary

    def plan(
        self,
        cache: CompressedCache,
        tokens: Tensor,
        mask: Tensor | None = None,
        request: ForwardRequest | None = None,
        position_ids: Tensor | None = None,
    ) -> Forward:
        """The forward that feeds `tokens` to `cache`, which counts them from here on.

        Args:
            tokens: ids `[B, n]` or embeddings `[B, n, hidden]`.
            mask: `[B, seen + n]`; zeros are padding.
            request: what the caller says of it; None: a plain call of the model.
            position_ids: `[B or 1, n]` by which the model rotates; None: by column.

        Raises:
            ValueError: the forward cannot be run; the cache is as it was.
        """
        unchanged = cache.sequence
        try:
            forward = self._describe(cache, tokens, mask, request)
            self._check_length(cache, forward)
            if position_ids is not None:
                forward = replace(forward, rotated=position_ids)
            if cache.spec.codec_rope is not None:
                made = None if request is None else request.position_ids  # not read back from the device
                cache.note_shift(forward if made is None else replace(forward, rotated=made))
            self.auxiliary.plan(cache, forward, tokens)
        except ValueError:  # a refused forward leaves no trace
            cache.restore(unchanged)
            raise
        return forward

    def chunk(self, cache: CompressedCache, length: int) -> int:
        """Tokens per forward of a prompt of `length`: all, unless compact positions have it stream through the cache.

        Raises:
            ValueError: it would have to stream, and the budget leaves no room for new tokens or is a share.
        """
        limit, budget = compat.max_positions(self.model), self.compressor.method.budget
        if cache.spec.compact_rope is None or limit is None or length <= limit:
            return length
        if isinstance(budget, float):
            raise ValueError(
                f"a prompt longer than the model's {limit} positions needs a budget in tokens (an int) with compact "
                f"positions; budget={budget} is a share"
            )
        if budget >= limit:
            raise ValueError(f"budget={budget} leaves no room for new tokens within the model's {limit} positions")
        return limit - budget

    def _describe(
        self, cache: CompressedCache, tokens: Tensor, mask: Tensor | None, request: ForwardRequest | None
    ) -> Forward:
        batch, length = tokens.shape[:2]
        seen = cache.get_seq_length()
        real = None if request is None else request.real
        if real is None and mask is not None:
            real = _new_real(mask, seen, length)
        if real is not None and bool(real.all()):
            real = None
        before = cache.real if cache.real is not None else torch.zeros(batch, dtype=torch.long)
        if len(before) != batch:
            raise ValueError(f"the cache holds {len(before)} rows, the input has {batch}")
        if real is None:
            added = torch.full((batch,), length)
            start = before[:1] if bool((before == before[0]).all()) else before
            positions = start[:, None] + torch.arange(length)
        else:
            added = real.sum(1)
            positions = torch.where(real, before[:, None] + real.long().cumsum(1) - 1, -1)
        cache.advance(real, added)
        phase = request.phase if request is not None else "prompt" if length > 1 or seen == 0 else "decode"
        prefill = self.compressor.parts.prefill
        if phase == "prompt" and request is None and prefill.needs_segments:
            raise ValueError(
                f"prefill={prefill.name} reuses the segments of a prompt, and a plain model() or generate() call has none: "
                "run the prompt with session.prefill([prefix, chunk, …, question]), then session.generate(); or use "
                "prefill=oneshot"
            )
        if phase == "prompt":
            assert cache.real is not None
            self._check_host(batch, cache.real)
            cache.begin_prompt(self.compressor.method.cap(cache.real) if self.compressor.limited else None)
        columns = torch.arange(seen, seen + length)[None]  # what transformers rotates by unless told otherwise
        fires = self._read_tokens(cache, tokens, real, phase)
        fusion = None if request is None else request.recompute
        observer = self.compressor
        return Forward(
            phase, length, real, positions.int(), added, columns, fires=fires, fusion=fusion, observer=observer
        )

    def _read_tokens(self, cache: CompressedCache, tokens: Tensor, real: Tensor | None, phase: str) -> Tensor | None:
        """Rows whose new tokens `[B, n]` fire the schedule, bool `[B]`; rows whose compression ends are noted in `cache`.

        Raises:
            ValueError: embeddings were given where the schedule needs ids.
        """
        schedule = self.compressor.parts.schedule
        if phase != "decode" or not self.compressor.limited or not (schedule.newline_ids or schedule.until_ids):
            return None
        if tokens.dim() != 2:
            raise ValueError("the schedule fires on token ids, and this forward was given embeddings: pass input_ids")
        ids = tokens.cpu() if real is None else tokens.cpu().masked_fill(~real, -1)

        def among(wanted: tuple[int, ...]) -> Tensor:
            return torch.isin(ids, torch.tensor(wanted, dtype=torch.long)).any(1)

        if schedule.until_ids:
            cache.close_rows(among(schedule.until_ids))
        return among(schedule.newline_ids) if schedule.newline_ids else None

    def load(self, cache: CompressedCache, ids: Tensor, rows: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Put keys and values that were computed before at the end of `cache`; arguments as of `Session.load`."""
        cache.begin(self.plan(cache, ids, request=ForwardRequest("append")))
        for layer, module in zip(cache.full_layers, compat.decoder_layers(self.model), strict=True):
            device = next(module.parameters()).device
            keys, values = (side.to(device) for side in rows(layer.index))
            layer.update(keys, values, kwargs={})
            layer.end_attention()
        cache.end()

    def _check_length(self, cache: CompressedCache, forward: Forward) -> None:
        limit = compat.max_positions(self.model)
        if limit is None or forward.phase == "decode":
            return
        assert cache.real is not None
        longest = (
            int(cache.real.max())
            if cache.spec.compact_rope is None or cache.full_layers[0].store is None
            else int(cache.held_rows().max()) + forward.length
        )
        if longest > limit:
            raise ValueError(
                f"the prompt reaches {longest} tokens, but {self.model.config.model_type!r} has {limit} positions: "
                "shorten it, or use compact positions (StreamingLLM(positions='compact')) through session.prefill"
            )

    def _check_host(self, batch: int, real: Tensor) -> None:
        reader = self.compressor.reader
        if isinstance(reader, PagedReader):
            per_token = reader.host_numbers(*compat.head_sizes(self.model)[0]) * torch.finfo(self.model.dtype).bits // 8
            full = [i for i, kind in enumerate(compat.layer_types(self.model)) if kind == "full_attention"]
            check_host(reader, full, batch, int(real.max()), per_token)


def _new_real(mask: Tensor, seen: int, length: int) -> Tensor:
    """The new columns of a caller's mask, bool `[B, length]` on the CPU.

    Raises:
        ValueError: it is not `[B, seen + length]`.
    """
    if mask.dim() != 2:
        raise ValueError(f"attention_mask needs 2 dimensions [batch, tokens] under compress(), got {mask.dim()}")
    if mask.shape[1] != seen + length:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens, the cache has seen {seen} and {length} are new: "
            f"give a mask of {seen + length}; to ask more of this cache, pass the new ids after the old ones"
        )
    return mask[:, -length:].bool().cpu()
