"""The seams for codecs and readers, tried with test-only parts, and the table of legal combinations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from helpers import all_held, feed, make, tensors_of
from reference import MaskedReference, stock_logits
from small_models import left_padded, random_ids, small_model
from transformers import AttentionInterface, DynamicCache

from kvcompress import compress
from kvcompress.method import Allocator, Codec, Plain, Reader, Schedule
from kvcompress.methods import H2O, Full, SnapKV, StreamingLLM


@dataclass(frozen=True)
class PerTokenInt8(Codec):
    """Each token's key and value as int8 with one scale per token and head."""

    name: ClassVar[str] = "per_token_int8"

    @staticmethod
    def pack(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        return (x / scale).round().to(torch.int8), scale

    def encode(self, keys, values, slots):
        k, k_scale = self.pack(keys)
        v, v_scale = self.pack(values)
        return {"k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}

    def decode(self, channels, slots):
        return channels["k"] * channels["k_scale"], channels["v"] * channels["v_scale"]


class RoundTripCache(DynamicCache):
    """A cache that holds what the codec makes of keys and values; prompts attend to their own as they are."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        codec, n = PerTokenInt8(), key_states.shape[2]
        keys, values = codec.decode(codec.encode(key_states, value_states, None), None)
        keys, values = super().update(keys, values, layer_idx, *args, **kwargs)
        if n == 1:
            return keys, values
        return torch.cat([keys[:, :, :-n], key_states], 2), torch.cat([values[:, :, :-n], value_states], 2)


def test_a_codec_holds_codes_and_attention_sees_what_it_returns():
    """A prompt equals the stock model, a later one and decode the stock model over decoded codes; int8 is stored."""
    model, twin = small_model(), small_model(twin=True)
    ids, more = random_ids(1, 20), random_ids(1, 8, 1)
    with torch.no_grad():
        cache = RoundTripCache()
        expected_first = twin(ids, cache=cache).logits[:, -1]
        expected = torch.cat(
            [
                twin(more[:, :4], cache=cache).logits,
                *[twin(more[:, t : t + 1], cache=cache).logits for t in range(4, 8)],
            ],
            1,
        )
    with compress(model, Full(codec=PerTokenInt8())) as session:
        first = session.prefill(ids).logits
        got = [feed(model, session.cache, more[:, :4], torch.ones(1, 24, dtype=torch.long))]
        got += [
            feed(model, session.cache, more[:, t : t + 1], torch.ones(1, 21 + t, dtype=torch.long)) for t in range(4, 8)
        ]
        held = [t for layer in session.cache.layers for t in tensors_of(layer)]
        assert sum(t.dtype == torch.int8 for t in held) >= 6
        assert not [t for t in held if t.is_floating_point() and t.shape[-1] == 16], "no full-precision copy is held"
        keys, _ = session.cache.keys_values(1)
        assert (keys - cache.layers[1].keys).abs().max() <= 1e-5
        sizes = session.cache.nbytes()
        assert sizes["keys_values"] == 28 * 2 * 3 * (2 * 16 + 2 * 4)
        assert sizes["full"] == 28 * 2 * 3 * 2 * 16 * 4
    assert (torch.cat(got, 1) - expected).abs().max() <= 1e-5
    assert (expected[:, -1] - stock_logits(small_model(), torch.cat([ids, more], 1))[:, -1]).abs().max() > 1e-4
    assert (first - stock_logits(small_model(), ids)[:, -1]).abs().max() <= 1e-5
    assert (first - expected_first).abs().max() <= 1e-5


def test_eviction_over_a_codec_keeps_codes_as_they_are():
    """What SnapKV keeps of an int8 cache are the same codes, not codes of codes."""
    model = small_model()
    ids = random_ids(1, 24)
    with compress(model, Full(codec=PerTokenInt8())) as session:
        session.prefill(ids)
        keys, values = session.cache.keys_values(1)
    with compress(model, SnapKV(budget=0.5, window=2, codec=PerTokenInt8())) as session:
        session.prefill(ids)
        kept = session.cache.positions(1)
        got_keys, got_values = session.cache.keys_values(1)
    index = kept[..., None].expand(-1, -1, -1, 16)
    # layer 1 sees layer 0 un-evicted during the prompt, so its codes are the same
    assert torch.equal(got_keys, keys.gather(2, index))
    assert torch.equal(got_values, values.gather(2, index))


@dataclass(frozen=True)
class FirstAndLast(Reader):
    """Reads the first slot and the last n."""

    name: ClassVar[str] = "first_and_last"
    n: int = 5

    def select(self, q, index, state):
        positions = index.positions.expand(q.shape[0], index.keys.shape[1], -1)
        count = (positions >= 0).sum(-1, keepdim=True)
        slots = torch.arange(positions.shape[-1]).expand_as(positions)
        order = torch.where(positions >= 0, slots, positions.shape[-1]).sort(-1).values
        last = (count - 1 - torch.arange(self.n)).clamp(min=-1)
        chosen = torch.cat([order[..., :1], order.gather(-1, last.clamp(min=0)).where(last > 0, torch.tensor(-1))], -1)
        return chosen


def test_a_reader_decides_what_a_decode_query_attends_to():
    """Decode steps equal the reference that shows first and last; longer forwards read all; nothing is lost."""
    model, twin = small_model(), small_model(twin=True)
    lengths = [16, 9]
    ids, mask = left_padded(lengths)
    tokens, question = random_ids(2, 6, 1), random_ids(2, 3, 2)
    with compress(model, Full(reader=FirstAndLast(n=5))) as session:
        prefilled = session.prefill(ids, attention_mask=mask)
        whole = mask
        got = []
        for t in range(6):
            whole = torch.cat([whole, torch.ones(2, 1, dtype=torch.long)], 1)
            got.append(feed(model, session.cache, tokens[:, t : t + 1], whole))
        whole = torch.cat([whole, torch.ones_like(question)], 1)
        got.append(feed(model, session.cache, question, whole))
        assert session.cache.kept_tokens()[:, :, 0].tolist() == [[n + 9 for n in lengths]] * 3
    with MaskedReference(twin) as reference:
        assert (reference.forward(ids, mask)[:, -1] - prefilled.logits).abs().max() <= 1e-5
        expected = []
        for t in range(6):
            seen = 16 + t + 1
            keep = torch.zeros(2, 2, seen, dtype=torch.bool)
            keep[:, :, seen - 5 :] = True
            for b, length in enumerate(lengths):
                keep[b, :, 16 - length] = True
            reference.keep = dict.fromkeys(range(3), keep)
            expected.append(reference.forward(tokens[:, t : t + 1]))
        reference.keep = {}
        expected.append(reference.forward(question))
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5


def test_a_reader_works_over_an_evicted_cache():
    """Reader and eviction compose: a reader that reads all it is shown equals no reader at all."""
    model = small_model()
    ids = random_ids(1, 24)

    def run(method):
        with compress(model, method) as session:
            session.prefill(ids)
            out = [
                feed(model, session.cache, random_ids(1, 1, t), torch.ones(1, 25 + t, dtype=torch.long))
                for t in range(5)
            ]
            return torch.cat(out, 1), all_held(session)

    plain, kept = run(SnapKV(budget=0.5, window=2))
    read, kept_too = run(SnapKV(budget=0.5, window=2, reader=FirstAndLast(n=200)))
    few, _ = run(SnapKV(budget=0.5, window=2, reader=FirstAndLast(n=2)))
    assert kept == kept_too
    assert (plain - read).abs().max() <= 1e-5
    assert (plain - few).abs().max() > 1e-3


@dataclass(frozen=True)
class Lopsided(Allocator):
    """Not uniform."""

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        raise AssertionError("never reached")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Full(allocator=Lopsided()), "scorer"),
        (lambda: StreamingLLM(budget=8, positions="compact", allocator=Lopsided()), "compact"),
        (lambda: StreamingLLM(budget=8, positions="compact", reader=FirstAndLast()), "reader"),
        (lambda: StreamingLLM(budget=8, positions="compact", codec=PerTokenInt8()), "codec"),
    ],
)
def test_illegal_combinations_are_refused_at_construction(build, words):
    """Before any model is loaded, by the name of the part that does not fit."""
    with pytest.raises(ValueError, match=words):
        build()


def test_legal_combinations_are_built():
    """The parts a method was given are the parts it answers with."""
    method = SnapKV(budget=0.5, codec=PerTokenInt8(), reader=FirstAndLast(), schedule=Schedule(every=4))
    names = method.parts().names()
    assert names["codec"] == "per_token_int8" and names["reader"] == "first_and_last"
    assert method.replace(codec=Plain()).parts().names()["codec"] == "plain"
    assert "every4" in names["schedule"]
    assert make("H2O", 0.5).parts().names()["schedule"].endswith("every1")


def test_needs_nobody_serves_are_refused_by_name():
    """A scorer that wants hidden states is told so when the session opens."""
    from kvcompress.method import Needs, Scorer

    class Wants(Scorer):
        @property
        def needs(self):
            return Needs(hidden=True)

        def score(self, view, observed, state):
            raise AssertionError

    class Hidden(H2O):
        def make_scorer(self):
            return Wants()

    with pytest.raises(ValueError, match="hidden"), compress(small_model(), Hidden(budget=0.5)) as session:
        session.prefill(random_ids(1, 8))


def test_a_schedule_of_every_n_tokens_drops_in_bursts():
    """every=4: a row grows to the cap plus 3, and is back at the cap with the fourth."""
    model = small_model()
    with compress(model, H2O(budget=8, schedule=Schedule(every=4))) as session:
        session.prefill(random_ids(1, 20))
        counts = []
        for t in range(9):
            feed(model, session.cache, random_ids(1, 1, t), torch.ones(1, 21 + t, dtype=torch.long))
            counts.append(session.cache.kept_tokens().unique().tolist())
    assert counts == [[9], [10], [11], [8], [9], [10], [11], [8], [9]]


def test_the_attention_registered_is_ours_only():
    """Opening a session replaces none of transformers' own attention functions."""
    before = {name: AttentionInterface._global_mapping[name] for name in ("sdpa", "flash_attention_2")}
    with compress(small_model(), Full()):
        pass
    assert {name: AttentionInterface._global_mapping[name] for name in before} == before
