"""ThinK: the key channels that the prompt's last queries make least of are not held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvcompress.method import Codec, Method, Needs, Slots, Tensor

CHANNELS = "channels"


@dataclass(frozen=True)
class ThinKCodec(Codec):
    """Keys without some of their channels, chosen per row and KV head when the prompt ends; see `ThinK`."""

    name: ClassVar[str] = "think"

    pruned: float = 0.5
    window: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.pruned, bool) or not 0.0 <= self.pruned < 1.0:
            raise ValueError(f"pruned={self.pruned!r} is a share of the key channels: from 0 to below 1")
        if self.window < 1:
            raise ValueError(f"window={self.window}; at least 1 query looks at the keys")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        if CHANNELS not in slots.state:
            slots.state[CHANNELS] = self._chosen(keys, slots)
        return {"keys": keys.gather(-1, _over(slots.state[CHANNELS].long(), keys)), "values": values}

    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        held, values = channels["keys"], channels["values"]
        keys = held.new_zeros(*held.shape[:-1], values.shape[-1])
        return keys.scatter(-1, _over(slots.by_segment(slots.state[CHANNELS]).long(), held), held), values

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        """The same channels of the query: those that are not held would be multiplied with 0."""
        chosen = slots.state[CHANNELS].long()
        return q.gather(-1, _over(chosen.repeat_interleave(q.shape[1] // chosen.shape[1], dim=1), q))

    def read(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        return channels["keys"], channels["values"]

    def _chosen(self, keys: Tensor, slots: Slots) -> Tensor:
        """Channels to keep, ascending, int16 `[B, H_kv, kept]`: by |queries of a channel| x |its keys| (equation 5)."""
        squares = keys.float().square()
        strength = (squares if slots.taken is None else squares.where(slots.taken[..., None], 0.0)).sum(2)
        if slots.queries is not None:
            queries, at = slots.queries
            squares = queries.float().square() * (at >= 0)[:, None, :, None]
            strength = strength * squares.sum(2).unflatten(1, (slots.heads, -1)).mean(2)
        kept = max(1, round((1.0 - self.pruned) * keys.shape[-1]))
        order = torch.sort(strength, dim=-1, descending=True, stable=True).indices[..., :kept]
        return order.sort(-1).values.to(torch.int16)


def _over(chosen: Tensor, like: Tensor) -> Tensor:
    """Channels `[B, h, kept]` of every slot of `like [B, h, n, ...]`."""
    return chosen[:, :, None].expand(-1, -1, like.shape[2], -1)


@dataclass(frozen=True, kw_only=True)
class ThinK(Method):
    """Hold keys without the channels that matter least (Xu et al., 2025, arXiv 2407.21018, section 3.2).

    When a prompt ends, each channel of a KV head is as strong as the product of its norms over the last `window`
    queries and over the keys that are kept; the weakest `pruned` of them are dropped, of these keys and of later ones.
    Values are held whole. With eviction: `SnapKV(budget=0.25, codec=ThinK(pruned=0.4))`. `budget` has no effect.

    Attributes:
        pruned: share of the key channels that are dropped; the paper shows 0.3 to 0.6.
        window: most recent queries that choose.
    """

    family = "low rank"
    keeps = "every token, keys without their weakest channels"
    source = "arXiv 2407.21018; SalesforceAIResearch/ThinK and kvpress"
    differences = "channels are really dropped; keys of the window and of later tokens lose them too"

    budget_kind: ClassVar[Literal["none"]] = "none"

    pruned: float = 0.5
    window: int = 32

    def check(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        return ThinKCodec(self.pruned, self.window)
