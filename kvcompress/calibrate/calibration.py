"""Calibration files: tensors measured once on a model, found again by its weights and adapters.

A file is `<kind>/<name>.safetensors`. Its metadata say how it was made and which adapters were active; `weight_sample`
holds some numbers of every matrix, so that it is found whatever the model is called, in any float type, and never taken
for another's: not for a model into which an adapter was merged either.
"""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcompress.common.atomic_files import replacing
from kvcompress.common.hashing import source_hash
from kvcompress.method import Method
from kvcompress.models.loading import cache_dir
from kvcompress.models.model_hash import adapter_state, same_weights, weight_sample

Tensor = torch.Tensor

SAMPLE = "weight_sample"  # tensor of a file: see `model_hash.weight_sample`
ADAPTERS = "adapters"  # in its metadata: `model_hash.adapter_state`


def made(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """When and by what command and versions a file is made: part of its provenance."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["kvcompress", command, *arguments]),
        "versions": {name: metadata.version(name) for name in ("kvcompress", "torch", "transformers")}
        | {"source": source_hash()},
    }


@torch.no_grad()
def own_text(
    model: Any, sequences: int, length: int, seed: int, start: int, temperature: float = 1.0, top_p: float = 0.95
) -> Tensor:
    """Token ids `[sequences, length]` on the model's device, which it samples after the token `start`, never stopping."""
    from kvcompress.hook.session import compress

    first = torch.full((sequences, 1), start, device=model.device)
    with compress(model, Method()) as session:  # no part but the defaults: all is held
        session.prefill(first)
        rows = session.generate(length - 1, temperature=temperature, top_p=top_p, seed=seed).tokens
    return torch.cat([first, torch.tensor(rows, device=model.device)], dim=1)


def folders(kind: str, package: Path) -> list[Path]:
    """Where files of a kind are looked for: the user's (`KVCOMPRESS_CACHE`/calibration), then the package's."""
    return [cache_dir() / "calibration" / kind, package / kind]


def save(path: Path, model: torch.nn.Module, tensors: dict[str, Tensor], provenance: dict[str, Any]) -> None:
    """Write `tensors` and how they were made, for this model: whoever reads meanwhile sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"provenance": json.dumps(provenance, sort_keys=True), ADAPTERS: adapter_state(model)}
    held = {**{k: v.contiguous() for k, v in tensors.items()}, SAMPLE: weight_sample(model)}
    with replacing(path) as temporary:
        save_file(held, temporary, metadata=said)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a file, the sample of the weights among them, and how they were made."""
    tensors, about = _read(path)
    return tensors, json.loads(about.get("provenance", "{}"))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  (no dict)


def find(model: torch.nn.Module, places: Iterable[Path]) -> dict[str, Tensor] | None:
    """Tensors of the first file in these folders, or among these files, that was made for this model, or None."""
    wanted, adapters = weight_sample(model), adapter_state(model)
    for place in places:
        for path in [place] if place.is_file() else sorted(place.glob("*.safetensors")):
            tensors, about = _read(path)
            if about.get(ADAPTERS, "") == adapters and same_weights(tensors.pop(SAMPLE, torch.zeros(0)), wanted):
                return tensors
    return None


def adapters_noted(model: torch.nn.Module) -> str:
    """What a message that nothing is known of a model adds where it bears adapters, "" elsewhere."""
    if not adapter_state(model):
        return ""
    return (
        " (it bears an adapter or another change to its forward, and what was measured holds for one state of it: measure "
        "it as it is now, or merge the adapter and measure that)"
    )
