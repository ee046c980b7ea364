"""The Triton kernel behind `triton_codes`; imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def _numbers(codes, high, meaning, slots, d, inside, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """What codes `[slots, d]` of rows of `WIDTH` numbers stand for; BITS 0: numbers themselves."""
    if BITS == 0:
        found = tl.load(codes + slots[:, None] * WIDTH + d[None, :], mask=inside, other=0).to(tl.float32)
    else:
        if BITS == 3:  # the lower two bits, and the highest one in a plane of its own
            low = tl.load(codes + slots[:, None] * (WIDTH // 4) + (d // 4)[None, :], mask=inside, other=0).to(tl.int32)
            top = tl.load(high + slots[:, None] * (WIDTH // 8) + (d // 8)[None, :], mask=inside, other=0).to(tl.int32)
            code = ((low >> ((d % 4) * 2)[None, :]) & 3) | (((top >> (d % 8)[None, :]) & 1) << 2)
        else:
            per: tl.constexpr = 8 // BITS
            levels: tl.constexpr = (1 << BITS) - 1
            packed = tl.load(codes + slots[:, None] * (WIDTH // per) + (d // per)[None, :], mask=inside, other=0)
            code = (packed.to(tl.int32) >> ((d % per) * BITS)[None, :]) & levels
        found = tl.load(meaning + code, mask=inside, other=0.0)
    return found


@triton.jit
def coded_sums(
    q,
    key_codes,
    key_high,
    key_scale,
    key_zero,
    key_meaning,
    value_codes,
    value_high,
    value_scale,
    value_zero,
    value_meaning,
    positions,
    table,
    oldest,
    sums,
    tops,
    totals,
    scaling,
    softcap,
    tokens,
    capacity,
    heads,
    row_stride,
    head_stride,
    most,
    blocks_per_split,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per segment and split: running maximum, total and weighted values, as `triton_kernels.partial_sums`.

    A segment's slots lie one behind the other in buffers of `capacity` slots, or in lanes of BLOCK slots that `table`
    names. Scales of a token are multiplied into its logit and its probability, zeros are added there.
    """
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, dv, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK)
    in_group, in_dim, in_width = g < G, d < D, dv < DV
    query = tl.load(
        q + (segment * G + g)[:, None] * D + d[None, :], mask=in_group[:, None] & in_dim[None, :], other=0.0
    )
    if UPCAST:  # the interpreter multiplies bfloat16 as if it were whole numbers
        query = query.to(tl.float32)
    all_of_query = tl.sum(query.to(tl.float32), 1)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    weighted = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    since = tl.load(oldest + segment)
    places = positions + (segment // heads) * row_stride + (segment % heads) * head_stride
    first = split * blocks_per_split
    for i in range(first, tl.minimum(first + blocks_per_split, most)):
        if LANES:
            slots = tl.load(table + segment * most + i).to(tl.int64) * BLOCK + n  # below 0 past the last lane
            held = tl.load(positions + slots, mask=slots >= 0, other=-1) >= since
        else:
            token = i * BLOCK + n
            slots = segment * capacity + token
            held = tl.load(places + token, mask=token < tokens, other=-1) >= since
        inside = held[:, None] & in_dim[None, :]
        keys = _numbers(key_codes, key_high, key_meaning, slots, d, inside, D, KEY_BITS).to(query.dtype)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if KEY_SCALE:
            logits = logits * tl.load(key_scale + slots, mask=held, other=0.0).to(tl.float32)[None, :]
        if KEY_ZERO:
            zero = tl.load(key_zero + slots, mask=held, other=0.0).to(tl.float32)
            logits = logits + all_of_query[:, None] * zero[None, :]
        logits = logits * scaling
        if SOFTCAP:
            logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
        logits = tl.where(held[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing held so far
        p = tl.exp(logits - level[:, None])
        kept = tl.exp(top - level)
        total = total * kept + tl.sum(p, 1)
        weighted = weighted * kept[:, None]
        if VALUE_ZERO:
            zero = tl.load(value_zero + slots, mask=held, other=0.0).to(tl.float32)
            weighted = weighted + tl.sum(p * zero[None, :], 1)[:, None]
        if VALUE_SCALE:
            p = p * tl.load(value_scale + slots, mask=held, other=0.0).to(tl.float32)[None, :]
        inside = held[:, None] & in_width[None, :]
        values = _numbers(value_codes, value_high, value_meaning, slots, dv, inside, DV, VALUE_BITS).to(query.dtype)
        weighted = weighted + tl.dot(p.to(query.dtype), values, input_precision="ieee")
        top = new_top
    row = (segment * splits + split) * G + g
    tl.store(tops + row, top, mask=in_group)
    tl.store(totals + row, total, mask=in_group)
    tl.store(sums + row[:, None] * DV + dv[None, :], weighted, mask=in_group[:, None] & in_width[None, :])
