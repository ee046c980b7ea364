"""Codes in bytes, and the quantisation of groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.method.packing import BITS, dequantise, pack, quantise, unpack


@pytest.mark.parametrize("bits", BITS)
def test_unpacking_gives_back_what_was_packed_in_as_many_bytes_as_bits_say(bits):
    codes = torch.randint(0, 2**bits, (3, 2, 5, 16), generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, 5, 16 * bits // 8)
    assert torch.equal(unpack(packed, bits).long(), codes)


def test_the_first_code_is_the_lowest_bits():
    assert pack(torch.tensor([1, 2, 3, 0]), 2).tolist() == [1 | 2 << 2 | 3 << 4]
    assert pack(torch.tensor([5, 9]), 4).tolist() == [5 | 9 << 4]


def test_widths_and_lengths_that_do_not_fill_bytes_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="bits=3; valid: 1, 2, 4, 8"):
        pack(torch.zeros(8), 3)
    with pytest.raises(ValueError, match="give a multiple of 4"):
        pack(torch.zeros(6), 2)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS[1:]),
    offset=st.sampled_from([0.0, 3.0, -50.0, 1000.0]),
    spread=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 20),
)
def test_no_number_is_off_by_more_than_half_a_scale(bits, offset, spread, dtype, seed):
    """However far a group lies from 0 and however narrow it is; constant groups are exact to float16."""
    x = (offset + spread * torch.randn(4, 32, 6, generator=torch.Generator().manual_seed(seed))).to(dtype)
    codes, scale, zero = quantise(x, bits, dim=1)
    assert scale.dtype == zero.dtype == torch.float16 and int(codes.max()) < 2**bits
    error = (dequantise(codes, scale, zero) - x.float()).abs()
    assert (error <= scale.float() / 2 + 1e-6 * (1 + abs(offset))).all()
    # a scale is no more than rounding larger than the range asks for
    reach = (x.float().amax(1) - x.float().amin(1)) / (2**bits - 1)
    assert (
        scale.float().squeeze(1) <= reach * 1.002 + 2**-8 * abs(offset) / (2**bits - 1) + 2**-8 * spread + 1e-6
    ).all()


@pytest.mark.parametrize("bits", BITS[1:])
def test_as_many_equally_spaced_levels_as_there_are_codes_are_exact(bits):
    levels = torch.arange(2**bits).float() * 0.25 - 8
    codes, scale, zero = quantise(levels[:, None], bits, dim=0)
    assert codes.flatten().tolist() == list(range(2**bits))
    assert torch.equal(dequantise(codes, scale, zero).flatten(), levels)


def test_a_constant_group_has_scale_and_codes_zero():
    codes, scale, zero = quantise(torch.full((32, 2), 1.5), 2, dim=0)
    assert not codes.any() and not scale.any() and (zero == 1.5).all()


@pytest.mark.parametrize("numbers", [[1e6, -1e6, 0.0, 1.0], [-65485.0, 0.0]])  # the second lies above its nearest
def test_numbers_at_and_beyond_the_end_of_float16_stay_finite(numbers):
    codes, scale, zero = quantise(torch.tensor(numbers), 4, dim=0)
    assert dequantise(codes, scale, zero).isfinite().all()
