"""The disk tier of a KV store: one safetensors file per chunk, whole or absent, checked layer by layer when read.

A folder may be shared by models (each has one of its own inside), and by processes: a file is written under another
name, flushed and renamed, and never written to again. What a process that died was about to write has a name that
nobody reads, and is taken away after a while.

Whatever another process does to the folder (deletes, shortens or overwrites a file, puts a link, a pipe or a folder in
its place, writes a header of its own) leads to an entry that is not used and computed again. Checksums find damage;
against someone who may write to the folder and means harm they do not help.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import secrets
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvcompress.reuse.tensor_file import Layout, TensorFile, Unreadable, folders_in, open_regular, regular_files

Tensor = torch.Tensor

FORMAT = "kvcompress chunk 2"
ENDING = ".safetensors"
STALE_S = 3600.0  # writing takes seconds: what is older was left by a process that died

logger = logging.getLogger(__name__)


class Damaged(ValueError):
    """An entry that must not be used: not what was stored, or (`foreign`) of another origin."""

    def __init__(self, text: str, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign


class Entry:
    """One open file: a layer is read from disk when it is asked for."""

    def __init__(self, path: Path, file: TensorFile, ids: Tensor, sums: Mapping[str, int], layers: int) -> None:
        self.path, self.ids, self.layers = path, ids, layers
        self.nbytes = sum(_nbytes(*about) for name, about in file.layout.items() if name != "ids")
        self._parts = sorted({name.rpartition(".")[0] for name in sums if name != "ids"})
        self._file, self._sums = file, sums

    def layer(self, index: int) -> dict[str, Tensor]:
        """Copies of a layer's tensors by name; Damaged where they are not what was stored."""
        return {part: _checked(self._file, f"{part}.{index}", self._sums) for part in self._parts}


