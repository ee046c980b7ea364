"""Data sets of the Hugging Face Hub at a pinned revision, from data files alone (`datasets` runs no loading script)."""

from __future__ import annotations

import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcompress.data import jsonl

RETRY_S = 60  # a Hub that could not be reached takes half a minute to say so, and a sweep asks for every cell
_failed: dict[Source, tuple[float, Exception]] = {}


class Source(NamedTuple):
    """A data set of the Hub; `revision` is a commit, which pins it, or a branch or tag, which may move.

    With `file`, one JSON Lines file of its repository, as it was published: no split, and values of mixed types as they are.
    """

    repository: str
    subset: str | None
    split: str
    revision: str
    file: str | None = None

    @property
    def pinned(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    def __str__(self) -> str:
        return ":".join(filter(None, (self.repository, self.subset, self.split, self.file)))


class Rows(NamedTuple):
    """Rows of a data set and the commit they are of."""

    rows: tuple[dict[str, Any], ...]
    revision: str


def fetch(source: Source) -> Rows:
    """All rows of a data set, from the local cache or the network.

    Raises:
        ValueError: what came is of another commit: without a network `datasets` takes what it last had.
        Exception: whatever the Hub's client raises where it has neither.
    """
    when, error = _failed.get(source, (0.0, None))
    if error is not None and time.monotonic() - when < RETRY_S:
        raise error
    try:
        found = _load(source)
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
    if source.file is not None:
        return _load_file(source, source.file)
    from datasets import load_dataset_builder

    builder = load_dataset_builder(source.repository, source.subset, revision=source.revision)
    builder.download_and_prepare()
    return Rows(tuple(dict(row) for row in builder.as_dataset(split=source.split)), str(builder.hash))


def _load_file(source: Source, file: str) -> Rows:
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(source.repository, file, repo_type="dataset", revision=source.revision))
    folders = path.parts[::-1]
    commit = folders[folders.index("snapshots") - 1]  # the cache keeps files as snapshots/<commit>/<file>
    return Rows(jsonl.read(path), commit)
