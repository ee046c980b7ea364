"""LowRank: exact at full rank, what a loop over projected keys computes below it, and the bytes that were asked for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from helpers import feed, grid, held, thinned
from reference import stock_logits
from small_models import left_padded, random_ids, small_model
from transformers import DynamicCache

from kvcompress import compress
from kvcompress.calibrate import latent_attention, low_rank
from kvcompress.method.codec import Slots
from kvcompress.method.latents import GroupLatents, JointLatent, spread
from kvcompress.methods import Full, LowRank, SnapKV, StreamingLLM
from kvcompress.methods.lowrank import LowRankCodec
from kvcompress.models import compat

TEXT = {"tokens": 512, "length": 64}
ARCHITECTURES = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "smollm3"]
FULL_RANK = [
    {"rank": 16},
    {"rank": 32, "head_group": 2},
    {"form": "mla", "rope_dims": 32, "rank": 32},
]


def answers(model, method, ids, mask, more, steps=5):
    """Logits `[B, n, V]` of `more` behind a prompt: one forward of several tokens, then single ones."""
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    n, width = more.shape[1], ids.shape[1]
    with compress(model, method) as session:
        session.prefill(ids, attention_mask=mask)
        got = [feed(model, session.cache, more[:, : n - steps], whole[:, : width + n - steps])]
        got += [feed(model, session.cache, more[:, t : t + 1], whole[:, : width + t + 1]) for t in range(n - steps, n)]
        return torch.cat(got, 1), session.cache


@pytest.mark.parametrize(
    ("architecture", "options"),
    grid(
        ARCHITECTURES,
        FULL_RANK,
        short=lambda name, options: "form" in options or (name, len(options)) in (("llama", 2), ("phi3", 1)),
    ),
)
def test_full_rank_is_the_stock_model(architecture, options):
    """Left-padded, in a second turn and in decode: biases, query-key norms and fused projections included."""
    if options.get("form") == "mla" and architecture == "phi3":
        options = options | {"rope_dims": 16, "rank": 48}  # half of its dimensions rotate
    if options.get("form") == "mla" and architecture == "smollm3":
        options = options | {"rank": 64}  # a layer without rotation has more that can go into its latent
    model = small_model(architecture)
    ids, mask = left_padded([40, 25])
    more = random_ids(2, 8, 3)
    got, _ = answers(model, LowRank(**options, tokens=128, length=32), ids, mask, more)  # whatever the text
    expected = stock_logits(model, torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1))[:, 40:]
    assert (got - expected).abs().max() <= 1e-5


class ProjectedCache(DynamicCache):
    """Holds keys and values after projection on their bases, key by key before rotation; a prompt sees its own exact."""

    def __init__(self, model, latents, group):
        super().__init__()
        self.model, self.latents, self.group, self.start = model, latents, group, 0

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        start, n = self.get_seq_length(layer_idx), key_states.shape[2]
        keys, values = super().update(
            self.projected(key_states, layer_idx, start, True), self.projected(value_states, layer_idx, start, False),
            layer_idx, *args, **kwargs,
        )  # fmt: skip
        if n == 1:
            return keys, values
        return torch.cat([keys[:, :, :-n], key_states], 2), torch.cat([values[:, :, :-n], value_states], 2)

    def projected(self, x, layer, start, turn):
        """Loops over tokens: turn back by complex numbers, project each group's heads together, turn again."""
        half, result = x.shape[-1] // 2, torch.empty_like(x)
        frequencies = self.model.model.rotary_emb.inv_freq
        basis = (self.latents[layer].keys if turn else self.latents[layer].values).value
        for t in range(x.shape[2]):
            token = x[:, :, t]
            angle = torch.polar(torch.ones(half), (start + t) * frequencies)
            if turn:
                pair = torch.complex(token[..., :half], token[..., half:]) / angle
                token = torch.cat([pair.real, pair.imag], -1)
            done = []
            for g in range(basis.shape[0]):
                heads = token[:, g * self.group : (g + 1) * self.group].flatten(1)
                done.append((heads @ basis[g] @ basis[g].T).view(len(x), self.group, -1))
            token = torch.cat(done, 1)
            if turn:
                pair = torch.complex(token[..., :half], token[..., half:]) * angle
                token = torch.cat([pair.real, pair.imag], -1)
            result[:, :, t] = token
        return result


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("allocation", ["uniform", "energy"])
def test_attention_sees_what_a_loop_over_projected_keys_sees(group, allocation):
    """A second turn and decode equal the stock model over a cache of projected keys and values."""
    model, twin = small_model(), small_model(twin=True)
    ids, more = random_ids(1, 30), random_ids(1, 7, 1)
    method = LowRank(budget=0.4, head_group=group, allocation=allocation, **TEXT)
    got, cache = answers(model, method, ids, torch.ones_like(ids), more)
    projected = ProjectedCache(twin, cache.spec.codec.layers, group)
    with torch.no_grad():
        twin(ids, cache=projected)
        parts = [twin(more[:, :2], cache=projected).logits]
        parts += [twin(more[:, t : t + 1], cache=projected).logits for t in range(2, 7)]
    assert (got - torch.cat(parts, 1)).abs().max() <= 1e-5
    exact = stock_logits(model, torch.cat([ids, more], 1))[:, 30:]
    assert (got - exact).abs().max() > 0.05


