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
    places,
    oldest,
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
    """One program per segment and split: running maximum, total and weighted values of its lanes' slots.

    `table` says where a lane's keys and values lie, `places` where its positions do; a slot counts from `oldest` on.
    """
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
    since = tl.load(oldest + segment)
    for i in range(first, tl.minimum(first + lanes_per_split, most)):
        lane = tl.load(table + segment * most + i).to(tl.int64)
        place = tl.load(places + segment * most + i).to(tl.int64)
        slots = lane * SLOTS + n  # below 0 past the last lane
        held = tl.load(positions + place * SLOTS + n, mask=slots >= 0, other=-1) >= since
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
def packed_sums(
    q,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    sums,
    tops,
    totals,
    scaling,
    softcap,
    tokens,
    tokens_per_split,
    splits,
    key_stride,
    key_group_stride,
    value_stride,
    value_group_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """As `partial_sums`, over packed codes: unpacked and scaled in registers, a block of tokens at a time.

    Strides are of a segment, in numbers of each tensor: its buffer may be longer than what is held.
    """
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, dv, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK)
    in_group, in_dim, in_width = g < G, d < D, dv < DV
    query = tl.load(
        q + (segment * G + g)[:, None] * D + d[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0
    )
    if UPCAST:
        query = query.to(tl.float32)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    weighted = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    per: tl.constexpr = 8 // BITS
    levels: tl.constexpr = (1 << BITS) - 1
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, tokens)
    for start in range(first, last, BLOCK):
        token = start + n
        held = token < last
        inside = held[:, None] & in_dim[None, :]
        packed = tl.load(
            key_codes + segment * key_stride + token[:, None] * (D // per) + (d // per)[None, :], mask=inside, other=0
        ).to(tl.int32)
        codes = ((packed >> ((d % per) * BITS)[None, :]) & levels).to(tl.float32)
        place = segment * key_group_stride + (token // GROUP)[:, None] * D + d[None, :]
        scale = tl.load(key_scale + place, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(key_zero + place, mask=inside, other=0.0).to(tl.float32)
        keys = (codes * scale + zero).to(query.dtype)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
        if SOFTCAP:
            logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
        logits = tl.where(held[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(logits - level[:, None])
        kept = tl.exp(top - level)
        inside = held[:, None] & in_width[None, :]
        packed = tl.load(
            value_codes + segment * value_stride + token[:, None] * (DV // per) + (dv // per)[None, :],
            mask=inside,
            other=0,
        ).to(tl.int32)
        codes = ((packed >> ((dv % per) * BITS)[None, :]) & levels).to(tl.float32)
        place = segment * value_group_stride + token[:, None] * (DV // GROUP) + (dv // GROUP)[None, :]
        scale = tl.load(value_scale + place, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(value_zero + place, mask=inside, other=0.0).to(tl.float32)
        values = (codes * scale + zero).to(query.dtype)
        total = total * kept + tl.sum(p, 1)
        weighted = weighted * kept[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = new_top
    row = (segment * (splits + 1) + split) * G + g  # one more split is for what is not coded
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
