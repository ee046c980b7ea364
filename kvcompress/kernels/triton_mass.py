"""Attention mass on a GPU: column sums of softmax from q, k and the log-sum-exp, no value read and no logit kept.

The output comes from an ordinary fast attention. Where that gives its log-sum-exp too (flash on a plain prompt) the
mass costs one product and one exponential of the causal half; elsewhere a pass of our own finds the log-sum-exp first.
"""

from __future__ import annotations

import torch

from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.triton_decode import usable as on_gpu

Tensor = torch.Tensor

BLOCK_M, BLOCK_N = 64, 128  # queries and columns of a tile


def usable(q: Tensor, features: AttentionParams) -> bool:
    """True if mass of queries like `q` can be summed here: on CUDA, with Triton, and a model that SDPA serves."""
    return features.plain and on_gpu(q)


def flash(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Causal output `[B, H, n, D]` and log-sum-exp `[B, H, n]` float32 of a sequence's first tokens, from one kernel.

    None where PyTorch's flash kernel does not take them: on CUDA in half precision, equal head sizes up to 256 that 8
    divides.
    """
    dim = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16) or dim > 256 or dim % 8 or v.shape[-1] != dim or not q.is_cuda:
        return None
    try:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scaling)
    except RuntimeError:  # a build without it, or a device too old
        return None
    return found[0], found[1]


def mass(
    q: Tensor,
    k: Tensor,
    asked: Tensor,
    positions: Tensor,
    features: AttentionParams,
    ordered: bool = True,
    plain: bool = False,
    weights: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """What each slot gets of the queries' attention, summed over queries in float32: `[B, H_kv, G, P]`.

    Args:
        q: `[B, H, n, D]`; k `[B, H_kv, P, D]`.
        asked: int `[B or 1, n]`, positions of the queries, -1 = padding, which gives nothing.
        positions: int `[B, H_kv or 1, P]`, -1 = empty.
        features: scaling, window and soft cap are applied; no sinks.
        ordered: the queries' own columns are the last n, so that no query sees a later one.
        plain: nothing is empty, padding or out of a window: order alone says who sees what.
        weights: float32 `[B or 1, n]`, what each query counts; None for 1.
        lse: float32 `[B, H, n]`, log-sum-exp of each query's logits; found here if not given.
    """
    from kvcompress.kernels import mass_kernels as kernels  # only where Triton is installed
    from kvcompress.kernels.triton_kernels import power_of_2

    if features.sinks is not None:
        raise ValueError("attention mass beside attention sinks is the blockwise kernel's")
    batch, heads, n, dim = q.shape
    kv, columns = k.shape[1], k.shape[2]
    ahead = columns - n if ordered else columns
    q, k, asked, positions = (x.contiguous() for x in (q, k, asked, positions))
    row, head = (
        0 if size == 1 else stride for size, stride in zip(positions.shape, positions.stride()[:2], strict=False)
    )
    asked_stride = 0 if len(asked) == 1 else n
    sizes = {
        "H": heads,
        "G": heads // kv,
        "D": dim,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": max(16, power_of_2(dim)),
        "SOFTCAP": features.softcap is not None,
        "WINDOW": features.window is not None,
        "UPCAST": not q.is_cuda,
    }
    numbers = (features.scaling, features.softcap or 1.0, features.window or 0, n, columns, ahead)
    if lse is None:
        lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
        kernels.row_logsumexp[(-(-n // BLOCK_M), batch * heads)](
            q, k, asked, positions, lse, *numbers, asked_stride, row, head, **sizes
        )
    found = torch.empty(batch, kv, heads // kv, columns, dtype=torch.float32, device=q.device)
    weights = None if weights is None else weights.float().contiguous()
    kernels.column_sums[(-(-columns // BLOCK_N), batch * heads)](
        q,
        k,
        lse.contiguous(),
        asked,
        positions,
        q if weights is None else weights,  # never read without weights
        found,
        *numbers,
        asked_stride,
        0 if weights is None or len(weights) == 1 else n,
        row,
        head,
        **sizes,
        WEIGHTED=weights is not None,
        CAUSAL=plain and ordered and features.window is None,
    )
    return found
