"""Plain transformers compiled: a `StaticCache` and `torch.compile`, the fastest step that a user has without this library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

Tensor = torch.Tensor


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own modules on the same weights: what hooks do to the other recompiles nothing here."""
    shared = {id(held): held for held in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class CompiledPlain:
    """Greedy decoding of plain transformers behind one prompt, compiled, as often as wanted from the same state.

    Args:
        ids: LongTensor `[1, n]`, the prompt; it is run here, eagerly, as transformers' `generate` does.
        tokens: that will be decoded.
        compile: what makes the step fast.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        tokens: int,
        compile: Callable[..., Callable[..., Tensor]] = torch.compile,
    ) -> None:
        self.model = twin(model)
        self.cache = StaticCache(config=self.model.config, max_cache_len=ids.shape[1] + tokens)
        self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1)
        layers: list[Any] = list(self.cache.layers)
        self._lengths: list[Tensor] = [layer.cumulative_length for layer in layers]
        self._start = [length.clone() for length in self._lengths]
        mode = "reduce-overhead" if model.device.type == "cuda" else "default"  # as transformers: CUDA graphs
        self._step = compile(self._forward, mode=mode, dynamic=False)

    def _forward(self, token: Tensor) -> Tensor:
        options: dict[str, Any] = {"cache": self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=token, **options).logits[:, -1]

    def rewind(self) -> None:
        """Go back to the end of the prompt."""
        for length, start in zip(self._lengths, self._start, strict=True):
            length.copy_(start)

    def __call__(self, token: Tensor) -> Tensor:
        """Logits `[1, V]` after `token [1, 1]`."""
        return self._step(token).clone()  # a graph writes into the same memory next time
