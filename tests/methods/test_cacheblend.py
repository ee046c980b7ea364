"""CacheBlend against a loop over tokens with one explicit mask, and against what holds of it at any ratio."""

from __future__ import annotations

import pytest
import torch
from helpers import all_held, examples, grid, make, thinned
from small_models import ARCHITECTURES, HYBRID, LATENT, random_ids, small_model

from kvcompress import compress
from kvcompress.methods import CacheBlend, Full, SnapKV
from kvcompress.methods.cacheblend import Blended
from kvcompress.methods.int8 import Int8Codec
from kvcompress.methods.kivi import KIVICodec
from kvcompress.models import compat
from kvcompress.reuse import chunk_loader, selective_recompute
from kvcompress.reuse.kv_store import Damaged, KVStore
from kvcompress.sweep.baseline import is_baseline

LENGTHS = (4, 16, 16, 16, 8)  # prefix, three chunks, question
CONTEXT, TOTAL = sum(LENGTHS[:-1]), sum(LENGTHS)


def prompt(lengths=LENGTHS, seed=0):
    return [random_ids(1, n, seed=10 * seed + i) for i, n in enumerate(lengths)]


OF_EACH_KIND = ("llama", "qwen3", "gemma2", "gpt_oss", "glm4", "smollm3")  # norms, soft-caps, sinks, ways to rotate


def model_of(architecture="llama", **options):
    if architecture not in HYBRID:
        options = {"num_hidden_layers": 5, **options}
    if architecture == "smollm3":
        options["no_rope_layers"] = [1, 0, 1, 1, 0]
    return small_model(architecture, **options)


def rows_of(session):
    return [session.cache.keys_values(i) for i in session.full_layers]


