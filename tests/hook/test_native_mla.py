"""Models with multi-head latent attention: their cache holds latents, and what is evicted are latents."""

from __future__ import annotations

import pytest
import torch
from helpers import feed, tensors_of, thinned
from reference import LoopH2O, LoopSnapKV, stock_logits
from small_models import LATENT, left_padded, random_ids, small_model
from test_references import follow

from kvcompress import compress
from kvcompress.method import Codec
from kvcompress.methods import (
    H2O,
    KIVI,
    CriticalKV,
    ExpectedAttention,
    Full,
    Int8,
    KeyDiff,
    Knorm,
    LowRank,
    SnapKV,
    StreamingLLM,
)
from kvcompress.models import projections

HEADS, LATENT_DIM, ROPE = 4, 24, 8


@pytest.mark.parametrize("architecture", LATENT)
def test_a_token_holds_its_latent_and_one_rotated_key(architecture):
    """Per token and layer d_c + d_r numbers, whatever the number of heads; stock's cache holds the same."""
    model = small_model(architecture)
    ids = random_ids(1, 30)
    with torch.no_grad():
        stock = model(ids).past_key_values
    with compress(model, Full()) as session:
        session.prefill(ids)
        sizes = session.cache.nbytes()
        assert sizes["keys_values"] == sizes["full"] == 30 * 3 * (LATENT_DIM + ROPE) * 4
        assert sizes["full"] == sum(x.keys.nbytes + x.values.nbytes for x in stock.layers)
        assert sizes["positions"] == 30 * 3 * 4 and sizes["allocated"] <= 1.25 * sizes["valid"] + 64 * 3 * 36 * 4
        for layer in session.cache.layers:
            assert max(t.shape[-1] for t in tensors_of(layer) if t.is_floating_point()) == LATENT_DIM
            keys, values = layer.keys_values()
            assert keys.shape == (1, 1, 30, LATENT_DIM + ROPE) and values.shape == (1, 1, 30, LATENT_DIM)
        session.generate(5)
        assert session.cache.nbytes()["keys_values"] == 34 * 3 * (LATENT_DIM + ROPE) * 4
    with compress(model, SnapKV(budget=10, window=3)) as session:
        session.prefill(ids)
        assert session.cache.nbytes()["keys_values"] == 10 * 3 * (LATENT_DIM + ROPE) * 4


@pytest.mark.parametrize("architecture", LATENT)
def test_absorbed_equals_expanded(architecture):
    """In float64 queries times latents are queries times the heads' own keys, and so are the values."""
    model = small_model(architecture, dtype=torch.float64)
    module = model.model.layers[1].self_attn
    latent, turned = (torch.randn(2, 1, 9, n, dtype=torch.float64) for n in (LATENT_DIM, ROPE))
    q = torch.randn(2, HEADS, 5, 16 + ROPE, dtype=torch.float64)
    keys, values = module.expand_kv(latent, turned)
    found = projections.latent_attention(module, q)
    held = torch.cat([latent, turned], dim=-1)
    assert ((found.absorb(q) @ held.mT) - q @ keys.mT).abs().max() <= 1e-12
    weights = torch.softmax(q @ keys.mT, -1)
    assert (found.expand(weights @ latent) - weights @ values).abs().max() <= 1e-12


def seen_as_one_head(loop):
    """Have a loop see queries and keys as of one head that holds latents, from the model's weights, head by head."""
    inner = loop.reference.forward

    def forward(ids, mask=None):
        logits = inner(ids, mask)
        for layer, (query, _, features) in loop.reference.captured.items():
            weight = loop.model.model.layers[layer].self_attn.kv_b_proj.weight.view(HEADS, 16 + 12, LATENT_DIM)
            turned = [query[:, h, :, :16] @ weight[h, :16] for h in range(HEADS)]
            held = loop.reference.cache.layers[layer]
            loop.reference.captured[layer] = (
                torch.cat([torch.stack(turned, 1), query[..., 16:]], -1),
                torch.cat([held.keys, held.values], -1),
                features,
            )
        return logits

    loop.reference.forward = forward


