"""Full disk: ends a sweep in one line, and the same command goes on when there is room."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class DiskFull(BaseException):
    """Nothing more can be written. Like an interrupt it ends the sweep and not one cell: no other cell could write either.

    What is finished is on disk by then.
    """


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, a write to `path` for which there is no room ends the sweep.

    Raises:
        DiskFull: the disk, the quota or the largest size of a file is exhausted.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"cannot write {path}: {error.strerror}") from error
        raise
