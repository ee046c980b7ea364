"""Hydra launcher plugin (`hydra/launcher=shared`): a sweep's cells are run all at once, so that they can share prefills."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from kvcompress.sweep.compose import compose_once_per_choice
from kvcompress.sweep.launcher.engines import ENGINES, part_runner
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.sweeper import CellSweeper, store_sweeper
from kvcompress.sweep.stored_config import resolve

__all__ = ["CellSweeper", "SharedLauncher", "register_launcher", "store_launcher"]

NAMESPACE = "hydra_plugins.kvcompress_launcher"  # Hydra takes launchers from below hydra_plugins only


class SharedLauncher(Launcher):
    """Composes every cell, then has the task function's `sweep` run them in this process.

    Args:
        share: one prefill per sample for all cells that can start from it.
        together: cells that share a prefill decode as rows of one batch where they can.
        check: also decode each cell alone, and fail it where the tokens differ without a close call.
        memory: GiB that the caches of a shared prefill and its cells may take; cells take turns to fit.
        engine: joblib, submitit or ray: groups become jobs of it, `workers` at a time, with its own `settings`.
    """

    __module__ = NAMESPACE

    def __init__(
        self,
        share: bool = True,
        together: bool = True,
        check: bool = False,
        memory: float | None = None,
        engine: str | None = None,
        workers: int = 2,
        settings: Any = None,
    ) -> None:
        if memory is not None and not memory > 0:
            raise ValueError(f"hydra.launcher.memory={memory}; GiB above 0, or null for no limit")
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"hydra.launcher.engine={engine!r}; valid: {', '.join(ENGINES)}, or null for this process")
        if workers < 1:
            raise ValueError(f"hydra.launcher.workers={workers}; at least 1")
        self.engine, self.workers, self.settings = engine, workers, dict(settings or {})
        self.share, self.together, self.check = share, together, check
        self.memory = None if memory is None else int(memory * 2**30)
        self.config: DictConfig | None = None
        self.context: HydraContext | None = None
        self.sweep: Callable[..., Any] | None = None
        self.listen: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        compose_once_per_choice(hydra_context.config_loader)  # Hydra's check of all cells takes the same way
        self.config, self.context = config, hydra_context
        # Hydra hands a launcher nothing but the task function: what runs many cells at once is an attribute of it
        self.sweep, self.listen = (getattr(task_function, name, None) for name in ("sweep", "listen"))
        if self.sweep is None:
            raise ValueError("hydra/launcher=shared runs kvcompress's own cells: use kvcompress run")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells.

        Raises:
            CompactHydraException: there is none; said without a traceback.
        """
        setup_globals()
        assert self.config is not None and self.context is not None and self.sweep is not None
        if not job_overrides:
            raise CompactHydraException("this sweep has no cell: an override stands for no value at all")
        returned = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            returned.append(_composed(config))
        how = Options(self.share, self.together, self.check, self.memory)

        def elsewhere(groups: list[list[int]]) -> Any:
            parts = [[list(job_overrides[cell]) for cell in group] for group in groups]
            return ENGINES[str(self.engine)](part_runner(self.listen), parts, how, self.workers, self.settings)

        self.sweep([job.cfg for job in returned], how, elsewhere if self.engine else None)
        return returned


def _composed(config: DictConfig) -> JobReturn:
    """A job as Hydra reports it, with the cell's own configuration resolved as long as Hydra's is at hand."""
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        job = JobReturn()
        job.overrides = [str(override) for override in config.hydra.overrides.task]
        job.hydra_cfg, job.cfg = cast(DictConfig, HydraConfig.instance().cfg), config
        with open_dict(job.cfg):
            del job.cfg["hydra"]
        resolve(job.cfg)  # what comes from the environment is read where it is used, and not written down
        job.status, job.return_value = JobStatus.COMPLETED, None  # faults are in records and the summary
        return job
    finally:
        HydraConfig.instance().cfg = before


@dataclass
class SharedLauncherConfig:
    """Settings of the shared launcher, as `hydra.launcher.*`."""

    _target_: str = f"{NAMESPACE}.SharedLauncher"
    share: bool = True
    together: bool = True
    check: bool = False
    memory: float | None = None
    engine: str | None = None
    workers: int = 2
    settings: dict[str, Any] = field(default_factory=dict)


def store_launcher() -> None:
    """Make `hydra/launcher=shared` a choice, and `hydra/sweeper=cells`."""
    store_sweeper()
    ConfigStore.instance().store(
        group="hydra/launcher", name="shared", node=SharedLauncherConfig, provider="kvcompress"
    )


def register_launcher() -> None:
    """Tell Hydra of the launcher: its own search does not look here. May be called more than once.

    Hydra wants the class to be found under its namespace, so this module is entered there: unlike a second package
    folder this works in every kind of installation.
    """
    store_launcher()
    package, _, name = NAMESPACE.partition(".")
    try:
        parent = importlib.import_module(package)
    except ModuleNotFoundError:  # no other plugin is installed
        parent = sys.modules[package] = types.ModuleType(package)
        parent.__path__ = []
    sys.modules[NAMESPACE] = sys.modules[__name__]
    setattr(parent, name, sys.modules[__name__])
    Plugins.instance().register(SharedLauncher)
    Plugins.instance().register(CellSweeper)
