"""KVzip keeps what plain loops over the model's own attention while it repeats the prompt keep."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from helpers import all_held, feed, thinned
from reference import Choice, Loop, best
from small_models import CharacterTokenizer, left_padded, random_ids, small_model
from test_references import SIZES, compare, follow

from kvcompress import compress
from kvcompress.kernels import blockwise
from kvcompress.method import Chunked, Schedule
from kvcompress.methods import H2O, KVzip
from kvcompress.methods.adakv import Ada
from kvcompress.methods.cake import Preference
from kvcompress.methods.kvzip import Global, turn
from kvcompress.methods.pyramidkv import Pyramid
from kvcompress.models.loading import load
from kvcompress.models.random_models import byte_tokenizer

WORDS = {"instruction": "say", "continuation": "on", "answer": ":"}
OPTIONS = {"chunk": 11, "postfix": 3, "sinks": 2, **WORDS}


@dataclass
class LoopKVzip(Loop):
    """When a prompt's last layer is done: repeat what has not been repeated, row by row, then one ranking of all."""

    chunk: int = 11
    postfix: int = 3
    sinks: int = 2
    instruction: str = ""
    continuation: str = ""
    answer: str = ""
    level: str = "pair"
    in_decode: bool = False
    fed: list = field(default_factory=list)  # every column's ids
    repeated: dict = field(default_factory=dict)  # row -> real tokens that were repeated
    scores: dict = field(default_factory=dict)  # (layer, row, head) -> {column: strongest attention}

    def step(self, ids, mask=None, **options):
        self.fed += [ids[:, column].tolist() for column in range(ids.shape[1])]
        return super().step(ids, mask, **options)

    def decide(self, layer, b, query, key, features, row):
        real = [c for c in range(self.reference.seen) if self.reference.mask[b, c]]
        if layer == self.layers[-1] and query.shape[1] > 1 and len(real) > self.caps[b]:
            self.repeat(b, real)
            self.share(b, real)

    def repeat(self, b, real):
        write = CharacterTokenizer().encode
        for first in range(max(self.repeated.get(b, 0), self.sinks), len(real), self.chunk):
            words = write(self.instruction)
            if first != self.sinks:
                words = write(self.continuation)
                words += [self.fed[c][b] for c in real[max(first - self.postfix, 0) : first]]
            piece = real[first : first + self.chunk]
            ids = words + write(self.answer) + [self.fed[c][b] for c in piece]
            for layer, (query, key, features) in self.run(ids).items():
                for h in range(key.shape[1]):
                    self.note(layer, b, h, piece, real[: self.sinks], query[b], key[b], features, len(ids))
        self.repeated[b] = len(real)

    def run(self, ids):
        """Queries and keys of every layer with `ids` behind all that is held; nothing of it stays."""
        reference = self.reference
        before = copy.deepcopy(reference.cache), reference.mask, dict(reference.captured), dict(reference.values)
        reference.forward(torch.tensor([ids]).expand(len(reference.mask), -1))
        seen = {layer: reference.captured[layer] for layer in self.layers}
        reference.cache, reference.mask, reference.captured, reference.values = before
        return seen

    def note(self, layer, b, h, piece, sinks, query, key, features, n):
        held = self.kept[layer][b][h]
        start = key.shape[1] - n
        columns = [c for c in [*sinks, *piece] if c in held] + list(range(start, start + n))
        got = self.scores.setdefault((layer, b, h), {})
        for c in piece:
            if c in held:
                got[c] = 0.0
        for at in range(start, start + n):
            for probabilities in self.probabilities(query, key, features, h, columns, start, at):
                for c in piece:
                    if c in held:
                        got[c] = max(got[c], probabilities[c])

    def share(self, b, real):
        """Sinks first, then the best scores of all layers and heads; where levels ask for it, of each apart."""
        pairs, guarded = [], set(real[: self.sinks])
        heads = len(self.kept[self.layers[0]][b])
        for layer in self.layers:
            for h in range(heads):
                known = self.scores.get((layer, b, h), {})
                for c in sorted(self.kept[layer][b][h] - guarded):
                    score = known.get(c, 1 + (real.index(c) + 1) / len(real))
                    pairs.append((score, layer, h, c))
        kept = {(layer, h): set() for layer in self.layers for h in range(heads)}
        groups = {"pair": lambda p: 0, "layer": lambda p: p[1], "uniform": lambda p: p[1:3]}[self.level]
        cap, whole = self.caps[b] - len(guarded), len(self.layers) * heads
        for group in sorted({groups(p) for p in pairs}):
            mine = [p for p in pairs if groups(p) == group]
            size = {"pair": whole, "layer": heads, "uniform": 1}[self.level]
            ranked = {i: p[0] for i, p in enumerate(mine)}
            for i in best(ranked, cap * size):
                kept[mine[i][1], mine[i][2]].add(mine[i][3])
        for (layer, h), columns in kept.items():
            scores = {c: score for score, at, head, c in pairs if (at, head) == (layer, h)}
            self.kept[layer][b][h] = columns | guarded
            self.choices[layer, b, h] = Choice(columns | guarded, scores, guarded)
            self._write(layer)


