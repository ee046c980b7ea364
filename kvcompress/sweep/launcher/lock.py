"""Lock files: one process at a time works on a cell. A lock dies with its process, however that ends.

The kernel locks files for as long as a process lives. A process locks one file per sweep, its *claim*; the file `lock` in
the folder of a cell names the claim that holds it. Any number of cells takes one descriptor, and no descriptor is
locked while something is written to it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcompress.common import strict_json
from kvcompress.common.atomic_files import open_plain, read_plain, replacing
from kvcompress.sweep.disk import written

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows has no flock)
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
CLAIM = re.compile(r"\.claim-[0-9]+-[0-9a-f]+")
_warned: set[Path] = set()


class FileLock:
    """An exclusive lock on an empty file, which is taken away when the lock is released.

    The kernel holds the lock, not the file: one that a killed process left behind is free.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self, wait: bool = False) -> bool:
        """True if the lock is ours now; with `wait`, once it is free.

        Raises:
            OSError: the file cannot be made, or is no plain file.
        """
        while True:
            file = open_plain(self.path, os.O_RDWR | os.O_CREAT)
            try:
                if not _flock(file, self.path, "LOCK_EX", wait):
                    return False
                if _still_there(file, self.path):  # else its last holder took it away in between
                    self._file, file = file, -1
                    return True
            finally:
                if file >= 0:
                    os.close(file)

    @property
    def held(self) -> bool:
        """True while the file that we locked is the one at this path."""
        return self._file is not None and _still_there(self._file, self.path)

    def release(self) -> None:
        """Give the lock back, if it is ours, and take the file away."""
        if self._file is not None:
            with suppress(OSError):  # the folder may be gone, or no longer ours to write
                if _still_there(self._file, self.path):
                    self.path.unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor and leave the file: in a forked child the lock is the parent's."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _flock(file: int, path: Path, kind: str, wait: bool = False) -> bool:
    """Lock an open file; False where another process has it. Without a way to lock, True: nobody has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, getattr(fcntl, kind) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: one process at a time is up to the user
        if path.parent not in _warned:
            _warned.add(path.parent)
            logger.warning("%s cannot be locked (%s): do not run two processes on this sweep", path, error)
    return True


def _still_there(file: int, path: Path) -> bool:
    try:
        here, there = os.fstat(file), os.lstat(path)
    except FileNotFoundError:
        return False
    return (here.st_ino, here.st_dev) == (there.st_ino, there.st_dev)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path` inside, waiting for it.

    Raises:
        DiskFull: there is no room for the file.
    """
    lock = FileLock(path)
    with written(path):
        lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Claim:
    """This process's claim on a sweep, and the cells that it holds."""

    lock: FileLock
    cells: set[Path] = field(default_factory=set)


_claims: dict[Path, _Claim] = {}  # by the sweep's folder


def _forget_claims() -> None:
    for claim in _claims.values():
        claim.lock.forget()
    _claims.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_claims)


class Lock:
    """The lock of a cell: the file `lock` in its folder, which says who holds it.

    Args:
        path: `<sweep>/<run-id>/lock`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.sweep = path, path.parent.parent
        self._claim: _Claim | None = None

    def acquire(self) -> bool:
        """True if the lock is ours now.

        Raises:
            OSError: the files cannot be made.
            DiskFull: there is no room for them.
        """
        with locked(self.sweep / ".lock"), written(self.path):
            if holder(self.path) is not None:
                return False
            claim = self._claimed()
            told = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "claim": claim.lock.path.name,
            }
            try:
                with replacing(self.path) as temporary:
                    temporary.write_text(json.dumps(told), encoding="utf-8")
                claim.cells.add(self.path)
                self._claim = claim
            finally:
                self._give_up(claim)
        return True

    def _claimed(self) -> _Claim:
        claim = _claims.get(self.sweep)
        if claim is None or not claim.lock.held:  # its file was taken away
            if claim is not None:
                claim.lock.release()
            lock = FileLock(self.sweep / f".claim-{os.getpid()}-{secrets.token_hex(4)}")
            lock.acquire()
            claim = _claims[self.sweep] = _Claim(lock)
        return claim

    def _give_up(self, claim: _Claim) -> None:
        """Release a claim that holds no cell."""
        if not claim.cells:
            claim.lock.release()
            if _claims.get(self.sweep) is claim:
                del _claims[self.sweep]

    def release(self) -> None:
        """Give the lock back, if it is ours, and take the file away."""
        claim, self._claim = self._claim, None
        if claim is None or _claims.get(self.sweep) is not claim:  # not ours, or a forked child's parent's
            return
        with suppress(OSError):  # the folder may be gone, or no longer ours to write
            if (_told(self.path) or {}).get("claim") == claim.lock.path.name:
                self.path.unlink(missing_ok=True)
        claim.cells.discard(self.path)
        self._give_up(claim)


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock of a cell (pid, host, since, claim), or None if nobody does."""
    told = _told(path)
    return told if told is not None and _alive(path.parent.parent / told["claim"]) else None


def _told(path: Path) -> dict[str, Any] | None:
    try:
        found = strict_json.loads(read_plain(path))
    except (OSError, ValueError):
        return None
    named = isinstance(found, dict) and CLAIM.fullmatch(str(found.get("claim")))
    return found if named else None


def _alive(claim: Path) -> bool:
    """True if the process that made a claim lives."""
    try:
        file = open_plain(claim, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _flock(file, claim, "LOCK_SH")
    finally:
        os.close(file)


def clear_locks(sweep: Path) -> None:
    """Take away what killed processes held; the caller holds the sweep's lock."""
    for path in (*sweep.glob("*/lock"), *sweep.glob(".claim-*")):
        with suppress(OSError):
            held = holder(path) is not None if path.name == "lock" else not path.is_symlink() and _alive(path)
            if not held:
                path.unlink(missing_ok=True)
