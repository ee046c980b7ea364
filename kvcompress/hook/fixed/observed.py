"""StepObserved: what a scorer is shown of a decode step with fixed shapes, tensors of the step all."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.method.view import Observed

Tensor = torch.Tensor


class StepObserved(Observed):
    """A single query's attention and the attention mass; the rest is not there.

    Args:
        probabilities: `[B, H_kv, G, 1, P]` of the step's query, None where they were not wanted.
        query: its positions, `[B, 1]`.
        summed: attention mass `[B, H_kv, G, P]`.
    """

    def __init__(self, probabilities: Tensor | None, query: Tensor, summed: Tensor | None, params: AttentionParams):
        self._p, self._query, self._mass, self._params = probabilities, query, summed, params

    def window(self, size: int) -> tuple[Tensor, Tensor]:
        if size != 1 or self._p is None:
            raise self._missing(f"a window of {size} queries")
        return self._p, self._query >= 0

    def window_parts(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        if size != 1 or self._p is None:
            raise self._missing(f"a window of {size} queries")
        yield self._p, self._query

    @property
    def mass(self) -> Tensor:
        if self._mass is None:
            raise self._missing("attention mass")
        return self._mass

    @property
    def scaling(self) -> float:
        return self._params.scaling

    def logits(self, size: int) -> tuple[Tensor, Tensor]:
        raise self._missing("logits")

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        raise self._missing("queries")

    @property
    def output_norms(self) -> Tensor:
        raise self._missing("projected values")

    @property
    def prerope(self) -> tuple[Tensor, Tensor]:
        raise self._missing("queries before rotation")

    def mean_rotation(self, ahead: int) -> Tensor:
        raise self._missing("the mean rotation")

    @staticmethod
    def _missing(what: str) -> ValueError:
        return ValueError(f"a scorer that says `traceable` asks a decode step with fixed shapes for {what}")
