"""A model that is copied or changed under a session: copies are stock models, changes are noticed when a forward begins."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from small_models import random_ids, small_model
from transformers import AttentionInterface, GenerationConfig, LlamaForCausalLM

from kvcompress import compress
from kvcompress.methods import SnapKV

METHOD = SnapKV(budget=0.5, window=4)


@pytest.mark.parametrize("part", ["model", "base", "container"])
def test_a_deep_copy_made_inside_is_a_stock_model(part):
    model, ids = small_model(fresh=True), random_ids(1, 20)
    expected = model(ids).logits
    with compress(model, METHOD) as session:
        session.prefill(ids)
        if part == "model":
            twin = copy.deepcopy(model)
        elif part == "base":
            twin = copy.deepcopy(model.model)
        else:
            twin = copy.deepcopy(torch.nn.ModuleList([model]))[0]
        session.prefill(ids)
        assert session.cache.kept_tokens().unique().tolist() == [10]  # the original goes on
    for module in twin.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not {"_kvcompress_session", "generate", "__deepcopy__"} & set(vars(module))
    assert twin.config._attn_implementation == model.config._attn_implementation != "kvcompress"
    if part != "base":
        assert torch.equal(twin(ids).logits, expected)
        twin.generate(ids, max_new_tokens=2)
        with compress(twin, METHOD) as session:
            session.prefill(ids)


def test_a_deep_copy_keeps_no_cache_alive():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD) as session:
        session.prefill(ids)
        held = weakref.ref(session.cache)
        twin = copy.deepcopy(model)
    del session
    gc.collect()
    assert held() is None and twin is not None


def test_a_shallow_copy_is_no_open_session_afterwards():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD):
        twin = copy.copy(model)
    twin.generate(ids, max_new_tokens=2)
    with compress(twin, METHOD) as session:
        session.prefill(ids)


def test_pickling_inside_is_refused_by_name():
    model = small_model(fresh=True)
    with compress(model, METHOD), pytest.raises(TypeError, match=r"compress\(\)"):
        pickle.dumps(model)
    pickle.dumps(model)


def other_forward(module):
    module.forward = type(module).forward.__get__(module)


def other_class(module):
    module.__class__ = type("Other", (type(module),), {})


CHANGES = {  # by what the error must name
    "its attention implementation": lambda model: model.set_attn_implementation("sdpa"),
    "its configuration": lambda model: setattr(model, "config", copy.deepcopy(model.config)),
    "its generate": lambda model: setattr(model, "generate", type(model).generate.__get__(model)),
    "its base model": lambda model: setattr(model, "model", copy.deepcopy(model.model)),
    "the forward of its LlamaForCausalLM": other_forward,
    "the forward of its LlamaModel": lambda model: other_forward(model.model),
    "the hooks of its LlamaForCausalLM": lambda model: model._forward_pre_hooks.clear(),
    "the hooks of its LlamaModel": lambda model: model.model._forward_hooks.clear(),
    "the class of its LlamaForCausalLM": other_class,
    "its layers": lambda model: model.model.layers.__setitem__(1, copy.deepcopy(model.model.layers[1])),
    "the attention of its layers": lambda model: other_forward(model.model.layers[1].self_attn),
}


@pytest.mark.parametrize("decode", ["eager", "static"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_swapped_inside_is_named_when_a_forward_begins(name, decode):
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD, decode=decode) as session:
        session.prefill(ids)
        session.step(ids[:, :1])
        CHANGES[name](model)
        with pytest.raises(ValueError, match=name):
            session.step(ids[:, :1])
        with pytest.raises(ValueError, match=name):
            session.prefill(ids)
        with pytest.raises(ValueError, match=name):
            model(ids)


def test_hooks_that_are_all_removed_are_noticed_by_attention():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD):
        for module in (model, model.model):
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        with pytest.raises(ValueError, match="no session's hooks"):
            model(ids)
    assert torch.isfinite(model(ids).logits).all()


def test_a_model_built_from_the_configuration_inside_is_refused_by_name():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD):
        twin = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    if twin.config._attn_implementation == "kvcompress":
        with pytest.raises(ValueError, match="set_attn_implementation"):
            twin(ids)


def test_a_layer_that_does_not_run_is_named():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    layers = model.config.num_hidden_layers
    with compress(model, METHOD) as session:
        handle = model.register_forward_pre_hook(lambda *_: setattr(model.config, "num_hidden_layers", layers - 1))
        with pytest.raises(ValueError, match=f"layers {layers - 1} did not"):
            session.prefill(ids)
        handle.remove()
        with pytest.raises(ValueError, match="number of layers"):
            session.prefill(ids)
        model.config.num_hidden_layers = layers
        session.prefill(ids)


def test_gradient_checkpointing_that_drops_the_cache_is_refused_by_name():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    model.activation_checkpointing_enable()
    with compress(model, METHOD) as session:
        model.train()
        with pytest.raises(ValueError, match="gradient checkpointing"):
            model(ids)
        model.eval()
        session.prefill(ids)


def test_another_attention_under_our_name_is_noticed(monkeypatch):
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD) as session:
        session.prefill(ids)
        monkeypatch.setitem(AttentionInterface._global_mapping, "kvcompress", lambda *_, **__: None)
        with pytest.raises(ValueError, match="registered"):
            session.prefill(ids)


def test_a_generation_config_may_be_set_inside():
    model, ids = small_model(fresh=True), random_ids(1, 20)
    with compress(model, METHOD):
        model.generation_config = GenerationConfig(max_new_tokens=2)
        assert model.generate(ids).shape == (1, 22)
