"""No method jumps at its first eviction: what an eviction changes is what hiding the evicted tokens changes, no more."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import EVICTING, REPRESENTATIVE, all_held, grid, make
from reference import MaskedReference
from small_models import CharacterTokenizer, left_padded, random_ids, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from kvcompress import compress
from kvcompress.methods import METHODS, Full
from kvcompress.models.tokenizers import remember_tokenizer

LENGTHS = [22, 13]
STEPS = 5


def original(name, budget):
    """The method with positions as they were: re-indexed ones are another model of the sequence, tested elsewhere."""
    fields = METHODS[name].__dataclass_fields__
    return make(name, budget, **({"positions": "original"} if "positions" in fields else {}))


def held_columns(session, width, seen):
    """`[B, H_kv, columns]` per layer: which of all columns so far are held."""
    masks = {}
    for layer in session.full_layers:
        positions = session.cache.positions(layer)
        mask = torch.zeros(*positions.shape[:2], width + seen, dtype=torch.bool)
        for row, length in enumerate(LENGTHS):
            for head in range(positions.shape[1]):
                held = positions[row, head]
                mask[row, head, held[held >= 0] + width - length] = True
        masks[layer] = mask
    return masks


@pytest.mark.parametrize(
    ("name", "budget"),
    grid(
        EVICTING,
        [max(LENGTHS) - 1, 0.9, 0.4],
        short=lambda name, budget: budget == (0.4 if name in REPRESENTATIVE else max(LENGTHS) - 1),
    ),
)
def test_after_each_eviction_logits_are_those_of_the_full_cache_with_the_evicted_hidden(name, budget):
    """From the first evicted token on, in a padded batch, through prompt, question and decode."""
    model, twin = small_model(seed=2), small_model(seed=2, twin=True)
    ids, mask = left_padded(LENGTHS, 3)
    width, question, tokens = ids.shape[1], random_ids(2, 3, 5), random_ids(2, STEPS, 6)
    with compress(model, original(name, budget)) as session, MaskedReference(twin) as reference:
        got, expected = session.prefill(ids, attention_mask=mask).logits, reference.forward(ids, mask)[:, -1]
        assert (got - expected).abs().max() <= 1e-5  # the forward that decides still sees everything
        reference.keep = held_columns(session, width, 0)
        assert not all(bool(keep[0].all()) for keep in reference.keep.values())
        got, expected = session.append(question), reference.forward(question)[:, -1]
        assert (got - expected).abs().max() <= 1e-5
        for step in range(STEPS):
            reference.keep = held_columns(session, width, question.shape[1] + step)
            token = tokens[:, step : step + 1]
            got, expected = session.step(token), reference.forward(token)[:, -1]
            assert (got - expected).abs().max() <= 1e-5, f"step {step}"


# A model in which some tokens provably do not matter: the slowest rotary pair does not turn, every query has the same
# large value in it, and a filler's key the opposite one. A query that sees any other token gives fillers no attention.
FILLERS, HIDDEN, HEAD = range(2, 10), 64, 16
LARGE = 40.0


@cache
def model_with_fillers():
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=1024,
        attention_bias=True,
        initializer_range=0.12,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e18},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    slow, flag = HEAD // 2 - 1, HIDDEN - 1
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, flag] = 0.0
        embedding[list(FILLERS), flag] = 1.0
        for layer in model.model.layers:
            attention = layer.self_attn
            for weight in (attention.o_proj.weight, layer.mlp.down_proj.weight):
                weight[flag] = 0.0  # nothing writes over the mark
            if attention.o_proj.bias is not None:
                attention.o_proj.bias[flag] = 0.0
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight[:, flag] = 0.0
            for head in range(4):
                attention.q_proj.weight[head * HEAD + slow] = 0.0
                attention.q_proj.bias[head * HEAD + slow] = LARGE
            for head in range(2):
                row = head * HEAD + slow
                attention.k_proj.weight[row] = 0.0
                attention.k_proj.weight[row, flag] = -LARGE
                attention.k_proj.bias[row] = 0.0
    remember_tokenizer(model, CharacterTokenizer())  # for methods that write prompts of their own
    return model


def prompt_of_fillers(length=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FILLERS.start, FILLERS.stop, (1, length), generator=generator)


@cache
def answer(method, kind):
    """Logits of a question and of the steps after it, as long as no token of either is evicted; tokens evicted."""
    prompt = prompt_of_fillers() if kind == "fillers" else random_ids(1, 40, 9) % 100 + 20
    question = random_ids(1, 12) % 100 + 20
    with compress(model_with_fillers(), method) as session:
        session.prefill(prompt)
        evicted = session.report()["evicted"]
        found = [session.append(question[:, :6])]
        for t in range(6, 12):
            heads = [set(head) for rows in all_held(session).values() for head in rows[0]]
            if not all(set(range(40, 40 + t)) <= head for head in heads):
                break
            found.append(session.step(question[:, t : t + 1]))
    return torch.cat(found), evicted


@pytest.mark.parametrize(
    ("name", "budget"),
    grid(
        EVICTING,
        [39, 0.5, 8],
        short=lambda name, budget: budget == (8 if name in REPRESENTATIVE else 39),
    ),
)
def test_evicting_tokens_that_do_not_matter_changes_nothing(name, budget):
    """Whatever a method evicts of a prompt of fillers, a question is answered as with the full cache."""
    method = original(name, budget)
    got, evicted = answer(method, "fillers")
    expected, _ = answer(Full(), "fillers")
    assert evicted > 0 and (got - expected[: len(got)]).abs().max() <= 1e-5
    # the same of tokens that do matter shows
    got, evicted = answer(method, "ordinary")
    expected, _ = answer(Full(), "ordinary")
    assert evicted > 0 and (got - expected[: len(got)]).abs().max() > 1e-3
