"""KIVI against slow loops: what is coded when, codes and scales, attention, bytes, rows, later turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import all_held, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import left_padded, random_ids, small_model
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.cache.layouts.quantized_groups import GroupSegment
from kvcompress.method import Plain, Schedule
from kvcompress.method.budget import NotTogether
from kvcompress.methods import CAKE, H2O, KIVI, AdaKV, Full, Int8, SnapKV
from kvcompress.methods.kivi import KIVICodec

MODEL = small_model()
G, R, D = 4, 8, 16


def loop_group(numbers, bits):
    """One group of floats, coded and decoded one number after the other."""
    numbers = [np.float32(x) for x in numbers]
    low, levels = min(numbers), 2**bits - 1
    zero = np.float16(low)
    if np.float32(zero) > low:
        zero = np.float16(low - abs(low) * np.float32(2.0**-10) - np.float32(2.0**-24))
    reach = (max(numbers) - np.float32(zero)) / np.float32(levels)
    scale = np.float16(reach)
    if np.float32(scale) < reach:
        scale = np.float16(reach + reach * np.float32(2.0**-10) + np.float32(2.0**-24))
    step = np.float32(scale) or np.float32(1)
    codes = [min(levels, max(0, int(np.rint((x - np.float32(zero)) / step)))) for x in numbers]
    return [np.float32(c) * np.float32(scale) + np.float32(zero) for c in codes]


class Loop:
    """One row and head: lists of tokens, encoded one group at a time when the rules say so."""

    def __init__(self, bits, group=G, residual=R):
        self.bits, self.group, self.residual = bits, group, residual
        self.keys, self.values, self.key_codes, self.value_codes = [], [], 0, 0

    def add(self, keys, values):
        self.keys += [list(k) for k in keys.tolist()]
        self.values += [list(v) for v in values.tolist()]

    def flush(self):
        while len(self.keys) - self.key_codes >= self.residual:
            for start in range(self.key_codes, self.key_codes + self.residual, self.group):
                block = self.keys[start : start + self.group]
                for c in range(len(block[0])):
                    for token, x in zip(block, loop_group([token[c] for token in block], self.bits), strict=True):
                        token[c] = x
            self.key_codes += self.residual
        while len(self.values) - self.value_codes > self.residual:
            token = self.values[self.value_codes]
            for c in range(0, len(token), self.group):
                token[c : c + self.group] = loop_group(token[c : c + self.group], self.bits)
            self.value_codes += 1

    def tensors(self):
        return torch.tensor(np.array(self.keys, np.float32)), torch.tensor(np.array(self.values, np.float32))


def codec(bits=2):
    return KIVICodec(bits=bits, group=G, residual=R)


def kivi(bits=2, **options):
    return KIVI(bits=bits, group=G, residual=R, **options)


def same(a, b):
    """Equal but for the last digit of a product and a sum."""
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
@settings(max_examples=12, deadline=None)
@given(first=st.integers(1, 3 * R), more=st.lists(st.integers(1, R + 2), max_size=6), seed=st.integers(0, 9))
def test_any_way_of_adding_tokens_codes_what_the_loop_codes_and_keeps_the_rest_bit_for_bit(bits, first, more, seed):
    """Lengths from 1 to several blocks in pieces of any size: counts of the rules, codes of the loops."""
    draw = torch.Generator().manual_seed(seed)
    unit, loop, exact = None, Loop(bits), []
    for n in (first, *more):
        keys, values = (torch.randn(1, 1, n, D, generator=draw) for _ in range(2))
        unit = GroupSegment(codec(bits), keys, values) if unit is None else unit
        if exact:
            unit.append(keys, values)
        exact.append((keys, values))
        loop.add(keys[0, 0], values[0, 0])
        unit.flush()
        loop.flush()
        seen = unit.length
        assert unit.counts == {"keys": seen // R * R, "values": max(0, seen - R)}
        for kind, held, mine in zip(("keys", "values"), loop.tensors(), range(2), strict=True):
            assert same(unit.whole(kind)[0, 0], held)
            whole = torch.cat([pair[mine] for pair in exact], 2)
            assert torch.equal(unit.left[kind], whole[:, :, unit.counts[kind] :])
    together = GroupSegment(codec(bits), *(torch.cat(parts, 2) for parts in zip(*exact, strict=True)))
    together.flush()
    for kind in ("keys", "values"):
        assert torch.equal(together.whole(kind), unit.whole(kind))


class LoopCache(DynamicCache):
    """One row: prompts attend to exact keys and values, later single tokens to what the loops hold."""

    def __init__(self, bits):
        super().__init__()
        self.bits, self.loops = bits, {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        n, heads = key_states.shape[2], key_states.shape[1]
        super().update(key_states, value_states, layer_idx, *args, **kwargs)
        loops = self.loops.setdefault(layer_idx, [Loop(self.bits) for _ in range(heads)])
        for h, loop in enumerate(loops):
            loop.flush()
            loop.add(key_states[0, h], value_states[0, h])
        if n > 1:
            return key_states, value_states
        keys, values = zip(*(loop.tensors() for loop in loops), strict=True)
        return torch.stack(keys)[None], torch.stack(values)[None]


@pytest.mark.parametrize("bits", [2, 4])
@torch.no_grad()
def test_decode_equals_the_stock_model_over_what_the_loops_hold(bits):
    """Prompt and 14 decode steps over three layers; the prompt's own attention is exact."""
    prompt, tokens = random_ids(1, 21), random_ids(1, 14, 5)
    cache = LoopCache(bits)
    expected = [MODEL(prompt, cache=cache, use_cache=True).logits[:, -1]]
    expected += [MODEL(tokens[:, t : t + 1], cache=cache, use_cache=True).logits[:, -1] for t in range(14)]
    with compress(small_model(), kivi(bits)) as session:
        got = [session.prefill(prompt).logits]
        got += [session.step(tokens[:, t : t + 1]) for t in range(14)]
        assert session.report()["kernel"] == "groups+sdpa"
    assert (torch.stack(got) - torch.stack(expected)).abs().max() <= 1e-4


