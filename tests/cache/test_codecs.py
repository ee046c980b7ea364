"""What a codec is told and when it is asked, tried with test-only codecs; and what every codec must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from helpers import all_held, feed, thinned
from small_models import left_padded, random_ids, small_model
from test_codec_reader_seams import PerTokenInt8

from kvcompress import compress
from kvcompress.hook.ragged_rows import guest_reason
from kvcompress.hook.shared_prefill import needs_of, prefill_once
from kvcompress.method import Codec, Method, Needs
from kvcompress.methods import CAKE, H2O, AdaKV, Full, Int8, SnapKV


@dataclass(frozen=True)
class BeforeRotation(Codec):
    """Keys as they were before rotation, in a basis of their own per head; values in another, expanded after softmax."""

    name: ClassVar[str] = "before_rotation"
    needs_rotation: ClassVar[bool] = True

    @staticmethod
    def basis(slots, dim=16):
        draw = torch.Generator().manual_seed(slots.layer)
        return torch.linalg.qr(torch.randn(slots.heads, dim, dim, generator=draw)).Q

    def encode(self, keys, values, slots):
        turn = self.basis(slots)
        return {"k": slots.unrotate(keys) @ turn, "v": values @ turn}

    def decode(self, channels, slots):
        back = slots.by_head(self.basis(slots)).mT
        return slots.rotate(channels["k"] @ back), channels["v"] @ back

    def read(self, channels, slots):
        return self.decode(channels, slots)[0], channels["v"]

    def expand(self, output, slots):
        group = output.shape[1] // slots.heads
        return output @ self.basis(slots).mT.repeat_interleave(group, 0)[None]


@dataclass(frozen=True)
class Shared(Codec):
    """Both heads' keys and values side by side, stored once; queries and outputs are taken to that space."""

    name: ClassVar[str] = "shared"
    in_lanes: ClassVar[bool] = False

    def encode(self, keys, values, slots):
        return {"k": keys.transpose(1, 2).flatten(2)[:, None], "v": values.transpose(1, 2).flatten(2)[:, None]}

    def decode(self, channels, slots):
        def own(held):  # [B, 1 or H, n, H * D]: after an eviction per head each holds all for itself
            parts = held.unflatten(3, (slots.heads, -1))
            return torch.stack([parts[:, min(h, held.shape[1] - 1), :, h] for h in range(slots.heads)], 1)

        return own(channels["k"]), own(channels["v"])

    def read(self, channels, slots):
        return channels["k"], channels["v"]

    def query(self, q, slots):
        wide, dim = q.new_zeros(*q.shape[:3], slots.heads * q.shape[3]), q.shape[3]
        group = q.shape[1] // slots.heads
        for h in range(q.shape[1]):
            wide[:, h, :, h // group * dim : (h // group + 1) * dim] = q[:, h]
        return wide

    def expand(self, output, slots):
        group, dim = output.shape[1] // slots.heads, output.shape[3] // slots.heads
        parts = [output[:, h, :, h // group * dim : (h // group + 1) * dim] for h in range(output.shape[1])]
        return torch.stack(parts, 1)


ids, mask = left_padded([24, 15])


def run(model, method, positions=True):
    """Logits and held positions of a prompt, decode steps, an appended question and a later prompt."""
    with compress(model, method) as session:
        got = [session.prefill(ids, attention_mask=mask).logits]
        whole = mask
        for t in range(4):
            whole = torch.cat([whole, torch.ones(2, 1, dtype=torch.long)], 1)
            if positions:
                got.append(feed(model, session.cache, random_ids(2, 1, t), whole)[:, -1])
            else:
                cache = session.cache
                got.append(model(random_ids(2, 1, t), attention_mask=whole, cache=cache, use_cache=True).logits[:, -1])
        got.append(session.append(random_ids(2, 5, 9)))
        got.append(session.prefill(random_ids(2, 6, 10), cache=session.cache).logits)
        got.append(session.step(random_ids(2, 1, 11)))
        return torch.stack(got), all_held(session), session.cache.nbytes()


KINDS = [Full, lambda **k: SnapKV(budget=0.5, window=3, **k),
         lambda **k: AdaKV(budget=0.5, window=3, **k), lambda **k: H2O(budget=9, **k)]  # fmt: skip


@pytest.mark.parametrize(("architecture", "method"), thinned(["llama", "phi3", "qwen3"], KINDS, every=2))
def test_a_codec_may_turn_keys_back_and_expand_values_after_the_softmax(architecture, method):
    """An orthogonal basis before rotation changes nothing: prompt, decode, question, later prompt, ragged layers."""
    model = small_model(architecture)
    expected, kept, _ = run(model, method())
    got, kept_too, _ = run(model, method(codec=BeforeRotation()))
    assert kept == kept_too
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("method", [Full, lambda **k: H2O(budget=9, **k), lambda **k: CAKE(budget=0.5, window=3, **k)])
def test_a_codec_may_store_once_what_all_heads_share_and_have_queries_taken_there(method):
    """Held under one head where heads hold the same tokens, and in as many bytes as before."""
    model = small_model()
    expected, kept, plain = run(model, method())
    got, kept_too, coded = run(model, method(codec=Shared()))
    assert kept == kept_too
    assert (got - expected).abs().max() <= 1e-5
    if method is Full:
        assert coded["keys_values"] == plain["keys_values"]


def test_keys_are_turned_back_by_the_position_ids_the_model_used():
    """A model called without position_ids counts padding: the codec sees the same keys before rotation."""
    model, seen = small_model(), {}

    class Noting(BeforeRotation):
        def encode(self, keys, values, slots):
            if slots.layer == 0 and keys.shape[2] > 1:
                seen[len(seen)] = slots.unrotate(keys)
            return super().encode(keys, values, slots)

    with compress(model, Full(codec=Noting())) as session:
        session.prefill(ids, attention_mask=mask)
        model(ids, attention_mask=mask, use_cache=True)  # position ids 0, 1, … whatever is padding
        assert session.cache.sequence.shift.tolist() == [0, 9]
        assert session.cache.fork().sequence.shift.tolist() == [0, 9]
    assert (seen[0] - seen[1])[1, :, 9:].abs().max() <= 1e-5
    jumping = torch.tensor([[0, 1, 2, 7]])
    with compress(model, Full(codec=Noting())) as session:
        with pytest.raises(ValueError, match="leave position_ids out"):
            model(ids[:1, :4], position_ids=jumping, use_cache=True)
        assert model(ids[:1, :4], use_cache=True).logits.isfinite().all()


def test_a_codec_is_shown_the_prompts_last_queries_once_and_keeps_a_state_with_its_rows():
    """The window it asked for; what it stores per row follows forks and reordering, and counts as bytes."""
    seen = []

    @dataclass(frozen=True)
    class Watching(PerTokenInt8):
        @property
        def needs(self):
            return Needs(window=4)

        def encode(self, keys, values, slots):
            if slots.queries is not None:
                seen.append(slots.queries[1].tolist())
                slots.state["mean"] = slots.queries[0].mean((1, 2))
            return super().encode(keys, values, slots)

        def decode(self, channels, slots):
            mean = slots.by_segment(slots.state["mean"][:, None].expand(-1, slots.heads, -1))
            assert mean.shape == (*channels["k"].shape[:2], 16)
            return super().decode(channels, slots)

    model = small_model()
    for method in (Full(codec=Watching()), SnapKV(budget=0.5, window=7, codec=Watching())):
        seen.clear()
        with compress(model, method) as session:
            session.prefill(ids, attention_mask=mask)
            session.generate(3)
            session.prefill(random_ids(2, 6), cache=session.cache)
            assert seen == [[[20, 21, 22, 23], [11, 12, 13, 14]]] * 3
            layer, fork = session.cache.layers[1], session.cache.fork()
            fork.reorder_cache(torch.tensor([1, 0]))
            assert torch.equal(fork.layers[1].encoding.state["mean"], layer.encoding.state["mean"].flip(0))
            assert fork.nbytes() == session.cache.nbytes()
            assert "queries" not in layer.state


CODED = {
    "full": lambda: Full(codec=Int8()),
    "snapkv": lambda: SnapKV(budget=0.5, window=3, codec=Int8()),
    "adakv": lambda: AdaKV(budget=0.5, window=3, codec=Int8()),
    "cake": lambda: CAKE(budget=0.5, window=3, codec=Int8()),
    "before rotation": lambda: SnapKV(budget=0.5, window=3, codec=BeforeRotation()),
}


@pytest.mark.parametrize("name", CODED)
def test_a_shared_prefill_is_encoded_after_the_fork_and_gives_what_a_prefill_alone_gives(name):
    model, method, prompt = small_model(), CODED[name](), random_ids(1, 30)
    with compress(model, method) as session:
        session.prefill(prompt)
        alone = session.generate(6).tokens, all_held(session), session.cache.nbytes(), session.cache.keys_values(1)
    shared = prefill_once(model, prompt, needs_of(method) | Needs(window=5))
    before = [t.clone() for layer in shared.cache.layers for t in layer.keys_values()]
    with compress(model, method, shared=shared) as session:
        session.prefill(prompt)
        got = session.generate(6).tokens, all_held(session), session.cache.nbytes(), session.cache.keys_values(1)
    assert got[:3] == alone[:3]
    assert all((a - b).abs().max() <= 1e-5 for a, b in zip(got[3], alone[3], strict=True))
    after = [t for layer in shared.cache.layers for t in layer.keys_values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert guest_reason(method)


def test_a_method_may_stand_for_its_codec_unless_it_evicts():
    method = SnapKV(budget=0.5, codec=Int8())
    assert method.parts().codec == Int8().parts().codec and method.parts().names()["codec"] == "int8"
    assert method.variant() == "codec=int8"
    with pytest.raises(ValueError, match="a codec is a method without a scorer"):
        Full(codec=SnapKV(budget=0.5))


def test_a_codec_that_does_not_fit_the_model_is_refused_before_any_work():
    @dataclass(frozen=True)
    class Wide(PerTokenInt8):
        def bind(self, model):
            raise ValueError("Wide needs heads of 64 numbers: take codec=int8")

    model = small_model()
    with pytest.raises(ValueError, match="codec=int8"):
        compress(model, Full(codec=Wide()))
    assert isinstance(Full(codec=Wide()), Method)
