"""A method that needs data of a model gets it once, when it is attached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.method import Method, Scorer
from kvcompress.sweep.components import METHOD_ELSEWHERE
from kvcompress.sweep.schemas import derive


@dataclass(frozen=True)
class Favourites(Scorer):
    liked: torch.Tensor

    def score(self, view, observed, state):
        return torch.isin(view.positions, self.liked).float()


@dataclass(frozen=True, kw_only=True)
class LikesSome(Method):
    strength: float = 1.0
    liked: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def bind(self, model):
        if model.config.num_hidden_layers > 2:
            raise ValueError("LikesSome has no data for this model: run make_data.py")
        return replace(self, liked=torch.tensor([3, 5, 8]))

    def make_scorer(self):
        return Favourites(self.liked)


MODEL = small_model(num_hidden_layers=2)


def test_a_session_works_with_the_bound_method_and_leaves_the_callers_alone():
    method = LikesSome(budget=3)
    with compress(MODEL, method) as session:
        session.prefill(random_ids(1, 12))
        assert session.cache.positions(1).unique().tolist() == [3, 5, 8]
        assert session.method.liked is not None
    assert method.liked is None


def test_a_cache_made_by_a_method_goes_on_in_another_session_of_it():
    with compress(MODEL, LikesSome(budget=3)) as session:
        cache = session.prefill(random_ids(1, 12)).cache
    with compress(MODEL, LikesSome(budget=3)) as session:
        session.prefill(random_ids(1, 4), cache=cache)
        assert session.cache.get_seq_length() == 16


def test_bound_data_is_neither_in_the_record_nor_on_the_command_line():
    bound = LikesSome(budget=3).bind(MODEL)
    assert "liked" not in bound.describe() and bound.describe()["strength"] == 1.0
    settings = derive(LikesSome, "likessome", METHOD_ELSEWHERE).settings
    assert [name for name, *_ in settings] == ["name", "preset", "strength"]
    assert bound == LikesSome(budget=3)


def test_a_model_without_data_is_refused_before_any_work():
    model = small_model(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"make_data\.py"):
        compress(model, LikesSome(budget=3))
    assert not hasattr(model, "_kvcompress_session")


def test_by_default_a_method_needs_nothing_of_a_model():
    from kvcompress.methods import Full

    method = Full()
    assert method.bind(MODEL) is method
