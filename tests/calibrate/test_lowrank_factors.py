"""Low-rank factors: exact at full rank, their error is what they say, whitened beats plain, found again on disk."""

from __future__ import annotations

import pytest
import torch
from small_models import random_ids, small_model

from kvcompress.calibrate import low_rank
from kvcompress.calibrate.low_rank import Basis, CalibrationText, allocate, factorise, outputs, stored
from kvcompress.method.latents import grouped
from kvcompress.models import compat

ARCHITECTURES = ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "smollm3", "gpt_oss"]


def inputs_of(model, ids):
    """What each layer's key projection is given, `[T, hidden]` float64, by hooks."""
    found = {i: [] for i in range(len(model.model.layers))}
    hooks = [
        layer.self_attn.k_proj.register_forward_pre_hook(lambda m, a, i=i: found[i].append(a[0][0].double()))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        for row in ids:
            model(row[None])
    for hook in hooks:
        hook.remove()
    return {i: torch.cat(parts) for i, parts in found.items()}


def projection_error(x, basis, rank):
    """Mean squared error per token of `x [T, G, w]` after projection on the first `rank` directions, `[G]`."""
    kept = basis.cut(rank).double()
    left = torch.einsum("tgw,gwr,gvr->tgv", x.double(), kept, kept)
    return (x.double() - left).pow(2).sum(-1).mean(0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_are_measured_before_rotation(architecture):
    """Rotated again to their positions they are the keys that the cache holds; values are its values."""
    model, ids = small_model(architecture), random_ids(2, 12)
    full = [i for i, kind in enumerate(compat.layer_types(model)) if kind == "full_attention"]
    rotations, seen = compat.rotations(model), []
    with torch.no_grad():
        caches = [model(row[None]).past_key_values for row in ids]
    for number, (layer, keys, values) in enumerate(outputs(model, ids)):
        cache = caches[number // len(full)]
        turned = rotations[layer].rotate(keys.transpose(0, 1)[None], torch.arange(12))
        assert (turned - cache.layers[layer].keys).abs().max() <= 1e-4 * turned.abs().max()
        assert torch.equal(values.transpose(0, 1)[None], cache.layers[layer].values)
        seen.append(layer)
    assert seen == full * 2


@pytest.mark.parametrize("group", [1, 2])
def test_the_error_of_a_rank_is_the_whitened_singular_values_it_discards(group):
    """The mean squared error over the calibration text equals |W L - W_r L|^2 of the projection, and so falls."""
    model, ids = small_model("llama"), random_ids(8, 40)
    factors, hidden = factorise(model, ids, group), inputs_of(model, ids)
    keys = {}
    for layer, k, _ in outputs(model, ids):
        keys.setdefault(layer, []).append(grouped(k, group))
    for layer, parts in keys.items():
        x, basis = torch.cat(parts), factors.sides[layer, "keys"]
        moment = hidden[layer].T @ hidden[layer] / len(hidden[layer])
        root = torch.linalg.cholesky(moment + 1e-10 * torch.eye(len(moment)))
        weight = model.model.layers[layer].self_attn.k_proj.weight.double().view(basis.vectors.shape[0], -1, 64)
        for rank in (1, 5, 16 * group - 1):
            expected = torch.linalg.svdvals(weight @ root)[:, rank:].pow(2).sum(-1)
            assert torch.allclose(basis.discarded(rank), expected, rtol=1e-3)
            assert torch.allclose(projection_error(x, basis, rank), expected, rtol=1e-3)
        errors = torch.stack([projection_error(x, basis, rank) for rank in range(1, 16 * group + 1)])
        assert (errors.diff(dim=0) <= 1e-9).all() and errors[-1].max() <= 1e-9 * errors[0].max()


def test_whitened_beats_the_projection_s_own_singular_vectors_on_held_out_text():
    """At equal rank, on tokens that nothing was measured on, in every layer."""
    model, ids, held_out = small_model("llama", fresh=True), random_ids(16, 40), random_ids(4, 40, seed=9)
    # a model's hidden states lie along few directions: give those of this one a few, too
    with torch.no_grad():
        for decoder in model.model.layers:
            decoder.input_layernorm.weight.mul_(torch.logspace(0, -1.5, 64))
    factors = factorise(model, ids)
    for layer, keys, _ in outputs(model, held_out):
        weight = model.model.layers[layer].self_attn.k_proj.weight.double().view(2, 16, 64)
        plain = Basis(torch.linalg.svd(weight).U.float(), torch.zeros(2, 16))
        for rank in (4, 8):
            whitened = projection_error(keys, factors.sides[layer, "keys"], rank)
            assert whitened.sum() < 0.9 * projection_error(keys, plain, rank).sum()


def test_ranks_use_up_what_there_is_and_are_at_least_one():
    model = small_model("llama")
    for group in (1, 2):
        sides = factorise(model, random_ids(8, 40), group).sides
        for how in ("uniform", "energy"):
            for numbers in (12, 50, 100, 6 * 32):
                ranks = allocate(sides, group, numbers, how)
                held = sum(rank * 2 // group for rank in ranks.values())
                assert numbers - 2 < held <= numbers
                assert all(group <= rank <= 16 * group and rank % group == 0 for rank in ranks.values())
            if how == "uniform":
                ranks = allocate(sides, group, 100, how)
                assert max(ranks.values()) - min(ranks.values()) <= group


def test_ranks_by_energy_discard_less_of_it_than_equal_ones():
    """Summed over layers and sides, each scaled to 1, which is what they go by."""
    model = small_model("llama", fresh=True)
    with torch.no_grad():  # one layer's hidden states lie along few directions
        model.model.layers[1].input_layernorm.weight.mul_(torch.logspace(0, -1.5, 64))
    sides = factorise(model, random_ids(8, 40)).sides

    def missing(ranks):
        return sum(float(b.discarded(ranks[s]).sum() / b.energy.sum()) for s, b in sides.items())

    for numbers in (40, 90, 130):
        assert missing(allocate(sides, 1, numbers, "energy")) < missing(allocate(sides, 1, numbers, "uniform"))


def test_too_few_numbers_for_one_direction_each_are_refused():
    sides = factorise(small_model("llama"), random_ids(8, 40)).sides
    with pytest.raises(ValueError, match="too small: rank 1 in all layers takes 12; raise it"):
        allocate(sides, 1, 11, "uniform")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: factorise(m, random_ids(1, 15)), "15 tokens is too short.*16 directions.*raise tokens"),
        (lambda m: factorise(m, random_ids(1, 40), group=3), "head_group=3 does not divide the model's 2 KV heads; valid: 1, 2"),
        (lambda m: factorise(m, random_ids(1, 40), group=0), "head_group=0"),
        (lambda m: CalibrationText(tokens=100, length=512), "tokens=100 in sequences of length=512"),
        (lambda m: factorise(m, CalibrationText("nowhere.txt", 64, 32)), "nowhere.txt.*own, prose, or the path"),
        (lambda m: factorise(small_model("gpt_oss", rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 512}), random_ids(1, 40)), "depends on the length"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_is_allowed(call, words):
    with pytest.raises(ValueError, match=words):
        call(small_model("llama"))


def test_a_text_shorter_than_asked_for_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a short text", encoding="utf-8")
    with pytest.raises(ValueError, match="has 12 tokens, fewer than the 64 asked for: give a longer text, or lower"):
        factorise(small_model("llama"), CalibrationText(str(path), 64, 32))


def test_texts_are_the_same_every_time():
    """The model's own text follows from its seed; prose and files from their words."""
    model = small_model("llama")
    own = CalibrationText(tokens=64, length=16)
    assert own.ids(model).shape == (4, 16) and torch.equal(own.ids(model), own.ids(model))
    assert not torch.equal(own.ids(model), CalibrationText(tokens=64, length=16, seed=1).ids(model))
    prose = CalibrationText("prose", tokens=64, length=16)
    assert torch.equal(prose.ids(model), prose.ids(small_model("qwen3")))


def test_factors_are_found_again_by_model_and_settings(tmp_path, monkeypatch):
    """The second time nothing is measured; another model, seed, group or a broken file has factors of its own."""
    monkeypatch.setattr(low_rank, "folder", lambda: tmp_path)
    model, text = small_model("llama"), CalibrationText(tokens=64, length=16)
    first = stored(model, text)
    assert first.made == {"tokens": 64, "group": 1, "text": "own", "length": 16, "seed": 0}
    with monkeypatch.context() as patch:
        patch.setattr(low_rank, "factorise", lambda *a: pytest.fail("measured again"))
        again = stored(small_model("llama"), text)
    for side, basis in first.sides.items():
        assert torch.equal(basis.vectors, again.sides[side].vectors)
        assert torch.equal(basis.energy, again.sides[side].energy)
    for other, group in ((small_model("llama", seed=3), 1), (model, 2)):
        assert not torch.equal(stored(other, text, group).sides[0, "keys"].energy, first.sides[0, "keys"].energy)
    stored(model, CalibrationText(tokens=64, length=16, seed=5))
    files = sorted(low_rank.folder().iterdir())
    assert len(files) == 7 and all(path.suffix == ".safetensors" for path in files)
    for path in files:
        path.write_bytes(b"broken")
    assert torch.equal(stored(model, text).sides[0, "keys"].vectors, first.sides[0, "keys"].vectors)