@pytest.mark.parametrize(("sizes", "budget"), thinned(SIZES, [9, 0.4], every=2))
def test_it_keeps_what_the_loop_keeps(sizes, budget):
    """Numbers and positions of every head, in two rows of different length, with decoded tokens and a later turn."""
    loop = follow(
        KVzip(budget=budget, **OPTIONS),
        LoopKVzip,
        sizes=sizes,
        lengths=[26, 15],
        later=(1, 9, 1),
        **OPTIONS,
    )
    for b, cap in enumerate(loop.caps):
        counts = [len(head) for layer in loop.layers for head in loop.kept[layer][b]]
        assert sum(counts) == (cap + 1) * len(counts) and len(set(counts)) > 1


@pytest.mark.parametrize("level", ["layer", "uniform"])
def test_layers_or_heads_can_get_equal_numbers(level):
    options = {**OPTIONS, "level": level}
    loop = follow(KVzip(budget=0.4, **options), LoopKVzip, groups=1, lengths=[26, 15], later=(1, 9), **options)
    for layer in loop.layers:
        counts = [len(head) for head in loop.kept[layer][0]]
        assert sum(counts) == loop.caps[0] * 4
        assert (len(set(counts)) == 1) is (level == "uniform")


@pytest.mark.parametrize("chunk", [4, 50])
def test_a_chunk_may_be_short_or_hold_the_whole_prompt(chunk):
    options = {**OPTIONS, "chunk": chunk}
    follow(KVzip(budget=8, **options), LoopKVzip, lengths=[24, 15], later=(1,), **options)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "cohere2", "gpt_oss"])
def test_scores_are_the_models_own_attention(architecture):
    """Query-key norms, soft-capping, missing rotation and sinks count; sliding layers see a pass and forget it."""
    follow(
        KVzip(budget=8, **OPTIONS), LoopKVzip, architecture=architecture, lengths=[24, 15], later=(1, 7, 1), **OPTIONS
    )


def test_the_size_of_blocks_changes_nothing(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 400)
    monkeypatch.setattr(blockwise, "MIN_BLOCK", 1)
    follow(KVzip(budget=8, **OPTIONS), LoopKVzip, lengths=[24, 15], later=(1, 9, 1), **OPTIONS)


def test_chunks_keep_what_the_loop_keeps():
    """Each chunk of a prompt is repeated when it ends, and its scores stay."""
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded([24, 15])
    with compress(model, KVzip(budget=8, prefill=Chunked(chunk=8), **OPTIONS)) as session:
        got = session.prefill(ids, attention_mask=mask).logits
        with LoopKVzip(twin, 8, **OPTIONS) as loop:
            loop.layers = session.full_layers
            for start in range(0, 24, 8):
                expected = loop.step(ids[:, start : start + 8], mask[:, start : start + 8], prompt=True)[:, -1]
            compare(session, loop, [24, 15], 24)
    assert (got - expected).abs().max() <= 2e-5


@torch.no_grad()
def test_a_plain_call_and_generate_compress_as_prefill_does():
    """`model(...)` and `model.generate(...)` hold and say what session.prefill and session.generate do."""
    ids, mask = left_padded([24, 15])
    model, method = small_model(), KVzip(budget=8, **OPTIONS)
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        held = all_held(session)
        tokens = session.generate(5).tokens
    with compress(model, method) as session:
        feed(model, None, ids, mask)
        assert all_held(session) == held
    with compress(model, method) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert out[:, 24:].tolist() == tokens
    with compress(model, method) as session:  # without position ids: rotated by column, and so are the passes
        model(ids, attention_mask=mask)
        assert all_held(session) == held


