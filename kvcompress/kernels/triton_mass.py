"""Attention mass on a GPU: column sums of softmax from q, k and the log-sum-exp, no value read and no logit kept.

The output comes from an ordinary fast attention. Where that gives its log-sum-exp too (flash on a plain prompt) the
mass costs one product and one exponential of the causal half; elsewhere a pass of our own finds the log-sum-exp first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompress.kernels.blockwise import AttentionParams
from kvcompress.kernels.launch import HALF, fits, launching, on_gpu, refused, tile

Tensor = torch.Tensor

WIDEST = 256  # channels of a head: a tile of more does not fit any card's shared memory
SCRATCH = 8_192  # bytes of a block beside its tiles, at most


@dataclass(frozen=True)
class Tiles:
    """How a block walks over a matrix of logits.

    Attributes:
        m, n: queries and columns of a tile.
        dim: channels of a tile.
        stages: tiles of what is walked over that are in flight.
        warps: of a block; with 4 the sums spill registers.
    """

    m: int
    n: int
    dim: int
    stages: int
    warps: int = 8

    def shared_bytes(self, size: int) -> int:
        """Shared memory of a block of either kernel in bytes, numbers of `size` bytes: one side held, the other in flight."""
        held_rows, held_columns = self.m + self.stages * self.n, self.n + self.stages * self.m
        return size * self.dim * max(held_rows, held_columns) + SCRATCH


def tiles(q: Tensor) -> Tiles | None:
    """The tiles for queries `[B, H, n, D]`: as many in flight as the card has room for; None where none fit."""
    dim = tile(q.shape[-1])
    if dim > WIDEST:
        return None
    found = (Tiles(64, 128 if dim < WIDEST else 64, dim, stages) for stages in (3, 2))
    return next((one for one in found if fits(q, one.shared_bytes(q.element_size()))), None)


def usable(q: Tensor, features: AttentionParams) -> bool:
    """True if mass of queries like `q` can be summed here: on CUDA with Triton, and a model that SDPA serves.

    In half precision only: what the kernels sum exactly in float32 they would spill.
    """
    if not features.plain or not on_gpu(q) or q.dtype not in HALF:
        return False
    found = tiles(q)
    return found is not None and not refused("mass", q, found)


def flash(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Causal output `[B, H, n, D]` and log-sum-exp `[B, H, n]` float32 of a sequence's first tokens, from one kernel.

    None where PyTorch says beforehand that its flash kernel does not take them: it wants CUDA, half precision and equal
    head sizes up to 256 that 8 divides.
    """
    dim = q.shape[-1]
    if q.dtype not in HALF or dim > 256 or dim % 8 or v.shape[-1] != dim or not q.is_cuda:
        return None
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, k.shape[1] != q.shape[1])
    if not torch.backends.cuda.can_use_flash_attention(asked):
        return None
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scaling)
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

    Raises:
        KernelUnusable: see `launch.launching`.
    """
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
    cut = tiles(q)
    if cut is None:
        raise ValueError(f"attention mass of heads of {dim} channels is the blockwise kernel's")
    sizes = {
        "H": heads,
        "G": heads // kv,
        "D": dim,
        "BLOCK_M": cut.m,
        "BLOCK_N": cut.n,
        "BLOCK_D": cut.dim,
        "SOFTCAP": features.softcap is not None,
        "WINDOW": features.window is not None,
        "UPCAST": not q.is_cuda,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    numbers = (features.scaling, features.softcap or 1.0, features.window or 0, n, columns, ahead)
    weighted = weights is not None
    strides = asked_stride, 0 if weights is None or len(weights) == 1 else n, row, head
    weights = q if weights is None else weights.float().contiguous()  # never read without weights
    found = torch.empty(batch, kv, heads // kv, columns, dtype=torch.float32, device=q.device)
    from kvcompress.kernels import mass_kernels as kernels  # only where Triton is installed

    with launching("mass", q, cut):
        if lse is None:
            lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
            kernels.row_logsumexp[(-(-n // cut.m), batch * heads)](
                q, k, asked, positions, lse, *numbers, asked_stride, row, head, **sizes
            )
        kernels.column_sums[(-(-columns // cut.n), batch * heads)](
            q,
            k,
            lse.contiguous(),
            asked,
            positions,
            weights,
            found,
            *numbers,
            *strides,
            **sizes,
            WEIGHTED=weighted,
            CAUSAL=plain and ordered and features.window is None,
        )
    return found
