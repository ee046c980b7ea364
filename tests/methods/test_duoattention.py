"""DuoAttention: retrieval heads keep everything, streaming heads sinks and recent tokens, and totals are exact."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from helpers import all_held, examples, feed, thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Choice, Loop
from small_models import left_padded, random_ids, small_model
from test_references import SIZES, follow

from kvcompress import compress
from kvcompress.calibrate.duo import FOLDER, head_order, model_facts, ranks, same_model
from kvcompress.method import Chunked
from kvcompress.method.budget import MOST_TOKENS
from kvcompress.methods import H2O, DuoAttention, Full, SnapKV, StreamingLLM
from kvcompress.methods.duoattention import HeadClasses

OPTIONS = {"sinks": 2, "window": 4, "heads": "random"}


def shares(cap, real, heads, sinks, window, share):
    """Tokens of the heads from the highest rank down, handed out one by one: first even, then head after head."""
    part = max(1, int(min(sinks + window, cap * share)))
    if real <= cap:
        return [cap] * heads
    counts, left = [part] * heads, heads * (cap - part)
    for i in range(heads):
        while left and counts[i] < real:
            counts[i] += 1
            left -= 1
    return counts


def streaming(columns, count, sinks, window):
    """The outermost `count` of a row: a sink is as far out as a recent token the same share of the way in."""

    def inwards(c):
        at, back = c - columns[0], columns[-1] - c + 1
        return (at + 1) / sinks if at < sinks else back / window

    return sorted(columns, key=lambda c: (inwards(c), c))[:count]


@dataclass
class LoopDuo(Loop):
    """Ranks are given; a head once whole stays whole while the row is in decode."""

    in_decode: bool = True
    order: tuple = ()
    sinks: int = 2
    window: int = 4
    share: float = 0.5
    prompt: bool = True
    given: dict = field(default_factory=dict)
    seen: dict = field(default_factory=dict)

    def step(self, ids, mask=None, *, prompt=None, compress=True):
        self.prompt = ids.shape[1] > 1 if prompt is None else prompt
        return super().step(ids, mask, prompt=prompt, compress=compress)

    def decide(self, layer, b, query, key, features, row):
        real = sorted(c for c in range(self.reference.seen) if self.reference.mask[b, c])
        cap, heads = self.caps[b], len(self.order) * len(row)
        for h in range(len(row)):
            if self.prompt:
                counts = shares(cap, len(real), heads, self.sinks, self.window, self.share)
                count = counts[self.order[layer][h]]
                self.given[layer, b, h] = float("inf") if cap < len(real) <= count else count
            limit = self.given[layer, b, h]
            if len(row[h]) > limit:
                ranked = streaming(real, len(real), self.sinks, self.window)
                row[h] = set([c for c in ranked if c in row[h]][:limit])
            self.choices[layer, b, h] = Choice(set(row[h]), {}, set(row[h]))


@pytest.mark.parametrize(("sizes", "budget"), thinned(SIZES, [8, 0.25, 0.5], every=3))
def test_it_keeps_what_the_loop_keeps(sizes, budget):
    """A batch of a whole and a left-padded row, decode and a later turn: kept positions and logits."""
    order = head_order("random", small_model(**sizes))
    follow(DuoAttention(budget=budget, **OPTIONS), LoopDuo, sizes=sizes, later=(1, 1, 1, 9, 1, 1), order=order)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_loop_agrees_for_other_shares_and_without_sinks(share):
    order = head_order("random", small_model())
    options = {"sinks": 0, "window": 5, "share": share}
    method = DuoAttention(budget=9, heads="random", **options)
    options["sinks"] = 1e-9  # no position is below it
    follow(method, LoopDuo, later=(1,) * 6, order=order, **options)


@settings(max_examples=examples(60, 200), deadline=None)
@given(
    cap=st.integers(1, 60),
    more=st.integers(0, 200),
    heads=st.integers(1, 40),
    sinks=st.integers(0, 10),
    window=st.integers(1, 30),
    share=st.floats(0.05, 1.0),
)
def test_totals_are_exact_and_classes_are_nested(cap, more, heads, sinks, window, share):
    """Whole heads, one in between, streaming heads: as handed out one by one; a larger budget unmakes no whole head."""
    allocator = HeadClasses(sinks, window, share)

    def counts(cap):
        part, whole, rest = allocator.numbers(cap, cap + more, heads)
        return [cap + more if r < whole else part + rest * (r == whole) for r in range(heads)]

    found = counts(cap)
    assert found == shares(cap, cap + more, heads, sinks, window, share)
    assert sum(found) == cap * heads and min(found) >= 1 and max(found) <= max(cap, cap + more)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.62, 0.9, 8, 17])
def test_rows_have_exact_totals_over_all_layers(budget):
    """Each row of a padded batch by its own length, for shares and tokens alike."""
    rows = [40, 23]
    ids, mask = left_padded(rows)
    with compress(small_model(groups=1), DuoAttention(budget=budget, **OPTIONS)) as session:
        kept = session.prefill(ids, attention_mask=mask).cache.kept_tokens()
    for row, real in enumerate(rows):
        cap = budget if isinstance(budget, int) else max(1, round(budget * real))
        assert int(kept[:, row].sum()) == min(cap, real) * 4 * 3


def test_in_decode_retrieval_heads_grow_and_the_others_stay():
    """Streaming heads move on with the newest tokens and keep their sinks; with decode=False all grow."""
    model, ids = small_model(), random_ids(1, 40)
    with compress(model, DuoAttention(budget=0.4, **OPTIONS)) as session:
        session.prefill(ids)
        before, mask = session.cache.kept_tokens()[:, 0], torch.ones_like(ids)
        for step in range(5):
            mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
            feed(model, session.cache, random_ids(1, 1, step), mask)
        after, held = session.cache.kept_tokens()[:, 0], all_held(session)
    whole = before == 40
    assert 0 < int(whole.sum()) < whole.numel()
    assert (after[whole] == 45).all() and torch.equal(after[~whole], before[~whole])
    for layer, head in (before == 6).nonzero().tolist():
        assert held[layer][0][head] == [0, 1, 41, 42, 43, 44]
    with compress(model, DuoAttention(budget=0.4, preset="kvpress", **OPTIONS)) as session:
        session.prefill(ids)
        session.generate(6)
        assert torch.equal(session.cache.kept_tokens()[:, 0], before + 5)


def test_retrieval_heads_are_those_that_rank_highest():
    """A scripted order: the first in it are whole, the next has the remainder, the rest stream."""
    order = ((5, 1), (0, 3), (4, 2))
    allocator = HeadClasses(2, 4, order=order)
    with compress(small_model(), DuoAttention(budget=20, allocator=allocator, sinks=2, window=4)) as session:
        kept = session.prefill(random_ids(1, 50)).cache.kept_tokens()[:, 0].tolist()
    assert kept == [[6, 46], [50, 6], [6, 6]]


def test_streaming_heads_keep_what_streaming_llm_keeps():
    """Of the same number of tokens, with original positions."""
    ids = random_ids(2, 40)
    with compress(small_model(), DuoAttention(budget=10, sinks=2, window=5, share=1.0, heads="random")) as session:
        session.prefill(ids)
        held = all_held(session)
    with compress(small_model(), StreamingLLM(budget=7, sinks=2, positions="original")) as session:
        session.prefill(ids)
        expected = all_held(session)[0][0][0]
    rows = [heads for rows in held.values() for heads in rows]
    assert sum(kept == expected for heads in rows for kept in heads) == 2 * 5
    assert sorted(len(kept) for heads in rows for kept in heads) == [7] * 10 + [25] * 2


def test_what_heads_hold_is_really_freed():
    """Bytes follow n_ret x n + n_str x (sinks + window) plus one head in between, not the longest head."""
    with compress(small_model(groups=1), DuoAttention(budget=0.2, **OPTIONS)) as session:
        session.prefill(random_ids(1, 400))
        sizes = session.cache.nbytes()
    assert sizes["keys_values"] == 80 * 12 * 2 * 16 * 4
    assert sizes["allocated"] <= 1.25 * sizes["valid"] + 64 * 12 * (2 * 16 * 4 + 4)


@pytest.mark.parametrize("method", [SnapKV, H2O])
def test_any_scorer_takes_the_classes(method):
    """Whole heads are whole, the others hold the scorer's choice, and the total is the budget's."""
    options = {"window": 3} if method is SnapKV else {}
    made = method(budget=0.4, allocator=HeadClasses(2, 6, heads="random"), **options)
    with compress(small_model(groups=1), made) as session:
        kept = session.prefill(random_ids(2, 50)).cache.kept_tokens()
        assert (kept.sum((0, 2)) == 20 * 12).all() and (kept == 50).any() and kept.min() == (8 if options else 10)
        assert session.generate(4).tokens


def test_it_is_refused_where_it_cannot_work():
    """By name: compact positions need equal heads, and a method without scores has nothing to rank."""
    with pytest.raises(ValueError, match="compact positions need equal numbers"):
        StreamingLLM(budget=0.5, allocator=HeadClasses())
    with pytest.raises(ValueError, match="an allocator needs a scorer"):
        Full(allocator=HeadClasses())


def test_a_prompt_in_chunks_keeps_retrieval_heads_whole():
    """Chunks are cut as they come; the highest ranks are never cut, and no more than the total is held."""
    with compress(small_model(), DuoAttention(budget=20, prefill=Chunked(25), **OPTIONS)) as session:
        kept = session.prefill(random_ids(1, 50)).cache.kept_tokens()
    assert int(kept.sum()) <= 20 * 6 and int((kept == 50).sum()) == 1


def test_the_limit_is_lifted_for_whole_heads_alone():
    limit = HeadClasses().limit(torch.tensor([[50, 6], [20, 6]]), torch.tensor([50, 30]))
    assert limit.tolist() == [[MOST_TOKENS, 6], [20, 6]]


@pytest.mark.parametrize(
    "options", [{"sinks": -1}, {"window": -1}, {"share": 0.0}, {"share": 1.5}, {"sinks": 0, "window": 0}]
)
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DuoAttention(budget=0.5, **options)


# ---------------------------------------------------------------------- data of a model


def test_a_model_without_a_file_is_refused_naming_the_command():
    """Only where the classes are needed: nothing is evicted at budget 1.0."""
    model = small_model()
    with pytest.raises(ValueError, match=r"no head classes .*llama with 3 .*kvcompress calibrate-duo"):
        compress(model, DuoAttention(budget=0.5))
    with pytest.raises(ValueError, match="kvcompress calibrate-duo"):
        compress(model, SnapKV(budget=0.5, window=3, allocator=HeadClasses()))
    with compress(model, DuoAttention(budget=1.0)) as session:
        session.prefill(random_ids(1, 20))


def test_a_file_is_found_by_its_model_and_refused_for_another(tmp_path, monkeypatch):
    """In any precision; other weights or sizes are another model. A path skips the search but not the sizes."""
    model = small_model()
    scores = [[0.1, 0.5], [0.9, 0.2], [0.2, 0.3]]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": 1, "model": {"name": "mine", **model_facts(model)}, "scores": scores}))
    monkeypatch.setattr("kvcompress.calibrate.duo.FOLDER", tmp_path)
    expected = ((5, 1), (0, 3), (4, 2))
    assert head_order("calibrated", model) == ranks(scores) == expected
    for dtype in (torch.bfloat16, torch.float16):
        assert head_order("calibrated", small_model(dtype=dtype)) == expected
    other = small_model(seed=1)
    with pytest.raises(ValueError, match="known: mine"):
        head_order("calibrated", other)
    assert head_order(str(path), other) == expected
    with pytest.raises(ValueError, match="made for mine"):
        head_order(str(path), small_model(num_hidden_layers=2))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 9, "model": {"a": 1}, "scores": [[1]]}'])
def test_a_file_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json.*calibrate-duo"):
        head_order(str(tmp_path / "bad.json"), small_model())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_file_says_where_it_comes_from(path):
    known = json.loads(path.read_text())
    assert {"date", "command", "versions"} <= set(known["made"]) and path.stem in known["made"]["command"]
    assert {"what", "lengths", "samples", "passkeys", "words", "seed", "dtype"} <= set(known["measured"])
    assert len(known["scores"]) == len(known["model"]["layers"])
    assert known["halves"]["rank_correlation"] > 0.8 and known["halves"]["top_quarter"] > 0.7


@pytest.mark.model
def test_smollm2_has_its_file(smollm2):
    """It is found by the weights, and its ranks are those of its scores."""
    model, _ = smollm2
    known = json.loads((FOLDER / "smollm2.json").read_text())
    assert same_model(known["model"], model_facts(model))
    assert head_order("calibrated", model) == ranks(known["scores"])
