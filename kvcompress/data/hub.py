"""Data sets of the Hugging Face Hub at a pinned revision, from data files alone (`datasets` runs no loading script)."""

from __future__ import annotations

import re
import time
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcompress.data import jsonl

RETRY_S = 60  # a Hub that could not be reached takes half a minute to say so, and a sweep asks for every cell
_failed: dict[Source | File, tuple[float, Exception]] = {}


def is_commit(revision: str) -> bool:
    """True for a commit, which pins what it names, and not for a branch or tag, which may move."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


class Source(NamedTuple):
    """A data set of the Hub; `revision` is a commit, which pins it, or a branch or tag, which may move."""

    repository: str
    subset: str | None
    split: str
    revision: str

    @property
    def pinned(self) -> bool:
        return is_commit(self.revision)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.repository, self.subset, self.split)))


class File(NamedTuple):
    """A file of a data set of the Hub that `datasets` cannot load: JSON Lines, a JSON list, or one of them in a zip file.

    `member` names what is in the zip file, "" where the file is none.
    """

    repository: str
    name: str
    member: str
    revision: str

    @property
    def pinned(self) -> bool:
        return is_commit(self.revision)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.repository, self.name, self.member)))


class Rows(NamedTuple):
    """Rows of a data set and the commit they are of."""

    rows: tuple[dict[str, Any], ...]
    revision: str


def fetch(source: Source | File) -> Rows:
    """All rows of a data set or of one of its files, from the local cache or the network.

    Raises:
        ValueError: what came is of another commit: without a network `datasets` takes what it last had.
        Exception: whatever the Hub's client raises where it has neither.
    """
    when, error = _failed.get(source, (0.0, None))
    if error is not None and time.monotonic() - when < RETRY_S:
        raise error
    try:
        found = _load(source) if isinstance(source, Source) else _read(source)
    except Exception as error:
        _failed[source] = time.monotonic(), error
        raise
    if source.pinned and found.revision != source.revision:
        raise ValueError(
            f"{source.repository}: commit {source.revision} is wanted, but only {found.revision} is in the local cache "
            "and the Hub cannot be reached; set task.revision to take that one"
        )
    return found


@lru_cache(maxsize=32)
def _load(source: Source) -> Rows:
    from datasets import load_dataset_builder

    builder = load_dataset_builder(source.repository, source.subset, revision=source.revision)
    builder.download_and_prepare()
    return Rows(tuple(dict(row) for row in builder.as_dataset(split=source.split)), str(builder.hash))


@lru_cache(maxsize=32)
def _read(file: File) -> Rows:
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(file.repository, file.name, repo_type="dataset", revision=file.revision))
    where = str(file)
    if file.member:
        with zipfile.ZipFile(path) as archive:
            if file.member not in archive.namelist():
                raise ValueError(f"{where}: not in the zip file, which holds {', '.join(archive.namelist()[:20])}")
            text = archive.read(file.member).decode("utf-8")
    else:
        text = path.read_text(encoding="utf-8")
    parts = path.parts  # …/snapshots/<commit>/<name>
    return Rows(tuple(row for _, row in jsonl.parsed(text, where)), parts[parts.index("snapshots") + 1])
