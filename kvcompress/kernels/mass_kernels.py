"""The Triton kernels behind `triton_mass`; imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def _logits(query, keys, scaling, softcap, SOFTCAP: tl.constexpr):
    logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
    if SOFTCAP:
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
    return logits


@triton.jit
def _visible(at, asked, window, WINDOW: tl.constexpr):
    """Which of the slots at positions `at [N]` the queries at `asked [M]` see; padding sees nothing."""
    seen = (at[None, :] >= 0) & (at[None, :] <= asked[:, None])
    if WINDOW:
        seen = seen & (at[None, :] > asked[:, None] - window)
    return seen


@triton.jit
def row_logsumexp(
    q,
    k,
    asked,
    positions,
    lse,
    scaling,
    softcap,
    window,
    queries,
    columns,
    ahead,
    asked_stride,
    row_stride,
    head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per block of queries and query head: the log-sum-exp of the logits of what each query sees.

    No query sees a column beyond `ahead` plus its own index. A query that sees nothing gets +inf, so that exp(logit -
    log-sum-exp) is 0.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, kv = head // H, (head // H) * (H // G) + (head % H) // G
    m, n, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    real, in_dim = m < queries, d < D
    query = tl.load(q + (head * queries + m)[:, None] * D + d[None, :], mask=real[:, None] & in_dim[None, :], other=0.0)
    if UPCAST:  # the interpreter multiplies bfloat16 as if it were whole numbers
        query = query.to(tl.float32)
    at_query = tl.load(asked + row * asked_stride + m, mask=real, other=-1)
    here = positions + row * row_stride + (head % H) // G * head_stride
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tl.minimum(columns, ahead + (block + 1) * BLOCK_M), BLOCK_N):
        column = start + n
        inside = column < columns
        keys = tl.load(
            k + (kv * columns + column)[:, None] * D + d[None, :], mask=inside[:, None] & in_dim[None, :], other=0.0
        )
        if UPCAST:
            keys = keys.to(tl.float32)
        at = tl.load(here + column, mask=inside, other=-1)
        logits = _logits(query, keys, scaling, softcap, SOFTCAP)
        logits = tl.where(_visible(at, at_query, window, WINDOW), logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(logits - level[:, None]), 1)
        top = new_top
    found = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), float("inf"))
    tl.store(lse + head * queries + m, found, mask=real)


@triton.jit
def _part(
    q,
    lse,
    asked,
    weights,
    keys,
    at,
    in_dim,
    d,
    m,
    first,
    queries,
    scaling,
    softcap,
    window,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """What one block of queries adds to the columns, `[M, N]`: exp(logit - log-sum-exp) times each query's weight."""
    i = first + m
    real = i < queries
    query = tl.load(q + i[:, None] * D + d[None, :], mask=real[:, None] & in_dim[None, :], other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    level = tl.load(lse + i, mask=real, other=float("inf"))
    p = tl.exp(_logits(query, keys, scaling, softcap, SOFTCAP) - level[:, None])
    if MASKED:
        p = tl.where(_visible(at, tl.load(asked + i, mask=real, other=-1), window, WINDOW), p, 0.0)
    if WEIGHTED:
        p = p * tl.load(weights + i, mask=real, other=0.0)[:, None]
    return p


@triton.jit
def column_sums(
    q,
    k,
    lse,
    asked,
    positions,
    weights,
    mass,
    scaling,
    softcap,
    window,
    queries,
    columns,
    ahead,
    asked_stride,
    weights_stride,
    row_stride,
    head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per block of columns and query head: the attention its columns get from every query that sees them.

    It walks over the queries from the first that can see a column (see `row_logsumexp`); no two programs write to the
    same place, so sums come in the same order every time. Where nothing but order decides (`CAUSAL`), only blocks on
    the diagonal are masked.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, kv = head // H, (head // H) * (H // G) + (head % H) // G
    n, d, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    inside, in_dim = n < columns, d < D
    keys = tl.load(k + (kv * columns + n)[:, None] * D + d[None, :], mask=inside[:, None] & in_dim[None, :], other=0.0)
    if UPCAST:
        keys = keys.to(tl.float32)
    at = tl.load(positions + row * row_stride + (head % H) // G * head_stride + n, mask=inside, other=-1)
    q += head * queries * D
    lse += head * queries
    asked += row * asked_stride
    weights += row * weights_stride
    first = tl.maximum(0, block * BLOCK_N - ahead) // BLOCK_M * BLOCK_M
    past = queries
    if CAUSAL:  # the first block of queries that all see all of these columns
        past = tl.minimum(queries, tl.maximum(first, tl.cdiv((block + 1) * BLOCK_N - 1 - ahead, BLOCK_M) * BLOCK_M))
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(first, past, BLOCK_M):
        total += _part(
            q, lse, asked, weights, keys, at, in_dim, d, m, i, queries, scaling, softcap, window,
            D, SOFTCAP, WINDOW, WEIGHTED, True, UPCAST,
        )  # fmt: skip
    for i in range(past, queries, BLOCK_M):
        total += _part(
            q, lse, asked, weights, keys, at, in_dim, d, m, i, queries, scaling, softcap, window,
            D, SOFTCAP, WINDOW, WEIGHTED, False, UPCAST,
        )  # fmt: skip
    tl.store(mass + head * columns + n, tl.sum(total, 0), mask=inside)
