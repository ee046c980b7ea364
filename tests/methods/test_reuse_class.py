"""What of each method's cache another prompt can use, found by running it on two prompts that share their beginning."""

from __future__ import annotations

import pytest
import torch
from helpers import METHODS, make
from small_models import small_model

from kvcompress import compress
from kvcompress.methods import KIVI, CacheBlend, Full, SnapKV

SHARED = 32
TIGHT = {"ShadowKV": {"rank": 4}, "CacheBlend": {"ratio": 0.5}}  # so that something is lost of what small models hold


@pytest.fixture(scope="module")
def model():
    return small_model()


def prompts(suffix: int) -> list[torch.Tensor]:
    """Two shared segments, one of `suffix` tokens, and a last one of 4."""
    drawn = torch.Generator().manual_seed(1)
    shared = torch.randint(5, 120, (1, SHARED), generator=drawn)
    drawn.manual_seed(suffix)
    rest = torch.randint(5, 120, (1, suffix + 4), generator=drawn)
    return [shared[:, :16], shared[:, 16:], rest[:, :suffix], rest[:, suffix:]]


def entries(model, method, suffix: int) -> list[dict[int, torch.Tensor]]:
    """Per layer and head the keys and values by position within the shared prefix, as a first step reads them."""
    segments = prompts(suffix)
    with torch.no_grad(), compress(model, method) as session:
        if method.parts().prefill.needs_segments:
            session.precompute(segments)
        session.prefill(segments)
        session.step(torch.tensor([[7]]))  # a reader arranges pages when it first reads
        cache, found = session.cache, []
        for layer in range(len(cache.layers)):
            positions, (keys, values) = cache.positions(layer)[0], cache.keys_values(layer)
            both = torch.cat([keys, values], dim=-1)[0]
            for head, row in enumerate(positions.tolist()):
                found.append({at: both[head, slot] for slot, at in enumerate(row) if 0 <= at < SHARED})
    return found


def equal(model, method, first: int, second: int) -> bool:
    """True if both prompts hold the same of what they share."""
    for one, other in zip(entries(model, method, first), entries(model, method, second), strict=True):
        if one.keys() != other.keys():
            return False
        if any(not torch.allclose(one[at], other[at], atol=1e-5) for at in one):
            return False
    return True


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_says_what_two_prompts_with_a_shared_prefix_show(model, name):
    method = make(name, 8 if METHODS[name].budget_kind == "read_tokens" else 0.5, **TIGHT.get(name, {}))
    # the last tokens of a prompt, which codecs hold back and windows protect, are no part of the shared ones
    alike = equal(model, method, 12, 24)
    if method.cache_reuse == "prefix":
        assert alike
    else:
        assert method.cache_reuse == "whole"
        assert not alike or not equal(model, method, 1, 24), "what is kept must depend on what follows"


def test_the_parts_decide_and_not_the_name():
    assert SnapKV(budget=1.0).cache_reuse == "prefix", "nothing is evicted"
    assert SnapKV(budget=0.5).cache_reuse == "whole" and SnapKV(budget=0.5, codec=KIVI()).cache_reuse == "whole"
    assert Full().cache_reuse == "prefix" and KIVI().cache_reuse == "prefix" and CacheBlend().cache_reuse == "whole"
