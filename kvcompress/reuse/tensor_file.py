"""Reads a safetensors file that other processes may change meanwhile: bounds first, then copies, never mapped.

A file that is mapped into memory and then made shorter ends the process that reads it (SIGBUS). Here bytes are copied
from a descriptor that stays open: a file that was unlinked is still read, one that was cut short is an error.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Number type and shape of tensors by name."""

HEADER_BYTES = 16 << 20  # at most: a chunk's header has some hundred bytes per layer
AT_ONCE = 4 << 20  # bytes of one read
FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # where the system has them
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Unreadable(ValueError):
    """No regular file, or no whole safetensors file."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorFile:
    """An open safetensors file.

    Attributes:
        metadata: of its header.
        layout: of its tensors, none of which has been read yet.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened; a link is not followed.
        Unreadable: it is no regular file, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._handle = open_regular(path)
        weakref.finalize(self, os.close, self._handle)
        self._lock = threading.Lock()  # layers may be read by a thread beside the one that computes
        size = os.fstat(self._handle).st_size
        length = int.from_bytes(self._read(0, 8).numpy().tobytes(), "little")
        if length > min(HEADER_BYTES, size - 8):
            raise Unreadable(f"a header of {length} bytes does not fit")
        try:
            header = json.loads(self._read(8, length).numpy().tobytes())
            metadata = header.pop("__metadata__", None) or {}
            self.metadata = {str(key): str(value) for key, value in metadata.items()}
            self._places = {str(name): _place(entry, 8 + length, size) for name, entry in header.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Unreadable(f"damaged header: {error}") from None
        self.layout: Layout = {name: (place.dtype, place.shape) for name, place in self._places.items()}

    def get(self, name: str) -> Tensor:
        """A copy of a tensor; OSError or Unreadable where the file cannot be read any more, or has become shorter."""
        place = self._places[name]
        return self._read(place.start, place.nbytes).view(place.dtype).view(place.shape)

    def touch(self) -> None:
        """Set the time of its last use to now."""
        if os.utime in os.supports_fd:
            os.utime(self._handle)

    def _read(self, start: int, count: int) -> Tensor:
        """Bytes of the file, uint8 `[count]`."""
        found = torch.empty(count, dtype=torch.uint8)
        into, done = found.numpy().data, 0
        with self._lock:
            os.lseek(self._handle, start, os.SEEK_SET)
            while done < count:
                part = os.read(self._handle, min(count - done, AT_ONCE))
                if not part:
                    raise Unreadable(f"it ends {count - done} bytes early")
                into[done : done + len(part)] = part
                done += len(part)
        return found


def _place(entry: Any, offset: int, size: int) -> Place:
    """A tensor's entry of a header, checked against the size of the file."""
    dtype, shape, (first, last) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError("sizes that are no whole numbers")
    if last - first != math.prod(shape) * dtype.itemsize or offset + last > size:
        raise ValueError("a tensor that does not fit into the file")
    return Place(dtype, tuple(shape), offset + first, last - first)


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file, the caller's to close; no link is followed, no pipe waited for.

    Raises:
        OSError: it cannot be opened, or is a link.
        Unreadable: it is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in FLAGS))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unreadable("no regular file")
    return handle


def regular_files(folder: Path, start: str, end: str) -> list[tuple[Path, os.stat_result]]:
    """The regular files of a folder whose names begin and end so, with their facts; what goes meanwhile is left out.

    Links are not followed, nor is the folder where it is one.
    """
    found = []
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(start) and entry.name.endswith(end):
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if stat.S_ISREG(about.st_mode):
                        found.append((Path(entry.path), about))
    except OSError:
        return found
    return found


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder that are no links, as far as they can be seen."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
