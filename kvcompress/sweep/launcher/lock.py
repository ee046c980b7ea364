"""Lock files: one process at a time works on a cell. A lock dies with its process, however that ends."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows has no flock)
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
TRIES = 3  # before a lock is taken to be another's


class Lock:
    """An exclusive lock on a file that says who holds it.

    The kernel holds the lock, not the file: one that a killed process left behind is free, and is taken over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def acquire(self, wait: bool = False) -> bool:
        """True if the lock is ours now; with `wait`, once it is free.

        Raises:
            OSError: the file cannot be made.
        """
        refused = 0
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(file)
                refused += 1
                if refused == TRIES:
                    return False
                time.sleep(0.01)  # whoever asks who holds it locks it for a moment as well
                continue
            except (
                OSError
            ) as error:  # a file system without locks: work goes on, one process at a time is up to the user
                logger.warning("%s cannot be locked (%s): do not run two processes on this sweep", self.path, error)
            if self._still_there(file):
                break
            os.close(file)  # its last holder took the file away in between
        os.ftruncate(file, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.write(file, json.dumps(holder).encode())
        self._file = file
        return True

    def _still_there(self, file: int) -> bool:
        try:
            return os.fstat(file).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock back, if it is ours, and take the file away."""
        if self._file is not None:
            with suppress(OSError):  # the folder may be gone, or no longer ours to write
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path` inside, waiting for it."""
    lock = Lock(path)
    lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock at `path` (pid, host, since), or None if nobody does."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if fcntl is None:
            return None
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            found = json.loads(os.read(file, 4096) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
    finally:
        os.close(file)
    return None