class LatentSnapKV(LoopSnapKV):
    def __post_init__(self):
        super().__post_init__()
        seen_as_one_head(self)


class LatentH2O(LoopH2O):
    def __post_init__(self):
        super().__post_init__()
        seen_as_one_head(self)


@pytest.mark.parametrize("architecture", LATENT)
@pytest.mark.parametrize(
    ("method", "loop", "options"),
    [(SnapKV(budget=9, window=3), LatentSnapKV, {"window": 3, "in_decode": False}), (H2O(budget=9), LatentH2O, {})],
)
def test_the_latents_kept_are_those_a_loop_keeps(architecture, method, loop, options):
    """One head is held, which all query heads vote for."""
    follow(method, loop, architecture=architecture, later=(1,) * 10, **options)


@pytest.mark.parametrize(
    ("architecture", "method"),
    thinned(LATENT, [SnapKV(budget=12, window=3), H2O(budget=12), KeyDiff(budget=12), Knorm(budget=12)], every=2),
)
def test_rows_of_a_batch_equal_what_they_give_alone(architecture, method):
    """Left-padded, evicted at the prompt's end and in decode where the method does."""
    model = small_model(architecture)
    lengths = [30, 19]
    ids, mask = left_padded(lengths)
    more = random_ids(2, 4, 5)
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        batch = [
            feed(model, session.cache, more[:, t : t + 1], torch.cat([mask, torch.ones(2, t + 1, dtype=torch.long)], 1))
            for t in range(4)
        ]
        for row, length in enumerate(lengths):
            session.prefill(ids[row : row + 1, -length:])
            for t in range(4):
                ones = torch.ones(1, length + t + 1, dtype=torch.long)
                alone = feed(model, session.cache, more[row : row + 1, t : t + 1], ones)
                assert (alone[0] - batch[t][row]).abs().max() <= 1e-5


def test_a_quantised_codec_holds_coded_latents():
    """Int8 of latents and rotated keys; near the stock model's logits, and smaller."""
    model, ids, more = small_model("deepseek_v3"), random_ids(1, 40), random_ids(1, 3, 4)
    with compress(model, Full(codec=Int8())) as session:
        session.prefill(ids)
        assert session.cache.nbytes()["keys_values"] == 40 * 3 * (LATENT_DIM + ROPE + 4)
        got = torch.cat(
            [feed(model, session.cache, more[:, t : t + 1], torch.ones(1, 41 + t, dtype=torch.long)) for t in range(3)],
            1,
        )
    error = (got - stock_logits(model, torch.cat([ids, more], 1))[:, 40:]).abs().max()
    assert 1e-6 < error < 0.05


class _Turning(Codec):
    name = "turning"

    def encode(self, keys, values, slots):
        raise AssertionError

    def decode(self, channels, slots):
        raise AssertionError

    def query(self, q, slots):
        return q


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (StreamingLLM(budget=8, positions="compact"), "holds latents.*compact positions"),
        (ExpectedAttention(budget=8), "holds latents.*before rotation"),
        (CriticalKV(budget=8, window=2), "output projection.*take another method"),
        (Full(codec=_Turning()), "codec=turning.*holds latents.*codec=plain"),
        (Full(codec=KIVI(group=8, residual=8)), "codec=kivi.*holds latents.*such as int8"),
        (KIVI(), "codec=kivi.*holds latents.*such as int8"),  # not that another group would do
        (LowRank(tokens=10**9), "codec=lowrank.*holds latents.*such as int8"),  # before anything is measured
    ],
)
def test_what_does_not_go_with_latents_is_refused_by_name(method, words):
    with pytest.raises(ValueError, match=words), compress(small_model("deepseek_v3"), method) as session:
        session.prefill(random_ids(1, 20))


def test_a_quantised_up_projection_is_refused():
    model = small_model("deepseek_v3", fresh=True)
    module = model.model.layers[0].self_attn
    module.kv_b_proj.weight = torch.nn.Parameter(module.kv_b_proj.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="plain weight.*unquantised"):
        compress(model, Full())
