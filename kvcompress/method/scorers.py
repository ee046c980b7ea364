"""Scorers over other scorers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcompress.method.parts import Scorer
from kvcompress.method.view import LayerView, Needs, Observed, Pass, State, Tensor


@dataclass(frozen=True)
class ScorerOver(Scorer):
    """A scorer over the scores of another: needs and protects what that one does, and scores as it does."""

    base: Scorer

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", self.base.sinks)
        object.__setattr__(self, "prompt_state", self.base.prompt_state)

    @property
    def needs(self) -> Needs:
        return self.base.needs

    def window(self, kept: Tensor) -> Tensor:
        return self.base.window(kept)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        return self.base.score(view, observed, state)

    def observe(self, view: LayerView, observed: Observed, state: State) -> None:
        self.base.observe(view, observed, state)

    @property
    def observes(self) -> bool:
        return self.base.observes

    def passes(self, ids: Tensor, tokenizer: Any, first: int = 0) -> Iterable[Pass]:
        return self.base.passes(ids, tokenizer, first)