@torch.no_grad()
def test_the_residual_is_bitwise_exact_in_every_row_after_every_step():
    """Of the first layer, whose keys depend on no code: the last S mod R keys and R values are the full cache's."""
    ids, mask = left_padded([21, 7, 16])
    tokens = random_ids(3, 12, 3)
    with compress(MODEL, Full()) as session:
        session.prefill(ids, attention_mask=mask)
        for t in range(12):
            session.step(tokens[:, t : t + 1])
        keys, values = session.cache.keys_values(0)
    with compress(MODEL, kivi()) as session:
        session.prefill(ids, attention_mask=mask)
        for t in range(12):
            session.step(tokens[:, t : t + 1])
            got_keys, got_values = session.cache.keys_values(0)
            for b, length in enumerate([21, 7, 16]):
                held, stop = length + t + 1, 21 + t + 1
                exact_keys = held % R
                for got, want, n in ((got_keys, keys, exact_keys), (got_values, values, min(held, R))):
                    assert torch.equal(got[b, :, stop - n :], want[b, :, stop - n : stop])
                    coded = slice(stop - held, stop - n)
                    assert held <= n or not torch.equal(got[b, :, coded], want[b, :, coded])


def test_shorter_than_the_residual_nothing_is_coded_and_all_is_the_full_cache():
    ids, mask = left_padded([R - 3, R - 4])
    with compress(MODEL, Full()) as session:
        expected = session.prefill(ids, attention_mask=mask).logits, session.generate(2).tokens
        size = session.cache.nbytes()["keys_values"]
    with compress(MODEL, kivi()) as session:
        got = session.prefill(ids, attention_mask=mask).logits, session.generate(2).tokens
        assert session.cache.nbytes()["keys_values"] == size
    assert (got[0] - expected[0]).abs().max() <= 1e-5 and got[1] == expected[1]


