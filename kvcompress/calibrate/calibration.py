"""What was computed once for a model: tensors in a small file, found again by the model's weights.

A file is `<kind>/<name>.safetensors`. Its metadata say how it was made; `probe` holds a few of the model's weights, so
that it is found whatever the model is called, in any float type, and never taken for another's.
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

Tensor = torch.Tensor

PROBED = 64  # weights looked at
TOLERANCE = 0.01  # relative: above bfloat16's rounding, below what training changes in all of them


def made(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """When and by what command and versions a file is made: part of its provenance."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", f"scripts/{script}", *arguments]),
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


def probe(model: torch.nn.Module) -> Tensor:
    """The number of weights and `PROBED` of them, spread over the model, float64 `[1 + PROBED]`."""
    weights = [p for _, p in sorted(model.named_parameters()) if p.dim() == 2]
    values = [float(sum(p.numel() for p in weights))]
    for i in range(PROBED):
        flat = weights[i * len(weights) // PROBED].detach().flatten()
        values.append(float(flat[(2 * i + 1) * flat.numel() // (2 * PROBED)]))
    return torch.tensor(values, dtype=torch.float64)


def save(path: Path, model: torch.nn.Module, tensors: dict[str, Tensor], provenance: dict[str, Any]) -> None:
    """Write `tensors` and how they were made, for this model: whoever reads meanwhile sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"provenance": json.dumps(provenance, sort_keys=True)}
    held = {**{k: v.contiguous() for k, v in tensors.items()}, "probe": probe(model)}
    with replacing(path) as temporary:
        save_file(held, temporary, metadata=said)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a file, `probe` among them, and how they were made."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        return tensors, json.loads((file.metadata() or {}).get("provenance", "{}"))


def find(model: torch.nn.Module, places: Iterable[Path]) -> dict[str, Tensor] | None:
    """Tensors of the first file in these folders, or among these files, that was made for these weights, or None."""
    wanted = probe(model)
    for place in places:
        for path in [place] if place.is_file() else sorted(place.glob("*.safetensors")):
            tensors, _ = load(path)
            made = tensors.pop("probe", torch.zeros(0))
            if made.shape == wanted.shape and made[0] == wanted[0]:
                if torch.allclose(made[1:], wanted[1:], rtol=TOLERANCE, atol=1e-6):
                    return tensors
    return None
