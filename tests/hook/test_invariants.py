"""What must hold for every method, prompt and budget."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BY_HEAD,
    CODED,
    EVICTING,
    LONG,
    REPRESENTATIVE,
    all_held,
    as_published,
    coded,
    every_method,
    examples,
    feed,
    grid,
    grows,
    make,
    thinned,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import left_padded, random_ids, small_model

from kvcompress import compress
from kvcompress.hook import evictor
from kvcompress.method import Chunked, Method, OneShot, Schedule
from kvcompress.method.budget import protect
from kvcompress.methods import H2O, METHODS, TOVA, SnapKV, StreamingLLM

MODEL = small_model(num_hidden_layers=2)
options = {"deadline": None, "suppress_health_check": list(HealthCheck)}
of_each_method = settings(max_examples=examples(4, 12), **options)
quick = settings(max_examples=examples(8, 12), **options)

lengths = st.lists(st.integers(1, 24), min_size=1, max_size=3)
shares = st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.1, 0.25, 0.5, 0.999]))


def cap_of(budget, real):
    return budget if isinstance(budget, int) else max(1, round(budget * real))


def held_after(real, cap, decoded, every):
    """Tokens per head after a prompt and some decoded tokens: back to the cap whenever `every` more have come."""
    held = min(real, cap)
    for _ in range(decoded):
        held += 1
        if every is not None and held >= cap + every:
            held = cap
    return held


def check_kept(method, session, rows, decoded):
    """Every head holds as many tokens as its method may, in strictly increasing order, none of them negative.

    Where an allocator hands out the budget unevenly, all heads of all layers together hold as many; heads that it lets
    grow in decode hold every token.
    """
    parts, held = method.parts(), all_held(session)
    for row, real in enumerate(rows):
        expected = held_after(real, cap_of(method.budget, real), decoded, parts.schedule.every)
        if not parts.allocator.uniform:
            counts = [len(kept) for heads in held.values() for kept in heads[row]]
            growing = 0
            if grows(method) and real > cap_of(method.budget, real) and parts.schedule.every is not None:
                growing = counts.count(real + decoded)
            assert sum(counts) == expected * len(counts) + growing * decoded
        for heads in held.values():
            for kept in heads[row]:
                assert len(kept) == expected or not parts.allocator.uniform
                assert all(a < b for a, b in zip(kept, kept[1:], strict=False))
                assert 0 <= kept[0] and kept[-1] < real + decoded


@pytest.mark.parametrize("name", EVICTING)
@of_each_method
@given(rows=lengths, budget=shares, steps=st.integers(0, 6), seed=st.integers(0, 5))
def test_kept_is_the_smaller_of_length_and_cap_in_order_and_nothing_comes_back(name, rows, budget, steps, seed):
    """Counts, order, and the arrow of time: a position once evicted never reappears; logits stay finite."""
    method = make(name, budget)
    ids, mask = left_padded(rows, seed)
    with compress(MODEL, method) as session:
        assert session.prefill(ids, attention_mask=mask).logits.isfinite().all()
        check_kept(method, session, rows, 0)
        before = all_held(session)
        for step in range(steps):
            token = random_ids(len(rows), 1, seed + step)
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            assert feed(MODEL, session.cache, token, mask).isfinite().all()
            check_kept(method, session, rows, step + 1)
            after = all_held(session)
            for layer, heads in after.items():
                for b, row in enumerate(heads):
                    for h, kept in enumerate(row):
                        assert set(kept) <= set(before[layer][b][h]) | {rows[b] + step}
            before = after


@pytest.mark.parametrize("name", EVICTING)
@of_each_method
@given(rows=lengths, budget=st.integers(6, 12), seed=st.integers(0, 5), steps=st.integers(0, 8))
def test_int_budgets_are_tokens(name, rows, budget, seed, steps):
    """An int budget keeps that many tokens in every row that has them, and all of shorter ones, which may grow."""
    method = make(name, budget)
    ids, mask = left_padded(rows, seed)
    with compress(MODEL, method) as session:
        session.prefill(ids, attention_mask=mask)
        check_kept(method, session, rows, 0)
        assert session.report()["clamped"] is False
        assert session.report()["active"] is (max(rows) > budget)
        for step in range(steps):
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            feed(MODEL, session.cache, random_ids(len(rows), 1, step), mask)
            check_kept(method, session, rows, step + 1)


@pytest.mark.parametrize(
    ("name", "length"),
    grid(
        sorted(METHODS),
        range(1, 9),
        short=lambda name, length: length == 3 or (name in REPRESENTATIVE and length in (1, 8)),
    ),
)
def test_prompts_of_one_to_eight_tokens_are_never_emptied(name, length):
    """Every budget on a tiny prompt leaves at least one token per head and finite logits, in prompt and decode."""
    ids, kind = random_ids(1, length), METHODS[name].budget_kind
    # 0.01 of eight tokens is one, as 0.1 is; bytes for less than a rank of 1 are refused for any prompt
    budgets = (1.0,) if kind == "none" else (0.1 if kind == "bytes" else 0.01, 0.5, *((0.9, 0.999) if LONG else ()))
    for budget in budgets:
        with compress(MODEL, make(name, budget)) as session:
            logits = [session.prefill(ids).logits]
            mask = torch.ones_like(ids)
            for step in range(3):
                mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
                logits.append(feed(MODEL, session.cache, random_ids(1, 1, step), mask))
            assert all(x.isfinite().all() for x in logits)
            assert session.cache.kept_tokens().min() >= 1
            session.append(ids[:, :1])
            assert session.generate(2).tokens and session.cache.kept_tokens().min() >= 1


@pytest.mark.parametrize("name", sorted(METHODS))
def test_prompts_of_one_to_eight_tokens_work_with_the_papers_own_settings(name):
    """The defaults (a window of 32, say) work on tiny prompts and small shares."""
    for length, budget in ((1, 0.5), (8, 0.05), *(((1, 0.05), (8, 0.5)) if LONG else ())):
        if METHODS[name].budget_kind == "bytes" and budget < 0.1:
            budget = 0.5
        with compress(MODEL, as_published(name, budget)) as session:
            assert session.prefill(random_ids(1, length)).logits.isfinite().all()
            assert session.generate(3).tokens[0]
            assert session.cache.kept_tokens().min() >= 1


@quick
@given(rows=lengths, budget=st.integers(6, 14), sinks=st.integers(0, 4), steps=st.integers(0, 8))
def test_streaming_llm_keeps_its_sinks(rows, budget, sinks, steps):
    """The first tokens and the last ones are always there."""
    ids, mask = left_padded(rows)
    with compress(MODEL, StreamingLLM(budget=budget, sinks=sinks)) as session:
        session.prefill(ids, attention_mask=mask)
        for step in range(steps):
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            feed(MODEL, session.cache, random_ids(len(rows), 1, step), mask)
        for heads in all_held(session).values():
            for row, real in enumerate(rows):
                total = real + steps
                tail = range(max(sinks, total - budget + sinks), total)
                assert all(set(kept) == {*range(min(sinks, total)), *tail} for kept in heads[row])


@quick
@given(rows=lengths, window=st.integers(1, 5), budget=st.integers(6, 14))
def test_snapkv_keeps_its_window(rows, window, budget):
    """The last tokens of every row's prompt are kept in every head."""
    ids, mask = left_padded(rows)
    with compress(MODEL, SnapKV(budget=budget, window=window)) as session:
        session.prefill(ids, attention_mask=mask)
        for heads in all_held(session).values():
            for row, real in enumerate(rows):
                assert all(set(range(max(0, real - window), real)) <= set(kept) for kept in heads[row])


