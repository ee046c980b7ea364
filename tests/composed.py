"""Configurations of cells: what overrides compose to is worked out once per process (`test_compose.py`)."""

from __future__ import annotations

import copy
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from kvcompress.sweep import config
from kvcompress.sweep.compose import compose_once_per_choice

_made: dict[Any, Any] = {}  # of a choice of groups
_cells: dict[tuple[str, ...], Any] = {}  # of all overrides but the folder


def composed(*overrides: str) -> Any:
    """The configuration that Hydra composes from command-line overrides; the caller's own to change.

    The folder of results, another one in each test, is set on a copy.
    """
    folders = [override.partition("=")[2] for override in overrides if override.startswith("paths.results=")]
    others = tuple(override for override in overrides if not override.startswith("paths.results="))
    if others not in _cells:
        config.register()
        with initialize_config_dir(str(config.folder()), version_base="1.3"):
            loader: Any = GlobalHydra.instance().config_loader()
            compose_once_per_choice(loader)
            loader.load_configuration._made = _made
            _cells[others] = compose("config", list(others))
    made = copy.deepcopy(_cells[others])
    if folders:
        made.paths.results = folders[-1]
    return made