SHAPES = [{}, {"head_group": 2}, {"allocation": "uniform"}, {"form": "mla", "rope_dims": 8}]


@pytest.mark.parametrize(("options", "budget"), thinned(SHAPES, [0.3, 0.5, 0.75], every=3))
def test_bytes_held_are_the_share_that_was_asked_for(budget, options):
    """Latents and positions, within 3% of the share and not above it, after the prompt and in decode."""
    model, ids = small_model(), random_ids(2, 50)
    with compress(model, LowRank(budget=budget, **options, **TEXT)) as session:
        session.prefill(ids)
        for _ in range(2):
            sizes = session.cache.nbytes()
            assert 0.97 * budget <= sizes["valid"] / sizes["full"] <= budget
            assert session.report()["active"]
            session.generate(10)
        widths = {
            layer.index: sum(value.shape[1] * value.shape[-1] for name, value in layer.store.channels.items()
                             if name != "positions")
            for layer in session.cache.layers
        }  # fmt: skip
        tokens = 2 * session.cache.get_seq_length()
        assert session.cache.nbytes()["keys_values"] == tokens * 4 * sum(widths.values())


@pytest.mark.parametrize(
    ("options", "beside"), [({}, 4 * 4), ({"head_group": 2}, 4 * 4), ({"form": "mla"}, 4 + 16 * 4)]
)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_latents_are_packed(bits, options, beside):
    """Per token and layer rank x bits / 8 bytes, a scale and a zero for each latent of a head, and what stays rotated."""
    model, ids = small_model(), random_ids(2, 50)
    with compress(model, LowRank(budget=0.4, bits=bits, **options, **TEXT)) as session:
        session.prefill(ids)
        sizes = session.cache.nbytes()
        assert sizes["valid"] / sizes["full"] <= 0.4
        codes = 0
        for layer in session.cache.spec.codec.layers.values():
            joint_latent = isinstance(layer, JointLatent)
            for factor in [layer.keys] if joint_latent else [layer.keys, layer.values]:
                codes += factor.value.shape[-1] * (1 if joint_latent else factor.value.shape[0])
        assert sizes["keys_values"] == 100 * (codes * bits // 8 + 3 * beside)
        session.generate(3)
        assert session.cache.nbytes()["keys_values"] == 104 * (codes * bits // 8 + 3 * beside)
        assert not [t for layer in session.cache.layers for t in layer.store.channels.values() if t.dtype == torch.float32
                    and t.shape[-1] > 16]  # fmt: skip


@pytest.mark.parametrize(
    "form", [{"rank": 16}, {"rank": 32, "head_group": 2}, {"rank": 32, "form": "mla", "rope_dims": 32}]
)
def test_eight_bits_of_full_rank_are_near_the_stock_model_and_two_are_not(form):
    model, ids, more = small_model(), random_ids(2, 40), random_ids(2, 8, 3)
    mask, exact = torch.ones_like(ids), stock_logits(model, torch.cat([ids, more], 1))[:, 40:]
    errors = [
        float((answers(model, LowRank(bits=bits, **form, **TEXT), ids, mask, more)[0] - exact).abs().max())
        for bits in (8, 4, 2)
    ]
    assert errors[0] < 0.1 and 2 * errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("rank", [1, 2, 12, 16, 30, 64])
def test_the_matrix_that_spreads_is_orthogonal_and_flat(rank):
    matrix = spread(rank).double()
    assert (matrix @ matrix.T - torch.eye(rank)).abs().max() <= 1e-6
    assert matrix.abs().max() <= (2 / rank) ** 0.5 + 1e-6


def test_spread_latents_quantise_better():
    """Principal components differ in size: as they are, the largest set the scale and the others are lost."""
    from kvcompress.method.packing import dequantise, quantise

    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(1, -1, 32)
    turned = x @ spread(32)

    def error(y):
        return (dequantise(*quantise(y, 4, -1)) - y).pow(2).mean()

    assert error(turned) < 0.6 * error(x)


def test_a_budget_of_one_holds_keys_and_values_as_they_are():
    model = small_model()
    with compress(model, LowRank(budget=1.0)) as session:
        session.prefill(random_ids(1, 20))
        assert not session.report()["active"] and session.cache.spec.codec.name == "plain"


def test_more_budget_is_nearer_to_the_full_cache():
    """The largest difference of logits falls with the share held."""
    model = small_model()
    ids, mask, more = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long), random_ids(2, 8, 3)
    exact = stock_logits(model, torch.cat([ids, more], 1))[:, 40:]
    errors = [
        (answers(model, LowRank(budget=budget, **TEXT), ids, mask, more)[0] - exact).pow(2).mean()
        for budget in (0.3, 0.6, 0.9)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("options", [{"budget": 0.5}, {"budget": 0.5, "head_group": 2}, {"form": "mla", "budget": 0.7}])
def test_a_latent_is_free_of_positions(options):
    """Other position ids give the same latents and turn what is read; only MLA's rotated part is held turned."""
    model, ids, next_id = small_model(), random_ids(1, 20), random_ids(1, 1, 4)
    found = []
    with compress(model, LowRank(**options, **TEXT)) as session, torch.no_grad():
        rope = 16 if options.get("form") == "mla" else 0
        for shift in (0, 300):
            at = torch.arange(20)[None] + shift
            model(ids, position_ids=at, use_cache=True)
            cache = session.cache
            logits = model(next_id, position_ids=torch.tensor([[20 + shift]]), cache=cache, use_cache=True).logits
            layer = cache.layers[1]
            latents = [layer.store.get(name)[..., rope:] for name in layer.encoding.channels(layer.store)]
            found.append((latents, layer.keys_values()[0], logits))
    (first, keys, logits), (second, turned, moved) = found
    for a, b in zip(first, second, strict=True):
        assert (a - b).abs().max() <= 1e-4 * a.abs().max()
    rotation = compat.rotations(model)[1]
    assert (rotation.rotate(keys, torch.tensor([[[300]]])) - turned).abs().max() <= 1e-3
    assert (keys - turned).abs().max() > 0.1
    assert (logits - moved).abs().max() <= 1e-3


def joint(rank, rope_dims=6, heads=2, dim=8, value_dim=10):
    """A JointLatent in float64 on bases of a random moment."""
    torch.manual_seed(0)
    x = torch.randn(500, heads * (dim + value_dim), dtype=torch.float64) @ torch.randn(36, 36, dtype=torch.float64)
    pairs = torch.stack([torch.arange(4), torch.arange(4) + 4], 1)
    basis = latent_attention.joint_basis(x.T @ x / 500, heads, dim, value_dim, pairs, rope_dims)
    cut = basis.cut(rank)
    return JointLatent(cut.rope.double(), cut.keys.double(), cut.values.double(), float(cut.ratio) ** 2)


class Float64Rotation(compat.Rotation):
    """In float64, so that what is left is rounding there."""

    def rotate(self, keys, positions):
        angle = positions[..., None].double() * self.inv_freq.double()
        a, b = keys.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def test_absorbed_equals_unabsorbed():
    """In float64, logits and outputs over latents are those over keys and values put together for every head."""
    latents, rotation = joint(rank=15), Float64Rotation("half", torch.tensor([1.0, 0.3, 0.1, 0.02]))
    at = torch.arange(7)[None, None]
    slots = Slots(0, at, dtype=torch.float64, heads=2, rotation=rotation)
    asked = Slots(0, torch.tensor([[[9]]]), dtype=torch.float64, heads=2, rotation=rotation)
    held_now = torch.randn(1, 1, 7, 6 + 15, dtype=torch.float64)
    q = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    keys, values = latents.read({"latent": held_now}, slots)
    logits = latents.query(q, asked) @ keys.mT
    output = latents.expand(torch.softmax(logits, -1) @ values)
    still_query = rotation.rotate(q, torch.tensor([[[-9]]]))
    for head in range(4):
        kv = head // 2
        moving = held_now[0, 0, :, :6] @ latents.rope.value[kv].T
        still = held_now[0, 0, :, 6:] @ latents.keys.value[kv].T * latents.scale
        own = held_now[0, 0, :, 6:] @ latents.values.value[kv].T
        expected = q[0, head, 0] @ moving.T + still_query[0, head, 0] @ still.T
        assert (logits[0, head, 0] - expected).abs().max() <= 1e-12
        assert (output[0, head, 0] - torch.softmax(expected, -1) @ own).abs().max() <= 1e-12


def test_a_joint_latent_of_full_rank_gives_back_what_it_was_given():
    """Keys that lose their rotation and values come back from the latent whatever their balance."""
    latents = joint(rank=30)
    slots = Slots(0, torch.zeros(1, 1, 5, dtype=torch.long), dtype=torch.float64, heads=2,
                  rotation=Float64Rotation("half", torch.ones(4)))  # fmt: skip
    keys, values = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 10)
    back = latents.decode({k: v.double() for k, v in joint_encoded(latents, keys, values, slots).items()}, slots)
    assert (back[0] - keys).abs().max() <= 1e-4 and (back[1] - values).abs().max() <= 1e-4
    assert not torch.allclose(torch.tensor(latents.scale), torch.tensor(1.0), rtol=0.02)


def joint_encoded(latents, keys, values, slots):
    return latents.encode(keys.double(), values.double(), replace(slots, dtype=torch.float64))


def test_sums_of_value_latents_are_expanded_once():
    """Single queries read the value channel as it lies in memory; its sum is expanded behind the softmax."""
    model = small_model()
    with compress(model, LowRank(budget=0.5, **TEXT)) as session:
        session.prefill(random_ids(1, 20))
        layer = session.cache.layers[0]
        latents: GroupLatents = session.cache.spec.codec.layers[0]
        values = layer.store.get("value_latent")
        channels = {name: layer.store.get(name) for name in layer.encoding.channels(layer.store)}
        slots = layer.encoding.slot_info(layer.positions(), layer.store.heads)
        assert layer.encoding.codec.read(channels, slots)[1].data_ptr() == values.data_ptr()
        weights = torch.softmax(torch.randn(1, 4, 1, 20), -1)
        whole = layer.keys_values()[1].repeat_interleave(2, 1)
        summed = weights @ values.repeat_interleave(2, 1)
        assert (latents.expand(summed) - weights @ whole).abs().max() <= 1e-5


def test_eviction_and_low_rank_go_together():
    """SnapKV keeps what it keeps alone, in latents; a float share of each."""
    model, ids = small_model(), random_ids(1, 60)
    snap = SnapKV(budget=0.5, window=4)
    with compress(model, snap) as session:
        session.prefill(ids)
        alone = held(session.cache, 0)
    with compress(model, snap.replace(codec=LowRank(budget=0.5, **TEXT))) as session:
        session.prefill(ids)
        assert held(session.cache, 0) == alone
        kept = session.cache.nbytes()
        assert kept["keys_values"] / kept["full"] == pytest.approx(
            0.25, abs=0.012
        )  # less the positions that the codec counts
        session.generate(6)
    with compress(model, snap.replace(codec=LowRank(rank=16, **TEXT))) as session:
        whole = session.prefill(ids).logits
        rest = feed(model, session.cache, random_ids(1, 1, 2), torch.ones(1, 61, dtype=torch.long))
    with compress(model, snap) as session:
        assert (session.prefill(ids).logits - whole).abs().max() <= 1e-5
        expected = feed(model, session.cache, random_ids(1, 1, 2), torch.ones(1, 61, dtype=torch.long))
    assert (rest - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"head_group": 2}, {"form": "mla"}, {"form": "mla", "bits": 8}])
