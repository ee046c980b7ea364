"""Reference outputs of the uncompressed model: made once per sample and sweep, kept beside the runs that need them.

`<sweep>/.references/<key>.safetensors`; the folder may be deleted at any time. A damaged file is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvcompress.common.atomic_files import read_plain, write_whole
from kvcompress.common.hashing import digest
from kvcompress.data.task import Sample, Task
from kvcompress.method import Method
from kvcompress.sweep.disk import written

FOLDER = ".references"


class References:
    """References of one group of comparable cells.

    Args:
        sweep: folder of the sweep, which must exist once a reference is made.
        key: what else a reference depends on: all that comparable cells share, and the sources.
    """

    def __init__(self, sweep: Path, key: Any) -> None:
        self.folder, self.key = sweep / FOLDER, key

    def attach(self, task: Task, sample: Sample, model: Any, kernel: str = "auto") -> Sample:
        """`sample` with its reference, run now or read from disk; unchanged where the task wants none."""
        if not task.wants_reference:
            return sample
        path = self.folder / f"{digest([self.key, sample.id])}.safetensors"
        found = _read(path)
        if found is None:
            found = self._make(task, sample, model, kernel)
            _write(path, found)
        return replace(sample, reference=found)

    @staticmethod
    def _make(task: Task, sample: Sample, model: Any, kernel: str) -> dict[str, torch.Tensor]:
        from kvcompress.hook.session import compress

        with compress(model, Method(), kernel) as session:  # no part but the defaults: all is held
            made = task.reference(session, sample)
        return {name: value.detach().cpu().contiguous() for name, value in made.items()}


def _checksum(value: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, forms and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(value.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        content = read_plain(path)  # not mapped: another process may shorten the file
        value = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        wanted = (header.get("__metadata__") or {}).get("sha256")
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError):  # not there, or cut short by a full disk
        return None
    return value if wanted == _checksum(value) else None  # safetensors itself does not notice a changed byte


def _write(path: Path, value: dict[str, torch.Tensor]) -> None:
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(value, metadata={"sha256": _checksum(value)}))
