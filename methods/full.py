"""The full cache: nothing is dropped. The baseline every other method is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcompress.method import Method


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Keep every token. `budget` has no effect; a sweep's budgets collapse to one cell."""

    family = "baseline"
    keeps = "everything"
    source = "the uncompressed cache"
    differences = "none: what every other method is measured against"

    budget_kind: ClassVar[Literal["none"]] = "none"
