"""The kernel that attends to codes, interpreted: the same output as `coded_rows`, in buffers with room and in lanes."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from test_coded_rows import beside, int8, levels, quantised

from kvcompress.kernels import triton_codes
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.coded_rows import CodedRows, attend_rows
from kvcompress.kernels.varlen_decode import lane_attention

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="Triton's interpreter"
)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cut(rows, slots):
    """The first slots of a buffer."""
    held = {
        name: x[:, :, :slots] for name in ("codes", "scale", "zero", "high") if (x := getattr(rows, name)) is not None
    }
    return CodedRows(**held, meaning=rows.meaning)


def operands(kind, slots, batch=2, heads=2, width=16, device="cpu", dtype=torch.float32):
    keys, values = (cut(kind(batch, heads, slots + 9, w)[0], slots) for w in (width, 8 if width == 16 else width))
    keys, values = (replace(rows, scale=rows.scale / 30) for rows in (keys, values))
    draw = torch.Generator().manual_seed(2)
    q = torch.randn(batch, 3 * heads, 1, width, generator=draw).to(device, dtype)
    positions = torch.arange(slots, dtype=torch.int32).expand(batch, heads, -1).clone()
    positions[torch.rand(positions.shape, generator=draw) < 0.2] = -1
    moved = (
        CodedRows(
            *(x.to(device) if isinstance(x, torch.Tensor) else x for x in (r.codes, r.scale, r.zero, r.meaning, r.high))
        )
        for r in (keys, values)
    )
    return q, *moved, positions.to(device)


@interpreted
@pytest.mark.parametrize(
    ("kind", "slots", "softcap"),
    [(int8, 70, None), (int8, 600, 1.5), (levels(1), 40, None), (levels(2), 70, None), (levels(3), 70, 1.5),
     (levels(4), 300, None), (quantised(4), 70, None), (quantised(8), 70, None)],
)  # fmt: skip
def test_codes_are_attended_to_as_the_numbers_that_they_stand_for(kind, slots, softcap):
    """Buffers with room behind what is held, holes, several splits, one positions tensor for all heads or one each."""
    q, keys, values, positions = operands(kind, slots)
    features = AttentionParams(scaling=0.3, softcap=softcap)
    for held in (positions, positions[:, :1]):
        expected, _ = attend_rows(q, keys, values, held[:, :, None] >= 0, features)
        assert (triton_codes.decode(q, keys, values, held, features) - expected).abs().max() <= 1e-5


@interpreted
def test_slots_before_the_window_do_not_count():
    q, keys, values, positions = operands(int8, 100)
    oldest = torch.tensor([90, 90, 30, 30], dtype=torch.int32)
    allowed = (positions >= oldest.view(2, 2, 1))[:, :, None]
    expected, _ = attend_rows(q, keys, values, allowed, AttentionParams(0.3))
    found = triton_codes.decode(q, keys, values, positions, AttentionParams(0.3), oldest=oldest)
    assert (found - expected).abs().max() <= 1e-5


@interpreted
@pytest.mark.parametrize("kind", [int8, levels(4), levels(3)])
def test_codes_are_read_where_they_lie_in_lanes(kind):
    """Segments of one to three lanes of 16 slots."""
    owners = torch.tensor([0, 0, 1, 2, 3, 2, 2])
    table = torch.tensor([[0, 1, -1], [2, -1, -1], [3, 5, 6], [4, -1, -1]], dtype=torch.int32)
    (keys, _), (values, _) = kind(1, 7, 16, 16), kind(1, 7, 16, 8)
    keys, values = (replace(rows, scale=rows.scale / 30) for rows in (keys, values))
    positions = torch.arange(16, dtype=torch.int32).expand(7, -1).clone()
    positions[[1, 6], 5:] = -1
    q, features = torch.randn(2, 6, 1, 16), AttentionParams(scaling=0.3)
    expected, _ = lane_attention(q, keys, values, positions < 0, owners, 2, features)
    assert (triton_codes.decode(q, keys, values, positions, features, table) - expected).abs().max() <= 1e-5


def test_the_kernel_is_left_to_others_with_the_reason():
    """Sinks, other types, rows of several parts, and blocks that a card has no room for."""
    (keys, _), plain, large = int8(1, 2, 10, 16), AttentionParams(1.0), 1 << 18
    reason = triton_codes.unsupported_reason
    assert reason(torch.float16, keys, keys, plain, large) is None
    assert "sinks" in reason(torch.float16, keys, keys, AttentionParams(1.0, sinks=torch.zeros(2)), large)
    assert "float64" in reason(torch.float64, keys, keys, plain, large)
    assert "more than codes" in reason(torch.float16, beside(1, 2, 10, 16)[0], keys, plain, large)
    wide, _ = levels(4)(1, 2, 10, 256)
    assert "49152" in reason(torch.bfloat16, wide, wide, plain, 49_152)
    assert reason(torch.bfloat16, wide, wide, plain, 101_376) is None


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [int8, levels(2), levels(3), levels(4), quantised(4)])
def test_on_a_gpu_too(kind, dtype):
    q, keys, values, positions = operands(kind, 3000, 2, 4, 128, "cuda", dtype)
    features = AttentionParams(scaling=128**-0.5)
    expected, _ = attend_rows(q.float(), keys, values, positions[:, :, None] >= 0, features)
    found = triton_codes.decode(q, keys, values, positions, features).float()
    assert (found - expected).abs().max() <= (1e-4 if dtype == torch.float32 else 2e-2)
