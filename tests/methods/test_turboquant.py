"""TurboQuant against its published distortions and a loop over coordinates; and the int8 baseline."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import all_held
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.method.codec import Slots
from kvcompress.method.orthogonal import gaussian, hadamard, orthogonal
from kvcompress.methods import AdaKV, Full, Int8, SnapKV, TurboQuant
from kvcompress.methods.turboquant import TurboQuantCodec, codebook

SLOTS = Slots(layer=0, rotated=torch.zeros(1, 1, 1, dtype=torch.long), heads=1)
MODEL = small_model()


def vectors(n, dim=128, seed=0):
    x = torch.randn(1, 1, n, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("dim", [8, 64, 96, 100])
def test_rotations_are_orthogonal_and_the_same_for_a_seed(dim):
    turn = orthogonal(dim, 3)
    assert (turn @ turn.T - torch.eye(dim)).abs().max() < 1e-5
    assert torch.equal(turn, orthogonal(dim, 3)) and not torch.equal(turn, orthogonal(dim, 4))


def test_a_hadamard_matrix_is_symmetric_and_its_own_inverse_and_needs_a_power_of_2():
    h = hadamard(16)
    assert torch.equal(h, h.T) and (h @ h - torch.eye(16)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="power of 2"):
        hadamard(12)


def test_the_codebooks_are_the_published_ones():
    """Levels of Lloyd-Max for a normal, to the digits they are printed with."""
    assert codebook(1).tolist() == pytest.approx([-0.7979, 0.7979], abs=1e-4)
    assert codebook(2)[2:].tolist() == pytest.approx([0.4528, 1.5104], abs=1e-4)
    assert codebook(3)[4:].tolist() == pytest.approx([0.2451, 0.7560, 1.3439, 2.1520], abs=1e-3)
    assert codebook(4)[8:].tolist() == pytest.approx(
        [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326], abs=2e-3
    )


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_mean_distortion_of_unit_vectors_is_the_papers(bits, distortion):
    x, codec = vectors(4000), TurboQuantCodec(bits=bits)
    keys, values = codec.decode(codec.encode(x, x, SLOTS), SLOTS)
    assert torch.equal(keys, values)
    assert float((keys - x).square().sum(-1).mean()) == pytest.approx(distortion, rel=0.03)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_coordinate_gets_the_nearest_level(bits):
    x, codec = vectors(3, 16) * 5, TurboQuantCodec(bits=bits, seed=2)
    keys, _ = codec.decode(codec.encode(x, x, SLOTS), SLOTS)
    turn, levels = orthogonal(16, 2), codebook(bits) / 4
    for i in range(3):
        norm = float(x[0, 0, i].norm())
        rotated = [float(turn[j] @ x[0, 0, i]) / norm for j in range(16)]
        nearest = torch.tensor([min(levels.tolist(), key=lambda c, y=y: abs(c - y)) for y in rotated])
        assert torch.allclose(keys[0, 0, i], norm * (turn.T @ nearest), atol=5e-3)


def test_products_with_keys_are_unbiased_in_mode_prod_and_shrunk_in_mode_mse():
    x, q = vectors(1, 64, 1), vectors(1, 64, 2)[0, 0, 0]
    x = (x + 2 * q) / (x + 2 * q).norm()
    truth = float(x.flatten() @ q)
    products = []
    for seed in range(400):
        codec = TurboQuantCodec(bits=2, mode="prod", seed=seed)
        products.append(float(codec.decode(codec.encode(x, x, SLOTS), SLOTS)[0].flatten() @ q))
    found = torch.tensor(products)
    assert abs(float(found.mean()) - truth) < 4 * float(found.std()) / math.sqrt(400)
    one = [TurboQuantCodec(bits=1, seed=seed) for seed in range(100)]
    mse = torch.tensor([float(c.decode(c.encode(x, x, SLOTS), SLOTS)[0].flatten() @ q) for c in one])
    assert float(mse.mean()) == pytest.approx(2 / math.pi * truth, rel=0.05)


@pytest.mark.parametrize("mode", ["mse", "prod"])
def test_the_opposite_vector_is_held_as_the_opposite(mode):
    x, codec = vectors(50, 64), TurboQuantCodec(bits=3, mode=mode)
    there, back = (codec.decode(codec.encode(y, y, SLOTS), SLOTS)[0] for y in (x, -x))
    assert torch.allclose(there, -back, atol=1e-5)


@pytest.mark.parametrize("mode", ["mse", "prod"])
def test_a_query_taken_to_the_rotated_basis_meets_the_same_products(mode):
    x, q = vectors(50, 64), torch.randn(1, 1, 1, 64)
    codec = TurboQuantCodec(bits=3, mode=mode)
    channels = codec.encode(x, x, SLOTS)
    keys, values = codec.decode(channels, SLOTS)
    near, turned = codec.read(channels, SLOTS)
    assert torch.allclose(codec.query(q, SLOTS) @ near.mT, q @ keys.mT, atol=1e-4)
    weights = torch.softmax(torch.randn(1, 1, 1, 50), -1)
    assert torch.allclose(codec.expand(weights @ turned, SLOTS), weights @ values, atol=1e-5)
    assert gaussian(64).shape == (64, 64)


@pytest.mark.parametrize(("bits", "mode"), [(1, "mse"), (2, "mse"), (3, "mse"), (4, "mse"), (2, "prod"), (3, "prod")])
def test_bytes_are_bits_per_number_and_a_length_per_vector(bits, mode):
    with compress(MODEL, TurboQuant(bits=bits, mode=mode)) as session:
        held = session.prefill(random_ids(1, 40)).cache.nbytes()
    per = 2 * 16 * bits // 8 + 4 + (2 if mode == "prod" else 0)
    assert held["keys_values"] == 40 * 2 * 3 * per
    assert held["codes"] == 40 * 2 * 3 * 2 * 16 * bits // 8 and held["residual"] == 0


@pytest.mark.parametrize("mode", ["mse", "prod"])
def test_decoding_in_the_rotated_basis_equals_decoding_over_decoded_keys(mode):
    """One appended token reads latents, a block of them decodes: same logits; ragged layers too."""
    ids, mask = left_padded([30, 18])
    method = TurboQuant(bits=4, mode=mode)
    for cell in (method, SnapKV(budget=0.5, window=3, codec=method), AdaKV(budget=0.5, window=3, codec=method)):
        with compress(MODEL, cell) as session:
            cache = session.prefill(ids, attention_mask=mask).cache
            fork = cache.fork()
            tokens = random_ids(2, 3)
            stepwise = [session.step(tokens[:, t : t + 1]) for t in range(3)][-1]
            session.cache = fork
            assert (session.append(tokens) - stepwise).abs().max() <= 1e-3


def test_zero_vectors_stay_zero_and_rows_keep_their_codes():
    codec = TurboQuantCodec()
    x = torch.zeros(1, 1, 2, 16)
    assert not any(t.any() for t in codec.decode(codec.encode(x, x, SLOTS), SLOTS))
    ids, mask = left_padded([20, 11])
    with compress(MODEL, TurboQuant()) as session:
        session.prefill(ids, attention_mask=mask)
        together = session.cache.keys_values(0)[0][1, :, -11:]
        session.prefill(ids[1:, -11:])
        assert torch.equal(session.cache.keys_values(0)[0][0], together)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 5}, "bits=5; valid: 1, 2, 3, 4"),
        ({"mode": "qjl"}, "valid: mse, prod"),
        ({"bits": 1, "mode": "prod"}, "bits=2"),
    ],
)
def test_bad_settings_are_refused_with_the_fix(options, words):
    with pytest.raises(ValueError, match=words):
        TurboQuant(**options)
    with pytest.raises(ValueError, match="multiples of 8"):
        compress(small_model(head_dim=12), TurboQuant())


def test_int8_loses_at_most_half_a_scale_and_holds_a_byte_per_number():
    """Beside it a float16 scale per token and head; a token of zeros stays zero."""
    codec = Int8().make_codec()
    x = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 0, 4] = 0
    channels = codec.encode(x, x * 2, SLOTS)
    keys, values = codec.decode(channels, SLOTS)
    assert ((keys - x).abs() <= channels["key_scale"].float() * 0.57).all() and not keys[0, 0, 4].any()
    for token in range(20):  # one after the other
        for h in range(2):
            scale = channels["value_scale"][0, h, token].float()
            codes = [max(-127, min(127, round(float(n / scale)))) if scale else 0 for n in x[0, h, token] * 2]
            assert channels["value_codes"][0, h, token].tolist() == codes
    with compress(MODEL, Full(codec=Int8())) as session:
        session.prefill(random_ids(1, 40))
        session.generate(3)
        held, kept = session.cache.nbytes(), all_held(session)
    assert held["keys_values"] == 42 * 2 * 3 * 2 * (16 + 2) and len(kept[0][0][0]) == 42
