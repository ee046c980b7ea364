"""Options of `model.generate` under a session: refused by name wherever they come from, and the model stays the stock model."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import thinned
from small_models import random_ids, small_model
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from kvcompress import compress
from kvcompress.methods import Full, SnapKV

METHOD = SnapKV(budget=0.5, window=4)
FIELDS = [
    {"assistant_early_exit": 1},
    {"prompt_lookup_num_tokens": 3},
    {"use_mtp": True},
    {"is_assistant": True},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "low"},
    {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5},
    {"force_words_ids": [[5]], "num_beams": 2},
    {"cache_implementation": "static"},
    {"cache_implementation": "quantized"},
    {"cache_implementation": "paged"},
    {"use_cache": False},
    {"output_attentions": True, "return_dict_in_generate": True},
]


def state(model):
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "implementation": model.config._attn_implementation,
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "own": sorted(vars(model)),
        "layers": len(model.model.layers),
    }


@pytest.mark.parametrize(
    ("options", "where"), thinned(FIELDS, ["argument", "generation_config", "model.generation_config"], every=3)
)
def test_an_option_is_refused_by_name_wherever_it_is_set(options, where):
    model, ids, name = small_model(fresh=True), random_ids(1, 16), next(iter(options))
    if where == "model.generation_config":
        model.generation_config.update(**options)
    before = state(model)
    with compress(model, METHOD) as session:
        with pytest.raises(ValueError, match=name):
            if where == "argument":
                model.generate(ids, max_new_tokens=3, **options)
            elif where == "generation_config":
                model.generate(ids, generation_config=GenerationConfig(max_new_tokens=3, **options))
            else:
                model.generate(ids, max_new_tokens=3)
        session.prefill(ids)
        assert len(session.generate(3).tokens[0]) == 3
    assert state(model) == before


def test_a_loop_from_the_hub_is_refused_and_one_of_the_caller_runs():
    model, ids = small_model(fresh=True), random_ids(1, 16)

    def first_token(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return model(input_ids, cache=kwargs["cache"]).logits[:, -1:].argmax(-1)

    with compress(model, METHOD) as session:
        with pytest.raises(ValueError, match="custom_generate"):
            model.generate(ids, custom_generate="transformers-community/dola", max_new_tokens=2)
        found = model.generate(ids, custom_generate=first_token, max_new_tokens=2)
        assert found.shape == (1, 1) and session.cache.kept_tokens().unique().tolist() == [8]


def test_a_prompt_that_generate_feeds_in_chunks_is_compressed_to_its_end():
    model, method = small_model(fresh=True), SnapKV(budget=8, window=4)
    for length in (24, 25):  # whose last chunk is one token
        ids = random_ids(1, length)
        with compress(model, method) as session:
            model.generate(ids, prefill_chunk_size=8, max_new_tokens=1)
            assert session.cache.kept_tokens().unique().tolist() == [8]
            model.generate(ids, prefill_chunk_size=8, max_new_tokens=3)
            assert session.cache.kept_tokens().unique().tolist() == [10]


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_continuous_batching_is_refused_by_name(name):
    model = small_model(fresh=True)
    with compress(model, METHOD), pytest.raises(ValueError, match=name):
        getattr(model, name)([[5, 6, 7]])
    assert name not in vars(model)


def test_a_compressed_model_cannot_draft_for_another():
    model, other, ids = small_model(fresh=True), small_model(seed=1, fresh=True), random_ids(1, 16)
    with compress(model, METHOD) as session:
        with pytest.raises(ValueError, match="is_assistant"):
            other.generate(ids, assistant_model=model, max_new_tokens=4)
        session.prefill(ids)


def test_whatever_a_generation_does_to_the_configuration_is_undone():
    model, ids = small_model(fresh=True), random_ids(1, 16)
    before = state(model)

    def spoil(model, input_ids, *args, **kwargs):
        model.config.num_hidden_layers = 1
        model.config.layer_types = ["full_attention"]
        model.generation_config.assistant_early_exit = 1
        model.generation_config = GenerationConfig(num_beams=3)
        raise ZeroDivisionError

    with compress(model, METHOD) as session:
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, custom_generate=spoil, max_new_tokens=2)
        session.prefill(ids)
    assert state(model) == before


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
        {"watermarking_config": WatermarkingConfig(bias=2.0)},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"compile_config": CompileConfig()},
        {"output_scores": True, "return_dict_in_generate": True},
        {"num_beam_groups": 1},
        {"penalty_alpha": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_neither_rewinds_nor_rewrites_generates_as_without_a_session(options):
    model, ids = small_model(fresh=True), random_ids(1, 16)
    before = state(model)

    def tokens():
        torch.manual_seed(0)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, **options)
        return getattr(found, "sequences", found).tolist()

    expected = tokens()
    with compress(model, Full()):
        assert tokens() == expected
    assert state(model) == before


def test_with_guidance_the_report_describes_the_prompt_and_not_the_negative_branch():
    model, ids, negative = small_model(fresh=True), random_ids(1, 40), random_ids(1, 6, 1)
    options = {"guidance_scale": 2.0, "negative_prompt_ids": negative, "max_new_tokens": 3}
    expected = model.generate(ids, **options).tolist()
    with compress(model, Full()) as session:
        assert model.generate(ids, **options).tolist() == expected
        assert session.cache.get_seq_length() == 42
    with compress(model, METHOD) as session:
        model.generate(ids, **options)
        assert session.report()["kv"]["kept_tokens_mean"] == 22  # half of 40, and 2 decoded
        model.generate(ids, guidance_scale=2.0, max_new_tokens=3)
        assert session.cache.get_seq_length() == 42


def test_a_model_without_a_head_is_compressed_by_its_forward_and_refused_by_name_where_logits_are_needed():
    model, ids = small_model(fresh=True), random_ids(1, 16)
    with compress(model, METHOD) as session:
        model(ids)
        expected = session.cache.positions(1)
    base = model.model
    with compress(base, METHOD) as session:
        for call in (lambda: session.prefill(ids), lambda: session.append(ids)):
            session.cache = session.new_cache()
            with pytest.raises(ValueError, match="LlamaModel has no language-modelling head"):
                call()
        base(ids)
        assert torch.equal(session.cache.positions(1), expected)
        hidden = base(ids[:, :1], cache=session.cache).last_hidden_state
        assert hidden.shape[:2] == (1, 1) and session.report()["active"]
    with pytest.raises(ValueError, match="language-modelling head"):
        compress(base, Full(), decode="static")
