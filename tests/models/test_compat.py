"""The contract with transformers: the names and signatures we rely on, checked with messages that say what moved."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from small_models import ARCHITECTURES, random_ids, small_model
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, cache_utils, masking_utils

from kvcompress.models import compat, projections

VERSION = f"transformers {transformers.__version__}"


def parameters(function):
    return list(inspect.signature(function).parameters)


def expect(condition: bool, what: str) -> None:
    assert condition, f"{VERSION} changed what kvcompress/models/compat.py relies on: {what}"


def test_cache_update_takes_keys_values_layer_and_passes_kwargs_on():
    """Cache.update(key_states, value_states, layer_idx, …) hands its keyword arguments to the layer's update."""
    names = parameters(cache_utils.Cache.update)
    expect(names[:4] == ["self", "key_states", "value_states", "layer_idx"], f"Cache.update{tuple(names)}")
    seen = {}

    class Layer(cache_utils.DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            seen.update(kwargs)
            return super().update(key_states, value_states, *args, **kwargs)

    cache = cache_utils.Cache(layers=[Layer()])
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0, kwargs={"position_ids": 7})
    expect(seen.get("kwargs", {}).get("position_ids") == 7, "Cache.update no longer passes kwargs= to layer.update")


def test_cache_answers_mask_sizes_and_query_offset():
    """The mask is built from get_mask_sizes(q, layer) -> (length, offset) and get_query_offset(layer)."""
    expect(hasattr(cache_utils.Cache, "get_query_offset"), "Cache.get_query_offset is gone")
    expect(
        parameters(cache_utils.Cache.get_mask_sizes)[:3] == ["self", "query_length", "layer_idx"],
        "Cache.get_mask_sizes",
    )
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 5, 4), 0)
    expect(
        tuple(cache.get_mask_sizes(3, 0)) == (8, 0), f"get_mask_sizes gives {cache.get_mask_sizes(3, 0)}, not (8, 0)"
    )
    expect(cache.get_query_offset(0) == 5, f"get_query_offset gives {cache.get_query_offset(0)}, not the length 5")


def test_cache_layers_have_the_members_a_layer_of_ours_implements():
    """The abstract members of CacheLayerMixin are the ones we implement, and no new one appeared."""
    ours = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    abstract = set(cache_utils.CacheLayerMixin.__abstractmethods__)
    expect(abstract <= ours, f"CacheLayerMixin has new abstract members: {sorted(abstract - ours)}")
    for name in ("reset", "reorder_cache", "offload", "prefetch"):
        expect(hasattr(cache_utils.CacheLayerMixin, name), f"CacheLayerMixin.{name} is gone")
    layers = cache_utils.Cache(layers=[cache_utils.DynamicLayer()]).layers
    expect(len(layers) == 1, "Cache(layers=[…]) no longer takes layers")


def test_every_layer_has_an_output_projection():
    """All query heads' outputs go through one linear module per layer, a plain weight `[hidden, H x D]`."""
    for architecture in ARCHITECTURES:
        model = small_model(architecture, head_dim=32)  # heads together wider than the model
        found = projections.output_projections(model)
        expect(sorted(found) == list(range(model.config.num_hidden_layers)), f"layers of {architecture}: {list(found)}")
        for projection in found.values():
            expect(projection.weight.shape == (64, 128), f"{architecture}: o_proj is {projection.weight.shape}")


def test_layer_types_are_read_from_the_configuration():
    """get_layer_types_and_kwargs(config) tells full from sliding layers, with what the sliding ones need."""
    expect(hasattr(cache_utils, "get_layer_types_and_kwargs"), "cache_utils.get_layer_types_and_kwargs is gone")
    types, kwargs = cache_utils.get_layer_types_and_kwargs(small_model("gemma2").config)
    expect(list(types) == ["sliding_attention", "full_attention"] * 2, f"layer types of gemma2: {types}")
    expect(len(kwargs) == 4, "one dict of arguments per layer")
    expect(
        {"full_attention", "sliding_attention"} <= set(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING),
        "DYNAMIC_LAYER_TYPE_MAPPING",
    )


