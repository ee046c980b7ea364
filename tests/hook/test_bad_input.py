"""Wrong input is refused before any work, with the value, what is allowed and the way out."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import EVICTING, grid, make
from small_models import VOCAB, random_ids, small_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DeepseekV32Config,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvcompress import compress
from kvcompress.methods import METHODS, Full, SnapKV, StreamingLLM


@pytest.mark.parametrize(
    ("name", "budget"),
    grid(
        EVICTING,
        [0, 0.0, -1, -0.5, 1.5, 2.0, math.nan, math.inf, -math.inf, True, False, "0.5", None],
        short=lambda name, budget: name == "SnapKV" or budget == 1.5,
    ),
)
def test_a_budget_out_of_range_is_refused(name, budget):
    """The error names the value and says what is allowed."""
    with pytest.raises(ValueError, match="budget") as error:
        METHODS[name](budget=budget)
    assert str(budget) in str(error.value)
    assert "(0, 1]" in str(error.value) and "int" in str(error.value)


def test_an_int_budget_below_sinks_and_window_is_refused():
    """SnapKV needs its window plus one, StreamingLLM its sinks plus one; the smallest legal budget is accepted."""
    with pytest.raises(ValueError, match="33"):
        SnapKV(budget=32, window=32)
    with pytest.raises(ValueError, match="5"):
        StreamingLLM(budget=4, sinks=4)
    assert SnapKV(budget=33, window=32).budget == 33
    assert StreamingLLM(budget=5, sinks=4).budget == 5


def test_a_float_above_one_hints_at_the_int():
    """Whoever writes 64.0 tokens is told to write 64."""
    with pytest.raises(ValueError, match="write the int 64"):
        SnapKV(budget=64.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SnapKV", {"window": 0}),
        ("SnapKV", {"kernel": 4}),
        ("SnapKV", {"kernel": 0}),
        ("SnapKV", {"pooling": "median"}),
        ("SnapKV", {"group_reduce": "min"}),
        ("H2O", {"recent_share": 1.5}),
        ("H2O", {"recent_share": -0.1}),
        ("H2O", {"group_reduce": "min"}),
        ("StreamingLLM", {"sinks": -1}),
        ("StreamingLLM", {"positions": "relative"}),
        ("SnapKV", {"preset": "mine"}),
    ],
)
def test_illegal_hyper_parameters_are_refused_by_name(name, options):
    """The error names the field."""
    with pytest.raises(ValueError, match=next(iter(options))):
        METHODS[name](budget=0.5, **options)


def tiny(config_class, **options):
    return config_class(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **options
    )


def test_encoder_only_models_are_refused():
    """A BERT has no KV cache to compress."""
    model = BertModel(tiny(BertConfig)).eval()
    with pytest.raises(ValueError, match="bert"), compress(model, Full()):
        pass


def test_encoder_decoder_models_are_refused():
    """A T5 is not supported."""
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    )
    with pytest.raises(ValueError, match="t5"), compress(model.eval(), Full()):
        pass


def test_state_space_models_are_refused():
    """A Mamba has a state, not a cache of tokens."""
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match="mamba"), compress(MambaForCausalLM(config).eval(), Full()):
        pass


def test_mla_with_an_indexer_is_refused_by_name():
    """DeepSeek-V3.2 caches indexer keys beside its latents, which need an adapter of their own."""
    config = DeepseekV32Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="deepseek_v32.*indexer"), compress(model, Full()):
        pass
    assert model.config._attn_implementation == before


def test_what_is_not_a_model_or_not_a_method_is_refused():
    """The error names what was given."""
    with pytest.raises(ValueError, match="dict"), compress({}, Full()):
        pass
    with pytest.raises(ValueError, match="str"), compress(small_model(), "snapkv"):
        pass
    with pytest.raises(ValueError), compress(small_model(), SnapKV):
        pass


def test_a_foreign_cache_with_content_is_refused():
    """An empty DynamicCache is replaced by ours; one that holds tokens is refused, in forward and in generate."""
    model, ids = small_model(), random_ids(1, 8)
    full = DynamicCache()
    model(ids, cache=full)
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        with pytest.raises(ValueError, match="DynamicCache"):
            model(ids, cache=full)
        with pytest.raises(ValueError, match="DynamicCache"):
            model.generate(torch.cat([ids, ids], 1), cache=full, max_new_tokens=2)
        assert full.get_seq_length() == 8
        model(ids, cache=DynamicCache())
        assert session.cache.kept_tokens().unique().tolist() == [4]
        model.generate(ids, cache=DynamicCache(), max_new_tokens=2)
        assert session.cache.get_seq_length() == 9


def test_an_empty_cache_passed_to_the_model_goes_on_being_ours():
    """A caller who passes the same DynamicCache object again continues the compressed sequence."""
    model, ids = small_model(), random_ids(1, 8)
    cache = DynamicCache()
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        out = model(ids, cache=cache)
        again = out.cache if out.cache is not None else cache
        model(random_ids(1, 1), cache=again)
        assert session.cache.get_seq_length() == 9
        assert session.cache.kept_tokens().unique().tolist() == [5]


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"output_attentions": True}, {"cache_implementation": "static"}]
)
def test_options_that_cannot_work_are_refused(options):
    """In forward and in generate; the error names the option."""
    model, ids = small_model(), random_ids(1, 8)
    name = next(iter(options))
    with compress(model, SnapKV(budget=0.5, window=2)):
        if name != "cache_implementation":
            with pytest.raises(ValueError, match=name):
                model(ids, **options)
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=2, **options)


def test_options_in_a_generation_config_are_refused_too():
    """use_cache=False hidden in a generation config does not slip through."""
    from transformers import GenerationConfig

    model, ids = small_model(), random_ids(1, 8)
    with compress(model, SnapKV(budget=0.5, window=2)), pytest.raises(ValueError, match="use_cache"):
        model.generate(ids, generation_config=GenerationConfig(use_cache=False, max_new_tokens=2))


def test_output_attentions_in_the_configuration_is_refused():
    """A model configured to return attentions cannot, and is told so instead of returning None."""
    model, ids = small_model(fresh=True), random_ids(1, 8)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"), compress(model, Full()) as session:
        session.prefill(ids)


def test_an_empty_prompt_is_refused():
    """No ids, no segments, or an all-zero mask."""
    model = small_model()
    empty = torch.zeros(1, 0, dtype=torch.long)
    with compress(model, Full()) as session:
        for call in (
            lambda: session.prefill(empty),
            lambda: session.prefill([]),
            lambda: session.prefill([empty, empty]),
            lambda: model(empty),
            lambda: model.generate(empty, max_new_tokens=2),
        ):
            with pytest.raises(ValueError, match="empty"):
                call()
        with pytest.raises(ValueError, match="real token"):
            session.prefill(random_ids(2, 5), attention_mask=torch.tensor([[1] * 5, [0] * 5]))
        session.prefill(random_ids(1, 5))
        with pytest.raises(ValueError, match="empty"):
            session.append(empty)


def test_generating_before_a_prompt_is_refused():
    """generate, append and report need a sequence."""
    with compress(small_model(), Full()) as session:
        for call in (lambda: session.generate(2), lambda: session.append(random_ids(1, 2)), session.report):
            with pytest.raises(ValueError, match="prefill"):
                call()


def test_a_prompt_longer_than_the_positions_is_refused():
    """Refused before any work, whole or as a second turn or appended; one of exactly that length is accepted."""
    model = small_model(max_position_embeddings=32)
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        with pytest.raises(ValueError, match="32"):
            session.prefill(random_ids(1, 33))
        with pytest.raises(ValueError, match="32"):
            model(random_ids(1, 33))
        session.prefill(random_ids(1, 32))
        session.prefill(random_ids(1, 20))
        seen = session.cache.get_seq_length(), session.cache.kept_tokens().tolist()
        with pytest.raises(ValueError, match="32"):
            session.append(random_ids(1, 13))
        with pytest.raises(ValueError, match="32"):
            session.prefill(random_ids(1, 13), cache=session.cache)
        assert (session.cache.get_seq_length(), session.cache.kept_tokens().tolist()) == seen
        assert session.append(random_ids(1, 12)).isfinite().all()


def test_compact_positions_take_a_prompt_longer_than_the_positions():
    """StreamingLLM with compact positions streams through a prompt of five times the model's positions."""
    model = small_model(max_position_embeddings=32)
    with compress(model, StreamingLLM(budget=16, sinks=2, positions="compact")) as session:
        logits = session.prefill(random_ids(1, 160)).logits
        assert logits.isfinite().all()
        assert session.cache.kept_tokens().unique().tolist() == [16]
        assert session.cache.positions(0)[0, 0].tolist() == [0, 1, *range(146, 160)]
        assert len(session.generate(40).tokens[0]) == 40
    with (
        compress(model, StreamingLLM(budget=16, sinks=2, positions="original")) as session,
        pytest.raises(ValueError, match="32"),
    ):
        session.prefill(random_ids(1, 160))


