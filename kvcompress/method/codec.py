"""Codec: the part that encodes kept keys and values, and the positions, heads and rotation that it is given of each slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch

from kvcompress.method.field_kinds import CheckedFields
from kvcompress.method.view import Needs, State, Tensor

Table = tuple[Tensor, Tensor]  # cosines and sines `[B, h, n, R / 2]` by which keys are rotated


class Rows(Protocol):
    """Rows `[B, h, n, W]` that attention multiplies with without having them all (`kernels.coded_rows.Rows`)."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    def dot(self, q: Tensor) -> Tensor: ...

    def weigh(self, p: Tensor) -> Tensor: ...

    def whole(self) -> Tensor: ...


class KeyRotation(Protocol):
    """How a layer rotates its keys (`compat.Rotation`)."""

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor: ...

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor: ...

    def table(self, positions: Tensor) -> Table | None: ...

    def rotate_by(self, keys: Tensor, table: Table | None) -> Tensor: ...


@dataclass(frozen=True)
class Slots:
    """The slots of one layer that a codec encodes or reads.

    Attributes:
        layer: index of the layer in the model.
        rotated: `[B, H_kv or 1, n]`, the position id by which each slot's key was rotated; 0 where a slot is empty.
        state: per-layer tensors of the codec, dim 0 the batch row: kept, forked, reordered and counted with the codes.
            What a codec puts there when it first encodes it finds again whenever it encodes or reads.
        heads: KV heads.
        taken: bool `[B, H_kv or 1, n]`, slots that hold a token; the others' keys and values mean nothing.
        dtype: of the model's keys and values.
        queries: queries `[B, H, w, D]` of the prompt's last tokens and their positions `[B, w]` (-1: the row has fewer),
            where the codec's `needs` ask for a window and a prompt has just ended; else None.
        table: cosines and sines of the rotation, where they were worked out beforehand (`with_table`).
        owners: where slots are read in lanes, LongTensor `[lanes]`: `row * heads + head` of each. Channels then are
            `[1, lanes, slots, ...]`.
    """

    layer: int
    rotated: Tensor
    state: State = field(default_factory=dict)
    heads: int = 1
    dtype: torch.dtype = torch.float32
    queries: tuple[Tensor, Tensor] | None = None
    owners: Tensor | None = None
    rotation: KeyRotation | None = None
    taken: Tensor | None = None
    table: Table | None = None

    def rotate(self, keys: Tensor) -> Tensor:
        """Keys `[B, H_kv or 1, n, D]` as attention sees them, from keys before rotation."""
        rotation = self._known()
        return rotation.rotate(keys, self.rotated) if self.table is None else rotation.rotate_by(keys, self.table)

    def unrotate(self, keys: Tensor) -> Tensor:
        """Keys before rotation, from keys `[B, H_kv, n, D]` as the model made them."""
        return self._known().unrotate(keys, self.rotated)

    def _known(self) -> KeyRotation:
        if self.rotation is None:
            raise ValueError("a codec that turns keys back says so: needs_rotation = True")
        return self.rotation

    def with_table(self) -> Slots:
        """These slots with the cosines and sines of their rotation, for keys that are rotated a part at a time."""
        return replace(self, table=self._known().table(self.rotated))

    def part(self, heads: slice, slots: slice) -> Slots:
        """Some of these slots: of all heads, or of some lanes."""
        rotated, taken, owners = self.rotated, self.taken, self.owners
        return replace(
            self,
            rotated=_cut(rotated, heads, slots),
            taken=None if taken is None else _cut(taken, heads, slots),
            table=None
            if self.table is None
            else (_cut(self.table[0], heads, slots), _cut(self.table[1], heads, slots)),
            owners=None if owners is None else owners[heads],
        )

    def by_head(self, factors: Tensor) -> Tensor:
        """`[H_kv, ...]` of each head as `[1, H_kv, ...]`, or as `[1, lanes, ...]` where slots lie in lanes."""
        return factors[None] if self.owners is None else factors.index_select(0, self.owners % self.heads)[None]

    def by_segment(self, values: Tensor) -> Tensor:
        """`[B, H_kv, ...]` of each row and head as it is, or as `[1, lanes, ...]` where slots lie in lanes."""
        return values if self.owners is None else values.flatten(0, 1).index_select(0, self.owners)[None]