def farthest(a, b):
    """The largest difference between two lists of (keys, values)."""
    return max(float((x - y).abs().max()) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


def run(model, method, segments, **options):
    """Logits, rows per layer and report of a prefill."""
    with compress(model, method, **options) as session:
        logits = session.prefill(segments).logits
        return logits, rows_of(session), session.report()


def full(model, segments):
    return run(model, Full(), torch.cat(segments, 1))


@pytest.fixture
def passing(monkeypatch):
    """Which tokens each layer of the last fused forward computed, filled in as it runs."""
    found = []

    class Spied(selective_recompute.SelectiveRecompute):
        def fuse(self, layer, keys, values):
            if layer == 0:
                found.clear()
            found.append(list(range(self.length)) if self.passing is None else self.passing.tolist())
            return super().fuse(layer, keys, values)

    monkeypatch.setattr(selective_recompute, "SelectiveRecompute", Spied)
    return found


# ---------------------------------------------------------------------------------------------- the loop reference


class Loop:
    """The algorithm on a Llama of transformers, token by token: every row of every layer in full, one explicit mask."""

    def __init__(self, model, ratio, deviation, selection, mix, check):
        self.model, self.layers = model.model, model.model.layers
        self.head, self.ratio, self.mix, self.check = model.lm_head, ratio, mix, check
        self.deviation, self.gradual = deviation, selection == "gradual"
        self.size = model.config.head_dim

    def rope(self, x, position):
        """One vector `[heads, D]` turned by its position, from the definition."""
        half, base = self.size // 2, self.model.config.rope_parameters["rope_theta"]
        angle = position * base ** (-2 * torch.arange(half) / self.size)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)

    def project(self, layer, h):
        attention, x = layer.self_attn, layer.input_layernorm(h)
        return [p(x).view(-1, self.size) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def attend(self, q, keys, values, at):
        """One query over the rows up to its position."""
        group = q.shape[0] // keys[0].shape[0]
        k, v = (torch.stack([x[j] for j in range(at + 1)], 1).repeat_interleave(group, 0) for x in (keys, values))
        weights = (k @ q[:, :, None] * self.size**-0.5).softmax(1)
        return (weights.mT @ v).flatten()

    def after(self, layer, h, attended):
        h = h + layer.self_attn.o_proj(attended)
        return h + layer.mlp(layer.post_attention_layernorm(h))

    def alone(self, ids, skip):
        """Per layer, keys before rotation and values of a text of its own, without its first `skip` tokens."""
        hidden, found = [self.model.embed_tokens(torch.tensor(i)) for i in ids], []
        for layer in self.layers:
            raw = [self.project(layer, h) for h in hidden]
            keys = [self.rope(k, j) for j, (_, k, _) in enumerate(raw)]
            values = [v for *_, v in raw]
            found.append([(k, v) for _, k, v in raw[skip:]])
            out = [self.attend(self.rope(q, j), keys, values, j) for j, (q, _, _) in enumerate(raw)]
            hidden = [self.after(layer, h, o) for h, o in zip(hidden, out, strict=True)]
        return found

    def share(self, layer):
        """Share of the context that the layer after `layer` computes: linear, 4/3 of the ratio first."""
        last = len(self.layers) - 2
        if not self.gradual or last == self.check:
            return self.ratio
        start = min(1.0, 4 / 3 * self.ratio)
        return start + (2 * (self.ratio - start)) * min(1.0, (layer - self.check) / (last - self.check))

    @torch.no_grad()
    def run(self, segments):
        texts = [s[0].tolist() for s in segments]
        ids, context = sum(texts, []), sum(len(t) for t in texts[:-1])
        alone = [self.alone(t if n == 0 else [1, *t], 0 if n == 0 else 1) for n, t in enumerate(texts[:-1])]
        hidden = {i: self.model.embed_tokens(torch.tensor(t)) for i, t in enumerate(ids)}
        cache, sets = [], []
        for number, layer in enumerate(self.layers):
            sets.append(sorted(hidden))
            new = {i: self.project(layer, h) for i, h in hidden.items()}
            keys = {i: self.rope(k, i) for i, (_, k, _) in new.items()}
            values = {i: v for i, (*_, v) in new.items()}
            stay = list(hidden)
            if number >= self.check:
                reused = [row for chunk in alone for row in chunk[number]]
                old_keys = {i: self.rope(k, i) for i, (k, _) in enumerate(reused)}
                old_values = {i: v for i, (_, v) in enumerate(reused)}
                far = {}
                for i in (i for i in hidden if i < context):
                    far[i] = 0.0
                    if "k" in self.deviation:
                        far[i] += float((keys[i] - old_keys[i]).square().sum())
                    if "v" in self.deviation:
                        far[i] += float((values[i] - old_values[i]).square().sum())
                wanted = int(context * self.share(number))
                best = sorted(far, key=lambda i: (-far[i], i))[:wanted]
                stay = sorted(best) + list(range(context, len(ids)))
                if number > self.check or self.mix:
                    kept = set(stay) if number == self.check else set(hidden)
                    keys = {i: keys[i] if i in kept else old_keys[i] for i in range(len(ids))}
                    values = {i: values[i] if i in kept else old_values[i] for i in range(len(ids))}
            cache.append(tuple(torch.stack([x[i] for i in range(len(ids))], 1)[None] for x in (keys, values)))
            hidden = {
                i: self.after(layer, hidden[i], self.attend(self.rope(new[i][0], i), keys, values, i)) for i in stay
            }
        return self.head(self.model.norm(hidden[len(ids) - 1])), cache, sets


CASES = [
    # heads, KV heads, ratio, deviation, selection, mix, check layer
    (4, 4, 0.3, "v", "oneshot", False, 1),
    (6, 2, 0.3, "k", "oneshot", True, 1),
    (6, 2, 0.4, "kv", "gradual", False, 1),
    (4, 4, 0.4, "v", "gradual", True, 2),
    (6, 2, 0.0, "kv", "gradual", False, 1),
    (6, 2, 0.8, "k", "gradual", False, 2),
]


@pytest.mark.parametrize("heads, kv_heads, ratio, deviation, selection, mix, check", CASES)
def test_rows_selections_and_logits_are_those_of_the_loop(
    passing, heads, kv_heads, ratio, deviation, selection, mix, check
):
    """Keys and values of every layer, which tokens each layer computed, and the logits."""
    model = model_of(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    segments = prompt((3, 7, 5, 6, 4))
    method = CacheBlend(ratio=ratio, deviation=deviation, selection=selection, mix=mix, check_layer=check)
    logits, rows, _ = run(model, method, segments)
    expected_logits, expected, sets = Loop(model, ratio, deviation, selection, mix, check).run(segments)
    assert passing == sets
    assert farthest(rows, expected) <= 1e-5
    assert (logits[0] - expected_logits).abs().max() <= 1e-5


# ---------------------------------------------------------------------------------------------- its two ends


@pytest.mark.parametrize(
    ("architecture", "preset"),
    [*grid(ARCHITECTURES, ["paper"], short=lambda name, _: name in OF_EACH_KIND), ("qwen3", "lmcache")],
)
def test_at_ratio_1_every_architecture_gets_its_full_prefill(architecture, preset):
    """Keys, values, logits, bytes and the tokens that follow; at ratio 0 they are others, so that the check says something."""
    model, segments = model_of(architecture), prompt()
    with compress(model, Full()) as session:
        logits = session.prefill(torch.cat(segments, 1)).logits
        expected, held, tokens = rows_of(session), session.cache.nbytes(), session.generate(6).tokens
    with compress(model, CacheBlend(ratio=1.0, preset=preset)) as session:
        found = session.prefill(segments).logits
        assert (found - logits).abs().max() <= 1e-5
        assert farthest(rows_of(session), expected) <= 1e-5
        assert session.cache.nbytes() == held
        assert session.generate(6).tokens == tokens
    assert (run(model, CacheBlend(ratio=0.0), segments)[0] - logits).abs().max() > 0.02


@pytest.mark.parametrize("architecture", grid(ARCHITECTURES, short=OF_EACH_KIND.__contains__))
def test_unselected_rows_behind_the_check_layer_are_the_reused_ones_bit_for_bit(architecture, passing):
    """And those of selected tokens are not; the question's never come from the store."""
    model, segments = model_of(architecture), prompt()
    with compress(model, CacheBlend(ratio=0.3)) as session:
        session.prefill(segments)
        found, _ = chunk_loader.precompute(session, segments[:-1])
        for layer in session.full_layers:
            if layer <= 1:
                continue
            raw = [chunk.layer(layer) for chunk in found]
            at = torch.arange(CONTEXT)
            keys = session.reuse_rotations[layer].rotate(torch.cat([k for k, _ in raw], 2), at)
            reused = keys, torch.cat([v for _, v in raw], 2)
            computed = [i for i in passing[layer] if i < CONTEXT]
            left = sorted(set(range(CONTEXT)) - set(computed))
            assert 0 < len(computed) < CONTEXT and passing[layer][-LENGTHS[-1] :] == list(range(CONTEXT, TOTAL))
            for held, old in zip(session.cache.keys_values(layer), reused, strict=True):
                assert torch.equal(held[:, :, left], old[:, :, left])
                assert (held[:, :, computed] != old[:, :, computed]).any(-1).any(1).all()


def test_a_true_prefix_deviates_by_nothing_and_gives_a_full_prefill():
    """A chunk right behind the token that every chunk is prefilled behind: at ratio 0 already."""
    model, segments = model_of(), [torch.tensor([[1]]), random_ids(1, 30, 1), random_ids(1, 6, 2)]
    logits, rows, _ = full(model, segments)
    found, blended, report = run(model, CacheBlend(ratio=0.0), segments)
    assert (found - logits).abs().max() <= 1e-5 and farthest(blended, rows) <= 1e-5
    assert report["reuse"]["tokens_reused"] == pytest.approx(31 * 3 / 5)


def test_what_deviates_is_nothing_in_a_prefix_and_something_in_a_moved_chunk(monkeypatch):
    """Squared distances at the check layer, for each of "k", "v" and "kv"."""
    seen = {}
    plain = Blended.distance

    def spy(self, keys, values):
        seen[self.deviation] = plain(self, keys, values)
        return seen[self.deviation]

    monkeypatch.setattr(Blended, "distance", spy)
    for deviation in ("k", "v", "kv"):
        run(model_of(), CacheBlend(ratio=0.3, deviation=deviation, selection="oneshot"), prompt())
        assert seen[deviation][: LENGTHS[0]].max() <= 1e-8
        assert seen[deviation][LENGTHS[0] :].min() > 1e-3
    assert torch.allclose(seen["k"] + seen["v"], seen["kv"])


@pytest.mark.parametrize("architecture", grid(ARCHITECTURES, short=OF_EACH_KIND.__contains__))
@torch.no_grad()
def test_a_chunk_put_elsewhere_is_one_prefilled_at_those_positions(architecture):
    """Rotated rows of the store equal a stock prefill with shifted position ids; values do not move at all."""
    model, ids, shift = model_of(architecture), random_ids(1, 12), 41
    with compress(model, CacheBlend()) as session:
        keys, values = chunk_loader.chunk_rows(session, ids, [1])
        rotations = session.reuse_rotations
    text, cache = torch.cat([torch.tensor([[1]]), ids], 1), compat.DynamicCache()
    model(text, position_ids=torch.arange(13)[None] + shift - 1, cache=cache, use_cache=True)
    for layer, (held, rotation) in enumerate(zip(cache.layers, rotations, strict=True)):
        moved = rotation.rotate(keys[layer], torch.arange(12) + shift)
        assert (moved - held.keys[:, :, 1:]).abs().max() <= 2e-5
        assert (values[layer] - held.values[:, :, 1:]).abs().max() <= 2e-5


# ---------------------------------------------------------------------------------------------- what holds in between


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_no_query_sees_a_later_token(monkeypatch, ratio, architecture):
    """With the last chunk or the question's end changed, and the same tokens selected, no earlier row changes."""
    monkeypatch.setattr(Blended, "distance", lambda self, keys, values: torch.arange(keys[0].shape[2]) * 7 % 13 + 0.0)
    model, segments = model_of(architecture), prompt()
    method = CacheBlend(ratio=ratio, selection="oneshot")
    _, rows, _ = run(model, method, segments)
    for number, first in ((3, CONTEXT - LENGTHS[3]), (4, CONTEXT)):
        changed = [random_ids(1, s.shape[1], 99) if i == number else s for i, s in enumerate(segments)]
        _, found, _ = run(model, method, changed)
        before = [tuple(t[:, :, :first] for t in pair) for pair in rows]
        assert farthest(before, [tuple(t[:, :, :first] for t in pair) for pair in found]) <= 1e-6
        later = [tuple(t[:, :, first:] for t in pair) for pair in rows]
        assert farthest(later, [tuple(t[:, :, first:] for t in pair) for pair in found]) > 0.1


def test_selections_are_sorted_sized_and_nested(passing):
    """One shot: of a larger ratio a superset. Gradual: of a later layer a subset. The question is in all of them."""
    model, segments, last = model_of(num_hidden_layers=6), prompt(), None
    for ratio in (0.0, 0.05, 0.15, 0.3, 0.7, 1.0):
        run(model, CacheBlend(ratio=ratio, selection="oneshot"), segments)
        assert all(layer == passing[2] for layer in passing[3:])
        chosen = passing[2]
        assert chosen == sorted(set(chosen)) and len(chosen) == int(CONTEXT * ratio) + LENGTHS[-1]
        assert chosen[-LENGTHS[-1] :] == list(range(CONTEXT, TOTAL))
        assert last is None or last <= set(chosen)
        last = set(chosen)
    run(model, CacheBlend(ratio=0.4, selection="gradual", start=0.6), segments)
    sizes = [len(layer) - LENGTHS[-1] for layer in passing]
    assert sizes == [CONTEXT, CONTEXT, *(int(CONTEXT * r) for r in (0.6, 0.6 - 0.4 / 3, 0.6 - 0.8 / 3, 0.2))]
    assert all(set(b) < set(a) for a, b in zip(passing[1:], passing[2:], strict=False))


@pytest.mark.parametrize("preset", ["paper", "code"])
def test_more_recomputation_never_leaves_the_rows_further_off(preset):
    """Mean squared error of keys and values over some prompts, from ratio to ratio."""
    model, ratios, seeds = model_of(), (0.0, 0.05, 0.15, 0.3, 1.0), range(examples(4, 20))
    error = dict.fromkeys(ratios, 0.0)
    with compress(model, Full()) as session:
        wanted = []
        for seed in seeds:
            session.prefill(torch.cat(prompt(seed=seed), 1))
            wanted.append(rows_of(session))
    store = KVStore(model)
    for ratio in ratios:
        with compress(model, CacheBlend(ratio=ratio, preset=preset), store=store) as session:
            for seed in seeds:
                session.prefill(prompt(seed=seed))
                for pair, other in zip(rows_of(session), wanted[seed], strict=True):
                    error[ratio] += sum(float((a - b).square().mean()) for a, b in zip(pair, other, strict=True))
    steps = list(error.values())
    assert all(b <= 1.05 * a for a, b in zip(steps, steps[1:], strict=False)), error
    assert steps[0] > 1 and steps[-1] <= 1e-9 and steps[3] < 0.9 * steps[0]


def test_the_report_counts_what_was_computed_loaded_and_reused():
    """Two full layers and `ratio` of the others, of context tokens; bytes of the layers that were read."""
    model, segments = model_of(num_hidden_layers=8), prompt()
    _, _, report = run(model, CacheBlend(ratio=0.25, selection="oneshot"), segments)
    reuse = report["reuse"]
    assert reuse["context_share"] == pytest.approx((2 + 0.25 * 6) / 8)
    assert reuse["tokens_recomputed"] == pytest.approx(CONTEXT * (2 + 0.25 * 6) / 8)
    assert reuse["tokens_recomputed"] + reuse["tokens_reused"] == CONTEXT == reuse["context_tokens"]
    assert reuse["recompute_share"] == pytest.approx((2 * TOTAL + 6 * (13 + 8)) / (8 * TOTAL))
    assert reuse["rows_per_layer"] == [60, 60] + [21] * 6
    assert reuse["bytes_loaded"] == 7 * CONTEXT * 2 * 2 * 16 * 4  # layers 1 to 7; keys, values; 2 heads of 16 float32
    assert (reuse["chunks"], reuse["chunks_computed"], reuse["question_tokens"]) == (4, 4, 8)
    assert report["active"] and report["evicted"] == 0 and report["notes"] == []


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_the_kernel_that_makes_logits_gives_the_same_rows(architecture):
    """Its blocks of scattered queries leave out the mask of columns that all of them see."""
    model, segments = model_of(architecture), prompt((5, 40, 60, 50, 9))
    auto = run(model, CacheBlend(ratio=0.3), segments)
    blockwise = run(model, CacheBlend(ratio=0.3), segments, kernel="blockwise")
    assert (auto[2]["kernel"], blockwise[2]["kernel"]) == ("sdpa", "blockwise")
    assert farthest(auto[1], blockwise[1]) <= 1e-5 and (auto[0] - blockwise[0]).abs().max() <= 1e-5


def test_in_bfloat16_the_ends_are_the_same_and_what_lies_between_is_held_in_it():
    """Chunks are stored, rotated and mixed in the model's number type."""
    model, segments = model_of(dtype=torch.bfloat16), prompt()
    logits, rows, _ = run(model, CacheBlend(ratio=1.0), segments)
    expected = full(model, segments)
    assert torch.equal(logits, expected[0]) and farthest(rows, expected[1]) == 0
    logits, rows, _ = run(model, CacheBlend(ratio=0.3), segments)
    assert logits.isfinite().all() and {t.dtype for pair in rows for t in pair} == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------- the store


def test_chunks_are_prefilled_once_whatever_their_order():
    """Known chunks in another order, one of them twice, cost no prefill, and end up where the full prefill has them."""
    model, segments = model_of(), prompt()
    store = KVStore(model)
    with compress(model, CacheBlend(ratio=1.0), store=store) as session:
        assert session.precompute(segments) == 4 and session.precompute(segments) == 0
        assert session.cache is None
    shuffled = [segments[i] for i in (0, 3, 1, 3, 2, 4)]
    with compress(model, CacheBlend(ratio=1.0), store=store) as session:
        logits = session.prefill(shuffled).logits
        assert session.report()["reuse"]["chunks_computed"] == 0 and session.report()["reuse"]["chunks"] == 5
    assert (logits - full(model, shuffled)[0]).abs().max() <= 1e-5
    twice, rows, _ = run(model, CacheBlend(ratio=0.0), shuffled, store=store)
    assert twice.isfinite().all()
    for _, values in rows[2:]:
        assert torch.equal(values[:, :, 4:20], values[:, :, 36:52])


def test_a_chunk_that_proves_damaged_half_way_is_computed_anew():
    """The store says so when layer 3 is read; the prompt starts over and ends as without the damage."""
    model, segments = model_of(), prompt()
    expected = run(model, CacheBlend(ratio=0.3), segments)

    class Breaking(KVStore):
        broken = True

        def get(self, ids, lead=(), form="raw", disk=True):
            chunk = super().get(ids, lead, form, disk=disk)
            if chunk is None or not self.broken or len(ids) != 16:
                return chunk
            store = self

            class Bad:
                def __len__(self):
                    return len(chunk)

                def layer(self, index):
                    if index == 3:
                        store.broken = False
                        raise Damaged("a flipped byte", False)
                    return chunk.layer(index)

            return Bad()

    found = run(model, CacheBlend(ratio=0.3), segments, store=Breaking(model))
    assert torch.equal(found[0], run(model, CacheBlend(ratio=0.3), segments)[0])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    store = Breaking(model)
    with compress(model, CacheBlend(ratio=0.3), store=store) as session:
        session.precompute(segments)
        logits = session.prefill(segments).logits
        assert not store.broken and farthest(rows_of(session), expected[1]) == 0
    assert torch.equal(logits, expected[0])


def test_a_store_of_another_model_is_refused():
    """When the session is made, before any work."""
    with pytest.raises(ValueError, match="this store holds chunks of another model"):
        compress(model_of(), CacheBlend(), store=KVStore(model_of(seed=3)))


# ---------------------------------------------------------------------------------------------- with other parts


@pytest.mark.parametrize(
    ("name", "architecture"),
    thinned(
        ["SnapKV", "PyramidKV", "AdaKV", "KeyDiff", "CAKE", "KVzip", "CriticalKV", "ChunkKV"],
        ["llama", "qwen3"],
        every=2,
    ),
)
def test_at_ratio_1_an_evicting_method_keeps_what_it_keeps_after_a_full_prefill(name, architecture):
    """Positions held per layer and head, logits, and the tokens that follow."""
    model, segments, found = model_of(architecture), prompt(), []
    for prefill, ids in ((None, torch.cat(segments, 1)), (Blended(1.0), segments)):
        with compress(model, make(name, 0.4, prefill=prefill)) as session:
            logits = session.prefill(ids).logits
            found.append((all_held(session), session.generate(6).tokens, logits))
    assert found[0][:2] == found[1][:2]
    assert (found[0][2] - found[1][2]).abs().max() <= 1e-5


def test_a_window_of_queries_is_the_last_recomputed_ones_at_their_positions():
    """SnapKV after a blended prefill scores with the question's queries: by loops over the rows that it was shown."""
    model, segments, window = model_of(), prompt(), 6
    with compress(model, CacheBlend(ratio=0.3)) as session:
        session.prefill(segments)
        rows = rows_of(session)
    queries = {}
    seen = SnapKV(budget=0.4, window=window, kernel=1, prefill=Blended(0.3))
    with compress(model, seen) as session:
        plain = session.compressor.decide

        def spy(at):
            if at.forward.phase == "prompt":
                held = at.layer.queries
                queries[at.layer.index] = held.queries.clone(), held.positions.clone()
            plain(at)

        session.compressor.decide = spy
        session.prefill(segments)
        held = all_held(session)
    for layer in range(5):
        q, at = queries[layer]
        assert at.tolist() == [list(range(TOTAL - window, TOTAL))]
        keys, budget = rows[layer][0][0], round(0.4 * TOTAL)
        for head in range(2):
            score = torch.zeros(TOTAL)
            for member in (2 * head, 2 * head + 1):
                for number in range(window):
                    stop = TOTAL - window + number + 1
                    logits = keys[head, :stop] @ q[0, member, number] * 16**-0.5
                    score[:stop] += logits.softmax(0) / 2
            best = score[: TOTAL - window].topk(budget - window).indices.tolist()
            assert held[layer][0][head] == sorted(best) + list(range(TOTAL - window, TOTAL))


@pytest.mark.parametrize("codec", [Int8Codec(), KIVICodec(bits=4, group=8, residual=16)], ids=["int8", "kivi"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_codec_takes_the_blended_rows_when_the_prompt_is_done(codec, architecture):
    """The prompt attends to exact rows; what is held then is what the codec makes of them, as after a full prefill."""
    model, segments = model_of(architecture), prompt()
    expected = run(model, Full(codec=codec), torch.cat(segments, 1))
    found = run(model, CacheBlend(ratio=1.0, codec=codec), segments)
    assert farthest(found[1], expected[1]) <= 1e-5 and (found[0] - expected[0]).abs().max() <= 1e-5
    exact, coded = (run(model, CacheBlend(ratio=0.3, codec=c), segments) for c in (None, codec))
    assert torch.equal(exact[0], coded[0])
    assert 1e-4 < farthest(exact[1], coded[1]) < 0.5
    assert coded[2]["nbytes"]["valid"] < exact[2]["nbytes"]["valid"]


def test_evicting_methods_with_a_codec_start_from_a_blended_prefill_too():
    """Selection first, by exact keys, then codes: the same tokens as without the codec."""
    model, segments, found = model_of(), prompt(), []
    for codec in (None, Int8Codec()):
        with compress(model, make("SnapKV", 0.5, prefill=Blended(0.3), codec=codec)) as session:
            logits = session.prefill(segments).logits
            found.append((all_held(session), logits))
            assert session.generate(4).tokens
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_a_later_turn_is_computed_whole():
    """It attends to the blended cache, and its rows are those of a model that was given these."""
    model, segments, more = model_of(), prompt(), random_ids(1, 9, 50)
    with compress(model, CacheBlend(ratio=1.0)) as session:
        session.prefill(segments)
        later = session.prefill([more[:, :4], more[:, 4:]], cache=session.cache).logits
        assert session.cache.get_seq_length() == TOTAL + 9
    assert (later - full(model, [*segments, more])[0]).abs().max() <= 1e-5


def test_a_prompt_of_one_segment_is_all_question_and_says_so():
    """Computed whole, also as a padded batch, with a note in the report."""
    model, ids = model_of(), random_ids(1, 30)
    logits, rows, report = run(model, CacheBlend(), ids)
    expected = full(model, [ids])
    assert torch.equal(logits, expected[0]) and farthest(rows, expected[1]) == 0
    assert "reuse" not in report and "had nothing to reuse" in report["notes"][0] and not report["active"]


def test_forks_and_decoding_go_on_from_a_blended_cache():
    """Decoding after a fork gives what decoding without one gives, and the report stays with both."""
    with compress(model_of(), CacheBlend(ratio=0.2)) as session:
        cache = session.prefill(prompt()).cache
        fork = cache.fork()
        tokens = session.generate(8).tokens
        session.cache = fork
        assert session.generate(8).tokens == tokens
        assert session.report()["reuse"] == cache.sequence.reuse


# ---------------------------------------------------------------------------------------------- bad input


def refused(segments, match, model=None, mask=None, **options):
    with compress(model or model_of(), CacheBlend(**options)) as session:
        with pytest.raises(ValueError, match=match):
            session.prefill(segments, attention_mask=mask)
        return session.prefill(prompt()).logits  # and the session goes on


def test_bad_prompts_are_refused_by_what_is_wrong_with_them():
    """Empty chunk or question, a prompt longer than the context, several rows, padding, too few layers."""
    empty, good = torch.zeros(1, 0, dtype=torch.long), prompt()
    refused([good[0], empty, good[4]], "segment 1 is empty: leave empty chunks out")
    refused([good[0], good[1], empty], r"the question \(the last segment\) is empty")
    refused([good[0], random_ids(1, 1100), good[4]], r"its longest segment \(1\) 1100, but 'llama' has 1024 positions")
    refused([torch.cat([s, s]) for s in good], "one prompt at a time, not for 2 rows")
    with compress(model_of(), CacheBlend()) as session:
        with pytest.raises(ValueError, match="one prompt at a time, not for 2 rows"):
            session.precompute([torch.cat([s, s]) for s in good])
    mask = torch.ones(1, TOTAL, dtype=torch.long)
    mask[0, 0] = 0
    refused(good, "without padding", mask=mask)
    with compress(model_of(num_hidden_layers=2), CacheBlend()) as session:
        with pytest.raises(
            ValueError, match="check_layer=1 leaves no layer to reuse: this 'llama' has 2, so at most 0"
        ):
            session.prefill(good)


def test_a_plain_call_of_the_model_is_refused_and_names_the_way():
    """model(...) and model.generate(...) have no segments; what follows a session's prompt may come through the model."""
    model, ids = model_of(), random_ids(1, 12)
    with compress(model, CacheBlend()) as session:
        with pytest.raises(ValueError, match=r"run the prompt with session.prefill\(\[prefix, chunk, …, question\]\)"):
            model(ids)
        with pytest.raises(ValueError, match="prefill=oneshot"):
            model.generate(ids, max_new_tokens=2)
        cache = session.prefill(prompt()).cache
        assert model(ids[:, :1], cache=cache, use_cache=True).logits.isfinite().all()


@pytest.mark.parametrize(
    "options, match",
    [
        ({"ratio": 1.2}, "ratio=1.2; a share of the context"),
        ({"check_layer": 0}, "check_layer=0; at least 1"),
        ({"deviation": "q"}, "deviation='q'; valid: v, k, kv"),
        ({"selection": "greedy"}, "selection='greedy'; valid: oneshot, gradual"),
        ({"ratio": 0.2, "start": 0.5}, "start=0.5; from ratio=0.2 to 0.4"),
        ({"preset": "kvpress"}, "no preset 'kvpress'; valid: paper, code, lmcache"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, match):
    """By the method and by the part that other methods take."""
    for kind in (CacheBlend, Blended):
        with pytest.raises(ValueError, match=match):
            kind(**options)


@pytest.mark.parametrize("name", ["H2O", "TOVA", "Scissorhands", "ExpectedAttention", "QFilters"])
def test_methods_that_want_all_queries_are_refused_with_a_blended_prefill(name):
    """Attention mass and statistics of queries would be those of the recomputed tokens only."""
    needs = make(name, 0.5).make_scorer().needs
    if not needs.mass and not needs.prerope:
        assert make(name, 0.5, prefill=Blended()).parts().prefill.name == "cacheblend"
        return
    with pytest.raises(
        ValueError, match="makes no query of their tokens, which this scorer observes: use prefill=oneshot"
    ):
        make(name, 0.5, prefill=Blended())


def test_compact_positions_are_refused_with_a_blended_prefill():
    """The two put keys at positions of their own."""
    with pytest.raises(ValueError, match="compact positions renumber what is kept"):
        make("StreamingLLM", 0.5, positions="compact", prefill=Blended())


def test_scaled_rotation_is_not_scaled_twice_and_one_that_depends_on_the_length_is_refused():
    """YaRN multiplies keys by a factor when it rotates them: rotated on, they keep it."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}
    model, segments = model_of(rope_parameters=yarn), [torch.tensor([[1]]), random_ids(1, 30, 1), random_ids(1, 6, 2)]
    assert model.model.rotary_emb.attention_scaling > 1.1
    assert farthest(run(model, CacheBlend(ratio=0.0), segments)[1], full(model, segments)[1]) <= 1e-5
    dynamic = model_of(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match=r"depends on the length \(dynamic RoPE scaling\)"):
        compress(dynamic, CacheBlend()).__enter__()


@pytest.mark.parametrize("architecture", LATENT)
def test_models_that_hold_latents_are_refused_by_name(architecture):
    """Their rotated part is no part of a key that a chunk could be turned by."""
    with pytest.raises(ValueError, match=f"'{architecture}' holds latents.*chunks reused elsewhere"):
        compress(small_model(architecture), CacheBlend()).__enter__()


def test_presets_are_what_their_sources_do():
    """The method's and the part's agree; the released code selects once by values, LMCache by keys and mixes."""
    assert CacheBlend().make_prefill() == Blended() == Blended(0.15, 1, "kv", "gradual", None, False)
    assert CacheBlend(preset="code").make_prefill() == Blended(preset="code")
    assert (Blended(preset="code").ratio, Blended(preset="code").deviation) == (0.16, "v")
    assert (Blended(preset="lmcache").deviation, Blended(preset="lmcache").mix) == ("k", True)
    assert CacheBlend().variant() == "ratio=0.15" and CacheBlend(preset="code").variant() == "preset=code ratio=0.16"
    assert SnapKV(budget=0.5, prefill=Blended()).variant() == "prefill=cacheblend prefill.ratio=0.15"
    assert CacheBlend(ratio=0.5).variant() == "ratio=0.5" and not CacheBlend(budget=0.3).limited


def test_a_run_with_reuse_is_no_baseline_and_shares_no_prefill():
    """Sweeps run it alone, and say why; boards measure it against the full cache."""
    from kvcompress.hook.shared_prefill import unsupported_reason

    assert unsupported_reason(CacheBlend()) == "prefill=cacheblend is its own"
    record = {"status": "ok", **{f"parts.{k}": v for k, v in CacheBlend().parts().names().items()}}
    assert not is_baseline(record) and is_baseline(record | {"parts.prefill": "oneshot"})
