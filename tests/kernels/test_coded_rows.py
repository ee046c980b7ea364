"""Rows of codes: products and sums as of the numbers they stand for, whatever blocks they are made in."""

from __future__ import annotations

import pytest
import torch

from kvcompress.kernels import coded_rows
from kvcompress.kernels.blockwise import AttentionParams, softmax_block
from kvcompress.kernels.coded_rows import CodedRows, MadeRows, RowsBeside, attend_rows, levels_of, whole_numbers
from kvcompress.method.packing import dequantise, pack, quantise, unpack
from kvcompress.methods.turboquant import codebook


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def scales(batch, heads, slots):
    return torch.rand(batch, heads, slots, 1, generator=drawn(1)).half()


def int8(batch, heads, slots, width):
    codes = torch.randint(-127, 128, (batch, heads, slots, width), generator=drawn(), dtype=torch.int8)
    scale = scales(batch, heads, slots)
    return CodedRows(codes, scale), codes.float() * scale.float()


def levels(bits):
    def make(batch, heads, slots, width):
        codes = torch.randint(0, 2**bits, (batch, heads, slots, width), generator=drawn())
        scale, numbers = scales(batch, heads, slots), codebook(bits)[codes]
        if bits == 3:
            packed, high = pack(codes & 3, 2), pack(codes >> 2, 1)
        else:
            packed, high = pack(codes, bits), None
        return CodedRows(packed, scale, meaning=levels_of(codebook, bits), high=high), numbers * scale.float()

    return make


def quantised(bits):
    def make(batch, heads, slots, width):
        x = torch.randn(batch, heads, slots, width, generator=drawn())
        codes, scale, zero = quantise(x, bits, -1)
        meaning = None if bits == 8 else levels_of(whole_numbers, bits)
        return CodedRows(pack(codes, bits), scale, zero, meaning), dequantise(codes, scale, zero)

    return make


def beside(batch, heads, slots, width):
    (left, a), (right, b) = int8(batch, heads, slots, width), levels(3)(batch, heads, slots, 2 * width)
    return RowsBeside((left, right)), torch.cat([a, b], -1)


def made(batch, heads, slots, width):
    x = torch.randn(batch, heads, slots, width, generator=drawn())
    return MadeRows(lambda at: x[:, at[0], at[1]], tuple(x.shape), x.device, by_lane=heads > slots), x


KINDS = {
    "int8": int8,
    **{f"levels{b}": levels(b) for b in (1, 2, 3, 4)},
    **{f"quantised{b}": quantised(b) for b in (2, 4, 8)},
    "beside": beside,
    "made": made,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 3, 200, 16), (1, 90, 16, 8)])
def test_rows_multiply_and_add_up_as_the_numbers_that_they_stand_for(kind, shape, monkeypatch):
    """Many blocks of slots, and of lanes where there are more of these."""
    monkeypatch.setattr(coded_rows, "BLOCK_NUMBERS", 1 << 10)
    rows, numbers = KINDS[kind](*shape)
    assert rows.shape == tuple(numbers.shape)
    assert torch.allclose(rows.whole(), numbers, atol=1e-6)
    q, p = (
        torch.randn(*shape[:2], 3, rows.shape[3]),
        torch.rand(*shape[:3]).softmax(-1)[:, :, None].expand(-1, -1, 3, -1),
    )
    scale = numbers.abs().max()
    assert (rows.dot(q) - q @ numbers.mT).abs().max() <= 2e-5 * scale
    assert (rows.weigh(p) - p @ numbers).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_byte_of_codes_is_looked_up_as_its_codes_one_by_one(bits):
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(
        coded_rows.looked_up(packed, levels_of(whole_numbers, bits).bytes.value), unpack(packed, bits).float()
    )


@pytest.mark.parametrize(
    "features", [AttentionParams(0.3), AttentionParams(0.3, softcap=2.0), AttentionParams(0.3, sinks=torch.arange(6.0))]
)
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_over_rows_is_a_softmax_over_their_numbers(features, heads, monkeypatch):
    """Grouped queries, a soft cap, sinks, and a mask of as many heads as keys or of all."""
    monkeypatch.setattr(coded_rows, "BLOCK_NUMBERS", 1 << 10)
    (large, _), (values, v) = int8(2, heads, 150, 16), levels(4)(2, heads, 150, 8)
    keys = CodedRows(large.codes, large.scale / 100)
    k = keys.whole()
    q, held = torch.randn(2, 6, 1, 16, generator=drawn()), torch.rand(2, 2, 1, 150, generator=drawn()) < 0.7
    for allowed in (None, held[:, :1], held):
        wide = (x.expand(-1, max(heads, 1 if allowed is None else allowed.shape[1]), -1, -1) for x in (k, v))
        expected, p = softmax_block(q, *wide, allowed, features)
        output, found = attend_rows(q, keys, values, allowed, features)
        assert (output - expected).abs().max() <= 1e-5
        assert (found - p.flatten(1, 3)).abs().max() <= 1e-6
