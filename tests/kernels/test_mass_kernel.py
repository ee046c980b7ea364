"""Attention mass equals the column sums of a dense softmax in float64: blockwise in torch, and the kernel interpreted."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers import examples, grid, thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from kvcompress import compress
from kvcompress.hook.compression import Compressor
from kvcompress.kernels import blockwise, triton_mass
from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.methods import H2O

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def dense(q, k, asked, positions, features, weights=None):
    """Column sums `[B, H_kv, G, P]`, log-sum-exp `[B, H, n]`: the whole matrix, in float64."""
    batch, heads, n, _ = q.shape
    kv, group = k.shape[1], heads // k.shape[1]
    logits = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * features.scaling
    if features.softcap is not None:
        logits = torch.tanh(logits / features.softcap) * features.softcap
    at = positions.long().expand(batch, kv, -1).repeat_interleave(group, 1)[:, :, None]
    who = asked.long().expand(batch, -1)[:, None, :, None]
    seen = (at >= 0) & (at <= who)
    if features.window is not None:
        seen &= at > who - features.window
    logits = logits.masked_fill(~seen, float("-inf"))
    p = torch.softmax(logits, -1).nan_to_num(0.0)  # a query that sees nothing gives nothing
    w = torch.ones(1, n, dtype=torch.float64) if weights is None else weights.double()
    sums = (p * w.to(p.device)[:, None, :, None]).sum(2)
    return sums.view(batch, kv, group, -1), logits.logsumexp(-1)


def case(batch, kv, group, n, held, dim, dtype=torch.float32, device="cpu", seed=0, empty=False):
    draw = torch.Generator().manual_seed(seed)
    q = (2 * torch.randn(batch, kv * group, n, dim, generator=draw)).to(device, dtype)
    k = torch.randn(batch, kv, held + n, dim, generator=draw).to(device, dtype)
    positions = torch.arange(held + n, dtype=torch.int32).expand(batch, kv, -1).clone()
    asked = torch.arange(held, held + n, dtype=torch.int32).expand(batch, -1).clone()
    if empty:  # the second row is padded at the left, heads have lost different slots
        lost = torch.rand(batch, kv, held + n, generator=draw) < 0.2
        lost[..., -n:] = False
        positions[lost] = -1
        pad = min(3, n - 1)
        asked[-1, :pad] = -1
        positions[-1, :, held : held + pad] = -1
    return q, k, asked.to(device), positions.to(device)


@needs_triton
@interpreted
@pytest.mark.parametrize(
    ("sizes", "group", "dtype"),
    grid(
        [(5, 0), (100, 0), (70, 0), (33, 150), (1, 300)],
        [1, 3, 4],
        [torch.float32, torch.bfloat16],
        short=lambda sizes, group, dtype: (
            (group == 3) == (sizes != (33, 150)) and (dtype == torch.float32) == (sizes != (70, 0))
        ),
    ),
)
def test_the_kernel_sums_what_a_dense_softmax_gives(sizes, group, dtype):
    """Whole prompts and later chunks, grouped queries, both types."""
    n, held = sizes
    q, k, asked, positions = case(1, 2, group, n, held, 24, dtype)
    features = AttentionParams(24**-0.5)
    expected, lse = dense(q, k, asked, positions, features)
    for plain in (True, False):
        found = triton_mass.mass(q, k, asked[:1], positions[:, :1], features, plain=plain)
        assert found.dtype == torch.float32
        assert (found.double() - expected).abs().max() <= 1e-5 * max(1.0, float(expected.max()))
        given_lse = triton_mass.mass(q, k, asked, positions, features, plain=plain, lse=lse.float())
        assert (given_lse.double() - expected).abs().max() <= 1e-5 * max(1.0, float(expected.max()))


@needs_triton
@interpreted
@settings(max_examples=examples(6, 25), deadline=None)
@given(
    kv=st.integers(1, 2),
    group=st.integers(1, 4),
    n=st.integers(1, 90),
    held=st.integers(0, 90),
    window=st.sampled_from([None, 1, 20, 100]),
    softcap=st.sampled_from([None, 3.0]),
    weighted=st.booleans(),
    ordered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_padding_windows_soft_caps_and_weights_count(kv, group, n, held, window, softcap, weighted, ordered, seed):
    q, k, asked, positions = case(2, kv, group, n, held, 16, seed=seed, empty=True)
    features = AttentionParams(0.25, window=window, softcap=softcap)
    weights = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) if weighted else None
    expected, _ = dense(q, k, asked, positions, features, weights)
    found = triton_mass.mass(q, k, asked, positions, features, ordered, False, weights)
    assert bool(found.isfinite().all())
    assert (found.double() - expected).abs().max() <= 1e-4


@needs_triton
@interpreted
def test_the_same_sums_come_every_time_and_lie_only_where_a_query_looks():
    q, k, asked, positions = case(1, 1, 2, 200, 0, 16)
    few, looked = q[:, :, :90].contiguous(), asked[:, :90]
    k[:, :, 90:] = float("nan")  # what no query sees is neither counted nor spoils the rest
    found = triton_mass.mass(few, k, looked, positions, AttentionParams(0.25), ordered=False)
    assert torch.equal(found, triton_mass.mass(few, k, looked, positions, AttentionParams(0.25), ordered=False))
    assert bool((found[..., 90:] == 0).all()) and abs(float(found.sum()) - 2 * 90) <= 1e-3, "every query gives 1"


@needs_triton
def test_sinks_are_refused():
    q, k, asked, positions = case(1, 1, 1, 4, 0, 16)
    with pytest.raises(ValueError, match="sinks"):
        triton_mass.mass(q, k, asked, positions, AttentionParams(0.25, sinks=torch.zeros(1)))


@needs_triton
@interpreted
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_and_a_later_chunk_collect_what_the_blockwise_kernel_collects(padded, monkeypatch):
    """H2O's sums and logits through the GPU's path, interpreted, beside the path of a CPU."""
    model = small_model(num_hidden_layers=1)
    ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0

    def run():
        seen = []

        def note(self, layer, mass, forward):
            seen.append(mass.clone())
            stock(self, layer, mass, forward)

        monkeypatch.setattr(Compressor, "add_mass", note)
        with compress(model, H2O(budget=0.5)) as session:
            session.prefill(ids, attention_mask=mask)
            session.append(ids[:, :17])
            return seen, session.cache.logits, session.report()["kernel"]

    stock = Compressor.add_mass
    expected, logits, kernel = run()
    monkeypatch.setattr(triton_mass, "usable", lambda q, features: features.plain)
    found, after, used = run()
    assert (kernel, used) == ("blockwise", "sdpa+triton") and len(found) == len(expected) == 2
    assert (logits - after).abs().max() <= 1e-4
    assert all((a - b).abs().max() <= 1e-4 for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("sizes", "group", "dtype"),
    thinned([(90, 0, None), (40, 30, None), (70, 20, 25)], [1, 3, 4], [torch.float32, torch.bfloat16], every=3),
)
def test_blocks_on_a_cpu_sum_what_a_dense_softmax_gives(sizes, group, dtype, monkeypatch):
    """Blocks of 16 queries, padding, lost slots and weights that decay; the output beside the sums."""
    n, held, window = sizes
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 16)
    q, k, asked, positions = case(2, 2, group, n, held, 24, dtype, empty=True)
    features = AttentionParams(24**-0.5, window=window)
    weights = 0.95 ** (asked.amax(1, keepdim=True) - asked).float()
    weights[asked < 0] = 0.0
    sums = torch.zeros(2, 2, group, held + n)
    cut = blockwise.blocks(n, q[:1, :group], k)
    assert len(cut) == -(-n // 16)
    spans = [(rows, 0, held + rows.stop) for rows in cut]
    output = blockwise.softmax_blocks(q, k, k, positions, asked, features, spans, sums, weights)
    expected, lse = dense(q, k, asked, positions, features, weights)
    assert (sums.double() - expected).abs().max() <= (1e-4 if dtype == torch.float32 else 0.05)
    logits = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * features.scaling
    at, who = positions.repeat_interleave(group, 1)[:, :, None], asked[:, None, :, None]
    seen = (at >= 0) & (at <= who) & (True if window is None else at > who - window)
    p = (logits - lse[..., None]).exp().masked_fill(~seen, 0.0)
    whole = p @ k.double().repeat_interleave(group, 1)
    real = (asked >= 0)[:, None, :, None].expand_as(whole)
    assert (output.double() - whole)[real].abs().max() <= (1e-5 if dtype == torch.float32 else 0.05)
