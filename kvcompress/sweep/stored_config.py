"""The configuration of a run as it is stored in its folder, `config.yaml`: written without values of the environment, and
read back as plain data in which nothing is resolved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from kvcompress.common.atomic_files import read_plain

LARGEST = 1_000_000  # bytes of a file that is read
_DEEPEST = 20
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(?:env|decode)\b")
_REFERENCE = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")


def from_environment(config: DictConfig) -> dict[str, str]:
    """What is written under keys whose values come from an environment variable, themselves or through other keys."""
    texts = {key: value for key, value in _leaves(OmegaConf.to_container(config)) if isinstance(value, str)}
    found: dict[str, str] = {}
    while True:
        more = {
            key: text
            for key, text in texts.items()
            if _ENVIRONMENT.search(text) or any(_part_of(name, found) for name in _REFERENCE.findall(text))
        }
        if more == found:
            return found
        found = more


def _part_of(name: str, keys: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for key in keys)


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values that are no mapping or list, by their dotted keys."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        yield prefix[:-1], node
    for key, value in items or ():
        yield from _leaves(value, f"{prefix}{key}.")


def resolve(config: DictConfig) -> None:
    """Resolve every interpolation in place, but for what comes from the environment: that is resolved where it is used."""
    written = from_environment(config)
    OmegaConf.resolve(config)
    for key, text in written.items():
        OmegaConf.update(config, key, text)


def plain_yaml(config: DictConfig) -> str:
    """The configuration as YAML, resolved but for what comes from the environment, which stays as it is written."""
    return OmegaConf.to_yaml(_resolved(config))


def plain(config: DictConfig) -> dict[str, Any]:
    """The same as plain data."""
    found = OmegaConf.to_container(_resolved(config))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _resolved(config: DictConfig) -> DictConfig:
    copy = config.copy()
    resolve(copy)
    return copy


def typed_paths(config: DictConfig) -> list[str]:
    """Absolute paths that a user gave among the settings."""
    values = [value for _, value in _leaves(plain(config)) if isinstance(value, str) and "$" not in value]
    return [value for value in values if len(value) > 1 and Path(value).is_absolute()]


class _Loader(yaml.SafeLoader):
    """YAML without aliases, of which a few lines can stand for more than fits into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias in a stored configuration")
        return super().compose_node(parent, index)


def read(path: Path) -> dict[str, Any] | None:
    """The configuration at `path` as plain values; what refers to something (`${…}`) stays the text that it is.

    None where the file is not there, is no plain file, or holds no configuration.
    """
    try:
        content = read_plain(path)
        found = yaml.load(content.decode("utf-8"), _Loader) if len(content) <= LARGEST else None  # noqa: S506 - safe
    except (OSError, ValueError, yaml.YAMLError, RecursionError, OverflowError):
        return None
    return found if isinstance(found, dict) and _simple(found, _DEEPEST) else None


def _simple(value: Any, deep: int) -> bool:
    """True for nested text, numbers and nothing, with text as keys."""
    if deep == 0:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and _simple(one, deep - 1) for key, one in value.items())
    if isinstance(value, list):
        return all(_simple(one, deep - 1) for one in value)
    return value is None or isinstance(value, (str, int, float))
