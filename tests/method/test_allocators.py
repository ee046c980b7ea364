"""Allocators that look at several layers: the seam that layer budgets are built on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from small_models import random_ids, small_model

from kvcompress import compress
from kvcompress.method import Allocator
from kvcompress.methods import H2O, SnapKV, StreamingLLM


def share(total: torch.Tensor, weights: list[int], heads: int) -> list[torch.Tensor]:
    """Layer i gets weights[i] of the whole, its heads equal parts."""
    return [(total * w // (sum(weights) * heads))[:, None].expand(-1, heads) for w in weights]


@dataclass(frozen=True)
class Pyramid(Allocator):
    """1 : 2 : 3 from the first layer to the last, decided when all are known."""

    scope: ClassVar = "all"

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        assert layers_seen == n_layers == len(scores)
        return share(total, list(range(1, n_layers + 1)), scores[0].shape[1])


@dataclass(frozen=True)
class Cascade(Allocator):
    """The whole budget shared equally among the layers seen so far."""

    scope: ClassVar = "cascade"

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        return share(total, [1] * layers_seen, scores[0].shape[1])


@torch.no_grad()
def test_layers_keep_what_an_allocator_over_all_layers_gives():
    """Layers of different lengths, a question of several tokens after them, and decoding at the granted lengths."""
    model = small_model()
    with compress(model, H2O(budget=12, allocator=Pyramid())) as session:
        cache = session.prefill(random_ids(2, 60)).cache
        assert cache.kept_tokens()[:, 0, 0].tolist() == [6, 12, 18]
        session.append(random_ids(2, 5, seed=1))
        assert session.generate(20).tokens
        assert cache.kept_tokens()[:, 0, 0].tolist() == [6, 12, 18]


@torch.no_grad()
def test_a_cascade_trims_earlier_layers_as_later_ones_come():
    """The end is an equal share each, and no more than budget plus one layer was held on the way."""
    model = small_model()
    held = []
    with compress(model, SnapKV(budget=12, window=4, allocator=Cascade())) as session:
        cache = session.new_cache()
        handle = model.model.layers[2].register_forward_pre_hook(lambda *_: held.append(cache.nbytes()["valid"]))
        session.prefill(random_ids(1, 60), cache=cache)
        handle.remove()
        per_token = cache.nbytes()["valid"] / (3 * 12)
        assert cache.kept_tokens().unique().tolist() == [12]
    assert held[0] <= 36 * per_token * 1.05


def test_the_best_of_a_layer_survive_whatever_order_it_is_trimmed_in():
    """Trimming in a cascade keeps what one cut to the same count keeps."""
    model, ids = small_model(), random_ids(1, 50)
    with compress(model, H2O(budget=10)) as session:
        once = session.prefill(ids).cache.positions(0)
    with compress(model, H2O(budget=10, allocator=Cascade())) as session:
        assert torch.equal(session.prefill(ids).cache.positions(0), once)


def test_uneven_allocators_are_refused_with_compact_positions():
    with pytest.raises(ValueError, match=r"compact positions need equal numbers .*allocator=uniform"):
        StreamingLLM(budget=0.5, allocator=Pyramid())
