"""Costs of a method's requests: bytes, and fits of measured seconds that say how good they are and where they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from kvcompress.measure.tiers import bandwidth, dimensions, entry
from kvcompress.measure.transfers import ATTENTION, LINEAR

STORES = ("compressed", "exact")


@dataclass(frozen=True)
class Line:
    """`fixed + per_prompt · prompt tokens + per_output · generated tokens` of one request."""

    fixed: float = 0.0
    per_prompt: float = 0.0
    per_output: float = 0.0

    def at(self, prompt: float, output: float = 0) -> float:
        return self.fixed + self.per_prompt * prompt + self.per_output * output


@dataclass(frozen=True)
class MethodCosts:
    """What one method's requests cost.

    Attributes:
        reuse: as of `Method.cache_reuse`.
        held: bytes of a request's cache; kept: tokens that a decode step attends to, mean over layers and heads.
        token_bytes: of a token in the full cache; layers: of the model.
        prefill: c0, c1, c2, c3 of `c0 + c1 (n - p) + c2 a + c3 p` seconds of a prompt of n tokens of which p are reused, with
            a as of `attended`.
        compress: k0, k1 of `k0 + k1 n` seconds, over what is new of a "prefix" method and over all of a "whole" one.
        step: s0, s1, s2 of `s0 + s1 · rows + s2 · kept tokens of all rows`, of two rows or more.
        step_alone: a0, a1 of `a0 + a1 · kept tokens` for one row, whose products take other kernels; None: as `step`.
        read_ratio: bytes that a step reads over those of as many kept tokens in the full cache.
        store: "exact" keeps what the model made in the host's memory for reuse, and compresses anew for each request.
        source: "measured" or "modelled".
        r2: of each fit; ranges: least and most of each measured quantity ("prompt", "rows", "kept").
    """

    name: str
    reuse: Literal["prefix", "whole"]
    held: Line
    kept: Line
    token_bytes: float
    layers: int
    prefill: tuple[float, float, float, float]
    compress: tuple[float, float] = (0.0, 0.0)
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)
    step_alone: tuple[float, float] | None = None
    read_ratio: float = 1.0
    store: str = "compressed"
    source: str = "measured"
    r2: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reuse not in ("prefix", "whole"):
            raise ValueError(f"reuse={self.reuse!r}; valid: prefix, whole")
        if self.store not in STORES:
            raise ValueError(f"store={self.store!r}; valid: {', '.join(STORES)}")
        if not self.token_bytes > 0 or self.layers < 1:
            raise ValueError(f"token_bytes={self.token_bytes}, layers={self.layers}: above 0, at least 1")

    @property
    def ratio(self) -> float:
        """Bytes of a prompt token over those of the full cache."""
        return self.held.per_prompt / self.token_bytes

    @property
    def prefix_kept(self) -> float:
        """Share of a reused prefix's tokens that new tokens attend to: what an eviction method left of it."""
        return min(1.0, self.kept.per_prompt) if self.reuse == "whole" and self.store == "compressed" else 1.0

    def compute_s(self, start: float, end: float, reused: float = 0) -> float:
        """Seconds of the model's work on prompt tokens `start` to `end`, of a prompt of which the first `reused` were there."""
        c0, c1, c2, _ = self.prefill
        kept = self.prefix_kept
        return c0 + c1 * (end - start) + c2 * (attended(end, reused, kept) - attended(start, reused, kept))

    def compress_s(self, prompt: float, reused: float) -> float:
        """Seconds of compressing a prompt."""
        k0, k1 = self.compress
        return k0 + k1 * (prompt if self.reuse == "whole" else prompt - reused)

    def prefill_s(self, prompt: float, reused: float = 0) -> float:
        """Seconds of a prompt by itself, compression included."""
        return self.compute_s(reused, prompt, reused) + self.prefill[3] * reused + self.compress_s(prompt, reused)

    def step_s(self, rows: int, kept: float) -> float:
        """Seconds of a decode step."""
        if rows == 1 and self.step_alone is not None:
            return self.step_alone[0] + self.step_alone[1] * kept
        s0, s1, s2 = self.step
        return s0 + s1 * rows + s2 * kept

    def extrapolated(self, prompt: float, rows: float, kept: float) -> list[str]:
        """Which quantities lie above what was measured; all where times are modelled."""
        if self.source != "measured":
            return ["prompt", "rows", "kept"]
        asked = {"prompt": prompt, "rows": rows, "kept": kept}
        return [name for name, value in asked.items() if name in self.ranges and value > self.ranges[name][1]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> MethodCosts:
        """Back from `as_dict`, as of a JSON file.

        Raises:
            ValueError: a key that is missing or unknown.
        """
        try:
            changed: dict[str, Any] = {key: Line(**said[key]) for key in ("held", "kept")}
            changed |= {key: tuple(said[key]) for key in ("prefill", "compress", "step")}
            changed |= {"step_alone": None if said.get("step_alone") is None else tuple(said["step_alone"])}
            changed |= {"ranges": {key: tuple(pair) for key, pair in said.get("ranges", {}).items()}}
            return cls(**{**said, **changed})
        except (KeyError, TypeError) as error:
            raise ValueError(f"costs of {said.get('name', 'a method')}: {error}") from error

    def shown(self) -> str:
        """How well the fits hold, in words."""
        fits = ", ".join(f"{name} {value:.3f}" for name, value in self.r2.items())
        return f"{self.name} ({self.source}): R² {fits or '–'}"


def attended(end: float, reused: float, kept: float) -> float:
    """Pairs of tokens, twice over, that attention meets from token `reused` to `end` of a prompt: n² - p² where all is kept.

    Args:
        kept: share of the reused tokens that are still there.
    """
    new = end - reused
    return new * new + 2 * kept * reused * new


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Least squares with coefficients that are not negative, each point weighed by its seconds, and R² of the fit.

    Args:
        columns: one per point, as many numbers as there are coefficients.

    Raises:
        ValueError: fewer points than coefficients, or seconds that are not above 0.
    """
    table, wanted = np.array(columns, dtype=float), np.array(seconds, dtype=float)
    if len(table) < table.shape[1] or wanted.min() <= 0:
        raise ValueError(
            f"{len(table)} points with seconds from {wanted.min()}: at least {table.shape[1]}, all above 0"
        )
    active, found = list(range(table.shape[1])), np.zeros(table.shape[1])
    scale = np.abs(table).max(0)
    scale[scale == 0] = 1.0
    while active:  # what comes out negative is taken out, the worst first
        part = table[:, active] / scale[active] / wanted[:, None]
        solved, *_ = np.linalg.lstsq(part, np.ones(len(wanted)), rcond=None)
        if solved.min() >= 0:
            found[active] = solved / scale[active]
            break
        del active[int(solved.argmin())]
    spread = float(((wanted - wanted.mean()) ** 2).sum())
    error = float(((wanted - table @ found) ** 2).sum())
    varies = spread > 1e-12 * float((wanted**2).sum())  # else all points are one number but for rounding
    return [float(value) for value in found], 1 - error / spread if varies else 1.0


def modelled(measured: MethodCosts, device: str, model: str) -> MethodCosts:
    """A method on another device and model: its measured share of bytes, times by roofline. Always extrapolated.

    A prompt takes its operations over the device's rate, a step the weights and what is read of the cache over the
    bandwidth, both times the reached share; compressing as large a share of a prompt's seconds as was measured.
    Decoding codes costs nothing beside reading them, which flatters codecs.

    Raises:
        ValueError: an unknown name, or a device whose operations per second are not known.
    """
    shape, said = dimensions(model), entry("devices", device)
    if "flops" not in said:
        raise ValueError(f"{device!r} has no `flops` in tiers.yaml: add them, or take a device that has")
    reached = bandwidth("devices", device)
    rate = float(said["flops"]) * reached / float(said["bandwidth"])
    scale = shape.token_bytes / measured.token_bytes
    work = (0.0, shape.layers * LINEAR * shape.width**2 / rate, shape.layers * ATTENTION * shape.width / rate)
    at = measured.ranges.get("prompt", (1024.0, 1024.0))[1]
    bare, own = measured.compute_s(0, at), work[1] * at + work[2] * at * at
    share = measured.compress_s(at, 0) / bare if bare else 0.0
    again = measured.prefill[3] * at / bare if bare else 0.0  # what a reused token costs beside a computed one
    return replace(
        measured,
        held=Line(
            *(scale * value for value in (measured.held.fixed, measured.held.per_prompt, measured.held.per_output))
        ),
        token_bytes=shape.token_bytes,
        layers=int(shape.layers),
        prefill=(*work, again * own / at),
        compress=(0.0, share * own / at),
        step=(
            shape.parameters * shape.itemsize / reached,
            2 * shape.parameters / rate,
            shape.token_bytes * measured.read_ratio / reached,
        ),
        step_alone=None,
        source="modelled",
    )