def test_codes_of_a_row_depend_neither_on_other_rows_nor_on_padding():
    """Bit for bit what the row holds alone, in the layer whose keys do not depend on the batch's kernel."""
    rows = [29, 9, 20]
    ids, mask = left_padded(rows)
    with compress(MODEL, kivi()) as session:
        session.prefill(ids, attention_mask=mask)
        session.generate(5)
        cache, pending = session.cache, session.cache.pending
        together = [cache.row(b).layers[0].encoding.groups for b in range(3)]
        tokens = [cache.row(b).positions(0).shape[2] for b in range(3)]
    assert tokens == [n + 4 for n in rows] and pending is not None
    with compress(MODEL, kivi()) as session:
        for b, length in enumerate(rows):
            session.prefill(ids[b : b + 1, -length:])
            session.generate(5)
            alone = session.cache.layers[0].encoding.groups
            mine = {n: x for n, x in flat(alone)}
            theirs = {n: x for n, x in flat(together[b])}
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[n], theirs[n]) for n in mine if "left" not in n)


def flat(blocks):
    for r, h, unit in ((r, h, u) for r, row in enumerate(blocks.units) for h, u in enumerate(row)):
        for kind in ("keys", "values"):
            yield f"{r} {h} left {kind}", unit.left[kind]
            for name, buffer in unit.coded[kind].items():
                yield f"{r} {h} {kind} {name}", buffer.held


def formula(n, bits, heads=2, layers=3, dim=D, group=G, residual=R, size=4, positions=True):
    """Bytes of n tokens per head: codes, two float16 per group, exact tokens in the model's type, positions."""
    k, v = n // residual * residual, max(0, n - residual)
    codes = (k + v) * dim * bits // 8
    scales = (k // group * dim + v * dim // group) * 4
    left = (n - k + n - v) * dim * size
    return layers * (heads * (codes + scales + left) + (4 * n if positions else 0))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_bytes_equal_the_formula_at_every_length_and_are_all_that_is_stored(bits):
    with compress(small_model(), kivi(bits)) as session:
        session.prefill(random_ids(1, 40))
        for t in range(20):
            held = session.cache.nbytes()
            n = 40 + t
            assert held["valid"] == formula(n, bits)
            assert (
                held["codes"] + held["scales"] + held["residual"]
                == held["keys_values"]
                == formula(n, bits, positions=False)
            )
            assert session.report()["kv"]["read_bytes_per_token"] == held["keys_values"]
            session.step(random_ids(1, 1, t))
        held = session.cache.nbytes()
        assert held["allocated"] <= 1.25 * held["valid"] + formula(64, bits)


def test_an_outlier_channel_of_the_keys_does_not_blow_up_the_others():
    """Keys per channel: a channel 100 times as large costs the others nothing; per token it would."""
    keys = torch.randn(1, 1, 32, D, generator=torch.Generator().manual_seed(0))
    plain = codec(4).decode_keys(codec(4).encode_keys(keys))
    keys_out = keys.clone()
    keys_out[..., 3] *= 100
    out = codec(4).decode_keys(codec(4).encode_keys(keys_out))
    others = torch.arange(D) != 3
    assert torch.equal(out[..., others], plain[..., others])
    assert ((out - keys_out)[..., 3].abs() <= keys_out[..., 3].abs().max() / 7).all()
    token_wise = codec(4).decode_values(codec(4).encode_values(keys_out))
    error = (token_wise - keys_out)[..., :4][..., others[:4]].abs().max()
    assert error > 5 * (out - keys_out)[..., others].abs().max()


def test_more_bits_lose_less():
    x = torch.randn(1, 2, 64, D, generator=torch.Generator().manual_seed(1))
    for part in ("keys", "values"):
        errors = []
        for bits in (2, 4, 8):
            c = codec(bits)
            decoded = getattr(c, f"decode_{part}")(getattr(c, f"encode_{part}")(x))
            errors.append(float((decoded - x).norm() / x.norm()))
        assert errors[0] > 3 * errors[1] > 9 * errors[2] and errors[2] < 0.01


def test_forks_reordering_and_selecting_rows_keep_the_codes():
    ids, mask = left_padded([21, 13])
    with compress(MODEL, kivi()) as session:
        cache = session.prefill(ids, attention_mask=mask).cache
        before = cache.keys_values(1)
        fork = cache.fork()
        fork.reorder_cache(torch.tensor([1, 0]))
        assert all(torch.equal(a.flip(0), b) for a, b in zip(before, fork.keys_values(1), strict=True))
        assert fork.nbytes()["keys_values"] == cache.nbytes()["keys_values"]
        fork.batch_select_indices(torch.tensor([1]))
        fork.batch_repeat_interleave(3)
        assert all(
            torch.equal(a[:1].expand(3, -1, -1, -1), b) for a, b in zip(before, fork.keys_values(1), strict=True)
        )
        session.step(random_ids(2, 1))
        assert all(torch.equal(a[:1], b[:1]) for a, b in zip(before, fork.keys_values(1), strict=True))


@pytest.mark.parametrize("make", [lambda **k: SnapKV(budget=20, window=3, **k), lambda **k: AdaKV(budget=20, window=3, **k),
                                  lambda **k: CAKE(budget=20, window=3, schedule=Schedule(), **k)])  # fmt: skip
def test_eviction_comes_first_and_what_it_keeps_is_coded(make):
    """The same tokens as without a codec, held in fewer bytes, per head where heads differ; each head as it would alone."""
    ids, mask = left_padded([48, 33])
    with compress(MODEL, make()) as session:
        expected = session.prefill(ids, attention_mask=mask).logits
        kept, plain, keys = all_held(session), session.cache.nbytes(), session.cache.keys_values(0)[0]
    with compress(MODEL, make(codec=kivi(8))) as session:
        got = session.prefill(ids, attention_mask=mask).logits
        coded = session.cache.nbytes()
        assert all_held(session) == kept and (got - expected).abs().max() <= 1e-5
        near, positions = session.cache.keys_values(0)[0], session.cache.positions(0)
        first = near.shape[2] - keys.shape[2]
        assert first == 0 and (near - keys)[positions >= 0].abs().max() < 0.05
        assert session.generate(10).tokens and session.append(random_ids(2, 5)).isfinite().all()
    assert coded["keys_values"] < 0.75 * plain["keys_values"]


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=3), budget=st.integers(6, 24), seed=st.integers(0, 3),
       more=st.integers(2, 20))  # fmt: skip