def test_a_budget_below_the_least_is_told_the_least(options):
    """And the least is enough."""
    model, short = small_model(), {"tokens": 128, "length": 32, **options}
    with pytest.raises(ValueError, match="budget=0.02 is too small") as error:
        compress(model, LowRank(budget=0.02, **short))
    least = float(re.search(r"budget=([\d.]+) is the least", str(error.value))[1])
    with compress(model, LowRank(budget=least, **short)) as session:
        session.prefill(random_ids(1, 40))
        sizes = session.cache.nbytes()
        assert 0.9 * least * sizes["full"] <= sizes["valid"] <= least * sizes["full"]


@pytest.mark.parametrize("codec", [LowRank(head_group=2), LowRank(form="mla"), LowRankCodec(head_group=2)])
def test_heads_that_keep_different_tokens_share_no_latent(codec):
    with pytest.raises(ValueError, match="several heads together.*form=palu with head_group=1"):
        SnapKV(budget=0.5, codec=codec)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LowRank(rank=0), "rank=0 holds nothing; at least 1"),
        (lambda: LowRank(budget=64), "budget=64 of LowRank is a share.*float in"),
        (lambda: LowRank(budget=1.5), "budget=1.5"),
        (lambda: LowRank(bits=3), "bits=3; valid: 2, 4, 8"),
        (lambda: LowRank(form="svd"), "form='svd'; valid: palu, mla"),
        (lambda: LowRank(allocation="fisher"), "allocation='fisher'; valid: uniform, energy"),
        (lambda: LowRank(head_group=0), "head_group=0; at least 1"),
        (lambda: LowRank(form="mla", head_group=2), "head_group=2 is of form=palu"),
        (lambda: LowRank(rope_dims=8), "rope_dims=8 is of form=mla"),
        (lambda: LowRank(tokens=100), "tokens=100 in sequences of length=256"),
        (lambda: StreamingLLM(budget=9, positions="compact", codec=LowRank()), "compact"),
    ],
)
def test_settings_that_no_model_has_are_refused_at_once(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 17}, "rank=17; this model's full rank is 16 for head_group=1"),
        ({"rank": 15, "head_group": 2}, "rank=15.*full rank is 32 for head_group=2.*a multiple of 2"),
        ({"rank": 65, "form": "mla"}, "rank=65"),
        ({"rank": 15, "bits": 4}, "rank=15.*a multiple of 2"),
        ({"head_group": 3}, "head_group=3 does not divide the model's 2 KV heads; valid: 1, 2"),
        ({"budget": 0.05}, "too small: rank 1 in all layers takes 12"),
        ({"form": "mla", "rope_dims": 34}, "rope_dims=34; an even number from 0 to 32"),
        ({"form": "mla", "rope_dims": 7}, "rope_dims=7"),
        ({"form": "mla", "rope_dims": 32, "budget": 0.3}, "too small"),
        ({"tokens": 8, "length": 8}, "8 tokens is too short.*16 directions.*raise tokens"),
        ({"form": "mla", "tokens": 32, "length": 32}, "32 tokens is too short.*64 directions"),
        ({"text": "/nowhere.txt"}, "nowhere.txt.*cannot be read"),
    ],
)
def test_settings_that_a_model_does_not_have_are_refused_before_any_work(options, words):
    model = small_model()
    with pytest.raises(ValueError, match=words), compress(model, LowRank(**(TEXT | options))):
        pytest.fail("entered")