class DiskTier:
    """Files of one model in a folder.

    Args:
        folder: made if it is not there; each model has a folder of its own in it.
        identity: what the model is known by.
        layout: of a layer of a chunk of n tokens, and `layers` their number: an entry of another is not used, and none
            is written.
        limit: bytes of all files in the folder, None = no limit.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str],
        layout: Callable[[int], Layout],
        layers: int,
        limit: int | None = None,
    ) -> None:
        self.folder, self.limit = folder, limit
        self._layer_layout, self._layers = layout, layers
        self._identity = json.dumps(identity, sort_keys=True)
        name = hashlib.sha256(self._identity.encode()).hexdigest()[:16]
        self.own = folder / f"{identity['model']}-{name}"
        self._refused: set[Path] = set()  # not asked again until they are written anew
        self._full = self._too_large = False  # said once each
        try:
            self._make_folder()
        except OSError as error:
            raise ValueError(
                f"folder={folder} cannot hold a store ({error}): name a folder that can be written to"
            ) from None
        self._sweep()

    def path(self, key: str) -> Path:
        return self.own / f"{key}{ENDING}"

    def _make_folder(self) -> None:
        self.own.mkdir(parents=True, exist_ok=True)
        if self.own.is_symlink():  # which another process has put there
            raise OSError(errno.ELOOP, "is a link", str(self.own))

    def _layout(self, tokens: int) -> Layout:
        """Of an entry's tensors."""
        layer = self._layer_layout(tokens)
        whole = {f"{part}.{index}": about for index in range(self._layers) for part, about in layer.items()}
        return {"ids": (torch.int64, (tokens,)), **whole}

    # ------------------------------------------------------------------ reading

    def open(self, key: str, ids: Sequence[int]) -> Entry | None:
        """The entry of a key, for a chunk of these ids; None where there is none.

        Raises:
            Damaged: there is one that must not be used.
        """
        path = self.path(key)
        if path in self._refused or self.own.is_symlink():
            return None
        try:
            file = TensorFile(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no fault of the file: this process has too many open
                return None
            raise Damaged(f"cannot be read ({error})") from None
        except Unreadable as error:
            raise Damaged(f"cannot be read ({error})") from None
        about = file.metadata
        if about.get("format") != FORMAT:
            raise Damaged(f"is no chunk of this format ({about.get('format')!r})", foreign=True)
        if about.get("identity") != self._identity or about.get("key") != key:
            raise Damaged("is of another model or chunk than its name says", foreign=True)
        try:
            sums = {str(name): int(value) for name, value in json.loads(about["sums"]).items()}
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise Damaged(f"has a damaged header ({error})") from None
        expected = self._layout(len(ids))
        if not set(file.layout) == set(sums) == set(expected):
            raise Damaged("lacks some of its layers")
        if dict(file.layout) != expected:
            raise Damaged("holds tensors of other shapes or number types than this model's")
        held = _checked(file, "ids", sums)
        if held.tolist() != list(ids):
            raise Damaged("holds other tokens", foreign=True)
        try:
            file.touch()  # when it was last used, for the limit
        except OSError:
            logger.debug("cannot touch %s", path)
        return Entry(path, file, held, sums, self._layers)

    def refuse(self, path: Path, fault: Damaged) -> None:
        """Report an entry, and do not ask for it again until it is written anew."""
        if path not in self._refused:
            self._refused.add(path)
            warnings.warn(f"{path} {fault}: not used, the chunk is computed again", stacklevel=4)

    def cool(self) -> None:
        """Ask the system to forget what it holds of the files in memory, so that the next read is one from the disk."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path, _ in regular_files(self.own, "", ENDING):
            try:
                handle = open_regular(path)
            except (OSError, Unreadable):
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
        if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} != self._layout(len(ids)):
            logger.debug("a chunk whose shapes are not this model's is not written")
            return False
        sums = {name: _sum(name, tensor) for name, tensor in tensors.items()}
        about = {"format": FORMAT, "identity": self._identity, "key": key, "sums": json.dumps(sums)}
        path = self.path(key)
        for attempt in (1, 2):
            try:
                return self._write(path, tensors, about)
            except (OSError, SafetensorError) as error:
                if attempt == 1 and not self.own.is_dir():  # another process has taken the folder away
                    try:
                        self._make_folder()
                        continue
                    except OSError:
                        logger.debug("cannot make %s again", self.own)
                if isinstance(error, (IsADirectoryError, PermissionError)) and path.is_dir():
                    logger.debug("a folder lies at %s", path)  # no reason to write no other chunk
                    return False
                self._full = True
                warnings.warn(
                    f"no chunk is written to {self.folder} any more ({error}): make room there, or give the store another "
                    "folder or a higher limit; it goes on in memory",
                    stacklevel=4,
                )
        return False

    def _write(self, path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> bool:
        """Write a file under another name and rename it; OSError or SafetensorError where that fails."""
        temporary = self.own / f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        if self.own.is_symlink():
            raise OSError(errno.ELOOP, "is a link", str(self.own))
        try:
            save_file(tensors, temporary, metadata=about)
            size = temporary.stat().st_size
            if not self._room(size, path):
                self._warn_of_size(size)
                return False
            _flush(temporary)
            os.replace(temporary, path)
            _flush(self.own)
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
        files = [
            (about.st_mtime_ns, about.st_size, found)
            for folder in folders_in(self.folder)
            for found, about in regular_files(folder, "", ENDING)
            if found != path
        ]
        total = sum(length for _, length, _ in files)
        for _, length, found in sorted(files):
            if total + size <= self.limit:
                break
            try:
                found.unlink(missing_ok=True)
            except OSError:
                continue
            total -= length
        return total + size <= self.limit

    def nbytes(self) -> int:
        """Bytes of this model's files."""
        return sum(about.st_size for _, about in regular_files(self.own, "", ENDING))

    def _sweep(self) -> None:
        """Take away what processes that died were about to write."""
        for folder in folders_in(self.folder):
            for left, about in regular_files(folder, ".", ".tmp"):
                if time.time() - about.st_mtime > STALE_S:
                    try:
                        left.unlink(missing_ok=True)
                    except OSError:
                        continue


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _sum(name: str, tensor: Tensor) -> int:
    """CRC-32 of name, form and bytes: finds a byte that changed, not one that was changed with care."""
    start = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, start)


def _checked(file: TensorFile, name: str, sums: Mapping[str, int]) -> Tensor:
    """A copy of a tensor, whose checksum is the one that was stored."""
    try:
        found = file.get(name)
    except (OSError, Unreadable) as error:
        raise Damaged(f"cannot be read ({error})") from None
    if _sum(name, found) != sums.get(name):
        raise Damaged(f"is damaged in {name}")
    return found
