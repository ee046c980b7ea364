"""Files that are whole or as they were, whenever the process dies; and files opened without following links.

A folder of results may be shared or come from elsewhere: what lies there under a known name may be a link to another
file, a pipe or a device. Nothing is written through a link, and nothing but a plain file is waited for.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# absent on some systems, where nothing is asked for then
_NO_LINK, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)


def open_plain(path: str | Path, flags: int, follow: bool = False) -> int:
    """A descriptor of the plain file at `path`; it does not wait, and a link is refused unless `follow`.

    Raises:
        OSError: the file cannot be opened, or is a link, pipe, device or folder.
    """
    try:
        file = os.open(path, flags | _NO_WAIT | (0 if follow else _NO_LINK), 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and not follow:
            raise OSError(errno.ELOOP, "is a link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return file


def read_plain(path: Path) -> bytes:
    """What is in the plain file at `path`, or in the one that a link there leads to.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    with os.fdopen(open_plain(path, os.O_RDONLY, follow=True), "rb") as file:
        return file.read()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another path beside `path`, of an empty file to write to; when the block ends it takes the place of `path` at once.

    After a fault nothing is left of it. Of two processes that write the same, the last wins. A link at `path` is
    replaced, not followed; the name of the new file cannot be foreseen.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    os.close(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file that is whole or as it was, and on disk when this returns; text as UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def append_whole(path: Path, line: bytes) -> None:
    """Add a line to the end of a file; of a line that cannot be written whole nothing is left.

    Raises:
        OSError: it cannot be written.
    """
    file = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        before = os.fstat(file).st_size
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except BaseException:  # an interrupt as well
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)