def test_padding_does_not_count_as_length():
    """A left-padded row that is wider than the positions but holds few real tokens is accepted."""
    model = small_model(max_position_embeddings=32)
    mask = torch.zeros(1, 40, dtype=torch.long)
    mask[:, 20:] = 1
    with compress(model, Full()) as session:
        assert session.prefill(random_ids(1, 40), attention_mask=mask).seen.tolist() == [20]


def test_ids_no_longer_than_the_cache_are_never_fed_again():
    """generate with a cache needs the ids seen so far and new ones behind them."""
    model, ids = small_model(), random_ids(1, 20)
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        cache = session.prefill(ids).cache
        for tokens in (ids, ids[:, :5], ids[:, -1:]):
            with pytest.raises(ValueError, match="20"):
                model.generate(tokens, cache=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 20 and cache.kept_tokens().unique().tolist() == [10]
        whole = torch.cat([ids, random_ids(1, 3, 2)], 1)
        model.generate(whole, attention_mask=torch.ones_like(whole), cache=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 24


def test_two_sessions_on_one_model_are_refused():
    """The first goes on working."""
    model, ids = small_model(), random_ids(1, 12)
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        expected = session.prefill(ids).logits
        with pytest.raises(ValueError, match="session"), compress(model, Full()):
            pass
        assert torch.equal(session.prefill(ids).logits, expected)
        assert session.cache.kept_tokens().unique().tolist() == [6]
    with compress(model, Full()) as session:
        session.prefill(ids)


def test_assisted_and_contrastive_decoding_are_refused():
    """They rewind or copy the cache in ways an evicted cache cannot follow."""
    model, helper, ids = small_model(), small_model(num_hidden_layers=1), random_ids(1, 12)
    with compress(model, SnapKV(budget=0.5, window=2)):
        for options in (
            {"assistant_model": helper},
            {"prompt_lookup_num_tokens": 3},
            {"penalty_alpha": 0.6, "top_k": 4},
        ):
            with pytest.raises(ValueError, match=next(iter(options))):
                model.generate(ids, max_new_tokens=4, **options)


def test_a_cache_of_another_method_is_refused():
    """A cache is bound to the method that filled it."""
    model, ids = small_model(), random_ids(1, 12)
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        cache = session.prefill(ids).cache
    with compress(model, make("H2O", 0.5)) as session:
        with pytest.raises(ValueError, match="method"):
            session.prefill(ids, cache=cache)
        with pytest.raises(ValueError, match="method"):
            model(ids[:, :1], cache=cache)


def test_a_mask_of_the_wrong_width_or_shape_is_refused():
    """A mask covers the new ids or everything seen; anything else says what was expected."""
    model, ids = small_model(), random_ids(1, 12)
    with compress(model, Full()) as session:
        session.prefill(ids)
        with pytest.raises(ValueError, match="mask"):
            session.prefill(ids, attention_mask=torch.ones(1, 5, dtype=torch.long))
        with pytest.raises(ValueError, match="mask"):
            model(ids, attention_mask=torch.ones(1, 1, 12, 12))
        session.prefill(ids)
        with pytest.raises(ValueError, match="mask"):
            session.append(ids, attention_mask=torch.ones(1, 5, dtype=torch.long))
        with pytest.raises(ValueError, match="rows"):
            session.append(random_ids(2, 3))


def test_right_padding_is_handled_or_refused():
    """A mask with zeros on the right either gives the row's own logits for its real tokens or is refused."""
    model, ids = small_model(), random_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    with compress(model, SnapKV(budget=0.5, window=2)) as session:
        try:
            session.prefill(ids, attention_mask=mask)
        except ValueError as error:
            assert "left" in str(error)
            return
        kept = session.cache.positions(1)[1]
        alone = session.prefill(ids[1:, :8]).cache.positions(1)[0]
        assert [p for p in kept.flatten().tolist() if p >= 0] == alone.flatten().tolist()


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": 2, "temperature": -1.0}]
)
def test_generation_settings_out_of_range_are_refused(options):
    """The error names the setting."""
    with compress(small_model(), Full()) as session:
        session.prefill(random_ids(1, 5))
        with pytest.raises(ValueError, match=list(options)[-1]):
            session.generate(**options)


def test_a_model_in_training_mode_with_dropout_is_refused():
    """Attention dropout would make every comparison noise."""
    model = small_model(attention_dropout=0.5, fresh=True).train()
    with pytest.raises(ValueError, match="eval"), compress(model, Full()) as session:
        session.prefill(random_ids(1, 5))
