"""The Triton kernels behind `triton_decode`; imported only where Triton is installed."""

import triton
import triton.language as tl


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n`."""
    return triton.next_power_of_2(n)


@triton.jit
def partial_sums(
    q,
    k,
    v,
    positions,
    table,
    sums,
    tops,
    totals,
    scaling,
    softcap,
    most,
    lanes_per_split,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per segment and split: running maximum, total and weighted values of its lanes' slots."""
    segment, split = tl.program_id(0), tl.program_id(1)
    g, d, dv, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, SLOTS)
    in_group = g < G
    in_dim = d < D
    in_width = dv < DV
    query = tl.load(
        q + (segment * G + g)[:, None] * D + d[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0
    )
    if UPCAST:  # the interpreter multiplies bfloat16 as if it were whole numbers
        query = query.to(tl.float32)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    weighted = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    first = split * lanes_per_split
    for i in range(first, tl.minimum(first + lanes_per_split, most)):
        lane = tl.load(table + segment * most + i).to(tl.int64)
        slots = lane * SLOTS + n  # below 0 past the last lane
        held = tl.load(positions + slots, mask=slots >= 0, other=-1) >= 0
        keys = tl.load(k + slots[:, None] * D + d[None, :], mask=held[:, None] & in_dim[None, :], other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
        if SOFTCAP:
            logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
        logits = tl.where(held[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing held so far
        p = tl.exp(logits - level[:, None])
        kept = tl.exp(top - level)
        values = tl.load(v + slots[:, None] * DV + dv[None, :], mask=held[:, None] & in_width[None, :], other=0.0)
        if UPCAST:
            values = values.to(tl.float32)
        total = total * kept + tl.sum(p, 1)
        weighted = weighted * kept[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = new_top
    row = (segment * splits + split) * G + g
    tl.store(tops + row, top, mask=in_group)
    tl.store(totals + row, total, mask=in_group)
    tl.store(sums + row[:, None] * DV + dv[None, :], weighted, mask=in_group[:, None] & in_width[None, :])


@triton.jit
def merge(
    sums,
    tops,
    totals,
    output,
    splits,
    G: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program per query head: its splits' sums meet over their common maximum."""
    head = tl.program_id(0)
    s, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    row = ((head // G) * splits + s) * G + head % G
    top = tl.load(tops + row, mask=s < splits, other=float("-inf"))
    total = tl.load(totals + row, mask=s < splits, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    inside = (s < splits)[:, None] & (dv < DV)[None, :]
    weighted = tl.load(sums + row[:, None] * DV + dv[None, :], mask=inside, other=0.0)
    whole = tl.sum(total * weight, 0)
    value = tl.sum(weighted * weight[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(output + head * DV + dv, value.to(output.dtype.element_ty), mask=dv < DV)