def test_a_pass_leaves_no_trace_in_the_cache():
    """Keys, values and sliding windows are the full model's for what is kept; the forward's logits are untouched."""
    ids, mask = left_padded([24, 15])
    for architecture in ("llama", "gemma2"):
        model = small_model(architecture)
        with compress(model, KVzip(budget=1.0)) as session:
            full = session.prefill(ids, attention_mask=mask)
        with compress(model, KVzip(budget=0.5, **OPTIONS)) as session:
            ours = session.prefill(ids, attention_mask=mask)
            assert ours.seen.tolist() == [24, 15] and ours.cache.get_seq_length() == 24
            for i in session.full_layers:
                positions = ours.cache.positions(i)
                keys, values = ours.cache.keys_values(i)
                for b, offset in enumerate((0, 9)):
                    index = (positions[b].clamp(min=0) + offset)[..., None].expand(-1, -1, 16)
                    for got, all_of in zip((keys, values), full.cache.keys_values(i), strict=True):
                        same = (got[b] - all_of[b].gather(1, index))[positions[b] >= 0]
                        assert same.abs().max() <= 1e-5
            for mine, other in zip(ours.cache.layers, full.cache.layers, strict=True):
                if not hasattr(mine, "store"):
                    assert torch.equal(mine.keys, other.keys)
        assert (ours.logits - full.logits).abs().max() <= 1e-5


def test_the_choice_does_not_know_later_questions():
    """Questions appended to copies of one compressed cache leave what is kept of the context as it is."""
    with compress(small_model(), KVzip(budget=8, **OPTIONS)) as session:
        cache = session.prefill(random_ids(1, 24)).cache
        context = all_held(session)
        for seed in (1, 2):
            session.cache = cache.fork()
            session.append(random_ids(1, 5, seed))
            session.generate(3)
            for layer, rows in all_held(session).items():
                for h, kept in enumerate(rows[0]):
                    assert kept[: len(context[layer][0][h])] == context[layer][0][h]


def test_a_larger_budget_keeps_what_a_smaller_one_keeps():
    held = []
    for budget in (0.2, 0.5, 0.8):
        with compress(small_model(), KVzip(budget=budget, **OPTIONS)) as session:
            session.prefill(random_ids(1, 40))
            held.append(all_held(session))
    for small, large in zip(held, held[1:], strict=False):
        assert all(set(a) <= set(b) for i in small for a, b in zip(small[i][0], large[i][0], strict=True))


def test_in_decode_prompt_tokens_go_by_their_scores_and_decoded_ones_by_age():
    """Under a decode schedule no pass is run: decoded tokens stay until nothing that was repeated is left."""
    method = KVzip(budget=8, level="uniform", schedule=Schedule(every=1), **OPTIONS)
    with compress(small_model(), method) as session:
        session.prefill(random_ids(1, 24))
        session.generate(20)
        assert session.cache.kept_tokens().unique().tolist() == [8]
        for rows in all_held(session).values():
            assert all(kept == [0, 1, *range(37, 43)] for kept in rows[0])


def test_passes_ask_for_each_chunk_in_turn():
    """The released code's words, the tokens before a later chunk, the end of the turn, and the chunk itself."""
    tokenizer = byte_tokenizer()
    opening, closing = turn(tokenizer, "")
    assert tokenizer.decode(opening) == "<bos><turn>user\n" and tokenizer.decode(closing) == "<eos><turn>assistant\n"
    text = "one two three four five"
    ids = torch.tensor(opening + tokenizer.encode(text, add_special_tokens=False))
    scorer = KVzip(budget=0.5, chunk=10).make_scorer()
    passes = list(scorer.passes(ids, tokenizer))
    said = [tokenizer.decode(of.ids) for of in passes]
    end = "<eos><turn>assistant\n"
    later = "\n\nRepeat the part of the previous context exactly, starting with "
    assert said == [
        f"\n\nRepeat the previous context exactly.{end}one two th",
        f"{later}e two th{end}ree four f",
        f"{later}e four f{end}ive",
    ]
    n = len(opening)
    assert [(of.first - n, of.last - n, of.beside) for of in passes] == [(0, 10, n), (10, 20, n), (20, 23, n)]
    rest = list(scorer.passes(ids, tokenizer, first=n + 15))
    assert [(of.first - n, of.last - n) for of in rest] == [(15, 23)]
    assert tokenizer.decode(rest[0].ids) == f"{later} three f{end}our five"
    assert KVzip(budget=0.5, preset="kvpress").make_scorer().continuation.endswith("with")


