"""The disk tier of a KV store: one safetensors file per chunk, whole or absent, checked layer by layer when read.

A folder may be shared by models (each has one of its own inside), and by processes: a file is written under another
name, flushed and renamed, and never written to again. What a process that died was about to write has a name that
nobody reads, and is taken away after a while.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

Tensor = torch.Tensor

FORMAT = "kvcompress chunk 1"
ENDING = ".safetensors"
STALE_S = 3600.0  # writing takes seconds: what is older was left by a process that died

logger = logging.getLogger(__name__)


class Damaged(ValueError):
    """An entry that must not be used: not what was stored, or (`foreign`) of another origin."""

    def __init__(self, text: str, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign


class Entry:
    """One open file. Its bytes are memory-mapped: a layer is read from disk when it is asked for."""

    def __init__(self, path: Path, file: Any, ids: Tensor, sums: Mapping[str, int], nbytes: int) -> None:
        self.path, self.ids, self.nbytes = path, ids, nbytes
        self.names, self.layers = _parted(sums)
        self._file, self._sums = file, sums

    def layer(self, index: int) -> dict[str, Tensor]:
        """Copies of a layer's tensors by name; Damaged where a checksum differs."""
        return {name: _checked(self._file, f"{name}.{index}", self._sums) for name in self.names}


