"""LowRank: keys and values held as latents of low rank, as Palu or as multi-head latent attention does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from kvcompress import lowrank, mla
from kvcompress.latents import GroupLatents, Latents
from kvcompress.lowrank import Allocation, Basis, CalibrationText, Side, allocate
from kvcompress.method import Codec, Method, Plain, Slots, Tensor

Form = Literal["palu", "mla"]
POSITION = 4  # bytes of a token's position in a layer, where all heads hold the same


@dataclass(frozen=True)
class LowRankCodec(Codec):
    """Latents instead of keys and values; see `LowRank`, whose fields these are.

    Attributes:
        budget: share of a full cache's bytes, positions and scales counted, in (0, 1].
        layers: what was measured on the model, by layer; `bind` fills it in.
    """

    name: ClassVar[str] = "lowrank"
    needs_rotation: ClassVar[bool] = True

    budget: float = 0.5
    form: Form = "palu"
    group: int = 1
    rank: int | None = None
    rope_dims: int | None = None
    allocation: Allocation = "energy"
    text: str = lowrank.OWN
    tokens: int = 4096
    length: int = 512
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
        if self.group < 1:
            raise ValueError(f"group={self.group}; at least 1 KV head")
        if self.form == "mla" and self.group != 1:
            raise ValueError(f"group={self.group} is of form=palu; form=mla holds one latent for all heads")
        if self.form == "palu" and self.rope_dims is not None:
            raise ValueError(f"rope_dims={self.rope_dims} is of form=mla; form=palu rotates whole keys")
        self.calibration  # noqa: B018  (checks tokens and length)

    @property
    def calibration(self) -> CalibrationText:
        return CalibrationText(self.text, self.tokens, self.length, self.seed)

    @property
    def joint(self) -> bool:
        return self.form == "mla" or self.group > 1

    @property
    def absorbed(self) -> bool:
        return self.form == "mla"

    def bind(self, model: Any) -> Codec:
        if self.layers is not None:
            return self
        layers: dict[int, Latents] = {}
        if self.form == "palu":
            factors = lowrank.stored(model, self.calibration, self.group)
            ranks = self.ranks(factors.sides, model.dtype.itemsize)
            for layer in factors.layers:
                keys, values = (factors.sides[layer, name].cut(ranks[layer, name]) for name in ("keys", "values"))
                layers[layer] = GroupLatents(keys, values, self.group)
        else:
            bases = mla.stored(model, self.calibration, self.rope_dims)
            ranks = self.ranks(mla.spectra(bases), model.dtype.itemsize, bases)
            layers |= {layer: basis.latent(ranks[layer, mla.SIDE]) for layer, basis in bases.items()}
        return replace(self, layers=layers)

    def ranks(
        self, sides: Mapping[Side, Basis], item: int, bases: Mapping[int, mla.JointBasis] | None = None
    ) -> dict[Side, int]:
        """Rank per layer and side: what was asked for, or as much as the budget's bytes allow.

        Args:
            sides: the bases to choose among.
            item: bytes per number of the model's keys and values.
            bases: of form=mla, for the numbers that are held beside the latents.

        Raises:
            ValueError: a rank above full, or a budget too small for the least rank.
        """
        unit = self.group
        if self.rank is not None:
            most = max(basis.energy.shape[1] for basis in sides.values())
            if self.rank > most or self.rank % unit:
                raise ValueError(
                    f"rank={self.rank}; this model's full rank is {most} for group={self.group}: at most that, and a "
                    f"multiple of {unit}"
                )
            return {side: min(self.rank, basis.energy.shape[1]) for side, basis in sides.items()}
        layers = len({layer for layer, _ in sides})
        beside = 0
        if bases is None:
            full = sum(basis.energy.numel() for basis in sides.values())
        else:
            full = sum(b.keys.shape[0] * (b.keys.shape[1] + b.values.shape[1]) for b in bases.values())
            beside = sum(b.rope.shape[-1] for b in bases.values())
        numbers = (self.budget * full * item - POSITION * layers) / item - beside
        return allocate(sides, unit, numbers, self.allocation)

    def encode(self, keys: Tensor, values: Tensor, slots: Slots) -> dict[str, Tensor]:
        return self._of(slots).encode(keys, values, slots)

    def decode(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        return self._of(slots).decode(channels, slots)

    def query(self, q: Tensor, slots: Slots) -> Tensor:
        return self._of(slots).query(q, slots)

    def read(self, channels: dict[str, Tensor], slots: Slots) -> tuple[Tensor, Tensor]:
        return self._of(slots).read(channels, slots)

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
        budget: share of a full cache's bytes, in (0, 1]; 1.0 holds keys and values as they are, unless `rank` is set.
        form: "palu" or "mla".
        group: KV heads that share a latent of form=palu; the paper takes 4. With eviction only 1.
        rank: of every latent, instead of what the budget allows.
        rope_dims: numbers of all heads' keys together that keep their rotation in form=mla; None for one head's.
        allocation: "uniform" ranks, or by "energy" (see `kvcompress.lowrank.allocate`).
        text, tokens, length, seed: what is measured on (see `kvcompress.lowrank.CalibrationText`).
    """

    family = "low rank"
    keeps = "every token, projected on the directions that keys and values of a text use most"
    needs_data = "bases of the model, measured when first used"
    source = "arXiv 2407.21118, 2502.07864; shadowpa0327/Palu, fxmeng/TransMLA"
    differences = "bytes are held, not emulated; no weights changed; ranks by discarded energy, not Fisher information"

    budget_kind: ClassVar[Literal["bytes"]] = "bytes"

    budget: float = 0.5
    form: Form = "palu"
    group: int = 1
    rank: int | None = None
    rope_dims: int | None = None
    allocation: Allocation = "energy"
    text: str = lowrank.OWN
    tokens: int = 4096
    length: int = 512
    seed: int = 0

    def check(self) -> None:
        self._codec()

    def make_codec(self) -> Codec:
        return Plain() if self.budget == 1.0 and self.rank is None else self._codec()

    def _codec(self) -> LowRankCodec:
        return LowRankCodec(**{item.name: getattr(self, item.name) for item in fields(LowRankCodec) if item.repr})
