"""What the uncompressed model does with a sample: made once per sample and sweep, kept beside the runs it is for.

`<sweep>/.references/<key>.safetensors`; the folder may be deleted at any time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvcompress.method import Method
from kvcompress.record import digest
from kvcompress.task import Sample, Task

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
        from kvcompress.session import compress

        with compress(model, Method(), kernel) as session:  # no part but the defaults: all is held
            made = task.reference(session, sample)
        return {name: value.detach().cpu().contiguous() for name, value in made.items()}


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return load_file(path)
    except (OSError, SafetensorError):  # not there, or cut short by a full disk
        return None


def _write(path: Path, value: dict[str, torch.Tensor]) -> None:
    """Whole or absent, whenever the process dies; of two that write the same, the last wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(value, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
