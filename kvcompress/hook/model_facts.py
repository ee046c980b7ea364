"""ModelFacts: what a compressor needs of a model's modules beside its attention, found once per session."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from kvcompress.method import Needs
from kvcompress.models import compat, projections


class ModelFacts:
    """Rotations and output projections of a model, as far as a method needs them.

    Attributes:
        projections: attention output projections by layer, where values are measured behind them.
    """

    def __init__(self, model: Any = None, needs: Needs | None = None, compact: bool = False):
        """Args:
        needs: of the method's parts.
        compact: positions are compact, so that keys are held before rotation.
        """
        needs = Needs() if needs is None else needs
        self._model, self._compact, self._prerope = model, compact, needs.prerope
        self.projections: Mapping[int, torch.nn.Module] = projections.output_projections(model) if needs.output else {}

    @cached_property
    def _rope(self) -> list[compat.Rotation] | None:
        return compat.rotations(self._model) if self._compact or self._prerope else None

    def measure(self) -> None:
        """Find the rotations, by forwards of the model: before a session hooks it.

        Raises:
            ValueError: they depend on the length, or match no known form.
        """
        _ = self._rope

    @property
    def rope(self) -> list[compat.Rotation] | None:
        """Rotation per layer, where queries are wanted as they were before it."""
        return self._rope if self._prerope else None

    @property
    def compact_rope(self) -> list[compat.Rotation] | None:
        """Rotation per layer, where positions are compact."""
        return self._rope if self._compact else None
