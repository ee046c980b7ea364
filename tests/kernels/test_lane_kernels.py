"""Attention over lanes equals plain softmax over each segment: batched in torch, and the Triton kernel interpreted."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers import grid

from kvcompress.cache.layouts import RaggedStore
from kvcompress.kernels import triton_decode
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.varlen_decode import lane_attention


def ragged(counts, dim, width, dtype=torch.float32, device="cpu", emptied=0):
    """A store in lanes whose segments hold `counts [B, H]` tokens, and a few of them emptied again."""
    torch.manual_seed(0)
    counts, total = torch.tensor(counts), int(torch.tensor(counts).sum())
    channels = {
        "keys": torch.randn(total, dim, dtype=dtype, device=device),
        "values": torch.randn(total, width, dtype=dtype, device=device),
        "positions": torch.cat([torch.arange(n) for n in counts.flatten().tolist()]).int().to(device),
    }
    store = RaggedStore(channels, counts)
    for step in range(3):  # appended tokens put it into lanes
        new = {name: torch.randn(*counts.shape, 1, size, dtype=dtype, device=device)
               for name, size in (("keys", dim), ("values", width))}  # fmt: skip
        new["positions"] = torch.full((len(counts), 1, 1), 10_000 + step, dtype=torch.int32, device=device)
        store.append(new, None, torch.ones(len(counts), dtype=torch.long))
    for i in range(emptied):
        slots = torch.full((*counts.shape, 1), store.length - 2 - i, device=device)
        store.mark_empty(slots)
    return store


def segment_by_segment(store, q, features):
    """Softmax over what each segment holds, in float64, one head after the other."""
    batch, all_heads = q.shape[:2]
    group = all_heads // store.heads
    keys, values, held = store.get("keys").double(), store.get("values").double(), store.get("positions") >= 0
    output = torch.zeros(batch, all_heads, 1, values.shape[-1], dtype=torch.float64, device=q.device)
    for b in range(batch):
        for head in range(all_heads):
            h, mine = head // group, held[b, head // group]
            if not mine.any():
                continue
            logits = keys[b, h, mine] @ q[b, head, 0].double() * features.scaling
            if features.softcap is not None:
                logits = torch.tanh(logits / features.softcap) * features.softcap
            if features.sinks is not None:
                logits = torch.cat([logits, features.sinks[head, None].double()])
            p = torch.softmax(logits, 0)
            output[b, head, 0] = p[: int(mine.sum())] @ values[b, h, mine]
    return output


def kernels():
    yield "torch"
    if importlib.util.find_spec("triton") is not None:
        yield "triton"


@pytest.fixture(params=list(kernels()))
def attention(request):
    """What is tested: a function of a store in lanes and queries."""
    if request.param == "torch":

        def torch_lanes(store, q, features):
            args = store.in_lanes("keys"), store.in_lanes("values"), store.in_lanes("positions") < 0, store.owners()
            return lane_attention(q, *args, store.heads, features)[0]

        return torch_lanes
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")

    def interpreted(store, q, features):
        if features.sinks is not None:
            pytest.skip("attention sinks take the torch path")
        args = store.in_lanes("keys"), store.in_lanes("values"), store.in_lanes("positions")
        return triton_decode.decode(q, *args, store.table(), features)

    return interpreted


CASES = [  # tokens per row and head, query heads per KV head, head size, value size
    ([[70, 3, 33]], 3, 64, 64),
    ([[5, 200], [129, 64]], 1, 128, 128),
    ([[40], [1], [900]], 8, 80, 80),
    ([[30, 0], [0, 7]], 4, 96, 96),
    ([[300, 20]], 5, 24, 16),
    ([[1500, 260, 700]], 2, 64, 64),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    grid(CASES, [torch.float32, torch.bfloat16], short=lambda case, dtype: dtype == torch.float32 or case == CASES[3]),
)
def test_lanes_give_what_each_segment_gives(attention, case, dtype):
    """Ragged lengths, empty heads, emptied slots, grouped queries and head sizes that are no power of 2."""
    counts, group, dim, width = case
    store = ragged(counts, dim, width, dtype, emptied=2)
    q = (3 * torch.randn(len(counts), store.heads * group, 1, dim)).to(dtype)
    features = AttentionParams(dim**-0.5)
    expected = segment_by_segment(store, q, features)
    found = attention(store, q, features)
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= (2e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("extra", [{"softcap": 1.5}, {"sinks": torch.randn(6) * 3}])
def test_soft_capping_and_sinks_are_applied(attention, extra):
    store = ragged([[70, 0, 33]], 64, 64)
    q, features = 3 * torch.randn(1, 6, 1, 64), AttentionParams(0.125, **extra)
    for head in (2, 3):  # of a segment without tokens before the appended ones
        assert segment_by_segment(store, q, features)[0, head].abs().max() > 0
    assert (attention(store, q, features).double() - segment_by_segment(store, q, features)).abs().max() <= 2e-6


def test_a_head_that_holds_nothing_gives_zero(attention):
    store = ragged([[3, 40]], 64, 64)
    store.channels["positions"][store.places()[0][0, 0]] = -1
    found = attention(store, torch.randn(1, 2, 1, 64), AttentionParams(0.125))
    assert bool((found[0, 0] == 0).all()) and bool(found.isfinite().all())


def test_logits_far_apart_between_heads_stay_exact(attention):
    """One head's maximum must not push another's exponentials out of range."""
    store = ragged([[50, 50]], 64, 64)
    q = torch.randn(1, 2, 1, 64)
    q[0, 0] *= 1000
    features = AttentionParams(0.125)
    assert (attention(store, q, features).double() - segment_by_segment(store, q, features)).abs().max() <= 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "group", "dim", "width"), [*CASES, ([[30_000, 4_000, 9_000, 17_000]], 4, 128, 128)])
def test_the_compiled_kernel_gives_what_each_segment_gives(counts, group, dim, width, dtype):
    pytest.importorskip("triton")
    store = ragged(counts, dim, width, dtype, "cuda", emptied=2)
    q = (3 * torch.randn(len(counts), store.heads * group, 1, dim, device="cuda")).to(dtype)
    features = AttentionParams(dim**-0.5)
    args = store.in_lanes("keys"), store.in_lanes("values"), store.in_lanes("positions")
    assert triton_decode.usable(q, *args[:2], store.heads)
    found = triton_decode.decode(q, *args, store.table(), features)
    expected = segment_by_segment(store, q, features)
    assert (found.double() - expected).abs().max() <= (5e-6 if dtype == torch.float32 else 3e-2)