def test_what_the_chat_template_opens_with_is_kept():
    """In every head, although `sinks` is 0 and it was not repeated."""
    model, tokenizer = load("random/llama")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a b c d e f g h i j"}], return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    opening = len(turn(tokenizer, "")[0])
    with compress(model, KVzip(budget=opening + 4, sinks=0)) as session:
        session.prefill(ids)
        assert all(kept[:opening] == list(range(opening)) for rows in all_held(session).values() for kept in rows[0])


def test_what_it_cannot_do_is_refused_by_name():
    model = small_model()
    ids = random_ids(1, 24)
    bare = copy.deepcopy(model)  # no tokenizer is known for it
    with pytest.raises(ValueError, match="KVzip .* tokenizer"):
        compress(bare, KVzip(budget=0.5))
    with compress(bare, KVzip(budget=0.5, **OPTIONS), tokenizer=CharacterTokenizer()) as session:
        session.prefill(ids)
        assert session.report()["active"]
    compress(bare, KVzip(budget=1.0))
    with compress(model, KVzip(budget=0.5)) as session:
        with pytest.raises(ValueError, match="inputs_embeds"):
            model(inputs_embeds=model.get_input_embeddings()(ids))
        cache = session.prefill(ids).cache
        before = all_held(session)
        with pytest.raises(ValueError, match="needs .* positions behind a prompt of 524 tokens .* lower `chunk`"):
            session.prefill(random_ids(1, 500), cache=cache)
        assert all_held(session) == before and not cache.broken and cache.real.tolist() == [24]


@pytest.mark.parametrize("options", [{"chunk": 0}, {"postfix": -1}, {"sinks": -1}, {"level": "token"}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        KVzip(budget=0.5, **options)


def test_passes_count_as_compression_and_hold_no_second_cache(monkeypatch):
    """The report's time covers them; a layer's copy is gone before the next layer's is made."""
    from kvcompress.hook.auxiliary import AuxiliaryLayer

    model, alive = small_model(), []
    stock = AuxiliaryLayer.update

    def watch(self, *args, **kwargs):
        alive.append(sum(layer.store is not None for layer in self.context().full_layers))
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(AuxiliaryLayer, "update", watch)
    with compress(model, KVzip(budget=8, **OPTIONS)) as session:
        session.prefill(random_ids(2, 24))
        seconds = session.report()["time"]
    assert len(alive) == 2 * 2 * 3 and set(alive) == {0}
    assert seconds["prefill_s"] > seconds["compress_s"] > 0.5 * seconds["prefill_s"]


def allocate(scores, total):
    return Global().allocate(scores, [None] * len(scores), len(scores), len(scores), torch.tensor([total]))


def test_the_global_threshold_is_exact_and_empties_no_head():
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(1, 2, 20, generator=generator) for _ in range(3)]
    scores[1][0, 1] *= 1e-6
    scores[0][..., :2] = float("inf")
    scores[2][..., 15:] = float("-inf")
    for total in (8, 11, 40, 109, 110, 130):
        counts = torch.cat(allocate(scores, total), 1)[0]
        assert counts.sum() == total and counts.min() >= 1 and counts[:2].min() >= 2
    assert allocate(scores, 20)[1][0, 1] == 1


@pytest.mark.parametrize("allocator", [Ada(), Pyramid(), Preference(window=3)])
def test_any_allocator_takes_its_scores(allocator):
    """Allocators of a layer, a cascade and all layers decide when the passes have run; sinks are always kept."""
    ids, mask = left_padded([40, 23])
    with compress(small_model(groups=1), KVzip(budget=10, allocator=allocator, **OPTIONS)) as session:
        session.prefill(ids, attention_mask=mask)
        assert session.cache.kept_tokens().sum((0, 2)).tolist() == [120, 120]
        assert all(kept[:2] == [0, 1] for rows in all_held(session).values() for row in rows for kept in row)
        assert len(session.generate(4).tokens[0]) == 4


def test_any_scorer_takes_the_global_allocator():
    with compress(small_model(groups=1), H2O(budget=10, allocator=Global())) as session:
        session.prefill(random_ids(2, 40))
        kept = session.cache.kept_tokens()
        assert (kept.sum((0, 2)) == 120).all() and len(kept.unique()) > 1
