"""GQAPool holds means of heads, and attention is that of a model with fewer KV heads."""

from __future__ import annotations

import pytest
import torch
from helpers import feed
from reference import stock_logits
from small_models import left_padded, random_ids, small_model
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.methods import Full, GQAPool, SnapKV


class PooledCache(DynamicCache):
    """Holds means of heads, in a loop, in place of the heads; a prompt sees its own as they are."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        n = key_states.shape[2]
        keys, values = super().update(self.pooled(key_states), self.pooled(value_states), layer_idx, *args, **kwargs)
        if n == 1:
            return keys, values
        return torch.cat([keys[:, :, :-n], key_states], 2), torch.cat([values[:, :, :-n], value_states], 2)

    def pooled(self, x):
        result = torch.empty_like(x)
        for first in range(0, x.shape[1], self.pool):
            members = range(first, first + self.pool)
            for head in members:
                result[:, head] = sum(x[:, member] for member in members) / self.pool
        return result


@pytest.mark.parametrize(("groups", "pool"), [(2, 2), (1, 2), (1, 4)])
def test_attention_sees_the_means(groups, pool):
    """A later turn and decode equal the stock model over a cache of means."""
    model, twin = small_model(groups=groups), small_model(groups=groups, twin=True)
    ids, more, cache = random_ids(1, 20), random_ids(1, 6, 1), PooledCache(pool)
    with torch.no_grad():
        twin(ids, cache=cache)
        expected = [twin(more[:, :2], cache=cache).logits]
        expected += [twin(more[:, t : t + 1], cache=cache).logits for t in range(2, 6)]
    with compress(model, GQAPool(pool=pool)) as session:
        session.prefill(ids)
        ones = torch.ones(1, 26, dtype=torch.long)
        got = [feed(model, session.cache, more[:, :2], ones[:, :22])]
        got += [feed(model, session.cache, more[:, t : t + 1], ones[:, : 21 + t]) for t in range(2, 6)]
    assert (torch.cat(got, 1) - torch.cat(expected, 1)).abs().max() <= 1e-5
    exact = stock_logits(model, torch.cat([ids, more], 1))[:, 20:]
    assert (torch.cat(got, 1) - exact).abs().max() > 1e-2


def test_equal_heads_lose_nothing():
    """Where the heads of a group are the same, their mean is each of them: left-padded, in decode."""
    model = small_model(groups=1, fresh=True)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = projection.weight.view(4, 16, -1)
                heads[1::2] = heads[::2]
    ids, mask = left_padded([20, 12])
    more = random_ids(2, 3, 2)
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    with compress(model, GQAPool(pool=2)) as session:
        session.prefill(ids, attention_mask=mask)
        got = [feed(model, session.cache, more[:, t : t + 1], whole[:, : 21 + t]) for t in range(3)]
    assert (torch.cat(got, 1) - stock_logits(model, torch.cat([ids, more], 1), whole)[:, 20:]).abs().max() <= 1e-5


@pytest.mark.parametrize(("groups", "pool"), [(2, 1), (2, 2), (1, 2), (1, 4)])
def test_bytes_are_those_of_the_heads_left(groups, pool):
    model = small_model(groups=groups)
    with compress(model, GQAPool(pool=pool)) as session:
        session.prefill(random_ids(2, 30))
        sizes = session.cache.nbytes()
        assert sizes["keys_values"] * pool == sizes["full"]
        session.generate(5)
        sizes = session.cache.nbytes()
        assert sizes["keys_values"] * pool == sizes["full"]


@pytest.mark.parametrize(("heads", "kv_heads", "pool"), [(4, 2, 2), (4, 4, 2), (6, 3, 3), (5, 5, 5), (4, 1, 1)])
def test_the_default_fits_any_number_of_heads(heads, kv_heads, pool):
    model = small_model(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with compress(model, GQAPool()) as session:
        session.prefill(random_ids(1, 30))
        sizes = session.cache.nbytes()
        assert sizes["keys_values"] * pool == sizes["full"]
        found = session.generate(5).tokens
    with compress(model, GQAPool(pool=pool)) as session:
        session.prefill(random_ids(1, 30))
        assert session.generate(5).tokens == found


def test_the_default_is_described_by_its_number():
    """So that run ids are those of the time when the default was 2."""
    assert GQAPool().describe() == GQAPool(pool=2).describe() and GQAPool().describe()["pool"] == 2
    assert repr(Full(codec=GQAPool()).codec) == repr(GQAPool(pool=2).make_codec()) == "GQAPoolCodec(pool=2)"
    assert GQAPool().variant() == ""


@pytest.mark.parametrize("pool", [2.5, "x", True, float("nan")])
def test_a_pool_of_another_kind_is_refused_by_name(pool):
    with pytest.raises(ValueError, match="pool=.*takes an int"):
        GQAPool(pool=pool)


def test_pools_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="pool=0; at least 1"):
        GQAPool(pool=0)
    with pytest.raises(ValueError, match="pool=3 does not divide the model's 2 KV heads; valid: 1, 2"):
        compress(small_model(), GQAPool(pool=3))
    with pytest.raises(ValueError, match="several heads.*pool=1"):
        SnapKV(budget=0.5, codec=GQAPool())
