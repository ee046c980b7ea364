"""Seeded models without weights: tiny ones of many architectures for tests, full-size ones for timing.

Default initialisation gives almost uniform attention, where dropping a token or leaving out a soft cap moves nothing
that a test could see. The weights made here give attention logits a standard deviation of about `PEAK`, so a query
spends most of its attention on a few keys, and logits are of order 1, so float32 noise stays near 1e-6.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PEAK = 2.0  # standard deviation of the scaled attention logits
WINDOW = 8  # sliding window of small models whose family has one, in tokens

# How each family takes a sliding window: "none", "all" (every layer, through the config's `sliding_window` alone),
# "mixed" (per layer, through `layer_types`, off unless asked for), "always" (per layer, the family's default).
WINDOWS = {
    "llama": "none",
    "mistral": "all",
    "qwen2": "mixed",
    "qwen3": "mixed",
    "qwen3_moe": "all",
    "phi3": "all",
    "gemma2": "always",
    "gemma3_text": "always",
    "smollm3": "mixed",
    "granite": "none",
    "olmo2": "none",
    "glm4": "none",
    "cohere2": "always",
    "starcoder2": "all",
    "gpt_oss": "always",
    "deepseek_v2": "none",
    "deepseek_v3": "none",
}
SMALL = tuple(WINDOWS)

_LATENT = {  # multi-head latent attention: 32 + 8 numbers are held per token
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SMALL_EXTRAS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma2": {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 10.0},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 1.25},
    "cohere2": {"logit_scale": 1.5},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
    }


def _theta(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


# Configuration values as published with each model; the weights are random.
FULL: dict[str, dict[str, Any]] = {
    "llama3-8b": {  # Llama-3.1-8B
        "model_type": "llama",
        **_shape(4096, 14336, 32, 32, 8, 128, 128256),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama3-1b": {  # Llama-3.2-1B
        "model_type": "llama",
        **_shape(2048, 8192, 16, 32, 8, 64, 128256),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        **_shape(4096, 12288, 36, 32, 8, 128, 151936),
        "max_position_embeddings": 40960,
        "rope_parameters": _theta(1e6),
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        **_shape(1024, 3072, 28, 16, 8, 128, 151936),
        "max_position_embeddings": 40960,
        "rope_parameters": _theta(1e6),
        "tie_word_embeddings": True,
    },
    "mistral-7b": {  # Mistral-7B v0.3: no sliding window
        "model_type": "mistral",
        **_shape(4096, 14336, 32, 32, 8, 128, 32768),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _theta(1e6),
        "sliding_window": None,
    },
    "smollm2-135m": {
        "model_type": "llama",
        **_shape(576, 1536, 30, 9, 3, 64, 49152),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _theta(1e5),
        "tie_word_embeddings": True,
    },
    "smollm2-1.7b": {
        "model_type": "llama",
        **_shape(2048, 8192, 24, 32, 32, 64, 49152),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _theta(130000.0),
        "tie_word_embeddings": True,
    },
}


def byte_tokenizer(model_max_length: int = 8192) -> PreTrainedTokenizerFast:
    """A tokenizer that needs no files: one token per UTF-8 byte, ids 4 to 259, after pad, bos, eos and turn marks.

    As with Llama 3, encoding adds one bos (`add_special_tokens=False` leaves it out) and the chat template writes its
    own; a turn ends with eos.
    """
    special = ["<pad>", "<bos>", "<eos>", "<turn>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<turn>"],
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    return tokenizer


def random_model(
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **options: Any,
) -> PreTrainedModel:
    """A seeded model with random weights, in eval mode and without gradients.

    Args:
        architecture: a small one from `SMALL` (hidden size 64, head size 16; the same weights on every device), or a
            full-size one from `FULL` (made on `device`).
        seed: the weights follow from it; torch's global generators are left alone.
        dtype: of the weights. Small models are drawn in float32 and then cast.
        device: where the model ends up.
        options: for small models `layers=4, heads=4, kv_heads=2, head_dim=16, sliding_window, softcap`, plus any field
            of the family's configuration. `sliding_window` is in tokens; families with `layer_types` alternate sliding
            and full layers (sliding first), the others slide in every layer. Full-size models take configuration
            fields only (`num_hidden_layers=2`).

    Raises:
        ValueError: unknown architecture or option, or a window or soft cap for a family that has none.
    """
    config, small = random_config(architecture, **options), architecture in SMALL
    build_on, build_dtype = (torch.device("cpu"), torch.float32) if small else (torch.device(device), dtype)
    devices = [build_on] if build_on.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), build_on:
        model = AutoModelForCausalLM.from_config(config, dtype=build_dtype)
    _fill(model, seed)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    model.generation_config.pad_token_id = config.pad_token_id
    return model


def random_config(architecture: str, **options: Any) -> PreTrainedConfig:
    """The configuration of a random model, without its weights; arguments and errors as for `random_model`."""
    if architecture not in SMALL and architecture not in FULL:
        raise ValueError(
            f"random model {architecture!r} is unknown; small: {', '.join(SMALL)}; full-size: {', '.join(FULL)}"
        )
    return _small_config(architecture, **options) if architecture in SMALL else _full_config(architecture, options)


def _small_config(
    architecture: str,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **overrides: Any,
) -> PreTrainedConfig:
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; each KV head serves as many queries")
    tokenizer = byte_tokenizer()
    hidden = heads * head_dim
    values: dict[str, Any] = {
        **_shape(hidden, 2 * hidden, layers, heads, kv_heads, head_dim, len(tokenizer)),
        "max_position_embeddings": tokenizer.model_max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,  # tied random weights answer every token with itself
        **_SMALL_EXTRAS.get(architecture, {}),
        **_window_fields(architecture, sliding_window, layers),
    }
    if "kv_lora_rank" in values:  # all heads share what is held, and take part in it alone
        values |= {"num_key_value_heads": heads, "head_dim": values["qk_rope_head_dim"]}
    if architecture.startswith("gemma"):
        values["query_pre_attn_scalar"] = head_dim
    if architecture == "granite":
        values["attention_multiplier"] = head_dim**-0.5
    if architecture == "phi3":
        values["original_max_position_embeddings"] = tokenizer.model_max_length
    if softcap is not None:
        if architecture != "gemma2":
            raise ValueError(f"softcap={softcap} does not apply to {architecture}; of the small models gemma2 has one")
        values["attn_logit_softcapping"] = softcap
    return _config(architecture, values, overrides)


def _full_config(architecture: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    values = dict(FULL[architecture])
    tokenizer = byte_tokenizer()  # ids beyond its 260 are never prompted; decoded they are empty
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return _config(values.pop("model_type"), {**values, **special}, overrides)


def _config(model_type: str, values: dict[str, Any], overrides: dict[str, Any]) -> PreTrainedConfig:
    known = AutoConfig.for_model(model_type, **values)
    unknown = [name for name in overrides if not hasattr(known, name)]
    if unknown:
        raise ValueError(
            f"{model_type} has no option {', '.join(unknown)}; valid: layers, heads, kv_heads, head_dim, sliding_window,"
            f" softcap, seed, dtype, device, and fields of {type(known).__name__}"
        )
    return AutoConfig.for_model(model_type, **{**values, **overrides})


def _window_fields(architecture: str, window: int | None, layers: int) -> dict[str, Any]:
    kind = WINDOWS[architecture]
    if kind == "always" and window is None:
        window = WINDOW
    if window is None:
        return {"sliding_window": None} if kind == "all" else {}
    if kind == "none":
        raise ValueError(f"sliding_window={window} does not apply to {architecture}: the family has no sliding layers")
    if window < 1:
        raise ValueError(f"sliding_window={window} must be at least 1 token, or None")
    fields: dict[str, Any] = {"sliding_window": window}
    if architecture in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        fields["use_sliding_window"] = True
    if kind != "all":
        fields["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    return fields


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter from one generator, in the order of their names."""
    gain = PEAK**0.5
    offset = 1.0 if model.config.model_type.startswith("gemma") else 0.0  # Gemma's norms multiply by 1 + weight
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    generator = torch.Generator(embedding.device).manual_seed(seed)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if parameter is embedding:
            _normal(parameter, 1.0, generator).mul_(3.0 / embedding.shape[1] ** 0.5)
        elif "norm" in name and name.endswith("weight"):
            scale = gain if "q_norm" in name or "k_norm" in name else 1.0
            _normal(parameter, 0.1 * scale, generator).add_(scale - offset)
        elif parameter.dim() > 1 and not name.endswith("bias"):
            _normal(parameter, _gain(name) * parameter.shape[-1] ** -0.5, generator)
        else:
            _normal(parameter, 1.0 if "sinks" in name else 0.1, generator)


def _gain(name: str) -> float:
    """Standard deviation of a matrix's output for an input of size 1."""
    if "q_b_proj" in name:  # the keys it meets have a gain of 1
        return PEAK
    if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")):
        return PEAK**0.5
    if any(part in name for part in ("o_proj", "down_proj", "c_proj")):
        return 0.5  # what a layer adds to the residual stream: more would amplify float32 noise from layer to layer
    return 0.5 if "lm_head" in name else 1.0


def _normal(parameter: nn.Parameter, std: float, generator: torch.Generator) -> torch.Tensor:
    return parameter.data.normal_(0.0, std, generator=generator)