class Codec(CheckedFields, ABC):
    """In what form kept keys and values are held: named channels whose dim 2 is the slot.

    A codec takes effect as an eviction does: a prompt attends to exact keys and values and scorers see them; what is
    kept is encoded, layer by layer, as soon as the layer's selection is final. Tokens that come later are encoded at
    once, unless the codec holds some of them back (`GroupedCodec`). Codes once stored are never encoded again.

    Attributes:
        needs_rotation: `Slots.rotate` and `unrotate` are wanted. Refused for models whose rotation depends on length.
        absorbed: every query, not single ones alone, is answered through `query`, `read` and `expand`, tokens of its own
            forward included: the codec changes how attention is computed, not only what it is given.
        joint: heads share what is held, so they must hold the same tokens: no scorer goes with it.
        in_lanes: single queries may read channels where they lie, `[1, lanes, slots, ...]`, in ragged layers.
        scales: names of channels that are scales and zeros, counted as such.
    """

    name: ClassVar[str]
    needs_rotation: ClassVar[bool] = False
    in_lanes: ClassVar[bool] = True
    scales: ClassVar[tuple[str, ...]] = ()

    @property
    def by_prompt(self) -> bool:
        """What a token is held as depends on the prompt's later tokens, as of `Method.cache_reuse`."""
        return self.needs.window > 0

    @property
    def absorbed(self) -> bool:
        return False

    @property
    def joint(self) -> bool:
        return False

    @property
    def needs(self) -> Needs:
        """A window of the prompt's last queries, where encoding depends on them. Nothing else is served."""
        return Needs()

    def bind(self, model: Any) -> Codec:
        """This codec ready for a model: one that needs data of the model returns a copy with it.

        Such data goes into fields declared with `repr=False, compare=False`.

        Raises:
            ValueError: it does not fit the model's shapes, or there is no data, naming the fix.
        """
        return self

    def fingerprint(self) -> dict[str, str]:
        """Facts beside the settings that change results, as of `Method.fingerprint`."""
        return {}

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        """`[B, H_kv, n, D]` each → channels `[B, H_kv, n, ...]`, or `[B, 1, n, ...]` for what all heads share."""

    @abstractmethod
    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        """Channels → keys and values `[B, H_kv, n, D]` as attention, scorers and readers see them: rotated."""

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        """What a single query `q [B, H, 1, D]` is multiplied as with the keys of `read`, `[B, H, 1, D']`.

        `slots` speaks of the query: its `rotated` is `[B, 1, 1]`.
        """
        return q

    def read(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys `[B, H_kv or 1, n, D']` and values `[B, H_kv or 1, n, D_v']` that a single query attends to.

        By default those of `decode`; a codec that attends in latents returns those.
        """
        return self.decode(channels, slots)

    def rows(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Rows, Rows] | None:
        """Keys and values of `read` as `kernels.coded_rows` attends to them, made a block at a time.

        None, the default, where `read` gives no more numbers than are held.
        """
        return None

    def expand(self, output: Tensor, slots: Slots) -> Tensor:
        """The output `[B, H, 1, D_v]` of a single query from its weighted sum of the values of `read`."""
        return output


class GroupedCodec(Codec):
    """A codec that encodes tokens in groups and holds the most recent ones as they are until a group is full.

    Keys and values are encoded apart, and may be held back differently. Eviction drops whole groups of `group` coded
    tokens, or exact tokens one by one.

    Attributes:
        packed: channels are `codes` of `bits` as `packing.pack` makes them, `scale` and `zero`: of keys along groups of
            `group` tokens, of values along groups of `group` channels. On a GPU they are read as they are.
    """

    in_lanes: ClassVar[bool] = False
    packed: ClassVar[bool] = False
    group: int

    @abstractmethod
    def due(self, kind: str, held: int) -> int:
        """How many of the oldest of `held` exact tokens to encode now, of `kind` "keys" or "values".

        A multiple of `group` for keys. Asked when a forward's attention is done.
        """

    @abstractmethod
    def encode_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """`[b, h, n, D]` → channels `[b, h, n or n / group, ...]`, by token or by group."""

    @abstractmethod
    def decode_keys(self, channels: dict[str, Tensor]) -> Tensor:
        """Channels of whole groups → `[b, h, n, D]` float32."""

    @abstractmethod
    def encode_values(self, values: Tensor) -> dict[str, Tensor]:
        """`[b, h, n, D]` → channels `[b, h, n, ...]`."""

    @abstractmethod
    def decode_values(self, channels: dict[str, Tensor]) -> Tensor:
        """Channels → `[b, h, n, D]` float32."""

    def encode(self, keys, values, slots):
        return {f"key_{n}": x for n, x in self.encode_keys(keys).items()} | {
            f"value_{n}": x for n, x in self.encode_values(values).items()
        }

    def decode(self, channels, slots):
        keys = {n.removeprefix("key_"): x for n, x in channels.items() if n.startswith("key_")}
        values = {n.removeprefix("value_"): x for n, x in channels.items() if n.startswith("value_")}
        return self.decode_keys(keys).to(slots.dtype), self.decode_values(values).to(slots.dtype)


def _cut(x: Tensor, heads: slice, slots: slice) -> Tensor:
    return x[:, heads if x.shape[1] > 1 else slice(None), slots]


@dataclass(frozen=True)
class Plain(Codec):
    """Keys and values as the model made them."""

    name: ClassVar[str] = "plain"

    def encode(self, keys, values, slots):
        return {"keys": keys, "values": values}

    def decode(self, channels, slots):
        return channels["keys"], channels["values"]


def overwritten(held: Tensor, new: Tensor, real: Tensor | None, sorted_out: bool) -> Tensor:
    """`held [B, H, P, D]` with its last slots replaced by new tokens `[B, H, n, D]`.

    Args:
        real: bool `[B, n]`, which of them are no padding; None for all.
        sorted_out: padding was left out when they were stored.
    """
    n, held = new.shape[2], held.clone()
    if real is None or not sorted_out:
        held[:, :, held.shape[2] - n :] = new
        return held
    order = torch.sort(real.to(torch.uint8), dim=1, stable=True).indices.to(new.device)
    last = new.gather(2, order[:, None, :, None].expand_as(new))[:, :, -min(n, held.shape[2]) :]
    beyond = torch.arange(n)[None] >= n - real.sum(1, keepdim=True).cpu()
    mask = beyond[:, None, -last.shape[2] :, None].to(new.device)
    tail = held[:, :, held.shape[2] - last.shape[2] :]
    tail.copy_(torch.where(mask, last, tail))
    return held
