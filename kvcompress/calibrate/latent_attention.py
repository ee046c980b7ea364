"""Multi-head latent attention from a grouped-query layer: measured rotations, and one basis for keys and values.

TransMLA (Meng et al., 2025, arXiv 2502.07864) takes all KV heads of a layer as one latent. Per rotated pair of
dimensions the heads are turned among each other (RoRoPE: the same orthogonal matrix for both numbers of a pair commutes
with rotation), so that a few of the turned pairs carry most of the keys. Those keep their rotation, `rope_dims` numbers
in all; the others lose it, which is the approximation, and go into one latent together with the values, balanced so
that neither outweighs the other, by principal components of the outputs. MHA2MLA (Ji et al., 2025, arXiv 2502.14837)
picks pairs per head and decomposes weights instead. Here nothing is trained, so more has to keep its rotation than in
models that are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcompress.calibrate.calibration import SAMPLE
from kvcompress.calibrate.low_rank import Basis, CalibrationText, check_tokens, kept, outputs
from kvcompress.models import compat

Tensor = torch.Tensor

SIDE = "latent"  # of a layer: keys and values together


@dataclass(frozen=True, eq=False)
class JointBasis:
    """One layer as MLA at full rank; N = all numbers of keys and values that have no rotation left.

    Attributes:
        rope: float32 `[H_kv, D, rope_dims]`, from a key to the part that stays rotated.
        keys: float32 `[H_kv, D, N]`, from a key before rotation to the latent; divided by `ratio`.
        values: float32 `[H_kv, D_v, N]`.
        ratio: what keys were divided by, so that they are as long as values on average.
        energy: float64 `[N]`, mean square along each direction of the latent, largest first.
    """

    rope: Tensor
    keys: Tensor
    values: Tensor
    ratio: Tensor
    energy: Tensor

    def cut(self, rank: int) -> JointBasis:
        """The same with the first `rank` directions of the latent."""
        return replace(self, keys=self.keys[..., :rank], values=self.values[..., :rank])


def joint_moments(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """Mean of x x^T over the tokens, x = all heads' keys before rotation, then values: float64 per layer."""
    total: dict[int, Tensor] = {}
    for layer, keys, values in outputs(model, ids):
        x = torch.cat([keys.flatten(1), values.flatten(1)], dim=1).double()
        moment = (x.T @ x / ids.numel()).cpu()
        total[layer] = total[layer] + moment if layer in total else moment
    return total