def test_latents_of_latents_are_refused():
    with pytest.raises(ValueError, match="holds latents"), compress(small_model("deepseek_v3"), LowRank(**TEXT)):
        pytest.fail("entered")


def test_what_is_measured_is_no_hyper_parameter():
    """Two codecs of equal settings are equal whatever was measured, and records show settings alone."""
    codec = LowRank(budget=0.5, **TEXT).parts().codec
    bound = codec.bind(small_model())
    assert bound == codec and bound.layers and "layers" not in repr(bound)
    assert bound.bind(small_model(fresh=True)) is bound
    described = LowRank(budget=0.5, **TEXT).describe()
    assert described["tokens"] == 512 and described["text"] == "own" and described["seed"] == 0


def test_a_rank_leaves_no_budget_and_a_sweeps_budgets_are_one_cell():
    assert LowRank().budget_kind == "bytes" and LowRank(rank=8).budget_kind == "none"
    assert LowRank(rank=8).replace(rank=None).budget_kind == "bytes"


@pytest.mark.parametrize("wrap", [lambda codec: codec, lambda codec: SnapKV(budget=0.5, codec=codec)])
def test_what_a_file_says_counts_for_a_runs_identity(tmp_path, wrap):
    file = tmp_path / "text.txt"
    found = []
    for text in ("one text", "another", "one text"):
        file.write_text(text)
        found.append(wrap(LowRank(text=str(file))).fingerprint())
    assert found[0] == found[2] != found[1] and list(found[0]) == ["codec.text"]
    assert wrap(LowRank()).fingerprint() == wrap(LowRank(text="prose")).fingerprint() == {}


def test_full_and_low_rank_prompts_are_the_same():
    """A prompt attends to exact keys and values: what is held takes effect after it."""
    model, ids = small_model(), random_ids(1, 30)
    with compress(model, Full()) as session:
        expected = session.prefill(ids).logits
    for form in ("palu", "mla"):
        with compress(model, LowRank(budget=0.5, form=form, **TEXT)) as session:
            assert (session.prefill(ids).logits - expected).abs().max() <= 1e-5


def test_stored_bases_are_used_again(monkeypatch):
    """Opening a session a second time measures nothing, for both forms."""
    model = small_model()
    for method in (LowRank(**TEXT), LowRank(form="mla", **TEXT)):
        with compress(model, method):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(low_rank, "outputs", lambda *a: pytest.fail("measured again"))
            patch.setattr(latent_attention, "outputs", lambda *a: pytest.fail("measured again"))
            with compress(model, method):
                pass
