"""The calibration finds a head that copies, whatever else a model does, and says how sure it is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from reference import MaskedReference
from small_models import small_model

from kvcompress.calibrate.duo import agreement, calibrate, head_order, measure, passkey_sample, ranks, retrieval
from kvcompress.models.loading import byte_tokenizer, random_model

TOKENIZER = byte_tokenizer(4096)


def model(**options):
    return random_model("llama", layers=2, **options)


def test_a_sample_repeats_every_passkey_and_fits():
    """First occurrence and repetition hold the same tokens; a query stands one before the token it predicts."""
    sample = passkey_sample(TOKENIZER, 2000, 3, 4, seed=5)
    ids = sample.ids.tolist()
    assert len(ids) <= 2000 and len(sample.pairs) == 3
    for first, queries in sample.pairs:
        assert first.stop <= sample.context <= queries.start + 1
        assert [ids[i] for i in first] == [ids[q + 1] for q in queries]
    assert TOKENIZER.decode(ids).count("second passkey") == 3
    assert torch.equal(sample.ids, passkey_sample(TOKENIZER, 2000, 3, 4, seed=5).ids)
    assert not torch.equal(sample.ids, passkey_sample(TOKENIZER, 2000, 3, 4, seed=6).ids)


@pytest.mark.parametrize(("passkeys", "words", "length"), [(0, 4, 900), (11, 4, 900), (4, 40, 900)])
def test_passkeys_that_cannot_be_are_refused(passkeys, words, length):
    with pytest.raises(ValueError):
        passkey_sample(TOKENIZER, length, passkeys, words, 0)


def test_a_score_is_the_mean_attention_of_the_best_query_head():
    """Against loops over the model's own probabilities."""
    sample = passkey_sample(TOKENIZER, 700, 2, 2, seed=1)
    twin = model()
    with MaskedReference(twin) as reference:
        reference.forward(sample.ids[None])
        captured = dict(reference.captured)
    found = measure(twin, sample)
    for layer, (query, key, features) in captured.items():
        group = query.shape[1] // key.shape[1]
        for h in range(key.shape[1]):
            means = []
            for g in range(group):
                per_key = []
                for first, queries in sample.pairs:
                    masses = []
                    for q in queries:
                        logits = (key[0, h, : q + 1] @ query[0, h * group + g, q]) * features.scaling
                        masses.append(float(logits.softmax(0)[first.start : first.stop].sum()))
                    per_key.append(sum(masses) / len(masses))
                means.append(sum(per_key) / len(per_key))
            assert abs(float(found[layer, h]) - max(means)) < 1e-5


def test_a_planted_copying_head_ranks_first():
    """All attention of one query head goes to the token that comes next in the first occurrence."""
    sample = passkey_sample(TOKENIZER, 700, 2, 2, seed=2)
    size = len(sample.ids) - sample.context
    attention = torch.full((3, 2, size, len(sample.ids)), 1.0 / len(sample.ids))
    for first, queries in sample.pairs:
        for at, q in zip(first, queries, strict=True):
            attention[1, 0, q - sample.context] = 0.0
            attention[1, 0, q - sample.context, at] = 1.0
    scores = retrieval(attention, sample)
    assert float(scores[1]) == pytest.approx(1.0) and ranks([scores.tolist()])[0][1] == 0


def test_the_file_is_reproducible_and_says_how_far_halves_agree():
    options = {"lengths": (600,), "samples": 2, "passkeys": 2, "words": 2, "note": lambda line: None}
    first, second = (calibrate(model(), TOKENIZER, "toy", **options) for _ in range(2))
    assert first == second and first["measured"]["samples"] == 2
    assert -1.0 <= first["halves"]["rank_correlation"] <= 1.0
    assert len(first["scores"]) == 2 and all(0.0 <= x <= 1.0 for row in first["scores"] for x in row)
    with pytest.raises(ValueError, match="samples=1"):
        calibrate(model(), TOKENIZER, "toy", **options | {"samples": 1})


def test_agreement_is_one_for_equal_scores_and_less_for_others():
    scores = torch.arange(12.0).view(4, 3)
    assert agreement(scores, 2 * scores) == {"rank_correlation": 1.0, "top_quarter": 1.0, "top_half": 1.0}
    assert agreement(scores, -scores) == {"rank_correlation": -1.0, "top_quarter": 0.0, "top_half": 0.0}


def test_the_script_writes_a_file_that_its_model_takes(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location(
        "calibrate_duo", Path(__file__).parents[2] / "scripts" / "calibrate_duo.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "toy.json"
    given = ["--model", "random/llama", "--lengths", "600", "--samples", "2", "--passkeys", "2", "--words", "2"]
    assert script.main([*given, "--out", str(out)]) == 0
    known = json.loads(out.read_text())
    assert known["made"]["command"].startswith("kvcompress calibrate-duo --model random/llama")
    assert known["made"]["versions"]["torch"] == torch.__version__
    assert head_order(str(out), random_model("llama")) == ranks(known["scores"])
    assert script.main([*given, "--passkeys", "99", "--out", str(out)]) == 1
    assert "passkeys=99" in capsys.readouterr().err


def test_only_layers_of_full_attention_are_ranked():
    hybrid = small_model("gemma3_text")
    order = head_order("random", hybrid)
    assert len(order) == 2 and sorted(r for row in order for r in row) == list(range(4))
