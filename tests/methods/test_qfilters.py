"""QFilters keeps the tokens whose keys reach furthest in the direction of their head's queries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import drawn_filters
from helpers import load_script, thinned
from reference import Choice, Loop, MaskedReference, best
from small_models import left_padded, random_ids, small_model
from test_references import BUDGET, SIZES, follow

from kvcompress import compress
from kvcompress.calibrate import calibration
from kvcompress.calibrate.query_filters import DATA, KIND, calibrate
from kvcompress.methods import QFilters


@dataclass
class LoopQFilters(Loop):
    filters: torch.Tensor | None = None
    window: int = 0

    def decide(self, layer, b, query, key, features, row):
        cap, filters = self.caps[b], drawn_filters(self.model) if self.filters is None else self.filters
        window = self.window if cap >= self.window + 1 else min(self.window, cap // 2)
        for h in range(len(row)):
            columns = sorted(row[h])
            if len(columns) <= cap:
                continue
            recent = set(columns[len(columns) - window :])
            scores = {}
            for c in columns:
                if c not in recent:
                    scores[c] = sum(float(k) * float(f) for k, f in zip(key[h, c], filters[layer, h], strict=True))
            row[h] = best(scores, cap - window) | recent
            self.choices[layer, b, h] = Choice(set(row[h]), scores, recent)


@pytest.mark.parametrize(
    ("sizes", "options"),
    thinned(SIZES, [{"window": 3}, {"preset": "kvpress"}, {"preset": "kvpress", "window": 2}], every=3),
)
def test_it_keeps_what_the_loop_keeps(sizes, options):
    """Batch of a whole and a left-padded row, a later turn and decode, with eviction in decode and without."""
    method = QFilters(budget=BUDGET, **options)
    follow(
        method, LoopQFilters, sizes=sizes, later=(1, 1, 9, 1, 1), window=method.window, in_decode=bool(method.decode)
    )


@pytest.mark.parametrize("budget", [0.1, 0.3])
def test_a_small_share_shrinks_the_window(budget):
    follow(QFilters(budget=budget, window=6), LoopQFilters, lengths=[24, 15, 7], later=(1,) * 4, window=6)


def loop_filters(model, texts):
    """Filters by a singular value decomposition of every query head's queries, as the model's attention sees them."""
    with MaskedReference(model) as reference:
        found = {}
        for ids, mask in texts:
            reference.cache, reference.mask = type(reference.cache)(), None
            reference.forward(ids, mask)
            for layer, (query, key, _) in reference.captured.items():
                for b in range(len(ids)):
                    for head in range(query.shape[1]):
                        own = found.setdefault((layer, head // (query.shape[1] // key.shape[1])), {})
                        own.setdefault(head, []).append(query[b, head, mask[b].bool()])
    filters = {}
    for key, heads in found.items():
        directions = []
        for rows in heads.values():
            u, _, v = torch.linalg.svd(torch.cat(rows).double(), full_matrices=False)
            directions.append(v[0] * u[:, 0].sum().sign())
        filters[key] = sum(directions) / len(directions)
    return filters


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_filters_are_the_first_singular_vectors_of_the_queries(groups):
    """Joined over texts, padding left out, signed towards the queries, averaged over a KV head's query heads."""
    ids, mask = left_padded([20, 13])
    model, twin = small_model(groups=groups), small_model(groups=groups, twin=True)
    expected = loop_filters(twin, [(ids[:1], mask[:1]), (random_ids(2, 9, 4), torch.ones(2, 9, dtype=torch.long))])
    found = calibrate(model, [ids[:1], random_ids(2, 9, 4)])
    for (layer, head), direction in expected.items():
        assert torch.allclose(found[layer, head].double(), direction, atol=1e-4)


