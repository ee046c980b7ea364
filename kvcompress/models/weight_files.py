"""What a model folder or a Hub repository says that its weights are, checked before any of them is read.

transformers' `use_safetensors` decides which index is read, not what the index names: a `.bin` in it is unpickled, and
a path leads to any file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    WEIGHTS_INDEX_NAME,
    cached_file,
)

SAFE = ".safetensors"
INDEX = ".index.json"
ADAPTER_FIX = (
    "attach it with peft to a model that was loaded here, or merge it (peft: merge_and_unload) and save that as a model"
)


class UnsafeWeights(ValueError):
    """A model names weights that are not read."""


def check_weight_files(source: str, name: str, revision: str | None = None, allow_pickle: bool = False) -> None:
    """Refuse a model whose index or configuration names weights that are not safetensors files of its own folder.

    Args:
        source: a folder, or a Hub id, of which what is there or in reach is looked at.
        name: what the user called it.
        allow_pickle: other formats may be named; paths out of the folder may not.

    Raises:
        UnsafeWeights: names the file that says so; also for an adapter, whose base model and weights lie elsewhere.
    """
    if _found(source, ADAPTER_CONFIG_NAME, revision) is not None:
        raise UnsafeWeights(f"model {name!r} is an adapter ({ADAPTER_CONFIG_NAME}) of another model: {ADAPTER_FIX}")
    named = [SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME]
    explicit = _json(_found(source, CONFIG_NAME, revision), name).get("transformers_weights")
    if explicit is not None:  # a file that the configuration names in place of the usual ones
        _check_name(explicit, CONFIG_NAME, name, allow_pickle, (SAFE, SAFE + INDEX))
        named.append(explicit)
    for file in dict.fromkeys(file for file in named if file.endswith(INDEX)):
        if allow_pickle or file.endswith(SAFE + INDEX):
            for shard in _shards(_found(source, file, revision), name):
                _check_name(shard, file, name, allow_pickle, (SAFE,))


def _shards(index: Path | None, name: str) -> list[Any]:
    """The files that an index names."""
    if index is None:
        return []
    held = _json(index, name)
    weights = held.get("weight_map")
    if not isinstance(weights, dict) or not isinstance(held.get("metadata"), dict):
        raise UnsafeWeights(f"model {name!r} has a {index.name} without a map of its weights and metadata")
    return list({str(shard): shard for shard in weights.values()}.values())


def _check_name(file: Any, where: str, name: str, allow_pickle: bool, endings: tuple[str, ...]) -> None:
    """Refuse a name that is no plain file name, or of another format."""
    if not isinstance(file, str) or file in ("", ".", "..") or any(mark in file for mark in ("/", "\\", "\0", ":")):
        raise UnsafeWeights(
            f"model {name!r} names the weights {file!r} in its {where}: only files that lie beside it are read, since a path "
            "leads to any file; move them there, and correct the names"
        )
    if not allow_pickle and not file.endswith(endings):
        raise UnsafeWeights(
            f"model {name!r} names the weights {file!r} in its {where}, which are not safetensors: pickled ones can run any "
            "code when read; convert them, or pass allow_pickle=True if you trust them"
        )


def _found(source: str, file: str, revision: str | None) -> Path | None:
    """A file of a folder, or of a Hub repository (from the cache or the Hub), or None."""
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    found = cached_file(
        source,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _json(path: Path | None, name: str) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsafeWeights(f"model {name!r} has a {path.name} that cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise UnsafeWeights(f"model {name!r} has a {path.name} that is no JSON object")
    return found
