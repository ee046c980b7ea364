"""State per row: what rows of a batch are when others are dropped, repeated, exchanged, forked or looked at alone."""

from __future__ import annotations

import pytest
import torch
from helpers import EVICTING, OTHERWISE_HELD, THROUGH_MODEL, every_method, make
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.method import Reader, Schedule
from kvcompress.methods import METHODS, RKV, AdaKV, Full, Int8, Quest

MODEL = small_model()
LENGTHS = [44, 27, 36]
BUDGETS = {"held_tokens": 12, "read_tokens": 12, "bytes": 0.5, "none": 1.0}
NAMES = [name for name in THROUGH_MODEL if name not in ("QFilters", "Random")]  # data of a model; draws by row


class Counting(Reader):
    """Reads all slots but a few, as many as the steps it has counted in a state with a row in dim 0."""

    name = "counting"

    def select(self, q, index, state):
        before = state.get("steps", torch.zeros(len(q), 1))
        state["steps"] = before + 1
        slots = torch.arange(index.positions.shape[2]).expand(*index.positions.shape[:2], -1)
        held = index.positions >= 0
        oldest = held & (held.cumsum(-1) <= state["steps"][:, :, None])
        return slots.masked_fill(oldest | ~held, -1)


def method_of(case):
    if case == "a reader with a state":
        return Full(reader=Counting())
    if case == "pages of a ragged codec":
        return AdaKV(
            budget=14, window=3, codec=Int8(), reader=Quest(budget=8, page_size=4, skip_layers=1).make_reader()
        )
    if case == "a decode schedule":
        return RKV(budget=14, schedule=Schedule(every=1))
    return make(case, BUDGETS[METHODS[case].budget_kind])


@torch.no_grad()
def steps(session, rows, first, n=2):
    """Logits `[n, B, V]` of steps; each of the original rows has tokens of its own."""
    tokens = random_ids(len(LENGTHS), 20, 9)
    out = []
    for t in range(first, first + n):
        out.append(session.step(tokens[rows, t : t + 1]))
    return torch.stack(out)


@pytest.mark.parametrize(
    "case",
    [
        *every_method(NAMES, short=OTHERWISE_HELD),
        "a reader with a state",
        "pages of a ragged codec",
        "a decode schedule",
    ],
)
@torch.no_grad()
def test_rows_that_stay_go_on_as_if_they_were_alone(case):
    """Dropped to one, repeated, exchanged, and forked: every row's steps are those that it takes alone."""
    ids, mask = left_padded(LENGTHS)
    method, tolerance = method_of(case), 2e-4
    alone = []
    for row, length in enumerate(LENGTHS):
        with compress(MODEL, method) as session:
            session.prefill(ids[row : row + 1, -length:])
            alone.append(torch.cat([steps(session, [row], 0), steps(session, [row], 2)])[:, 0])
            bytes_alone = session.report(row=0)["kv"]["bytes_held"]
    with compress(MODEL, method) as session:
        cache = session.prefill(ids, attention_mask=mask).cache
        first = steps(session, [0, 1, 2], 0)
        for row in range(3):
            assert (first[:, row] - alone[row][:2]).abs().max() <= tolerance, row
        copies = {name: cache.fork() for name in ("dropped", "chosen", "repeated", "exchanged")}
        copies["dropped"].batch_select_indices(torch.tensor([1]))  # the longer rows have ended
        copies["chosen"].batch_select_indices(torch.tensor([True, False, True]))
        copies["repeated"].batch_repeat_interleave(2)
        copies["exchanged"].reorder_cache(torch.tensor([2, 2, 0]))
        rows = {"dropped": [1], "chosen": [0, 2], "repeated": [0, 0, 1, 1, 2, 2], "exchanged": [2, 2, 0]}
        for name, copy in copies.items():
            session.cache = copy
            found = steps(session, rows[name], 2)
            for place, row in enumerate(rows[name]):
                assert (found[:, place] - alone[row][2:]).abs().max() <= tolerance, (name, place)
        session.cache = cache
        last = steps(session, [0, 1, 2], 2)
        for row in range(3):
            assert (last[:, row] - alone[row][2:]).abs().max() <= tolerance, row
        assert session.report(row=2)["kv"]["bytes_held"] == bytes_alone


def test_the_list_of_cases_covers_every_reader_and_codec():
    parts = [method_of(name).parts() for name in NAMES]
    assert {"quest", "shadowkv", "flexicache", "indexer"} <= {p.reader.name for p in parts}
    assert {"int8", "kivi", "turboquant", "lowrank", "gqapool"} <= {p.codec.name for p in parts}
    assert set(EVICTING) - {"QFilters", "Random"} <= set(NAMES)
