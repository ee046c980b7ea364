"""H2O, TOVA, SnapKV and StreamingLLM keep what plain loops over captured queries and keys keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers import all_held, examples, feed, thinned
from reference import Loop, LoopH2O, LoopSnapKV, LoopStreamingLLM, LoopTOVA
from small_models import left_padded, random_ids, small_model
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.kernels import blockwise
from kvcompress.method import Allocator, Chunked
from kvcompress.methods import H2O, TOVA, SnapKV, StreamingLLM

LENGTHS = [24, 15]
GROUPS = [1, 2, 4]
THREE = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}  # three query heads per KV head
SIZES = [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, THREE]
BUDGET = 8
STEPS = examples(2, 3) * BUDGET  # all that decode evicts by then was generated


def compare(session: Any, loop: Loop, lengths: list[int], width: int) -> int:
    """Assert that a session holds what the loop holds. Returns in how many heads another, equally good set was kept.

    Equally good: a valid top-k within rounding. The loop then goes on from the session's set.
    """
    adopted = 0
    for layer, rows in all_held(session).items():
        for b, row in enumerate(rows):
            for h, positions in enumerate(row):
                expected = loop.real_index(b, loop.kept[layer][b][h])
                if positions != expected:
                    columns = {p + width - lengths[b] for p in positions}
                    choice = loop.choices.get((layer, b, h))
                    assert positions == sorted(positions) and choice is not None and choice.allows(columns), (
                        f"layer {layer} row {b} head {h} after {loop.reference.seen} columns: "
                        f"kept {positions}, the loop {expected}"
                    )
                    loop.adopt(layer, b, h, columns)
                    adopted += 1
    return adopted


def follow(
    method: Any,
    loop_class: type[Loop],
    *,
    architecture="llama",
    groups=2,
    lengths=LENGTHS,
    later=(1,) * STEPS,
    seed=0,
    sizes=None,
    **loop_options,
) -> Loop:
    """Run a method and its loop side by side on twin models; assert equal kept positions and logits at every step.

    A batch is followed by its first row alone, for a few steps. `later` gives the number of tokens of each forward
    after the prompt: 1 is a decode step, more is another turn. `sizes` are the model's, where not the usual ones.
    """
    if len(lengths) > 1:
        alone = {"lengths": lengths[:1], "later": later[:3], "seed": seed, "sizes": sizes}
        follow(method, loop_class, architecture=architecture, groups=groups, **alone, **loop_options)
    model, twin = (
        small_model(architecture, groups=groups, seed=seed, **(sizes or {}), twin=twin) for twin in (False, True)
    )
    ids, mask = left_padded(lengths, seed)
    width, adopted, decisions = ids.shape[1], 0, 0
    with compress(model, method) as session, loop_class(twin, method.budget, **loop_options) as loop:
        loop.layers = session.full_layers
        logits = session.prefill(ids, attention_mask=mask).logits
        expected = loop.step(ids, mask)[:, -1]
        for turn in range(len(later) + 1):
            assert (logits - expected).abs().max() <= 2e-5, f"logits of forward {turn}"
            adopted += compare(session, loop, lengths, width)
            decisions += sum(len(row) for rows in loop.kept.values() for row in rows)
            if turn < len(later):
                tokens = random_ids(len(ids), later[turn], seed + 100 + turn)
                mask = torch.cat([mask, torch.ones_like(tokens)], 1)
                logits = feed(model, session.cache, tokens, mask)[:, -1]
                expected = loop.step(tokens)[:, -1]
    assert adopted <= max(1, decisions // 50), "ties are rare: most sets are exactly the loop's"
    return loop


@pytest.mark.parametrize(
    ("groups", "options"),
    thinned(GROUPS, [{}, {"group_reduce": "max", "recent_share": 0.25}, {"recent_share": 0.0}], every=3),
)
def test_h2o_keeps_what_the_loop_keeps(groups, options):
    """H2O accumulates attention mass over prompt and decode and drops one token per head and step."""
    loop = follow(H2O(budget=BUDGET, **options), LoopH2O, groups=groups, **options)
    assert all(len(head) == BUDGET for rows in loop.kept.values() for row in rows for head in row)


def test_h2o_lets_generated_tokens_become_heavy_hitters():
    """After many steps some kept token outside the recent window was generated: heavy hitters do not freeze."""
    options = {"recent_share": 0.25}
    loop = follow(H2O(budget=BUDGET, **options), LoopH2O, lengths=[6, 6], later=(1,) * 30, seed=3, **options)
    width = 6
    heavy = [c for rows in loop.kept.values() for row in rows for head in row for c in sorted(head)[: BUDGET - 2]]
    assert any(c >= width for c in heavy)
    assert any(c < width for c in heavy)


@pytest.mark.parametrize("groups", GROUPS)
def test_tova_keeps_what_the_loop_keeps(groups):
    """TOVA drops the token its last query attends to least, the same for every head."""
    follow(TOVA(budget=BUDGET), LoopTOVA, groups=groups)


@pytest.mark.parametrize(
    ("method", "loop_class", "options"),
    [(H2O, LoopH2O, {}), (TOVA, LoopTOVA, {}), (SnapKV, LoopSnapKV, {"window": 3, "kernel": 3})],
)
def test_the_size_of_blocks_changes_nothing(method, loop_class, options, monkeypatch):
    """Attention in blocks of a few queries keeps what the loops keep, in prompt, later turn and decode."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 400)
    monkeypatch.setattr(blockwise, "MIN_BLOCK", 1)
    follow(method(budget=BUDGET, **options), loop_class, later=(1, 9, 1, 1, 1), **options)