@quick
@given(rows=lengths, budget=st.integers(2, 12), steps=st.integers(1, 6))
def test_h2o_keeps_its_recent_half(rows, budget, steps):
    """The most recent half of the cap is always held."""
    ids, mask = left_padded(rows)
    with compress(MODEL, H2O(budget=budget)) as session:
        session.prefill(ids, attention_mask=mask)
        for step in range(steps):
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            feed(MODEL, session.cache, random_ids(len(rows), 1, step), mask)
        for heads in all_held(session).values():
            for row, real in enumerate(rows):
                total = real + steps
                recent = set(range(max(0, total - budget // 2), total))
                assert all(recent <= set(kept) for kept in heads[row])


@quick
@given(rows=lengths, budget=shares)
def test_tova_keeps_the_same_tokens_in_every_head(rows, budget):
    """All heads of a layer agree."""
    ids, mask = left_padded(rows)
    with compress(MODEL, TOVA(budget=budget)) as session:
        session.prefill(ids, attention_mask=mask)
        assert all(len({tuple(kept) for kept in row}) == 1 for heads in all_held(session).values() for row in heads)


@pytest.mark.parametrize("name", EVICTING)
def test_a_batch_row_gets_what_it_gets_alone(name):
    """Kept positions of a row do not depend on its neighbours or its padding (Random draws per row)."""
    rows = [22, 9, 15]
    ids, mask = left_padded(rows)
    with compress(MODEL, make(name, 0.5)) as session:
        logits = session.prefill(ids, attention_mask=mask).logits
        together = all_held(session)
    if name == "Random":
        return
    for b, length in enumerate(rows):
        with compress(MODEL, make(name, 0.5)) as session:
            alone_logits = session.prefill(ids[b : b + 1, -length:]).logits
            alone = all_held(session)
        assert (alone_logits - logits[b]).abs().max() <= 1e-5
        assert {layer: heads[b] for layer, heads in together.items()} == {
            layer: heads[0] for layer, heads in alone.items()
        }


@pytest.mark.parametrize("name", EVICTING)
def test_prompt_logits_are_the_full_models(name):
    """The forward that computed the queries attends to everything; eviction takes effect after it."""
    ids, mask = left_padded([20, 7])
    with compress(MODEL, METHODS["Full"]()) as session:
        expected = session.prefill(ids, attention_mask=mask).logits
    with compress(MODEL, make(name, 0.2)) as session:
        assert (session.prefill(ids, attention_mask=mask).logits - expected).abs().max() <= 1e-5


def test_a_share_too_small_for_sinks_and_window_is_clamped_and_counted():
    """A share that resolves below sinks + window + 1 shrinks them, keeps the cap exactly, and says so."""
    for method in (SnapKV(budget=0.1, window=32), StreamingLLM(budget=0.1, sinks=4)):
        with compress(MODEL, method) as session:
            session.prefill(random_ids(1, 30))
            assert session.cache.kept_tokens().unique().tolist() == [3]
            assert session.report()["clamped"] is True
    with compress(MODEL, SnapKV(budget=0.5, window=4)) as session:
        session.prefill(random_ids(1, 30))
        assert session.report()["clamped"] is False
    assert protect(torch.tensor([0, 3]), 1, 0).clamped.tolist() == [True, False]
    assert not protect(torch.tensor([0, 3]), 0, 0).clamped.any(), "where nothing is protected nothing shrinks"


def test_a_method_without_a_scorer_drops_nothing_whatever_its_budget():
    with compress(MODEL, Method(budget=0.5)) as session:
        session.prefill(random_ids(1, 12))
        session.generate(3)
        assert session.report()["evicted"] == 0 and session.cache.kept_tokens().unique().tolist() == [14]


def test_the_sum_of_h2o_mass_is_the_number_of_queries():
    """Each prompt query hands out attention of 1: scores of an un-evicted prompt sum to its length per query head."""
    from reference import LoopH2O

    with LoopH2O(small_model(num_hidden_layers=2), 100) as loop:
        loop.step(random_ids(1, 13))
        for heads in loop.mass.values():
            for mass in heads:
                assert abs(sum(mass.values()) - 13) < 1e-4


@pytest.mark.parametrize("name", every_method())
def test_slots_emptied_in_place_change_nothing(name, monkeypatch):
    """Evicting one token per step in decode keeps the same whether holes are left for a while or closed at once."""
    ids, mask = left_padded([22, 15])
    held = []
    for holes in (16, 3, 0):
        monkeypatch.setattr(evictor, "MAX_HOLES", holes)
        with compress(MODEL, make(name, 0.4, schedule=Schedule(every=1))) as session:
            session.prefill(ids, attention_mask=mask)
            session.generate(7)
            session.prefill(random_ids(2, 7, 4), cache=session.cache)
            session.generate(3)
            held.append((session.cache.kept_tokens().tolist(), all_held(session)))
    assert held[0] == held[1] == held[2]


def test_a_protected_slot_stays_where_all_others_score_infinitely():
    counts, blocked = torch.tensor([[3]]), torch.tensor([[[False, True, True, True, True]]])
    step = evictor.IncrementalEvictor(counts, counts, blocked, torch.tensor([[[1]]]), 1)
    assert step.choose(torch.tensor([[[float("inf"), float("inf"), 1.0]]])).item() == 1


@pytest.mark.parametrize("name", EVICTING)
def test_permuting_the_batch_permutes_the_result(name):
    """Rows are independent of their order (Random excepted: it draws by row)."""
    if name == "Random":
        pytest.skip("draws depend on the row")
    ids, mask = left_padded([18, 7, 12])
    order = torch.tensor([2, 0, 1])
    with compress(MODEL, make(name, 0.4)) as session:
        session.prefill(ids, attention_mask=mask)
        straight = all_held(session)
    with compress(MODEL, make(name, 0.4)) as session:
        session.prefill(ids[order], attention_mask=mask[order])
        permuted = all_held(session)
    assert permuted == {layer: [heads[i] for i in order.tolist()] for layer, heads in straight.items()}


def test_random_is_seeded():
    """Random keeps the same tokens for the same seed, and not the same in every head."""
    fields = METHODS["Random"].__dataclass_fields__

    def run(**options):
        with compress(MODEL, METHODS["Random"](budget=0.5, **options)) as session:
            session.prefill(random_ids(1, 24))
            return all_held(session)

    assert run() == run()
    if "seed" in fields:
        assert run(seed=1) != run(seed=2)


def quantised():
    """Each method that holds tokens in another form, as codecs of others take it."""
    return {name: coded(name).as_codec() for name in BY_HEAD}


@pytest.mark.parametrize("codec", CODED)
@of_each_method
@given(rows=lengths, steps=st.integers(0, 9), seed=st.integers(0, 5))
def test_a_codec_leaves_the_prompt_exact_and_every_token_held(codec, rows, steps, seed):
    """Prompt logits are the full model's; every token is held, in order; what is decoded lies near what was coded."""
    ids, mask = left_padded(rows, seed)
    tokens = random_ids(len(rows), steps + 1, seed)
    with compress(MODEL, METHODS["Full"]()) as session:
        expected = session.prefill(ids, attention_mask=mask).logits
        for t in range(steps):
            session.step(tokens[:, t : t + 1])
        exact = session.cache.keys_values(0)
    with compress(MODEL, coded(codec)) as session:
        assert (session.prefill(ids, attention_mask=mask).logits - expected).abs().max() <= 1e-5
        for t in range(steps):
            assert session.step(tokens[:, t : t + 1]).isfinite().all()
        assert all_held(session)[0] == [[list(range(real + steps))] * 2 for real in rows]
        held = session.cache.positions(0) >= 0
        for near, far in zip(session.cache.keys_values(0), exact, strict=True):
            assert near.shape == far.shape
            most = 0.7 if codec in BY_HEAD else 1.0  # a mean of heads is no farther from them than 0 is
            assert (near - far)[held].norm() <= most * far[held].norm()


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *thinned(REPRESENTATIVE, BY_HEAD, every=3),
        *grid([name for name in EVICTING if name not in REPRESENTATIVE], BY_HEAD, short=lambda *_: False),
    ],
)
def test_a_codec_changes_nothing_of_what_a_prompt_keeps(name, codec):
    """Scorers see exact keys and values: the same tokens, batched and left-padded; decode and later turns go on."""
    ids, mask = left_padded([26, 11])
    options = {"positions": "original"} if "positions" in METHODS[name].__dataclass_fields__ else {}
    method = make(name, 0.5, schedule=Schedule(), prefill=OneShot(), **options)
    with compress(MODEL, method) as session:
        session.prefill(ids, attention_mask=mask)
        expected, plain = all_held(session), session.cache.nbytes()
    with compress(MODEL, method.replace(codec=quantised()[codec])) as session:
        session.prefill(ids, attention_mask=mask)
        assert all_held(session) == expected and session.cache.nbytes()["full"] == plain["full"]
        kept = session.cache.kept_tokens()
        assert session.generate(3).tokens and session.append(random_ids(2, 4)).isfinite().all()
        assert torch.equal(session.cache.kept_tokens(), kept + 2 + 5)
        assert session.prefill(random_ids(2, 6), cache=session.cache).logits.isfinite().all()
        assert session.cache.kept_tokens().min() >= 1 and session.generate(2).tokens


@pytest.mark.parametrize("codec", BY_HEAD)
def test_a_prompt_in_chunks_goes_on_over_codes(codec):
    """Later chunks attend to codes and to themselves, and the cap holds after each."""
    ids, mask = left_padded([40, 23])
    with compress(MODEL, SnapKV(budget=12, window=3, prefill=Chunked(chunk=10), codec=quantised()[codec])) as session:
        assert session.prefill(ids, attention_mask=mask).logits.isfinite().all()
        held = session.cache.kept_tokens()
        assert held.max() <= 12 and held.min() > 12 - 4
        assert session.generate(4).tokens


@pytest.mark.parametrize("codec", CODED)
def test_codes_of_a_batch_row_are_what_the_row_gets_alone(codec):
    """Bit for bit in the first layer, after a prompt and some steps, whatever its neighbours and its padding."""
    rows, steps = [22, 9, 15], 4
    ids, mask = left_padded(rows)
    tokens = random_ids(3, steps)
    with compress(MODEL, coded(codec)) as session:
        session.prefill(ids, attention_mask=mask)
        for t in range(steps):
            session.step(tokens[:, t : t + 1])
        together = session.cache.keys_values(0)
    for b, length in enumerate(rows):
        with compress(MODEL, coded(codec)) as session:
            session.prefill(ids[b : b + 1, -length:])
            for t in range(steps):
                session.step(tokens[b : b + 1, t : t + 1])
            for mine, theirs in zip(session.cache.keys_values(0), together, strict=True):
                assert (mine[0] - theirs[b, :, -length - steps :]).abs().max() <= 1e-5