def test_a_later_prompt_drops_whole_groups_or_exact_tokens_and_codes_nothing_twice(rows, budget, seed, more):
    """Every coded key group that is left is one that was there before or one made of exact tokens; counts fit the cap."""
    ids, mask = left_padded(rows, seed)
    with compress(MODEL, SnapKV(budget=budget, window=2, codec=kivi(2))) as session:
        cache = session.prefill(ids, attention_mask=mask).cache
        before = [by_position(cache, b) for b in range(len(rows))]
        coded = [groups_of(cache, b) for b in range(len(rows))]
        session.prefill(random_ids(len(rows), more, seed + 1), cache=cache)
        for b, length in enumerate(rows):
            after = by_position(cache, b)
            for h in range(2):
                assert len(after[h]) <= min(budget, length + more)
                assert len(after[h]) > min(budget, length + more) - G
                assert set(range(length + more - 2, length + more)) <= set(after[h]) or len(after[h]) <= 2
                for group in coded[b][h]:
                    assert len(group & after[h].keys()) in (0, G)
                    assert all(torch.equal(after[h][p], before[b][h][p]) for p in group & after[h].keys())


def by_position(cache, row):
    """Per head: position → decoded key of the first layer."""
    keys, positions = cache.keys_values(0)[0][row], cache.positions(0)[row]
    return [{int(p): keys[h, i] for i, p in enumerate(positions[h]) if p >= 0} for h in range(2)]


def groups_of(cache, row):
    """Per head: the positions of every coded group of keys."""
    found = []
    for h in range(2):
        units = cache.layers[0].encoding.groups.units
        unit = units[row if len(units) > 1 else 0][h if len(units[0]) > 1 else 0]
        held = [int(p) for p in cache.positions(0)[row, h] if p >= 0]
        found.append([set(held[i : i + G]) for i in range(0, unit.counts["keys"], G)])
    return found