def test_attention_and_mask_can_be_registered_and_receive_what_we_use():
    """A registered attention gets (module, q, k, v, mask, scaling=…), the mask function its sizes."""
    seen = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        seen["attention"] = (module.layer_idx, query.shape, key.shape, attention_mask, kwargs)
        from transformers.models.llama.modeling_llama import eager_attention_forward

        return eager_attention_forward(module, query, key, value, None, **kwargs)

    def mask(**kwargs):
        seen["mask"] = kwargs
        return

    AttentionInterface.register("test_compat_probe", attention)
    AttentionMaskInterface.register("test_compat_probe", mask)
    model = small_model(fresh=True)
    model.set_attn_implementation("test_compat_probe")
    expect(model.config._attn_implementation == "test_compat_probe", "set_attn_implementation takes registered names")
    with torch.no_grad():
        model(random_ids(1, 6), attention_mask=torch.ones(1, 6, dtype=torch.long), cache=DynamicCache())
    layer, query, key, got_mask, kwargs = seen["attention"]
    expect(layer == 2 and query == (1, 4, 6, 16) and key == (1, 2, 6, 16), f"attention saw {layer} {query} {key}")
    expect(got_mask is None, "a mask function may return None and the attention receives it")
    expect("scaling" in kwargs and "position_ids" in kwargs, f"attention keyword arguments: {sorted(kwargs)}")
    wanted = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"}
    expect(wanted <= set(seen["mask"]), f"mask keyword arguments: {sorted(seen['mask'])}")


def test_the_layer_may_hand_itself_on_through_the_keyword_arguments():
    """The dict that a layer's update receives is the one later unpacked into the attention function."""
    seen = []

    class Layer(cache_utils.DynamicLayer):
        def update(self, key_states, value_states, *args, kwargs=None, **more):
            kwargs["handed_on"] = self
            return super().update(key_states, value_states, *args, **more)

    def attention(module, query, key, value, attention_mask, **kwargs):
        seen.append(kwargs.pop("handed_on", None))
        from transformers.models.llama.modeling_llama import eager_attention_forward

        return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("test_compat_hand_on", attention)
    AttentionMaskInterface.register("test_compat_hand_on", masking_utils.eager_mask)
    for architecture in ("llama", "gemma2", "gpt_oss", "cohere2", "phi3"):
        model = small_model(architecture, fresh=True)
        model.set_attn_implementation("test_compat_hand_on")
        cache = cache_utils.Cache(layers=[Layer() for _ in range(model.config.num_hidden_layers)])
        seen.clear()
        with torch.no_grad():
            model(random_ids(1, 4), cache=cache)
        expect(
            seen == cache.layers, f"{architecture}: kwargs written by layer.update do not reach the attention function"
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_take_the_cache_under_its_present_name(architecture):
    """forward(cache=…) is accepted and returned as output.cache, and generate passes the same name on."""
    model = small_model(architecture)
    expect("cache" in parameters(model.forward), f"{architecture}.forward has no argument `cache`")
    cache = DynamicCache()
    with torch.no_grad():
        output = model(random_ids(1, 4), cache=cache, use_cache=True)
    expect(output.cache is cache, f"{architecture}: output.cache is not the cache that was passed")
    expect(getattr(model, "_supports_attention_backend", False), f"{architecture} lost the attention interface")


def test_features_arrive_as_keyword_arguments():
    """Windows, soft-capping and sinks reach the attention function under the names we honour."""
    seen = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        seen.setdefault(module.layer_idx, kwargs)
        return query.transpose(1, 2), None

    AttentionInterface.register("test_compat_features", attention)
    AttentionMaskInterface.register("test_compat_features", masking_utils.eager_mask)
    for architecture, name, layer in (
        ("gemma2", "softcap", 1),
        ("gemma2", "sliding_window", 0),
        ("gpt_oss", "s_aux", 1),
    ):
        model = small_model(architecture, fresh=True)
        model.set_attn_implementation("test_compat_features")
        seen.clear()
        with torch.no_grad():
            model(random_ids(1, 4))
        expect(seen[layer].get(name) is not None, f"{architecture} passes no {name}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_rotations_are_those_of_the_model(architecture):
    """Keys of a whole sequence moved by 5 positions are the keys rotated by 5, in every layer."""
    model = small_model(architecture)
    ids, at = random_ids(1, 9), torch.arange(9)[None]
    caches = DynamicCache(), DynamicCache()
    for cache, shift in zip(caches, (0, 5), strict=True):
        model(ids, position_ids=at + shift, cache=cache)
    found = compat.rotations(model)
    assert len(found) == len(caches[0].layers)
    for layer, rotation in enumerate(found):
        before, after = (cache.layers[layer].keys for cache in caches)
        assert (rotation.rotate(before, torch.full((1, 1, 1), 5)) - after).abs().max() <= 1e-4
        assert (rotation.unrotate(after, torch.full((1, 1, 1), 5)) - before).abs().max() <= 1e-4


def test_generate_has_the_private_hooks_we_lean_on():
    """generate takes cache= and hands the model's forward one token per step."""
    model = small_model()
    lengths = []
    handle = model.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(random_ids(1, 5), cache=DynamicCache(), max_new_tokens=3, do_sample=False)
    handle.remove()
    expect(lengths == [5, 1, 1], f"generate fed {lengths} tokens, not [5, 1, 1]")
