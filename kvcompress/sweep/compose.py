"""Fast composition of configurations: the one module that reaches into Hydra's internals.

Hydra reads every file of the defaults list anew for each cell, twice in a sweep: 0.1 s each on one core. Here a choice of
groups is composed once, and each cell's values are set on a copy. `tests/sweep/test_compose.py` holds it to Hydra's results.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig


class Composer:
    """A config loader's `load_configuration`, to the same results.

    Cells that differ in plain values alone (`key=value` of a key that is no group) have their defaults list in common.
    Whatever else an override may be, as an added or deleted key, goes Hydra's own way.
    """

    def __init__(self, loader: ConfigLoaderImpl) -> None:
        self.loader, self.own = loader, loader.load_configuration
        self._made: dict[Any, DictConfig] = {}
        self._parse = lru_cache(maxsize=4096)(OverridesParser.create(config_loader=loader).parse_override)
        self._group_exists = lru_cache(maxsize=4096)(loader.repository.group_exists)

    def __call__(
        self, config_name: str | None, overrides: Sequence[str], run_mode: RunMode, *rest: Any, **options: Any
    ) -> DictConfig:
        """The configuration; arguments, results and errors are those of Hydra's own."""
        if run_mode != RunMode.RUN:
            return self.own(config_name, list(overrides), run_mode, *rest, **options)
        parsed = [self._parse(override) for override in overrides]
        values = [override for override in parsed if self._is_value(override)]
        chosen = [override for override in parsed if not self._is_value(override)]
        if not values or not all(override.is_hydra_override() or self._is_choice(override) for override in chosen):
            return self.own(config_name, list(overrides), run_mode, *rest, **options)
        key = (config_name, rest, *sorted(options.items()), *(override.input_line for override in chosen))
        if key not in self._made:
            lines = [str(override.input_line) for override in chosen]
            self._made[key] = self.own(config_name, lines, run_mode, *rest, **options)
        config = copy.deepcopy(self._made[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        mine = [override for override in parsed if not override.is_hydra_override()]
        job = config.hydra.job
        config.hydra.overrides.task = [override.input_line for override in mine]
        job.override_dirname = get_overrides_dirname(
            overrides=mine,
            kv_sep=job.config.override_dirname.kv_sep,
            item_sep=job.config.override_dirname.item_sep,
            exclude_keys=job.config.override_dirname.exclude_keys,
        )
        return config

    def _is_value(self, override: Override) -> bool:
        plain = not (override.is_add() or override.is_force_add() or override.is_delete() or override.package)
        swept = override.is_sweep_override() or override.is_hydra_override()
        return plain and not swept and not self._is_group(override)

    def _is_choice(self, override: Override) -> bool:
        return self._is_group(override) and not override.is_sweep_override() and isinstance(override.value(), str)

    def _is_group(self, override: Override) -> bool:
        return bool(self._group_exists(override.key_or_group))


def share_config_store() -> None:
    """Have Hydra copy its sources of configurations without the store of schemas. May be called more than once.

    It copies them for each composition, so as not to change the sources themselves; the store is never changed by it and hands
    out copies. With the schemas of all methods and tasks that takes three quarters of a composition.
    """
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def compose_once_per_choice(loader: ConfigLoader) -> None:
    """Have `loader` compose each choice of groups once. May be called more than once."""
    if isinstance(loader, ConfigLoaderImpl) and not isinstance(loader.load_configuration, Composer):
        loader.load_configuration = Composer(loader)  # type: ignore[method-assign]
