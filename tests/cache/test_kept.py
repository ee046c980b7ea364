"""What a record says of the tokens that were kept is what the cache holds."""

from __future__ import annotations

import pytest
import torch
from helpers import held, make
from small_models import small_model

from kvcompress import compress
from kvcompress.cache.retention_map import BINS, retention_map


def slowly(cache, seen):
    """Percent of each stretch that is held, counted token by token."""
    bins = min(BINS, seen)
    wanted, size = [0] * bins, [0] * bins
    for layer in cache.full_layers:
        for head in held(cache, layer.index)[0]:
            for position in range(seen):
                size[position * bins // seen] += 1
                wanted[position * bins // seen] += position in head
    return [100 * w / s for w, s in zip(wanted, size, strict=True)]


@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("name", ["SnapKV", "StreamingLLM", "AdaKV", "PyramidKV"])
def test_the_map_of_kept_tokens_is_the_share_of_each_stretch_that_is_held(name, length):
    model = small_model()
    with compress(model, make(name, 0.25)) as session:
        session.prefill(torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(1)))
        found = session.report(kept_map=True)
        assert found["kept_map"] == pytest.approx(slowly(session.cache, length), abs=0.51)
        counts = [[len(head) for head in held(session.cache, layer.index)[0]] for layer in session.cache.full_layers]
        assert found.get("kept_per_head", counts) == counts
        assert ("kept_per_head" in found) == any(len(set(layer)) > 1 for layer in counts)


def test_heads_are_named_where_they_hold_different_numbers_of_tokens():
    with compress(small_model(), make("AdaKV", 0.25)) as session:
        session.prefill(torch.randint(0, 128, (1, 120), generator=torch.Generator().manual_seed(1)))
        assert "kept_per_head" in retention_map(session.cache)


def test_pads_of_a_shorter_row_are_no_part_of_its_map():
    ids = torch.randint(0, 128, (2, 60), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    with compress(small_model(), make("SnapKV", 0.25)) as session:
        session.prefill(ids, attention_mask=mask)
        padded = retention_map(session.cache, row=1)
    with compress(small_model(), make("SnapKV", 0.25)) as session:
        session.prefill(ids[1:, 20:])
        assert padded == retention_map(session.cache)


def test_nothing_is_said_where_nothing_was_evicted_or_not_asked_for():
    ids = torch.randint(0, 128, (1, 30), generator=torch.Generator().manual_seed(3))
    with compress(small_model(), make("SnapKV", 1.0)) as session:
        session.prefill(ids)
        assert retention_map(session.cache) == {}
    with compress(small_model(), make("SnapKV", 0.3)) as session:
        session.prefill(ids)
        assert "kept_map" not in session.report() and "kept_map" in session.report(kept_map=True)
