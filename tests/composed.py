"""Configurations of cells: what a choice of groups composes to is worked out once per process (`test_compose.py`)."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from kvcompress.sweep import config
from kvcompress.sweep.compose import compose_once_per_choice

_made: dict[Any, Any] = {}


def composed(*overrides: str) -> Any:
    """The configuration that Hydra composes from command-line overrides; the caller's own to change."""
    config.register()
    with initialize_config_dir(str(config.folder()), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        compose_once_per_choice(loader)
        loader.load_configuration._made = _made
        return compose("config", list(overrides))
