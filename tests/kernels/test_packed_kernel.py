"""The kernel that reads packed codes, interpreted: the same output as decoding and attending in torch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvcompress.cache.layouts.quantized_groups import GroupSegment
from kvcompress.kernels import triton_groups
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.online_softmax import piecewise_attention
from kvcompress.methods.kivi import KIVICodec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def unit(n, bits, batch=1, heads=2, dim=16, more=0, group=8, residual=16, device="cpu", dtype=torch.float32):
    draw = torch.Generator().manual_seed(n)
    keys, values = (torch.randn(batch, heads, n, dim, generator=draw).to(device, dtype) for _ in range(2))
    held = GroupSegment(KIVICodec(bits=bits, group=group, residual=residual), keys, values)
    held.flush()
    for _ in range(more):  # so that buffers are longer than what they hold
        held.append(*(torch.randn(batch, heads, 1, dim, generator=draw).to(device, dtype) for _ in range(2)))
        held.flush()
    return held


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("n", "bits", "more", "softcap"),
    [(5, 4, 0, None), (17, 2, 0, None), (33, 8, 3, None), (150, 4, 7, 2.0), (300, 2, 21, None), (600, 4, 0, None)],
)
def test_packed_codes_are_attended_to_as_if_decoded(n, bits, more, softcap):
    """Shorter than the residual, at its edge, several splits, soft cap, rows and grouped queries."""
    held, features = unit(n, bits, batch=2, more=more), AttentionParams(scaling=0.3, softcap=softcap)
    q = torch.randn(2, 6, 1, 16, generator=torch.Generator().manual_seed(1)) * 2
    expected, _ = piecewise_attention(q, held.pieces("keys"), held.pieces("values"), features)
    assert (triton_groups.decode(q, held.packed(), features) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("n", [5, 16, 17, 31, 32, 40])
def test_the_tail_is_what_has_exact_values(n):
    held = unit(n, 4)
    keys, values = held.tail()
    assert torch.equal(values, held.left["values"])
    assert torch.allclose(keys, held.whole("keys")[:, :, held.counts["values"] :])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_on_a_gpu_too(bits, dtype):
    held = unit(3000, bits, 2, 4, 128, 5, 32, 128, "cuda", dtype)
    q, features = torch.randn(2, 16, 1, 128, device="cuda", dtype=dtype), AttentionParams(scaling=128**-0.5)
    expected, _ = piecewise_attention(q.float(), (x.float() for x in held.pieces("keys")),
                                      (x.float() for x in held.pieces("values")), features)  # fmt: skip
    assert (triton_groups.decode(q, held.packed(), features).float() - expected).abs().max() <= (
        1e-4 if dtype == torch.float32 else 1e-2
    )