def test_layers_without_full_attention_have_no_filter():
    model = small_model("gemma2")
    filters = calibrate(model, [random_ids(2, 12)])
    assert filters.shape == (4, 2, 16)
    assert [bool(layer.any()) for layer in filters] == [False, True, False, True]
    with compress(model, QFilters(budget=0.5, window=2, filters=filters)) as session:
        assert session.prefill(random_ids(1, 20)).logits.isfinite().all()


def test_calibrating_leaves_the_model_as_it_was():
    model = small_model()
    before = set(vars(model))
    calibrate(model, [random_ids(1, 12)])
    assert set(vars(model)) == before and model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="no text"):
        calibrate(model, [])


@pytest.fixture
def only_files(monkeypatch, filters_for_random_models, tmp_path):
    """No drawn filters, and a user's folder of our own."""
    monkeypatch.setattr(calibration, "find", filters_for_random_models)
    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path))
    return tmp_path / "calibration" / KIND


def script():
    return load_script("calibrate_qfilters")


def test_a_model_without_filters_is_refused_with_the_command_that_makes_them(only_files):
    with pytest.raises(ValueError, match=r"no filters for 'llama'.*kvcompress calibrate-qfilters --model llama"):
        compress(small_model(), QFilters(budget=0.5))
    with compress(small_model(), QFilters(budget=1.0)) as session:  # nothing to choose
        session.prefill(random_ids(1, 12))


def test_the_script_writes_filters_that_the_model_finds(only_files, capsys):
    from kvcompress import load

    run = ["--model", "random/llama", "--length", "24", "--sequences", "2"]
    assert script().main(run) == 0 and str(only_files) in capsys.readouterr().out
    (path,) = only_files.glob("*.safetensors")
    tensors, provenance = calibration.load(path)
    assert provenance["tokens"] == [2, 24] and provenance["command"].endswith("--sequences 2")
    assert "by the model" in provenance["text"]
    for dtype in ("float32", "bfloat16"):
        model, _ = load("random/llama", dtype=dtype)
        bound = QFilters(budget=0.5, window=2).bind(model)
        assert torch.equal(bound.filters, tensors["filters"])
    with pytest.raises(ValueError, match="no filters"):
        QFilters(budget=0.5).bind(load("random/llama", seed=1)[0])
    assert script().main([*run, "--text", str(only_files / "missing.txt")]) == 1


@pytest.mark.model
def test_the_embedded_model_has_filters(smollm2, only_files):
    """Made on this model: each points where the queries of a text it has not seen point."""
    model, tokenizer = smollm2
    filters = QFilters(budget=0.5).bind(model).filters
    assert filters.shape == (30, 3, 64)
    text = "The river runs through the old town, past the mill and under three bridges, before it reaches the sea."
    fresh = calibrate(model, [tokenizer(text, return_tensors="pt").input_ids])
    cosine = torch.nn.functional.cosine_similarity(filters, fresh, dim=-1)
    assert cosine.median() > 0.9
    (path,) = (DATA / KIND).glob("smollm2.safetensors")
    _, provenance = calibration.load(path)
    assert {"model", "text", "tokens", "date", "command", "versions"} <= set(provenance)


def test_other_weights_are_another_model(tmp_path, only_files):
    """Weights changed by a twentieth, or another number of layers; rounding to bfloat16 changes nothing."""
    calibration.save(tmp_path / "m.safetensors", small_model(), {"filters": torch.ones(1)}, {})
    changed = small_model(fresh=True)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.05)
    rounded = small_model(dtype=torch.bfloat16)
    assert calibration.find(rounded, [tmp_path])["filters"].tolist() == [1.0]
    assert calibration.find(changed, [tmp_path]) is None
    assert calibration.find(small_model(num_hidden_layers=2), [tmp_path]) is None
    assert calibration.find(rounded, [tmp_path / "nowhere"]) is None


@pytest.mark.parametrize("options", [{"window": -1}, {"preset": "official"}, {"window": 8, "budget": 8}])
def test_illegal_settings_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        QFilters(**{"budget": 0.5, **options})