def head_turns(moment: Tensor, heads: int, dim: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Per rotated pair, the orthogonal matrix that turns heads among each other, and what each turned pair carries.

    Args:
        moment: `[H_kv x D, H_kv x D]` of the keys before rotation.
        pairs: LongTensor `[F, 2]`, the dimensions of a head that are rotated together.

    Returns:
        `[F, H_kv, H_kv]`, columns the turned heads, most energy first; and that energy `[F, H_kv]`.
    """
    by_head = moment.view(heads, dim, heads, dim)
    both = sum(by_head[:, pairs[:, i], :, pairs[:, i]] for i in range(2))  # [F, H_kv, H_kv]: indexed dimensions lead
    assert isinstance(both, Tensor)
    energy, turns = torch.linalg.eigh(both)
    return turns.flip(-1), energy.flip(-1).clamp(min=0)


def joint_basis(moment: Tensor, heads: int, key_dim: int, value_dim: int, pairs: Tensor, rope_dims: int) -> JointBasis:
    """The basis of one layer from its joint second moment (see `joint_moments`).

    `rope_dims` is at most what the layer rotates; the turned pairs that carry most keep their rotation.
    """
    width = heads * key_dim
    turned = torch.eye(width, dtype=moment.dtype).view(heads, key_dim, heads, key_dim).clone()
    kept = torch.zeros(heads, key_dim, dtype=torch.bool)  # of the turned dimensions
    if len(pairs):
        turns, energy = head_turns(moment[:width, :width], heads, key_dim, pairs)
        for i in range(2):
            turned[:, pairs[:, i], :, pairs[:, i]] = turns
        best = energy.flatten().topk(rope_dims // 2).indices
        pair, head = best // heads, best % heads
        for i in range(2):
            kept[head, pairs[pair, i]] = True
    turned = turned.reshape(width, width)  # columns: turned heads' dimensions
    still = turned[:, ~kept.flatten()]
    both = torch.block_diag(still, torch.eye(heads * value_dim, dtype=moment.dtype))
    moment = both.T @ moment @ both
    n, diagonal = still.shape[1], moment.diagonal()
    ratio = torch.ones((), dtype=moment.dtype)
    if n:
        ratio = (diagonal[:n].mean() / diagonal[n:].mean().clamp(min=1e-30)).sqrt().clamp(min=1e-6)
    balance = torch.cat([ratio.reciprocal().expand(n), torch.ones(heads * value_dim, dtype=moment.dtype)])
    energy, vectors = torch.linalg.eigh(moment * balance * balance[:, None])
    vectors = vectors.flip(-1)
    return JointBasis(
        rope=turned[:, kept.flatten()].view(heads, key_dim, -1).float(),
        keys=(still @ vectors[:n] / ratio).view(heads, key_dim, -1).float(),
        values=vectors[n:].view(heads, value_dim, -1).float(),
        ratio=ratio.float(),
        energy=energy.flip(-1).clamp(min=0),
    )


def rotated_pairs(rotation: compat.Rotation) -> Tensor:
    """The dimensions of a head that a layer rotates together, LongTensor `[F, 2]`; empty where it rotates none."""
    if rotation.style == "none" or rotation.inv_freq is None:
        return torch.zeros(0, 2, dtype=torch.long)
    number = torch.arange(rotation.inv_freq.numel())
    return torch.stack([number, number + len(number)] if rotation.style == "half" else [2 * number, 2 * number + 1], 1)


def convert(
    model: Any, text: CalibrationText | Tensor, rope_dims: int | None = None, tokenizer: Any = None
) -> dict[int, JointBasis]:
    """Measure a model's full-attention layers, without looking for stored bases.

    `rope_dims` is of all heads together; None for as many as one head rotates.

    Raises:
        ValueError: `rope_dims` is odd, negative or more than the model rotates; fewer tokens than directions.
    """
    ids = text if isinstance(text, Tensor) else text.ids(model, tokenizer)
    heads, rotations = compat.kv_heads(model), compat.rotations(model)
    moments = joint_moments(model, ids)
    shapes = dict(zip(moments, compat.head_sizes(model), strict=True))
    found = {}
    most = max(2 * heads * len(rotated_pairs(rotations[layer])) for layer in moments)
    rope_dims = most // heads if rope_dims is None else rope_dims
    if rope_dims < 0 or rope_dims % 2 or rope_dims > most:
        raise ValueError(
            f"rope_dims={rope_dims}; an even number from 0 to {most}, which is all that this model rotates"
        )
    for layer, moment in moments.items():
        check_tokens(ids.numel(), len(moment), "keys and values of all heads together")
        pairs = rotated_pairs(rotations[layer])
        found[layer] = joint_basis(moment, heads, *shapes[layer], pairs, min(rope_dims, 2 * heads * len(pairs)))
    return found


def stored(
    model: Any, text: CalibrationText, rope_dims: int | None = None, tokenizer: Any = None
) -> dict[int, JointBasis]:
    """A model's bases from the user's folder, measured where it has none."""
    settings = {"form": "mla", "rope_dims": rope_dims}

    def measured() -> dict[str, Tensor]:
        bases = convert(model, text, rope_dims, tokenizer)
        return {f"{layer}.{name}": value for layer, basis in bases.items() for name, value in vars(basis).items()}

    tensors, names = kept(model, text, settings, measured), JointBasis.__dataclass_fields__
    layers = sorted({int(name.split(".")[0]) for name in tensors if name != SAMPLE})
    return {layer: JointBasis(**{name: tensors[f"{layer}.{name}"] for name in names}) for layer in layers}


def spectra(bases: Mapping[int, JointBasis]) -> dict[tuple[int, str], Basis]:
    """Energies of the latents as sides, for the allocation of ranks."""
    return {(layer, SIDE): Basis(torch.zeros(0), basis.energy[None]) for layer, basis in bases.items()}
