"""LowRank: keys and values held as latents of low rank, as Palu or as multi-head latent attention does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch

from kvcompress.calibrate import latent_attention, low_rank
from kvcompress.calibrate.low_rank import Allocation, Basis, CalibrationText, Side, allocate
from kvcompress.kernels.coded_rows import CodedRows, MadeRows, Rows, RowsBeside, levels_of, whole_numbers
from kvcompress.method import Codec, Method, Plain, Slots, Tensor
from kvcompress.method.latents import GroupLatents, JointLatent, Latents, spread
from kvcompress.method.packing import check_bits, pack, quantise

Form = Literal["palu", "mla"]
POSITION = 4  # bytes of a token's position in a layer, where all heads hold the same
BITS = (2, 4, 8)
SCALES = 4  # bytes of a scale and a zero in float16
MARKS = ("_scale", "_zero")


@dataclass(frozen=True)
class LowRankCodec(Codec):
    """Latents instead of keys and values; see `LowRank`, whose fields these are.

    Attributes:
        budget: share of a full cache's bytes, positions and scales counted, in (0, 1].
        layers: what was measured on the model, by layer; `bind` fills it in.
    """

    name: ClassVar[str] = "lowrank"
    needs_rotation: ClassVar[bool] = True
    scales: ClassVar[tuple[str, ...]] = tuple(
        name + mark for name in ("key_latent", "value_latent", "latent") for mark in MARKS
    )

    budget: float = 0.5
    form: Form = "palu"
    head_group: int = 1
    rank: int | None = None
    rope_dims: int | None = None
    allocation: Allocation = "energy"
    bits: int | None = None
    text: str = low_rank.OWN
    tokens: int = 4096
    length: int = 256
    seed: int = 0
    layers: Mapping[int, Latents] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, float) or not 0.0 < self.budget <= 1.0:
            raise ValueError(f"budget={self.budget!r} of LowRank is a share of a full cache's bytes: a float in (0, 1]")
        if self.form not in ("palu", "mla"):
            raise ValueError(f"form={self.form!r}; valid: palu, mla")
        if self.allocation not in ("uniform", "energy"):
            raise ValueError(f"allocation={self.allocation!r}; valid: uniform, energy")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank={self.rank} holds nothing; at least 1, or None for what the budget allows")
        if self.head_group < 1:
            raise ValueError(f"head_group={self.head_group}; at least 1 KV head")
        if self.form == "mla" and self.head_group != 1:
            raise ValueError(f"head_group={self.head_group} is of form=palu; form=mla holds one latent for all heads")
        if self.form == "palu" and self.rope_dims is not None:
            raise ValueError(f"rope_dims={self.rope_dims} is of form=mla; form=palu rotates whole keys")
        if self.bits is not None:
            check_bits(self.bits, BITS)
        self.calibration  # noqa: B018  (checks tokens and length)

    @property
    def calibration(self) -> CalibrationText:
        return CalibrationText(self.text, self.tokens, self.length, self.seed)

    def fingerprint(self) -> dict[str, str]:
        content = self.calibration.content
        return {} if content is None else {"text": content[:16]}

    @property
    def joint(self) -> bool:
        return self.form == "mla" or self.head_group > 1

    @property
    def absorbed(self) -> bool:
        return self.form == "mla"

    def bind(self, model: Any) -> Codec:
        if self.layers is not None:
            return self
        layers: dict[int, Latents] = {}
        if self.form == "palu":
            factors = low_rank.stored(model, self.calibration, self.head_group)
            ranks = self.ranks(factors.sides, model.dtype.itemsize)
            for layer in factors.layers:
                keys, values = (factors.sides[layer, name].cut(ranks[layer, name]) for name in ("keys", "values"))
                layers[layer] = GroupLatents(self._spread(keys), self._spread(values), self.head_group)
        else:
            bases = latent_attention.stored(model, self.calibration, self.rope_dims)
            ranks = self.ranks(latent_attention.spectra(bases), model.dtype.itemsize, bases)
            for layer, basis in bases.items():
                cut = basis.cut(ranks[layer, latent_attention.SIDE])
                layers[layer] = JointLatent(
                    cut.rope, self._spread(cut.keys), self._spread(cut.values), float(cut.ratio) ** 2
                )
        return replace(self, layers=layers)

    def _spread(self, basis: Tensor) -> Tensor:
        """A basis `[..., rank]` of the same space, turned so that its latents quantise well, where they are quantised."""
        return basis if self.bits is None else basis @ spread(basis.shape[-1])

    def ranks(
        self, sides: Mapping[Side, Basis], item: float, bases: Mapping[int, latent_attention.JointBasis] | None = None
    ) -> dict[Side, int]:
        """Rank per layer and side: what was asked for, or as much as the budget's bytes allow.

        Args:
            sides: the bases to choose among.
            item: bytes per number of the model's keys and values.
            bases: of form=mla, for the numbers that are held beside the latents.

        Raises:
            ValueError: a rank above full, or a budget too small for the least rank.
        """
        unit = self.head_group * (1 if self.bits is None else 8 // self.bits)
        if self.rank is not None:
            most = max(basis.energy.shape[1] for basis in sides.values())
            if self.rank > most or self.rank % unit:
                raise ValueError(
                    f"rank={self.rank}; this model's full rank is {most} for head_group={self.head_group}: at most that, and a "
                    f"multiple of {unit}"
                )
            return {side: min(self.rank, basis.energy.shape[1]) for side, basis in sides.items()}
        layers, beside = len({layer for layer, _ in sides}), 0
        if bases is None:
            full = sum(basis.energy.numel() for basis in sides.values())
            latents = sum(basis.energy.shape[0] * self.head_group for basis in sides.values())
        else:
            full = sum(b.keys.shape[0] * (b.keys.shape[1] + b.values.shape[1]) for b in bases.values())
            beside, latents = sum(b.rope.shape[-1] for b in bases.values()), layers
        whole, fixed = full * item, POSITION * layers + beside * item
        if self.bits is not None:
            fixed, item = fixed + SCALES * latents, self.bits / 8
        numbers, least = (self.budget * whole - fixed) / item, unit * sum(b.energy.shape[0] for b in sides.values())
        if numbers < least:
            share = math.ceil(1000 * (fixed + least * item) / whole) / 1000
            raise ValueError(
                f"budget={self.budget} is too small: rank {unit} in all layers takes {least} numbers per token, with what is "
                f"held beside them {share} of a full cache's bytes; "
                + (f"budget={share} is the least" if share <= 1.0 else "lower rope_dims")
            )
        return allocate(sides, unit, numbers, self.allocation)

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        latents = self._of(slots).encode(keys, values, slots)
        if self.bits is None:
            return latents
        channels: dict[str, Tensor] = {}
        for name, value in latents.items():
            rotated = self._rotated(slots)
            if rotated:
                channels["rope"], value = value[..., :rotated].contiguous(), value[..., rotated:]
            codes, scale, zero = quantise(value, self.bits, -1)
            channels |= {name: pack(codes, self.bits), name + MARKS[0]: scale, name + MARKS[1]: zero}
        return channels

    def _rotated(self, slots: Slots) -> int:
        """Numbers in front of a latent that are no part of it: they keep their rotation, and are not quantised."""
        layer = self._of(slots)
        return layer.rope_dims if isinstance(layer, JointLatent) else 0

    def rows(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Rows, Rows] | None:
        layer = self._of(slots)
        if isinstance(layer, JointLatent):
            if self.bits is None:
                return None
            latent = self._coded("latent", channels)
            return (RowsBeside((CodedRows(channels["rope"]), latent)) if "rope" in channels else latent), latent
        key_latent, value_latent = (self._coded(name, channels) for name in ("key_latent", "value_latent"))
        ready, lanes = slots.with_table(), slots.owners is not None
        batch, heads, n, _ = key_latent.shape
        shape, device = (batch, heads, n, layer.head_dim), key_latent.codes.device
        keys = MadeRows(lambda at: layer.keys_of(key_latent.numbers(at), ready.part(*at)), shape, device, lanes)
        if layer.group == 1:
            return keys, value_latent
        return keys, MadeRows(
            lambda at: layer.values_of(value_latent.numbers(at), slots.part(*at)), shape, device, lanes
        )

    def _coded(self, name: str, channels: dict[str, Tensor]) -> CodedRows:
        """One latent as it is held."""
        if self.bits is None:
            return CodedRows(channels[name])
        meaning = None if self.bits == 8 else levels_of(whole_numbers, self.bits)
        scale, zero = (channels[name + mark] for mark in MARKS)
        return CodedRows(channels[name], scale, zero, meaning)

    def _latents(self, channels: dict[str, Tensor], slots: Slots) -> dict[str, Tensor]:
        if self.bits is None:
            return channels
        found: dict[str, Tensor] = {}
        for name in ("key_latent", "value_latent", "latent"):
            if name in channels:
                value = self._coded(name, channels).whole().to(slots.dtype)
                found[name] = torch.cat([channels["rope"], value], dim=-1) if "rope" in channels else value
        return found

    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        return self._of(slots).decode(self._latents(channels, slots), slots)

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        return self._of(slots).query(q, slots)

    def read(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        return self._of(slots).read(self._latents(channels, slots), slots)

    def expand(self, output: Tensor, slots: Slots) -> Tensor:
        return self._of(slots).expand(output)

    def _of(self, slots: Slots) -> Latents:
        assert self.layers is not None, "bind() has measured the model"
        return self.layers[slots.layer]


@dataclass(frozen=True, kw_only=True)
class LowRank(Method):
    """Hold every token, in fewer numbers: projections of keys and values on the directions that text uses most.

    `form="palu"` (Chang et al., 2025, arXiv 2407.21118): a latent per group of KV heads and side; keys are put together
    and rotated when they are read, sums of value latents are expanded once per query. `form="mla"`: a grouped-query
    model as multi-head latent attention (TransMLA, arXiv 2502.07864; MHA2MLA, arXiv 2502.14837): one latent for keys
    and values of all heads, `rope_dims` numbers of the keys keep their rotation, queries are multiplied with what is
    held. What the projections are is measured on the model once, and kept in the user's cache folder.

    Attributes:
        budget: share of a full cache's bytes, in (0, 1]; 1.0 holds keys and values as they are, unless `rank` or
            `bits` is set.
        form: "palu" or "mla".
        head_group: KV heads that share a latent of form=palu; the paper takes 4. With eviction only 1.
        rank: of every latent, instead of what a budget allows: there is none then, and a sweep's budgets are one cell.
        rope_dims: numbers of all heads' keys together that keep their rotation in form=mla; None for one head's.
        bits: 2, 4 or 8 quantise every token's latent, spread by a Hadamard matrix (Palu, section 3.3), with a scale and
            a zero; None holds it in the model's own precision. The rotated part of form=mla is never quantised.
        allocation: "uniform" ranks, or by "energy" (see `kvcompress.calibrate.low_rank.allocate`).
        text, tokens, length, seed: what is measured on (see `kvcompress.calibrate.low_rank.CalibrationText`).
    """

    family = "low rank"
    keeps = "every token, projected on the directions that keys and values of a text use most"
    needs_data = "bases of the model, measured when first used"
    source = "arXiv 2407.21118, 2502.07864; shadowpa0327/Palu, fxmeng/TransMLA"
    differences = "bytes are held, not emulated; no weights changed; ranks by discarded energy, not Fisher information"

    budget_kind: ClassVar[Literal["bytes"]] = "bytes"

    budget: float = 0.5
    form: Form = "palu"
    head_group: int = 1
    rank: int | None = None
    rope_dims: int | None = None
    allocation: Allocation = "energy"
    bits: int | None = None
    text: str = low_rank.OWN
    tokens: int = 4096
    length: int = 256
    seed: int = 0

    def check(self) -> None:
        if self.rank is not None:
            object.__setattr__(self, "budget_kind", "none")
        self._codec()

    def make_codec(self) -> Codec:
        return Plain() if self.budget == 1.0 and self.rank is None and self.bits is None else self._codec()

    def _codec(self) -> LowRankCodec:
        return LowRankCodec(**{item.name: getattr(self, item.name) for item in fields(LowRankCodec) if item.repr})