@dataclass(frozen=True)
class Lopsided(Allocator):
    """Layer i of 3 gets i sixths of everything, its first head a quarter of that."""

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        layer = total * layers_seen // 6
        return [torch.stack([layer // 4, layer - layer // 4], 1)]


LOPSIDED = {(i, h): (i + 1) / 6 * (0.25, 0.75)[h] for i in range(3) for h in range(2)}


def test_h2o_over_heads_of_different_lengths_keeps_what_the_loop_keeps():
    """Mass, decode evictions and later turns are right where every head holds its own number of tokens."""
    method = H2O(budget=BUDGET, allocator=Lopsided())
    loop = follow(method, LoopH2O, lengths=[40, 37], later=(*[1] * 20, 9, 1, 1, 1), shares=LOPSIDED)
    assert sorted({len(head) for rows in loop.kept.values() for head in rows[0]}) == [2, 4, 6, 12, 18]


def test_tova_may_drop_the_newest_token():
    """The newest token takes part in the ranking like any other."""
    loop = follow(TOVA(budget=2), LoopTOVA, later=(1,) * 12)
    newest = loop.reference.seen - 1
    assert any(newest not in head for rows in loop.kept.values() for row in rows for head in row)


SNAP = [
    {},
    {"pooling": "avg", "kernel": 5},
    {"group_reduce": "max"},
    {"reduce_first": False},
    {"kernel": 1},
    {"reduce_first": False, "group_reduce": "max", "pooling": "avg", "kernel": 3},
]


@pytest.mark.parametrize(("groups", "options"), thinned(GROUPS, SNAP, every=3))
def test_snapkv_keeps_what_the_loop_keeps(groups, options):
    """SnapKV ranks the prefix by the pooled attention of the window; decoded tokens are appended."""
    options = {"window": 3, "kernel": 7, "pooling": "max", **options}
    loop = follow(SnapKV(budget=BUDGET, **options), LoopSnapKV, groups=groups, **options)
    assert all(len(head) == BUDGET + STEPS for rows in loop.kept.values() for row in rows for head in row)


@pytest.mark.parametrize(
    ("architecture", "rule"),
    thinned(
        ["qwen3", "gemma2", "cohere2", "gpt_oss"],
        [(H2O, LoopH2O, {}), (TOVA, LoopTOVA, {}), (SnapKV, LoopSnapKV, {"window": 3, "kernel": 3})],
        every=3,
    ),
)
def test_scores_are_the_models_own_attention(architecture, rule):
    """Query-key norms, soft-capping, missing rotation and sinks are part of the attention that is scored."""
    method, loop_class, options = rule
    follow(
        method(budget=BUDGET, **options), loop_class, architecture=architecture, later=(1, 1, 1, 7, 1, 1, 1), **options
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_snapkv_shrinks_its_window_when_a_share_is_small(share):
    """A window that the cap cannot hold shrinks to half of what is kept; short rows shrink on their own."""
    options = {"window": 6, "kernel": 3}
    follow(SnapKV(budget=share, **options), LoopSnapKV, lengths=[24, 15, 7], later=(1,) * 6, **options)


@pytest.mark.parametrize("budget", [5, BUDGET])
def test_streaming_llm_keeps_sinks_and_the_most_recent(budget):
    """StreamingLLM holds its sinks and a sliding tail."""
    follow(StreamingLLM(budget=budget, sinks=4, positions="original"), LoopStreamingLLM, sinks=4)


@pytest.mark.parametrize(
    ("rule", "budget"),
    thinned(
        [
            (H2O, LoopH2O, {}),
            (TOVA, LoopTOVA, {}),
            (SnapKV, LoopSnapKV, {"window": 3, "kernel": 3}),
            (partial(StreamingLLM, positions="original"), LoopStreamingLLM, {"sinks": 2}),
        ],
        [0.25, 0.5, 10],
        every=3,
    ),
)
def test_later_turns_keep_what_the_loop_keeps(rule, budget):
    """A second and third turn between decode steps are compressed by the same rule, on what is still held."""
    method, loop_class, options = rule
    loop = follow(method(budget=budget, **options), loop_class, later=(1, 1, 12, 1, 1, 9, 1), **options)
    real_at_last_prompt = [n + 2 + 12 + 2 + 9 for n in LENGTHS]
    assert loop.caps == [10 if budget == 10 else round(budget * n) for n in real_at_last_prompt]


@pytest.mark.parametrize(
    ("method", "loop_class", "options"),
    [(H2O, LoopH2O, {}), (TOVA, LoopTOVA, {}), (SnapKV, LoopSnapKV, {"window": 3, "kernel": 3})],
)
def test_chunks_keep_what_the_loop_keeps(method, loop_class, options):
    """A prompt in chunks, evicting between them, equals the loop fed chunk by chunk."""
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded([24, 15])
    budget = BUDGET
    with compress(model, method(budget=budget, prefill=Chunked(chunk=8), **options)) as session:
        got = session.prefill(ids, attention_mask=mask).logits
        with loop_class(twin, budget, **options) as loop:
            for start in range(0, 24, 8):
                expected = loop.step(ids[:, start : start + 8], mask[:, start : start + 8], prompt=True)[:, -1]
            compare(session, loop, [24, 15], 24)
    assert (got - expected).abs().max() <= 2e-5


def test_the_loop_is_a_loop_over_the_definition():
    """A hand-made case: equal scores keep the earlier position, and the choice knows equally good sets."""
    from reference import Choice, best

    assert best({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.9}, 2) == {0, 3}
    choice = Choice({0, 3, 9}, {0: 0.5, 1: 0.5, 2: 0.1, 3: 0.9}, {9})
    assert choice.allows({1, 3, 9}) and not choice.allows({2, 3, 9}) and not choice.allows({0, 3, 1})
    assert not choice.allows({0, 9})


def rotate_half_keys(model: Any, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys before rotation, rotated by the model's own module."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.model.rotary_emb(keys, positions)
    return apply_rotary_pos_emb(keys, keys, cos, sin)[1]


@torch.no_grad()
def test_compact_positions_equal_fresh_rotations_of_raw_keys():
    """With compact positions each step equals the stock model over a short cache of raw keys rotated to 0, 1, …"""
    model, twin = small_model(), small_model(fresh=True)
    sinks, budget, steps = 2, 8, 3 * 8
    ids, tokens = random_ids(1, 14), random_ids(1, steps, 5)
    raw: dict[int, list[torch.Tensor]] = {i: [] for i in range(3)}
    for i, layer in enumerate(twin.model.layers):
        layer.self_attn.k_proj.register_forward_hook(
            lambda _m, _a, out, i=i: raw[i].append(out.view(1, -1, 2, 16).transpose(1, 2))
        )
    values: dict[int, torch.Tensor] = {}
    held_raw: dict[int, torch.Tensor] = {}

    def evict(cache):
        n = cache.layers[0].keys.shape[2]
        kept = list(range(n)) if n <= budget else [*range(sinks), *range(n - budget + sinks, n)]
        fresh = DynamicCache()
        for i in range(3):
            new = torch.cat(raw[i], 2)
            raw[i].clear()
            held_raw[i] = torch.cat([held_raw[i], new], 2)[:, :, kept] if i in held_raw else new[:, :, kept]
            values[i] = cache.layers[i].values[:, :, kept]
            fresh.update(rotate_half_keys(twin, held_raw[i], torch.arange(len(kept))[None]), values[i], i)
        return fresh

    with compress(model, StreamingLLM(budget=budget, sinks=sinks, positions="compact")) as session:
        got = session.prefill(ids).logits
        cache = DynamicCache()
        assert (got - twin(ids, cache=cache).logits[:, -1]).abs().max() <= 1e-5
        cache = evict(cache)
        mask = torch.ones_like(ids)
        start = 0
        for n in (*[1] * 10, 5, 1, 1, 3, *[1] * 4):  # decode, and two more turns
            new = tokens[:, start : start + n]
            start += n
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            got = feed(model, session.cache, new, mask)
            expected = twin(new, cache=cache).logits
            assert (got - expected).abs().max() <= 2e-5, f"after {start} tokens"
            cache = evict(cache)
            keys = session.cache.keys_values(0)[0][session.cache.positions(0) >= 0].view(1, 2, -1, 16)
            assert (keys - cache.layers[0].keys).abs().max() <= 1e-4
            seen = 14 + start
            assert all_held(session)[0][0][0] == [*range(sinks), *range(seen - budget + sinks, seen)]


def test_original_and_compact_positions_agree_until_something_is_dropped():
    """Both position modes give the same logits while everything is held, and others afterwards."""
    ids, tokens = random_ids(1, 6), random_ids(1, 6, 5)

    def run(positions):
        model = small_model()
        with compress(model, StreamingLLM(budget=8, sinks=2, positions=positions)) as session:
            session.prefill(ids)
            mask = torch.ones(1, 12, dtype=torch.long)
            return torch.cat([feed(model, session.cache, tokens[:, t : t + 1], mask[:, : 7 + t]) for t in range(6)], 1)

    difference = (run("original") - run("compact")).abs().amax((0, 2))
    assert difference[:2].max() <= 1e-5
    assert difference[3:].min() > 1e-4
