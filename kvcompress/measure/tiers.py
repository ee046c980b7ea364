"""Rates, latencies and capacities of devices, links and far memories, read from `tiers.yaml`: one source of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvcompress.measure.transfers import TierPath

FILE = Path(__file__).with_name("tiers.yaml")
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Dimensions:
    """What a prefix of a model costs to compute and to hold.

    Attributes:
        width: hidden size; gqa: query heads per KV head; itemsize: bytes of a number; parameters: of the model.
    """

    layers: float
    width: float
    gqa: float
    kv_heads: float
    head_dim: float
    itemsize: float
    parameters: float

    @property
    def token_bytes(self) -> float:
        """Keys and values of a token in the full cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


@cache
def figures(path: Path = FILE) -> dict[str, Any]:
    """What `tiers.yaml`, or a file of its form, says; `measured` links replace those of the same name."""
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def with_measured(path: Path, file: Path = FILE) -> dict[str, Any]:
    """The figures of `file` with links as `scripts/bench.py links` measured them, under their names.

    Raises:
        ValueError: the file holds no fit of a link.
    """
    try:
        fits = json.loads(path.read_text(encoding="utf-8"))["links"]
        made = {
            name: {
                "bandwidth": float(fit["bandwidth"]),
                "share": 1.0,
                "latency": float(fit["latency"]),
                "source": "measured",
            }
            for name, fit in fits.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no file of `kvcompress bench links` ({error})") from error
    found = figures(file)
    return found | {"links": found["links"] | made}


def entry(kind: str, name: str, source: Figures | None = None) -> Figures:
    """What is said of a device, memory, link or model; `kind` in the plural.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    known = (figures() if source is None else source).get(kind, {})
    if name not in known:
        raise ValueError(f"{name!r} is none of the {kind} in {FILE.name}: {', '.join(known)}; add it there")
    return dict(known[name])


def bandwidth(kind: str, name: str, source: Figures | None = None) -> float:
    """Bytes per second that a device, memory or link is taken to reach; `kind` in the plural.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    said, share = entry(kind, name, source), (figures() if source is None else source)["share"]
    return float(said["bandwidth"]) * float(said.get("share", share))


def dimensions(name: str) -> Dimensions:
    """A model's dimensions by its name in `tiers.yaml`.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    said = entry("models", name)
    # YAML 1.1 takes 8.03e9 for text
    return Dimensions(**{field.name: float(said[field.name]) for field in fields(Dimensions)})


def path(
    link: str | None,
    device: str | None = None,
    memory: str | None = None,
    hosts: int = 1,
    latency: bool = True,
    source: Figures | None = None,
) -> TierPath:
    """The way between a device and what lies beyond a link: one source of numbers for loads, swaps and pools.

    Args:
        link: its name; None: the device's own.
        device: may be unified, so that nothing moves, or have a far memory of its own.
        memory: what lies at the far end, whose bandwidth `hosts` active machines share; None: the device's own, or none
            that is slower than the link.
        source: figures other than those of `tiers.yaml`.
        latency: False leaves latencies out, most of which are assumed.

    Raises:
        ValueError: an unknown name, or a memory that fewer hosts share.
    """
    own = {} if device is None else entry("devices", device, source)
    if own.get("unified"):
        return TierPath(bandwidth("devices", str(device), source), unified=True)
    link, memory = link or own.get("link"), memory or (own.get("far") if link in (None, own.get("link")) else None)
    if link is None:
        raise ValueError(f"device {device!r} has no link of its own: name one of {', '.join(figures()['links'])}")
    said, reached, sync = entry("links", link, source), bandwidth("links", link, source), 0.0
    if memory is not None:
        far = entry("memories", memory, source)
        if not 1 <= hosts <= far.get("hosts", 1):
            raise ValueError(f"hosts={hosts}: memory {memory!r} is shared by 1 to {far.get('hosts', 1)}")
        reached = min(reached, bandwidth("memories", memory, source) / hosts)
        sync = 0.0 if far.get("coherent", True) else float(said.get("sync", 0.0))
    waits = said.get("latency", 0.0)
    waits = float(waits["value"] if isinstance(waits, Mapping) else waits) if latency else 0.0
    return TierPath(reached, waits, int(said.get("granule", 1)), sync)
