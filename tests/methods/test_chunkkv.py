"""ChunkKV keeps the chunks of neighbouring tokens that the window attends to most, and one of them in part."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import all_held, thinned
from reference import Choice, LoopSnapKV
from small_models import left_padded, random_ids, small_model
from test_references import SIZES, compare, follow

from kvcompress import compress
from kvcompress.method import Chunked
from kvcompress.methods import ChunkKV, SnapKV
from kvcompress.methods.adakv import Ada
from kvcompress.methods.chunkkv import member


@dataclass
class LoopChunkKV(LoopSnapKV):
    size: int = 10
    combine: str = "sum"
    together: bool = False
    reuse: int = 1

    def decide(self, layer, b, query, key, features, row):
        """SnapKV's scores of the tokens, summed by chunk; chunks are taken one by one until the budget is used up."""
        before, cap = [set(r) for r in row], self.caps[b]
        if len(before[0]) <= cap:
            return
        if layer % self.reuse:
            leader = layer - layer % self.reuse
            for h in range(len(row)):
                row[h] = before[h] & self.kept[leader][b][h]
                self.choices[layer, b, h] = self.choices[leader, b, h]
            return
        super().decide(layer, b, query, key, features, row)
        offset = int((self.reference.mask[b] == 0).sum())
        chunks = []
        for h in range(len(row)):
            chunks.append({})
            for c, score in self.choices[layer, b, h].scores.items():
                chunks[h].setdefault((c - offset) // self.size, []).append((c, score))
        worth = [{i: sum(s for _, s in tokens) for i, tokens in head.items()} for head in chunks]
        numbers = [{i: len(tokens) for i, tokens in head.items()} for head in chunks]
        if self.together:
            everywhere = set().union(*worth)
            worth = [{i: sum(w.get(i, 0.0) for w in worth) for i in everywhere}] * len(row)
            numbers = [{i: sum(n.get(i, 0) for n in numbers) for i in everywhere}] * len(row)
        for h in range(len(row)):
            value = {i: worth[h][i] / (numbers[h][i] if self.combine == "mean" else 1) for i in chunks[h]}
            recent = before[h] - {c for tokens in chunks[h].values() for c, _ in tokens}
            kept, room = set(), cap - len(recent)
            for i in sorted(chunks[h], key=lambda i: (-value[i], i)):
                part = sorted(c for c, _ in chunks[h][i])[: room - len(kept)]
                kept |= set(part)
            row[h] = kept | recent
            scores = {c: value[i] for i, tokens in chunks[h].items() for c, _ in tokens}
            self.choices[layer, b, h] = Choice(set(row[h]), scores, recent)


OPTIONS = {"window": 3, "size": 4, "kernel": 1, "pooling": "avg"}
SETTINGS = [
    {},
    {"combine": "mean"},
    {"together": True, "combine": "mean", "kernel": 3},
    {"reuse": 2},
    {"size": 7, "group_reduce": "max"},
]


@pytest.mark.parametrize(("sizes", "extra", "budget"), thinned(SIZES, SETTINGS, [13, 0.4], every=4))
def test_it_keeps_what_the_loop_keeps(sizes, extra, budget):
    """In a padded batch chunks begin at the rows' own first tokens; a later turn judges what is still held."""
    options = {**OPTIONS, **extra}
    method = ChunkKV(budget=budget, **options)
    later = (1, 1, 9, 1)
    loop = follow(method, LoopChunkKV, sizes=sizes, lengths=[33, 21], later=later, **options)
    assert all(
        len(head) == loop.caps[b] + 1 for rows in loop.kept.values() for b, row in enumerate(rows) for head in row
    )


def test_a_prompt_in_chunks_keeps_what_the_loop_keeps():
    """Pieces of a prompt need not end where chunks end."""
    model, twin = small_model(), small_model(twin=True)
    ids, mask = left_padded([33, 21])
    for extra in ({}, {"reuse": 3}):
        options = {**OPTIONS, **extra}
        with compress(model, ChunkKV(budget=13, prefill=Chunked(chunk=11), **options)) as session:
            session.prefill(ids, attention_mask=mask)
            with LoopChunkKV(twin, 13, **options) as loop:
                for start in range(0, 33, 11):
                    loop.step(ids[:, start : start + 11], mask[:, start : start + 11], prompt=True)
                compare(session, loop, [33, 21], 33)


@pytest.mark.parametrize("budget", [20, 27, 48, 0.13, 0.5, 0.77])
def test_the_budget_is_met_exactly_and_at_most_one_chunk_is_cut(budget):
    """Where kvpress rounds down to whole chunks (36 of 51 tokens), nothing is left over here."""
    size, window, n = 10, 4, 130
    with compress(small_model(), ChunkKV(budget=budget, window=window, size=size)) as session:
        session.prefill(random_ids(1, n))
        cap = budget if isinstance(budget, int) else round(budget * n)
        for heads in all_held(session).values():
            for kept in heads[0]:
                assert len(kept) == cap and set(range(n - window, n)) <= set(kept)
                cut = 0
                for first in range(0, n - window, size):
                    chunk = [p for p in kept if first <= p < min(first + size, n - window)]
                    assert chunk == list(range(first, first + len(chunk))), "of a chunk that is cut the first stay"
                    cut += 0 < len(chunk) < min(size, n - window - first)
                assert cut <= 1


def test_chunks_of_one_are_snapkv_without_pooling():
    ids, mask = left_padded([40, 29])
    held = []
    for method in (ChunkKV(budget=12, window=3, size=1), SnapKV(budget=12, window=3, kernel=1)):
        with compress(small_model(), method) as session:
            session.prefill(ids, attention_mask=mask)
            held.append(all_held(session))
    assert held[0] == held[1]


def test_reused_layers_keep_what_their_leader_keeps():
    """Layers 0 and 1 agree, and so do 2 and 3; without reuse they differ. Decode schedules follow too."""
    from kvcompress.method import Schedule

    ids = random_ids(2, 40)
    for schedule in (None, Schedule(every=1), Schedule(every=3)):
        for reuse in (1, 2):
            method = ChunkKV(budget=12, window=3, size=4, reuse=reuse, schedule=schedule)
            with compress(small_model(num_hidden_layers=4), method) as session:
                session.prefill(ids)
                session.generate(9)
                held = all_held(session)
            assert (held[0] == held[1] and held[2] == held[3]) == (reuse == 2)
            assert held[1] != held[2]


def test_reused_layers_observe_nothing():
    """What a follower does is look up its leader's tokens: no attention of the window is computed for it."""
    from kvcompress.hook.observed import LayerObserved

    asked, original = [], LayerObserved.window

    def window(self, size):
        asked.append(self.layer.index)
        return original(self, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerObserved, "window", window)
        with compress(small_model(num_hidden_layers=4), ChunkKV(budget=12, window=3, reuse=3)) as session:
            session.prefill(random_ids(1, 40))
    assert asked == [0, 3]


def test_heads_keep_the_same_chunks_together():
    with compress(small_model(), ChunkKV(budget=12, window=3, size=4, together=True)) as session:
        session.prefill(random_ids(1, 40))
        assert all(heads[0][0] == heads[0][1] for heads in all_held(session).values())


def test_membership_is_by_position():
    positions = torch.tensor([[[-1, 0, 3, 7]]])
    assert member(positions, torch.tensor([[[-1, 3, 9]]])).tolist() == [[[False, False, True, False]]]


@pytest.mark.parametrize("options", [{"size": 0}, {"combine": "max"}, {"reuse": 0}, {"reuse": 2, "allocator": Ada()}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ChunkKV(budget=0.5, **options)