def test_a_row_that_has_ended_gets_no_codes():
    """Rows go apart when one of them adds nothing."""
    with compress(MODEL, kivi()) as session:
        session.prefill(random_ids(2, 20))
        for t in range(R):
            session.step(random_ids(2, 1, t), torch.tensor([True, False]))
        counts = [row[0].counts["keys"] for row in session.cache.layers[0].encoding.groups.units]
        assert counts == [24, 16] and session.cache.kept_tokens()[0].tolist() == [[28, 28], [20, 20]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, "bits=3; valid: 2, 4, 8"),
        ({"group": 24, "residual": 128}, "residual=128 is no multiple of group=24.*residual=144"),
        ({"group": 0}, "group=0; at least 1"),
        ({"group": -4}, "group=-4; at least 1"),
        ({"residual": 0}, "residual=0"),
        ({"residual": 48}, "no multiple of group=32"),
    ],
)
def test_bad_settings_are_refused_with_the_fix(options, words):
    with pytest.raises(ValueError, match=words):
        KIVI(**options)


def test_a_group_that_does_not_divide_a_value_is_refused_before_any_work():
    with pytest.raises(ValueError, match=r"group=32 does not divide the 16 channels of a value in layer 0.*group=16"):
        compress(MODEL, KIVI())


def test_schedules_that_drop_single_tokens_in_decode_are_refused_by_name():
    with pytest.raises(NotTogether, match="schedule=prompt"):
        H2O(budget=0.5, codec=kivi())
    assert H2O(budget=0.5, codec=kivi(), schedule=Schedule()).parts().codec.name == "kivi"


def test_presets_are_the_sources_settings():
    assert (KIVI().group, KIVI().residual) == (32, 128)
    assert (KIVI(preset="code").group, KIVI(preset="example").residual) == (128, 32)


def test_a_step_on_the_kernel_that_yields_attention_gives_the_same():
    for method in (kivi(4), SnapKV(budget=0.5, window=3, codec=kivi(4)), AdaKV(budget=0.5, window=3, codec=kivi(4))):
        got = []
        for kernel in ("auto", "blockwise"):
            ids, mask = left_padded([30, 18])
            with compress(MODEL, method, kernel=kernel) as session:
                session.prefill(ids, attention_mask=mask)
                got.append(feed(MODEL, session.cache, random_ids(2, 1), torch.cat([mask, torch.ones(2, 1)], 1).long()))
        assert (got[0] - got[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "phi3", "qwen3"])
def test_soft_caps_sinks_partial_rotation_and_sliding_layers_work_over_codes(architecture):
    """At 8 bits decode follows the full cache closely; layers with a window keep transformers' own cache."""
    model = small_model(architecture)
    ids, mask = left_padded([30, 19])
    tokens = random_ids(2, 6, 2)
    got = []
    for method in (Full(), kivi(8)):
        with compress(model, method) as session:
            got.append([session.prefill(ids, attention_mask=mask).logits])
            got[-1] += [session.step(tokens[:, t : t + 1]) for t in range(6)]
            got[-1].append(session.append(tokens[:, :4]))
    assert (got[0][0] - got[1][0]).abs().max() <= 1e-5
    for full, near in zip(got[0][1:], got[1][1:], strict=True):
        assert (torch.softmax(full, -1) - torch.softmax(near, -1)).abs().max() < 0.02


def test_a_board_tells_the_bits_of_two_codecs_apart():
    assert SnapKV(budget=0.5, codec=KIVI()).variant() == "codec=kivi codec.bits=2"
    assert SnapKV(budget=0.5, codec=KIVI(bits=4)).variant() == "codec=kivi codec.bits=4"
    assert (KIVI().variant(), KIVI(bits=4).variant()) == ("bits=2", "bits=4")


@pytest.mark.parametrize("build", [lambda: KIVI(codec=Int8()), lambda: Int8(codec=KIVI()), lambda: KIVI(codec=Plain())])
def test_a_method_that_is_a_codec_takes_no_other(build):
    with pytest.raises(NotTogether, match="itself a codec holds tokens in its own form, and takes no other"):
        build()
