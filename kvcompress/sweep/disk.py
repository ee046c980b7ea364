"""Full disk, or a folder that was taken away: ends a sweep in one line, and the same command goes on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class DiskFull(BaseException):
    """Nothing more can be written. Like an interrupt it ends the sweep and not one cell: no other cell could write either.

    What is finished is on disk by then.

    Attributes:
        advice: what is kept, and how to go on.
    """

    advice = "what is finished is kept, the same command goes on when there is room"


class FolderGone(DiskFull):
    """The folder of a sweep was deleted or moved while it was written to."""

    advice = "it was deleted or moved while the sweep ran; the same command runs again what was in it"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, a write to `path` for which there is no room ends the sweep.

    Raises:
        DiskFull: the disk, the quota or the largest size of a file is exhausted.
        FolderGone: the folder of the sweep is not there any more.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"cannot write {path}: {error.strerror}") from error
        sweep = path.parent.parent  # of a run; where only the run's own is gone, that cell fails
        if error.errno == errno.ENOENT and not sweep.is_dir():
            raise FolderGone(f"{sweep} is gone") from error
        raise
