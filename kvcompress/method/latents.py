"""What a layer's keys and values become when they are held as latents, and how attention reads them: two forms.

`GroupLatents` (Palu): keys and values of a group of KV heads on their own bases; keys are put together again and
rotated when they are read. `JointLatent` (MLA): one latent for the keys and values of all heads and a small rotated
part beside it; queries are turned to where they can be multiplied with what is held.
"""

from __future__ import annotations

import torch

from kvcompress.common.constants import Constant
from kvcompress.method.codec import Slots

Tensor = torch.Tensor


def grouped(x: Tensor, group: int) -> Tensor:
    """`[..., H_kv, D]` → `[..., H_kv / group, group * D]`: a group's heads side by side."""
    return x.unflatten(-2, (-1, group)).flatten(-2)


def spread(rank: int) -> Tensor:
    """An orthogonal matrix `[rank, rank]` that spreads each direction over all: numbers of equal size quantise best.

    Hadamard's where there is one of that size by doubling; else Hartley's, whose entries are all below sqrt(2 / rank).
    """
    if rank & (rank - 1):
        angle = torch.arange(rank, dtype=torch.float64).outer(torch.arange(rank, dtype=torch.float64)) % rank
        turn = angle * (2 * torch.pi / rank)
        return ((turn.cos() + turn.sin()) / rank**0.5).float()
    matrix = torch.ones(1, 1)
    while len(matrix) < rank:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / rank**0.5


class GroupLatents:
    """Per group of KV heads, a latent of the keys before rotation and one of the values.

    A latent is held in as many equal parts as heads share it, `[B, H_kv, n, rank / group]`: every head has a channel.

    Attributes:
        keys, values: orthonormal columns `[G, group x D, rank]`.
        head_dim: numbers of a key and of a value.
    """

    def __init__(self, keys: Tensor, values: Tensor, group: int):
        self.keys, self.values, self.group = Constant(keys), Constant(values), group
        self.head_dim = keys.shape[1] // group

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        turned = slots.unrotate(keys.float())
        found = {
            "key_latent": self._project(turned, self.keys),
            "value_latent": self._project(values.float(), self.values),
        }
        return {name: value.to(slots.dtype) for name, value in found.items()}

    def decode(self, latents: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        return self.keys_of(latents["key_latent"], slots), self.values_of(latents["value_latent"], slots)

    def keys_of(self, latent: Tensor, slots: Slots) -> Tensor:
        """Keys `[B, H_kv, n, D]` as attention sees them."""
        return slots.rotate(self._expanded(latent, self.keys, slots))

    def values_of(self, latent: Tensor, slots: Slots) -> Tensor:
        return self._expanded(latent, self.values, slots)

    def read(self, latents: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys rotated; values as they are held where every head has its own latent."""
        if self.group > 1:  # a latent of several heads is as wide as they are together: expanding it is less to read
            return self.decode(latents, slots)
        return self.keys_of(latents["key_latent"], slots), latents["value_latent"]

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        return q

    def expand(self, output: Tensor) -> Tensor:
        """`[B, H, n, rank]` → `[B, H, n, D]`, once per query instead of once per value."""
        if self.group > 1:
            return output
        factor = self.values.like(output)
        heads = output.unflatten(1, (factor.shape[0], -1))
        return (heads @ factor[:, None].transpose(-1, -2)).flatten(1, 2)

    def _project(self, x: Tensor, factor: Constant) -> Tensor:
        if self.group == 1:
            return x @ factor.like(x)
        joined = grouped(x.transpose(1, 2), self.group).transpose(1, 2) @ factor.like(x)
        return joined.unflatten(-1, (self.group, -1)).transpose(2, 3).flatten(1, 2)

    def _expanded(self, latent: Tensor, factor: Constant, slots: Slots) -> Tensor:
        if self.group == 1:
            return latent @ slots.by_head(factor.like(latent)).transpose(-1, -2)
        joined = latent.unflatten(1, (-1, self.group)).transpose(2, 3).flatten(-2)
        whole = joined @ factor.like(latent).transpose(-1, -2)
        return whole.unflatten(-1, (self.group, -1)).transpose(2, 3).flatten(1, 2)


class JointLatent:
    """One latent of all heads' keys and values, and a part of the keys that keeps its rotation.

    Held is `[B, 1, n, rope + rank]`. With a_j = rope[j], c_j = keys[j], e_j = values[j] of KV head j, the rotated part
    is sum k_j a_j and the latent sum k0_j c_j + v_j e_j, k0 the key before rotation. A query of head j is multiplied as
    [q a_j, q0 c_j s] (s = `scale`, which undoes the balance of keys and values), and what comes of the latent is turned
    to values by e_j.

    Attributes:
        rope: `[H_kv, D, rope]`; keys `[H_kv, D, rank]`; values `[H_kv, D_v, rank]`.
    """

    def __init__(self, rope: Tensor, keys: Tensor, values: Tensor, scale: float):
        self.rope, self.keys, self.values, self.scale = Constant(rope), Constant(keys), Constant(values), scale

    @property
    def rope_dims(self) -> int:
        return self.rope.value.shape[-1]

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        keys, values = keys.float(), values.float()
        turned = slots.unrotate(keys)
        latent = _sum_heads(turned, self.keys) + _sum_heads(values, self.values)
        return {"latent": torch.cat([_sum_heads(keys, self.rope), latent], dim=-1).to(slots.dtype)}

    def decode(self, latents: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys `[B, H_kv, n, D]`, the part without rotation turned as if it had one, and values.

        For what looks at keys alone; attention reads latents.
        """
        rope, latent = latents["latent"][..., : self.rope_dims], latents["latent"][..., self.rope_dims :]
        still = (latent * self.scale) @ self.keys.like(latent).transpose(-1, -2)
        return rope @ self.rope.like(rope).transpose(-1, -2) + slots.rotate(still), latent @ self.values.like(
            latent
        ).transpose(-1, -2)

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        heads = self.rope.value.shape[0]
        moving, still = (
            (x.unflatten(1, (heads, -1)) @ factor.like(q)[:, None]).flatten(1, 2)
            for x, factor in ((q, self.rope), (slots.unrotate(q), self.keys))
        )
        return torch.cat([moving, still * self.scale], dim=-1)

    def read(self, latents: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        held = latents["latent"]
        return held, held[..., self.rope_dims :]

    def expand(self, output: Tensor) -> Tensor:
        """`[B, H, n, rank]` → `[B, H, n, D_v]`."""
        factor = self.values.like(output)
        return (output.unflatten(1, (factor.shape[0], -1)) @ factor[:, None].transpose(-1, -2)).flatten(1, 2)


def _sum_heads(x: Tensor, factor: Constant) -> Tensor:
    """`[B, H_kv, n, D]` through `[H_kv, D, w]`, summed over heads: `[B, 1, n, w]`."""
    return torch.einsum("bhnd,hdw->bnw", x, factor.like(x))[:, None]


Latents = GroupLatents | JointLatent
