"""Cell specification: a configuration as method, task, identity and run id. Frozen; runs and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcompress.common import hashing
from kvcompress.data.task import Task
from kvcompress.data.think_rules import MODES as THINK
from kvcompress.hook.compression import KERNELS
from kvcompress.hook.static_decode import DECODES
from kvcompress.method import Method
from kvcompress.method.budget import NotTogether
from kvcompress.models import loading
from kvcompress.sweep.batches import cannot_batch
from kvcompress.sweep.components import build_method, build_task
from kvcompress.sweep.config import RESUME, check_keys, check_logger, check_sweep_name


@dataclass(frozen=True, eq=False)
class CellSpec:
    """One cell of a sweep, before it is run.

    Attributes:
        config: the resolved configuration.
        identity: everything that may change the result, as plain values; `run_id` is its hash.
        pair: what cells share that may be compared, as a hash.
        source: hash of the library's sources.
    """

    config: DictConfig
    method: Method
    task: Task
    identity: Mapping[str, Any]
    run_id: str
    pair: str
    source: str

    @classmethod
    def from_config(cls, config: DictConfig) -> CellSpec:
        """The specification that a composed configuration describes.

        Raises:
            ValueError, TypeError: an illegal setting.
            NotTogether: legal settings that do not go together.
        """
        check(config)
        method, task = build_method(config), build_task(config)
        reason = cannot_batch(task, method) if config.batch > 1 else None
        if reason is not None:
            raise NotTogether(f"batch={config.batch}: {reason}; use batch=1")
        check_thinking(config, task)
        config = with_dtype(config)
        found = identity(config, method, task)
        return cls(config, method, task, found, hashing.digest(found), pair_id(found), hashing.source_hash())

    @property
    def label(self) -> str:
        """Method, budget and task, for progress bars."""
        return f"{type(self.method).__name__} {self.method.budget} · {self.task.name}"

    @property
    def sweep(self) -> Path:
        """Folder of the sweep that the cell belongs to."""
        return Path(self.config.paths.results) / self.config.sweep.name

    @property
    def variant(self) -> str:
        """Settings that differ from the method's own, and the decode mode where it is not eager."""
        decode = str(self.config.decode)
        return " ".join(filter(None, (self.method.variant(), "" if decode == "eager" else f"decode={decode}")))

    @property
    def model_key(self) -> str:
        """Key of the loaded model: cells with the same key use the same one."""
        return model_key(self.config)


def with_dtype(config: DictConfig) -> DictConfig:
    """The configuration with the weights' type by its name: what is stored says what was run, on whatever device."""
    if config.dtype != "auto":
        return config
    dtype = loading.dtype_of(config.model.name, "auto", loading.resolve_device(config.device), config.model.revision)
    found = config.copy()
    found.dtype = str(dtype).removeprefix("torch.")
    return found


def identity(config: Any, method: Method, task: Task) -> dict[str, Any]:
    """Everything that may change the result of a cell, and nothing else.

    Left out: launcher, logger, paths, resume, batch, sweep name and the index of the device. A method without a budget
    gets 1.0, so that a sweep's budgets collapse to one cell.
    """
    model = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(model, dict)
    described = {key: value for key, value in method.describe().items() if key != "budget"}
    return {
        "model": {key: value for key, value in model.items() if key != "device_map"}
        | loading.folder_hash(model["name"]),
        "task": {
            "name": task.name,
            "version": task.version,
            "metric": f"{task.metric}/{task.metric_version}",
            **task.settings(),
            **task.fingerprint(),
        },
        "method": {"name": config.method.name, **described, **method.fingerprint()},
        "parts": method.parts().names(),
        "budget": method.budget if method.budget_kind != "none" else 1.0,
        "seed": config.seed,
        "dtype": str(loading.resolve_dtype(config.dtype)).removeprefix("torch."),
        "device": loading.resolve_device(config.device).type,
        "limit": config.limit,
        "kernel": config.kernel,
        **({} if config.decode == "eager" else {"decode": config.decode}),
        **({} if config.think == "keep" else {"think": config.think}),
        **({} if config.think_tokens is None else {"think_tokens": config.think_tokens}),
    }


def pair_id(cell: Mapping[str, Any]) -> str:
    """Hash of what cells share that may be compared: everything but method, parts and budget."""
    return hashing.digest({key: value for key, value in cell.items() if key not in ("method", "parts", "budget")})


def model_key(config: Any) -> str:
    """Hash of what a loaded model depends on."""
    settings = OmegaConf.to_container(config.model, resolve=True)
    return hashing.digest([settings, config.dtype, str(config.device), config.seed])


def check(config: DictConfig) -> None:
    """Refuse settings that no cell can have.

    Raises:
        ValueError: names the setting and what is allowed.
    """
    check_keys(config)
    for name, valid in (("resume", RESUME), ("kernel", KERNELS), ("decode", DECODES), ("think", THINK)):
        if config[name] not in valid:
            raise ValueError(f"{name}={config[name]!r}; valid: {', '.join(valid)}")
    if config.limit is not None and config.limit < 1:
        raise ValueError(f"limit={config.limit}; at least 1 sample, or null for all")
    if config.think_tokens is not None and config.think_tokens < 0:
        raise ValueError(f"think_tokens={config.think_tokens}; at least 0, or null for no budget of its own")
    for name in ("batch", "batch_memory"):
        if config[name] is not None and config[name] < 1:
            raise ValueError(f"{name}={config[name]}; at least 1{' byte' if name != 'batch' else ''}")
    check_logger(config.logger)
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed={config.seed}; 0 to 2**63 - 1")
    check_sweep_name(str(config.sweep.name), str(config.paths.results))


def check_thinking(config: DictConfig, task: Task) -> None:
    """Refuse rules of thinking that say nothing of a task.

    Raises:
        NotTogether: names the rule, and why.
    """
    if not task.thinks and (config.think != "keep" or config.think_tokens is not None):
        raise NotTogether(f"task={task.name} grades no answer: think=keep and think_tokens=null are what goes with it")
    if config.think == "drop" and not task.converses():
        raise NotTogether(
            f"think=drop takes thoughts out of a conversation before its next question, but no answer of task={task.name} "
            "stays for a later one (task.turns=session, where it has several questions); use think=keep"
        )
    if config.think == "off" and config.think_tokens is not None:
        raise NotTogether(
            f"think=off leaves nothing that think_tokens={config.think_tokens} could limit; set one of them"
        )
