"""Low-rank factors of a model's keys and values, measured on text: the bases of low-rank codecs.

Palu (Chang et al., 2025, arXiv 2407.21118, section 3) cuts a projection W of a group of KV heads to rank r where it is
least missed on text: with H = L L^T the second moment of its inputs, it truncates the singular value decomposition
U S V^T of W L. What is left of W x is U_r U_r^T W x: the projection of the output on the first r left singular vectors,
which are the eigenvectors of W H W^T, the second moment of the outputs, with S^2 for eigenvalues. So nothing of the
model but its keys and values is looked at, no weight is touched, and biases, query-key norms and fused projections are
in what is measured: keys as the cache gets them, with their rotation undone. The basis is orthonormal whatever was
measured (no inverse, so no damping is needed); its order is only worth something with more tokens than directions.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from kvcompress.calibrate import calibration
from kvcompress.common.tokenization import plain_ids
from kvcompress.data.haystack import load_haystack
from kvcompress.method.latents import grouped
from kvcompress.models import compat
from kvcompress.models.loading import cache_dir
from kvcompress.models.model_hash import model_hash
from kvcompress.models.tokenizers import tokenizer_of

Tensor = torch.Tensor
Allocation = Literal["uniform", "energy"]
Side = tuple[int, str]  # layer, "keys" or "values"

KIND = "lowrank"
WHAT = ("vectors", "energy")  # of a basis
FORMAT = 1  # of the stored factors: a file of another is made again
OWN = "own"
PROSE = "prose"


@dataclass(frozen=True)
class CalibrationText:
    """What factors are measured on.

    Attributes:
        text: "own" for text that the model samples itself, "prose" for generated prose that is the same everywhere
            (it needs the model's tokenizer, as does a file), or the path of a UTF-8 file.
        tokens: number of tokens; a text that has fewer is refused.
        length: tokens per sequence.
        seed: of the model's own text.
    """

    text: str = OWN
    tokens: int = 4096
    length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2 or self.tokens < self.length:
            raise ValueError(
                f"calibration on tokens={self.tokens} in sequences of length={self.length}; a sequence has at least 2, "
                "and tokens are at least one sequence"
            )

    def ids(self, model: Any, tokenizer: Any = None) -> Tensor:
        """Token ids `[sequences, length]` on the model's device.

        Raises:
            ValueError: the text is too short or cannot be read, or there is no tokenizer for it.
        """
        count = self.tokens // self.length
        if self.text == OWN:
            vocabulary = compat.text_config(model).vocab_size
            ends = (model.config.bos_token_id, model.config.eos_token_id)
            start = min(next((i for i in ends if isinstance(i, int)), 1), vocabulary - 1)
            # kept, since bases of another form or group are measured on the same text
            sampled = functools.partial(calibration.own_text, model, count, self.length, self.seed, start)
            return kept(model, self, {}, lambda: {"ids": sampled()})["ids"].to(model.device)
        tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError(
                f"calibration on text={self.text!r} needs the model's tokenizer: load the model with kvcompress.load, "
                "or take text=own"
            )
        found = plain_ids(tokenizer, self._read(self.tokens))
        if len(found) < count * self.length:
            raise ValueError(
                f"calibration text {self.text!r} has {len(found)} tokens, fewer than the {count * self.length} asked "
                "for: give a longer text, or lower tokens"
            )
        return torch.tensor(found[: count * self.length], device=model.device).view(count, self.length)

    @property
    def content(self) -> str | None:
        """64 hexadecimal digits of a file's text; None where the name says all of it."""
        return None if self.text in (OWN, PROSE) else hashlib.sha256(self._read(0).encode()).hexdigest()

    def _read(self, tokens: int) -> str:
        if self.text == PROSE:
            hay = load_haystack("essay", essays="builtin").sentences
            words = " ".join(hay[i % len(hay)] for i in range(max(8, tokens // 4)))
            return words[: 12 * tokens]  # a tokenizer of bytes has one token per character, others one in four
        try:
            return Path(self.text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"calibration text={self.text!r} cannot be read ({error}); valid: {OWN}, {PROSE}, or the path of a "
                "UTF-8 file"
            ) from error


# ---------------------------------------------------------------------- measuring


@torch.no_grad()
def outputs(model: Any, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(layer, keys before rotation `[T, H_kv, D]`, values `[T, H_kv, D_v]`) of every full-attention layer.

    In float32, of the tokens `ids [sequences, length]`, one sequence after the other.

    Raises:
        ValueError: the model's rotation depends on the length, or is not known.
    """
    rotations = compat.rotations(model)
    full = [i for i, kind in enumerate(compat.layer_types(model)) if kind == "full_attention"]
    positions = torch.arange(ids.shape[1], device=ids.device)
    for row in ids:
        cache = compat.DynamicCache(config=compat.text_config(model))
        compat.base_model(model)(input_ids=row[None], cache=cache, use_cache=True)
        for i in full:
            held: Any = cache.layers[i]
            keys = rotations[i].unrotate(held.keys.float(), positions)
            yield i, keys[0].transpose(0, 1), held.values[0].float().transpose(0, 1)


def second_moments(model: Any, ids: Tensor, group: int) -> dict[Side, Tensor]:
    """Mean of x x^T over the tokens, float64 `[G, w, w]`, per layer and side; w = group x D."""
    total: dict[Side, Tensor] = {}
    for layer, keys, values in outputs(model, ids):
        for name, x in (("keys", keys), ("values", values)):
            x = grouped(x, group).transpose(0, 1).double()  # [G, T, w]
            moment = x.transpose(1, 2) @ x / ids.numel()
            side = (layer, name)
            total[side] = total[side] + moment if side in total else moment
    return total


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions of one layer's keys or values, per group of KV heads, the most used first.

    Attributes:
        vectors: float32 `[G, w, w]`, orthonormal columns.
        energy: float64 `[G, w]`, mean square of the outputs along each: squared singular values of W L per token.
    """

    vectors: Tensor
    energy: Tensor

    @classmethod
    def of(cls, moment: Tensor) -> Basis:
        """The basis of second moments `[G, w, w]`."""
        energy, vectors = torch.linalg.eigh(moment)
        return cls(vectors.flip(-1).float(), energy.flip(-1).clamp(min=0))

    def cut(self, rank: int) -> Tensor:
        """The first `rank` directions, `[G, w, rank]`."""
        return self.vectors[:, :, :rank]

    def discarded(self, rank: int) -> Tensor:
        """Mean squared error per token of what is left at this rank, `[G]`."""
        return self.energy[:, rank:].sum(-1)


@dataclass(frozen=True, eq=False)
class Factors:
    """Bases of a model's full-attention layers, and how they were made."""

    group: int
    sides: Mapping[Side, Basis]
    made: dict[str, Any]

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.sides})


def factorise(model: Any, text: CalibrationText | Tensor, group: int = 1, tokenizer: Any = None) -> Factors:
    """Measure a model's bases, without looking for stored ones.

    Args:
        text: what to measure on, or token ids `[sequences, length]`.
        group: KV heads that share a latent.

    Raises:
        ValueError: `group` does not divide the KV heads, or there are fewer tokens than directions.
    """
    check_group(model, group)
    ids = text if isinstance(text, Tensor) else text.ids(model, tokenizer)
    moments = second_moments(model, ids, group)
    widest = max(m.shape[-1] for m in moments.values())
    check_tokens(ids.numel(), widest, f"{group} KV heads together")
    made = {"tokens": ids.numel(), "sequences": len(ids), "group": group}
    made |= {} if isinstance(text, Tensor) else asdict(text)
    return Factors(group, {side: Basis.of(moment.cpu()) for side, moment in moments.items()}, made)


def check_tokens(tokens: int, directions: int, what: str) -> None:
    """Refuse fewer tokens than there are directions: those without any would be kept or dropped at random."""
    if tokens < directions:
        raise ValueError(
            f"calibration on {tokens} tokens is too short: {what} have {directions} directions, and at least as many "
            f"tokens are needed; raise tokens"
        )


def check_group(model: Any, group: int) -> None:
    """Refuse a group that does not divide a model's KV heads."""
    heads = compat.kv_heads(model)
    if group < 1 or heads % group:
        valid = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"head_group={group} does not divide the model's {heads} KV heads; valid: {', '.join(valid)}")


# ---------------------------------------------------------------------- how much of each


def allocate(sides: Mapping[Side, Basis], unit: int, numbers: float, how: Allocation) -> dict[Side, int]:
    """Ranks per layer and side, in multiples of `unit`: at most `numbers` held per token over all of them.

    "uniform": the same share of every side's directions. "energy": the directions that carry most of their layer's and
    side's mean square go first, wherever they are (water-filling on singular values, each side's scaled to a sum of
    squares of 1); the groups of a layer have the same rank.

    Raises:
        ValueError: too few numbers for the least rank everywhere.
    """
    steps: list[tuple[float, int, Side, int]] = []
    least = 0
    for order, (side, basis) in enumerate(sorted(sides.items())):
        groups, width = basis.energy.shape
        least += groups * unit
        energy = basis.energy.sum(0)[: width // unit * unit]
        gains = energy.unflatten(0, (-1, unit)).sum(-1) / basis.energy.sum().clamp(min=1e-30)
        for number in range(1, width // unit):
            worth = float(gains[number]) if how == "energy" else -(number + 1) * unit / width
            steps.append((-worth, number * len(sides) + order, side, groups * unit))
    if numbers < least:
        raise ValueError(
            f"a budget of {numbers:.0f} numbers per token is too small: rank {unit} in all layers takes {least}; raise it"
        )
    ranks, left = dict.fromkeys(sides, unit), numbers - least
    for _, _, side, cost in sorted(steps):
        if cost <= left:
            ranks[side] += unit
            left -= cost
    return ranks


# ---------------------------------------------------------------------- kept on disk


def stored(model: Any, text: CalibrationText, group: int = 1, tokenizer: Any = None) -> Factors:
    """A model's factors from the user's folder (`KVCOMPRESS_CACHE`/calibration/lowrank), measured where it has none."""
    check_group(model, group)
    settings = {"group": group}

    def measured() -> dict[str, Tensor]:
        sides = factorise(model, text, group, tokenizer).sides.items()
        return {f"{layer}.{name}.{what}": getattr(basis, what) for (layer, name), basis in sides for what in WHAT}

    tensors = kept(model, text, settings, measured)
    sides = {tuple(name.split(".")[:2]) for name in tensors if name.endswith(WHAT[0])}
    bases = {(int(i), name): Basis(*(tensors[f"{i}.{name}.{what}"] for what in WHAT)) for i, name in sides}
    return Factors(group, bases, asdict(text) | settings)


def kept(
    model: Any, text: CalibrationText, settings: Mapping[str, Any], measure: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What was measured on a model and text with some settings, from a file of the user's folder, else now."""
    path = folder() / f"{file_key(model, text, settings)}.safetensors"
    try:
        found = path.stat()
        return dict(_read(path, found.st_mtime_ns, found.st_size))
    except (OSError, SafetensorError):  # there is none, or one that cannot be read
        tensors = {name: value.cpu() for name, value in measure().items()}
    calibration.save(path, model, tensors, asdict(text) | dict(settings))
    return tensors


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int) -> dict[str, Tensor]:
    """Tensors of a file, which are asked for again with every session of a sweep."""
    del changed, size  # tell a file from what lay there before
    with safe_open(path, framework="pt") as file:
        # copies, so that nothing reads from the file any more
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (not a dict)


def folder() -> Path:
    """Where what was measured is kept."""
    return cache_dir() / "calibration" / KIND


def file_key(model: Any, text: CalibrationText, settings: Mapping[str, Any]) -> str:
    """A name that says which model, text and settings, 24 hexadecimal digits."""
    said = asdict(text) | dict(settings) | {"format": FORMAT, "model": model_hash(model), "dtype": str(model.dtype)}
    said["text"] = text.content or text.text
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]
