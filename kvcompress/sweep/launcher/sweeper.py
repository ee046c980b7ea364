"""`hydra/sweeper=cells`: Hydra's own, without the file that it leaves in the folder of every sweep.

`multirun.yaml` would hold the paths of this machine, and nothing reads it: each cell has its `config.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

NAMESPACE = "hydra_plugins.kvcompress_launcher"


class CellSweeper(BasicSweeper):
    """Every combination of the values that the overrides list, handed to the launcher at once."""

    __module__ = NAMESPACE

    def sweep(self, arguments: list[str]) -> Any:
        """Run the cells; returns what the launcher returns for each batch."""
        assert self.launcher is not None and self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        returned, first = [], 0
        for batch in self.split_arguments(overrides, self.max_batch_size):
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
