"""Models that accelerate spreads: weights that come and go around each layer."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from accelerate import disk_offload
from small_models import random_ids, small_model
from sweeps import TOGETHER, cells, left, sweep

from kvcompress import compress, load
from kvcompress.methods import H2O, Full


def test_an_offloaded_model_gives_what_it_gives_in_memory(tmp_path):
    """accelerate's hooks around every module leave cache, phases and masks as they are."""
    model = small_model()
    spread = copy.deepcopy(model)
    disk_offload(spread, str(tmp_path), execution_device=torch.device("cpu"))
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    stock = model.generate(ids, **options)
    for method in (Full(), H2O(budget=0.4)):
        with compress(spread, method):
            found = spread.generate(ids, **options)
        with compress(model, method):
            expected = model.generate(ids, **options)
        assert torch.equal(found, expected)
        assert torch.equal(found, stock) == (method == Full())


@pytest.fixture
def saved(tmp_path):
    """The folder of a small model with its tokenizer."""
    model, tokenizer = load("random/llama")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def half_on_disk(folder):
    """Where each module goes: the second half of the layers is read from disk whenever it is needed."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    others = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    return others | {f"model.layers.{i}": "cpu" if i < layers // 2 else "disk" for i in range(layers)}


def test_a_sweep_over_a_model_that_is_partly_on_disk_leaves_the_same_records(tmp_path, saved):
    table = ", ".join(f"{name}: {place}" for name, place in half_on_disk(saved).items())
    for folder, settings in (("memory", []), ("disk", [f"model.device_map={{{table}}}"])):
        configs = cells(tmp_path / folder, "full,snapkv,h2o", "0.5", f"model.name={saved}", *settings)
        outcomes, text = sweep(configs, TOGETHER)
        assert {outcome.status for outcome in outcomes} <= {"ok", "same"}, text
    assert len(left(tmp_path / "disk")) == 3
    assert left(tmp_path / "disk") == left(tmp_path / "memory")


def test_weights_that_lie_where_the_map_says(saved):
    model, _ = load(saved, device_map=half_on_disk(saved))
    places = {str(parameter.device) for parameter in model.model.layers[-1].parameters()}
    assert places == {"meta"} and str(model.model.layers[0].mlp.up_proj.weight.device) == "cpu"


def test_embeddings_on_no_device_are_refused(saved):
    with pytest.raises(ValueError, match="map its embeddings"):
        load(saved, device_map={"": "disk"})
