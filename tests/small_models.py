"""Small random models whose attention is peaked, whose windows are short and whose soft-caps bite.

Everything a wrong mask could hide behind is made large: weights, query-key norms, sinks, soft-caps; everything a
window could hide behind is made short. Vocabulary 128, 4 query heads, 2 KV heads unless asked otherwise, head size 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvcompress.models.tokenizers import remember_tokenizer

VOCAB = 128
WINDOW = 6
SOFTCAP = 1.5

_HYBRID = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_SLIDING = {"layer_types": _HYBRID, "num_hidden_layers": 4, "sliding_window": WINDOW}

# architecture -> what its configuration needs beyond the common sizes
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "num_hidden_layers": 4},
    "qwen3": {"use_sliding_window": True, **_SLIDING},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phi3": {"pad_token_id": 0, "partial_rotary_factor": 0.5},
    "gemma2": {"attn_logit_softcapping": SOFTCAP, "query_pre_attn_scalar": 16, **_SLIDING},
    "gemma3_text": {"query_pre_attn_scalar": 16, **_SLIDING},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.7, "logits_scaling": 1.0},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
    "cohere2": {"logit_scale": 1.0, **_SLIDING},
    "starcoder2": {"sliding_window": None},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
}
ARCHITECTURES = tuple(OPTIONS)
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
OPTIONS |= {"deepseek_v2": _LATENT, "deepseek_v3": _LATENT}
LATENT = ("deepseek_v2", "deepseek_v3")  # multi-head latent attention: one head of 24 + 8 numbers is held
HYBRID = ("qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2", "gpt_oss")


@dataclass
class Made:
    """A model that tests share, how it was when it was made, and torch's global random state after that."""

    model: Any
    as_made: Any
    random_state: torch.Tensor


_made: dict[str, Made] = {}  # arguments of small_model -> the model of this process
_used: set[str] = set()  # those handed out since `altered` was last asked


def small_model(architecture: str = "llama", *, fresh: bool = False, twin: bool = False, **options: Any) -> Any:
    """A seeded random model of `build`, made once per process and shared: read-only, a test that alters it fails.

    `fresh=True` for a model of the caller's own, to alter it; `twin=True` for a second shared one of the same kind, to
    run beside the first.
    """
    if fresh:
        return build(architecture, **options)
    key = repr((architecture, twin, sorted(options.items())))
    if key not in _made:
        model = build(architecture, **options)
        _made[key] = Made(model, state_of(model), torch.get_rng_state())
    _used.add(key)
    torch.set_rng_state(_made[key].random_state)  # what a test draws next does not depend on who built the model
    return _made[key].model


def state_of(model: Any) -> tuple[Any, ...]:
    """All that a test could leave on a model, as values that compare."""
    tensors = [*model.parameters(), *model.buffers()]
    modules = list(model.modules())
    return (
        [(t.data_ptr(), t.dtype, t._version, t.requires_grad) for t in tensors],
        torch.stack([t.detach().double().sum() for t in tensors]).tolist(),  # `.data` is changed without a version
        [(sorted(vars(m)), m.training) for m in modules],
        [len(hooks) for m in modules for name, hooks in vars(m).items() if name.endswith("_hooks")],
        [str(vars(m.config)) for m in modules if "config" in vars(m)],
        str(model.generation_config.to_dict()),
    )


def altered() -> list[str]:
    """Arguments of shared models that are no longer as they were made, of those used since the last call.

    They are forgotten, so that later tests get them anew.
    """
    found = sorted(key for key in _used if state_of(_made[key].model) != _made[key].as_made)
    for key in found:
        del _made[key]
    _used.clear()
    return found


def build(
    architecture: str,
    *,
    seed: int = 0,
    groups: int = 2,
    scale: float = 0.12,
    attn: str = "eager",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """A seeded random model, drawn in float32, with 4 query heads per `4 // groups` KV heads."""
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4 // groups,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "initializer_range": scale,
            "bos_token_id": 1,
            "eos_token_id": None,
            "tie_word_embeddings": False,
            **OPTIONS[architecture],
            **options,
        },
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(0.3 + 0.2 * torch.rand(parameter.shape, generator=generator))
            elif name.endswith(("sinks", "q_proj.bias", "k_proj.bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif name == "lm_head.weight":  # rounding in float32 then stays well below 1e-5 in the logits
                parameter.mul_(0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    remember_tokenizer(model, CharacterTokenizer())
    model.set_attn_implementation(attn)
    return model if dtype == torch.float32 else model.to(dtype)


class CharacterTokenizer:
    """One token per character, for methods that write prompts of their own."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [2 + ord(character) % (VOCAB - 2) for character in text]


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]` that avoid the special ids 0 and 1."""
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1000 + seed))


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and 0/1 mask of a batch whose rows have `lengths` real tokens, padded on the left."""
    width = max(lengths)
    ids, mask = random_ids(len(lengths), width, seed), torch.ones(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return ids, mask
