"""Projection weights that are used outside the module's own forward: MLA's up-projection and the output projection.

They are read through `effective_weight`, so that they hold whatever stands around a weight: an adapter, a hook, weights
that are kept off the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.models.compat import base_model, holds_latents, text_config

Tensor = torch.Tensor


def is_plain_linear(module: torch.nn.Module) -> bool:
    """True if the module's forward is a product with its `weight`, and nothing else runs with it."""
    forward = vars(module).get("forward")
    if forward is not None and hasattr(
        module, "_hf_hook"
    ):  # accelerate's, which moves inputs, and weights that are meta
        forward = (
            None if getattr(vars(module).get("_old_forward"), "__func__", None) is torch.nn.Linear.forward else forward
        )
    return (
        type(module).forward is torch.nn.Linear.forward
        and forward is None
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and isinstance(module.weight, Tensor)
        and not module.weight.is_meta
    )


@torch.no_grad()
def effective_weight(module: torch.nn.Module, columns: int, like: Tensor) -> Tensor:
    """The matrix `[rows, columns]` that a linear module multiplies by now: with its active adapters, or merged ones.

    A plain module's own weight. Any other module is asked through its forward, with the identity as input, each time.

    Args:
        like: a tensor of the number type and on the device of the module's inputs.

    Raises:
        ValueError: the module cannot be called with such an input.
    """
    if is_plain_linear(module):
        assert isinstance(module.weight, Tensor)
        return module.weight
    offset, rows = _applied(module, torch.zeros(columns), like), _applied(module, torch.eye(columns), like)
    return (rows - offset).t().to(like.dtype)


def _applied(module: torch.nn.Module, rows: Tensor, like: Tensor) -> Tensor:
    """What a module makes of float32 `rows [..., columns]`, as `[..., outputs]` in float32."""
    inputs = rows.to(like.device, like.dtype)
    try:
        return module(inputs.view(1, -1, inputs.shape[-1]))[0].view(*rows.shape[:-1], -1).float()
    except Exception as error:
        raise ValueError(
            f"a {type(module).__name__} stands in for a linear layer whose weight is wanted, and cannot be asked for it "
            f"({error}): merge the adapter, or take another method"
        ) from error


@torch.no_grad()
def check_linear(module: torch.nn.Module, columns: int, like: Tensor, bias: bool = True) -> None:
    """Refuse by name a module that is no product with one matrix, such as a quantised one or dropout in training.

    Args:
        bias: a constant may be added.

    Raises:
        ValueError: names the module's class.
    """
    kind = type(module).__name__
    if is_plain_linear(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        if not weight.is_floating_point() or weight.shape[1:] != (columns,):
            raise ValueError(f"a {kind} has no plain floating-point weight of {columns} columns")
        if not bias and module.bias is not None:
            raise ValueError(f"a {kind} adds a bias")
        return
    weight = effective_weight(module, columns, like).float()
    offset = _applied(module, torch.zeros(columns), like)
    if not bias and bool((offset != 0).any()):
        raise ValueError(f"a {kind} adds a bias")
    some = torch.randn(4, columns, generator=torch.Generator().manual_seed(0))
    expected = some.to(like.device, like.dtype).float() @ weight.t() + offset
    error = (_applied(module, some, like) - expected).norm() / expected.norm().clamp(min=1e-12)
    if not error < (1e-4 if like.dtype in (torch.float32, torch.float64) else 3e-2):
        raise ValueError(f"a {kind} is no product with one matrix (off by {float(error):.1e})")


# ---------------------------------------------------------------------- multi-head latent attention


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """How an MLA layer's heads use what its cache holds: latents c `[d_c]` and rotated keys k `[d_r]`, one of each.

    A head's key is [U c, k] and its value V c (DeepSeek-V2, arXiv 2405.04434, section 2.1), so q [U c, k] = [q_n U, q_r]
    [c, k] and the sum of values is V times the sum of latents: attention of H query heads over one head's [c, k].

    Attributes:
        keys: U of each head, `[H, d_n, d_c]`.
        values: V of each head, `[H, d_v, d_c]`.
    """

    keys: Tensor
    values: Tensor

    def absorb(self, q: Tensor) -> Tensor:
        """Queries `[B, H, n, d_n + d_r]` as they are multiplied with [c, k], `[B, H, n, d_c + d_r]`."""
        width = self.keys.shape[1]
        return torch.cat([q[..., :width] @ self.keys, q[..., width:]], dim=-1)

    def expand(self, output: Tensor) -> Tensor:
        """Values `[B, H, n, d_v]` from sums of latents `[B, H, n, d_c]`."""
        return output @ self.values.transpose(1, 2)


def latent_attention(module: Any, like: Tensor) -> LatentAttention | None:
    """The two halves of an attention module's effective up-projection; None where it has none.

    Args:
        like: the module's queries.
    """
    up = getattr(module, "kv_b_proj", None)
    if up is None:
        return None
    still, values = int(module.qk_nope_head_dim), int(module.v_head_dim)
    weight = effective_weight(up, int(module.kv_lora_rank), like)
    heads = weight.view(-1, still + values, weight.shape[1])
    return LatentAttention(heads[:, :still], heads[:, still:])


def check_latent_attention(model: PreTrainedModel) -> None:
    """Refuse a model that holds latents and whose up-projection is no matrix that queries can be multiplied with.

    Raises:
        ValueError: by name.
    """
    if not holds_latents(model):
        return
    for module in base_model(model).modules():
        up = getattr(module, "kv_b_proj", None)
        if isinstance(up, torch.nn.Module):
            try:
                check_linear(up, int(module.kv_lora_rank), _input_of(up, model), bias=False)  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(
                    f"an MLA layer's kv_b_proj needs a plain weight without bias, and {error}: load the model unquantised"
                ) from None


# ---------------------------------------------------------------------- output projections


def output_projections(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """Per layer, the linear module that all query heads' outputs go through, weight `[hidden, H x D]`.

    Raises:
        ValueError: if a layer has none that we know, or one that is no product with a matrix of that shape.
    """
    config = text_config(model)
    if holds_latents(model):
        raise ValueError(
            f"{model.config.model_type!r} holds latents, which its output projection does not multiply: a method that "
            "weighs values by it does not go with it; take another method"
        )
    found: dict[int, torch.nn.Module] = {}
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    why = ""
    for module in base_model(model).modules():
        projection = getattr(module, "o_proj", None)
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and isinstance(projection, torch.nn.Module):
            try:
                check_linear(projection, width, _input_of(projection, model))
                found[layer] = projection
            except ValueError as error:
                why = f" ({error})"
    missing = sorted(set(range(config.num_hidden_layers)) - set(found))
    if missing:
        raise ValueError(
            f"{model.config.model_type!r} has no output projection that we know in layers {missing}{why}: a method that "
            f"weighs values by it needs an `o_proj` with a plain weight of {width} columns; take another method"
        )
    return found


def _input_of(module: torch.nn.Module, model: PreTrainedModel) -> Tensor:
    """An empty tensor like the inputs of a module of a model."""
    device = next((p.device for p in module.parameters() if not p.is_meta), model.device)
    return torch.empty(0, dtype=model.dtype, device=device)
