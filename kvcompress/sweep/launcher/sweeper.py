"""`hydra/sweeper=cells`: Hydra's own, without the file that it leaves in the folder of every sweep.

`multirun.yaml` would hold the paths of this machine, and nothing reads it: each cell has its `config.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

NAMESPACE = "hydra_plugins.kvcompress_launcher"


class CellSweeper(Sweeper):
    """Every combination of the values that the overrides list.

    Args:
        max_batch_size: cells that the launcher is given at once, None for all.
        params: values to sweep over by key, before those of the command line.
    """

    __module__ = NAMESPACE

    def __init__(self, max_batch_size: int | None = None, params: Mapping[str, Any] | None = None) -> None:
        self.max_batch_size, self.params = max_batch_size, dict(params or {})
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the cells; returns what the launcher returns for each batch."""
        # Hydra executes the modules of its plugins anew: a class imported above would be another
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        assert self.launcher is not None and self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = [f"{key}={value}" for key, value in self.params.items()]
        overrides = parser.parse_overrides([*given, *arguments])
        returned, first = [], 0
        for batch in BasicSweeper.split_arguments(overrides, self.max_batch_size):
            self.validate_batch_is_legal(batch)
            jobs = self.launcher.launch(batch, initial_job_idx=first)
            for job in jobs:
                _ = job.return_value  # raises what the job raised
            first += len(batch)
            returned.append(jobs)
        return returned


@dataclass
class CellSweeperConfig:
    """Settings of the sweeper, as `hydra.sweeper.*`: those of Hydra's own."""

    _target_: str = f"{NAMESPACE}.CellSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


def store_sweeper() -> None:
    """Make `hydra/sweeper=cells` a choice."""
    ConfigStore.instance().store(group="hydra/sweeper", name="cells", node=CellSweeperConfig, provider="kvcompress")