class DiskTier:
    """Files of one model in a folder.

    Args:
        folder: made if it is not there; each model has a folder of its own in it.
        identity: what the model is known by.
        limit: bytes of all files in the folder, None = no limit.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], limit: int | None = None) -> None:
        self.folder, self.limit = folder, limit
        self._identity = json.dumps(identity, sort_keys=True)
        name = hashlib.sha256(self._identity.encode()).hexdigest()[:16]
        self.own = folder / f"{identity['model']}-{name}"
        self._refused: set[Path] = set()  # not asked again until they are written anew
        self._full = self._too_large = False  # said once each
        try:
            self.own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"folder={folder} cannot hold a store ({error}): name a folder that can be written to"
            ) from None
        self._sweep()

    def path(self, key: str) -> Path:
        return self.own / f"{key}{ENDING}"

    # ------------------------------------------------------------------ reading

    def open(self, key: str, ids: Sequence[int]) -> Entry | None:
        """The entry of a key, for a chunk of these ids; None where there is none.

        Raises:
            Damaged: there is one that must not be used.
        """
        path = self.path(key)
        if path in self._refused:
            return None
        try:
            file = safe_open(path, "pt")
            about = file.metadata() or {}
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError) as error:
            raise Damaged(f"cannot be read ({error})") from None
        if about.get("format") != FORMAT:
            raise Damaged(f"is no chunk of this format ({about.get('format')!r})", foreign=True)
        if about.get("identity") != self._identity or about.get("key") != key:
            raise Damaged("is of another model or chunk than its name says", foreign=True)
        try:
            sums = {str(name): int(value) for name, value in json.loads(about["sums"]).items()}
            names = set(file.keys())
            nbytes = int(about["nbytes"])
        except (KeyError, ValueError, AttributeError) as error:
            raise Damaged(f"has a damaged header ({error})") from None
        parts, layers = _parted(sums)
        if not names == set(sums) == {"ids", *(f"{part}.{i}" for i in range(layers) for part in parts)}:
            raise Damaged("lacks some of its layers")
        held = _checked(file, "ids", sums)
        if held.tolist() != list(ids):
            raise Damaged("holds other tokens", foreign=True)
        try:
            os.utime(path)  # when it was last used, for the limit
        except OSError:
            logger.debug("cannot touch %s", path)
        return Entry(path, file, held, sums, nbytes)

    def refuse(self, path: Path, fault: Damaged) -> None:
        """Report an entry, and do not ask for it again until it is written anew."""
        if path not in self._refused:
            self._refused.add(path)
            warnings.warn(f"{path} {fault}: not used, the chunk is computed again", stacklevel=4)

    def cool(self) -> None:
        """Ask the system to forget what it holds of the files in memory, so that the next read is one from the disk."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in self.own.glob(f"*{ENDING}"):
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError:
                continue
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)

    # ------------------------------------------------------------------ writing

    def write(self, key: str, ids: Sequence[int], layers: Sequence[Mapping[str, Tensor]]) -> bool:
        """Write an entry, whole or not at all. False, with one warning, where there is no room: memory has to do."""
        tensors = {"ids": torch.tensor(ids)}
        for index, layer in enumerate(layers):
            tensors |= {f"{name}.{index}": tensor for name, tensor in layer.items()}
        if self._full:
            return False
        least = sum(tensor.nbytes for tensor in tensors.values())
        if self.limit is not None and least > self.limit:
            self._warn_of_size(least)
            return False
        sums = {name: _sum(tensor) for name, tensor in tensors.items()}
        about = {"format": FORMAT, "identity": self._identity, "key": key, "sums": json.dumps(sums)}
        about["nbytes"] = str(sum(tensor.nbytes for layer in layers for tensor in layer.values()))
        path = self.path(key)
        temporary = self.own / f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            save_file(tensors, temporary, metadata=about)
            size = temporary.stat().st_size
            if not self._room(size, path):
                self._warn_of_size(size)
                return False
            _flush(temporary)
            os.replace(temporary, path)
            _flush(self.own)
        except (OSError, SafetensorError) as error:
            self._full = True
            warnings.warn(
                f"no chunk is written to {self.folder} any more ({error}): make room there, or give the store another "
                "folder or a higher limit; it goes on in memory",
                stacklevel=4,
            )
            return False
        finally:
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                logger.debug("cannot remove %s", temporary)
        self._refused.discard(path)
        return True

    def _warn_of_size(self, size: int) -> None:
        """Say once that a chunk is larger than all files may be; smaller ones are still written."""
        if not self._too_large:
            self._too_large = True
            warnings.warn(
                f"a chunk takes {size} bytes, the limit is {self.limit}: it is not written to {self.folder}, nor are others "
                "of more; give the store a higher limit; it goes on in memory",
                stacklevel=5,
            )

    def _room(self, size: int, path: Path) -> bool:
        """Delete what was used least recently until a file of `size` bytes at `path` fits into the limit, if it can."""
        if self.limit is None:
            return True
        if size > self.limit:
            return False
        files = []
        for found in self.folder.glob(f"*/*{ENDING}"):
            try:
                about = found.stat()
            except OSError:  # another process made room
                continue
            if found != path:
                files.append((about.st_mtime_ns, about.st_size, found))
        total = sum(length for _, length, _ in files)
        for _, length, found in sorted(files):
            if total + size <= self.limit:
                break
            found.unlink(missing_ok=True)
            total -= length
        return total + size <= self.limit

    def nbytes(self) -> int:
        """Bytes of this model's files."""
        return sum(path.stat().st_size for path in self.own.glob(f"*{ENDING}"))

    def _sweep(self) -> None:
        """Take away what processes that died were about to write."""
        for left in self.folder.glob("*/.*.tmp"):
            try:
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink()
            except OSError:
                continue


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(tensor: Tensor) -> int:
    """CRC-32 of form and bytes: finds a byte that changed, not one that was changed with care."""
    start = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, start)


def _parted(names: Iterable[str]) -> tuple[list[str], int]:
    """The parts of a layer and the number of layers, from names such as `keys.3`."""
    found = [name.rpartition(".") for name in names if name != "ids"]
    return sorted({part for part, _, _ in found}), len({index for _, _, index in found})


def _checked(file: Any, name: str, sums: Mapping[str, int]) -> Tensor:
    """A copy of a tensor, whose checksum is the one that was stored."""
    try:
        found = file.get_tensor(name).clone()
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise Damaged(f"cannot be read ({error})") from None
    if _sum(found) != sums.get(name):
        raise Damaged(f"is damaged in {name}")
    return found
