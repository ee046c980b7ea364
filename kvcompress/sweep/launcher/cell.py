"""A cell: one configuration, its run id and its folder, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvcompress import tracking
from kvcompress.common import hashing
from kvcompress.common.memory import is_oom
from kvcompress.data.task import Sample, Task
from kvcompress.hook.compression import KERNELS
from kvcompress.hook.static_decode import DECODES
from kvcompress.measure.measuring import hardware
from kvcompress.method import Method
from kvcompress.method.budget import NotTogether
from kvcompress.models import loading
from kvcompress.sweep import record
from kvcompress.sweep.batches import cannot_batch
from kvcompress.sweep.config import RESUME, build_method, build_task, check_keys
from kvcompress.sweep.faults import text_of
from kvcompress.sweep.launcher.lock import Lock, locked
from kvcompress.sweep.sanity import Sanity
from kvcompress.sweep.stored_config import plain_yaml, typed_paths


@dataclass(frozen=True)
class Outcome:
    """What became of one cell.

    `status` is a record's status, or `done` (finished before), `same` (equals an earlier cell of this sweep), `stale`
    (finished with other sources; not run), `running` (another process has it), `dropped` (legal settings that do not
    go together, as a sweep over all combinations has them) or `refused` (an illegal configuration, or a folder that
    cannot be written to). Nothing was run or written of those two. `full` stands for all cells that are left when the
    disk takes no more.
    """

    method: str
    budget: float | int
    status: str
    run_id: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The method, what differs from its own settings where that is known, and the budget."""
        return " ".join(filter(None, (self.method, self.record.get("variant"), f"budget {self.budget}")))

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "oom", "refused", "partial", "full")


def identity(config: Any, method: Method, task: Task) -> dict[str, Any]:
    """Everything that may change the result of a cell, and nothing else.

    Left out: launcher, logger, paths, resume, batch, sweep name and the index of the device. A method without a budget gets
    1.0, so that a sweep's budgets collapse to one cell.
    """
    model = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(model, dict)
    described = {key: value for key, value in method.describe().items() if key != "budget"}
    return {
        "model": {key: value for key, value in model.items() if key != "device_map"}
        | loading.fingerprint(model["name"]),
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
    }


def pair_id(cell: Mapping[str, Any]) -> str:
    """What cells share that may be compared: everything but method, parts and budget."""
    return hashing.digest({key: value for key, value in cell.items() if key not in ("method", "parts", "budget")})


def check_lengths(samples: Sequence[Sample], model: Any, method: Method) -> None:
    """Refuse samples longer than the model's positions, before any of them is run.

    Raises:
        ValueError: names the sample, its length and the limit.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or method.compact_positions:
        return
    longest = max(samples, key=lambda sample: sample.total_tokens())
    if longest.total_tokens() > limit:
        raise ValueError(
            f"sample {longest.id} needs {longest.total_tokens()} positions, answer included; the model has {limit}; "
            "choose shorter prompts, or a method with compact positions"
        )


def model_key(config: Any) -> str:
    """What a loaded model is good for: cells with the same key use the same one."""
    settings = OmegaConf.to_container(config.model, resolve=True)
    return hashing.digest([settings, config.dtype, str(config.device), config.seed])


def check(config: DictConfig) -> None:
    """Refuse settings that no cell can have.

    Raises:
        ValueError: names the setting and what is allowed.
    """
    check_keys(config)
    if config.resume not in RESUME:
        raise ValueError(f"resume={config.resume!r}; valid: {', '.join(RESUME)}")
    if config.kernel not in KERNELS:
        raise ValueError(f"kernel={config.kernel!r}; valid: {', '.join(KERNELS)}")
    if config.decode not in DECODES:
        raise ValueError(f"decode={config.decode!r}; valid: {', '.join(DECODES)}")
    if config.limit is not None and config.limit < 1:
        raise ValueError(f"limit={config.limit}; at least 1 sample, or null for all")
    for name in ("batch", "batch_memory"):
        if config[name] is not None and config[name] < 1:
            raise ValueError(f"{name}={config[name]}; at least 1{' byte' if name != 'batch' else ''}")
    tracking.check(config.logger)
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed={config.seed}; 0 to 2**63 - 1")
    if Path(config.sweep.name).is_absolute() or ".." in Path(config.sweep.name).parts or not config.sweep.name:
        raise ValueError(f"sweep.name={config.sweep.name!r}; a name inside paths.results={config.paths.results}")


class Cell:
    """One configuration on its way to a record.

    Attributes:
        done: ids of the samples that are finished.
        total: samples there are, 0 until they are known; order: their ids, the order of the task.
        shared: its prefill is one that other cells use as well.
        sanity: how right and empty answers of its samples are scored.
        outcome: None while there is something to do.
    """

    def __init__(self, config: DictConfig) -> None:
        """Raises:
        ValueError, TypeError: an illegal setting.
        """
        check(config)
        self.config = config
        self.method, self.task = build_method(config), build_task(config)
        reason = cannot_batch(self.task, self.method) if config.batch > 1 else None
        if reason is not None:
            raise NotTogether(f"batch={config.batch}: {reason}; use batch=1")
        self.identity = identity(config, self.method, self.task)
        self.run_id = hashing.digest(self.identity)
        self.folder = record.RunFolder(Path(config.paths.results), config.sweep.name, self.run_id)
        self.source = hashing.source_hash()
        self.done: set[str] = set()
        self.total = 0
        self.shared = False
        self.sanity = Sanity()
        self.order: list[str] = []
        self.outcome: Outcome | None = None
        self._lock = Lock(self.folder.path / "lock")
        self._found = self.folder.stamp()
        self._rows_hold = True  # False where a record says otherwise than its samples: either may be wrong

    @property
    def title(self) -> str:
        return f"{type(self.method).__name__} {self.method.budget} · {self.task.name}"

    @property
    def open(self) -> bool:
        return self.outcome is None

    def _stepping(self) -> str:
        decode = str(self.config.decode)
        return "" if decode == "eager" else f"decode={decode}"

    def settle(self, status: str, found: Mapping[str, Any] | None = None, note: str = "") -> Outcome:
        """What became of it."""
        self.outcome = Outcome(
            str(self.config.method.name),
            self.config.budget,
            status,
            run_id=self.run_id,
            record=found or {},
            note=note,
            folder=self.folder.path,
        )
        return self.outcome

    def look(self) -> Outcome | None:
        """The outcome if there is nothing to do: finished before, or by other sources."""
        found = self.folder.record()
        if found is None:
            return None
        if found["status"] not in record.FINISHED:
            if found["status"] != "partial" and self.folder.stamp() != self._found:  # since this sweep began
                return self.settle(found["status"], found, "in another process: " + last_line(found["error"]))
            return None
        wrong = self._fault(found)
        if wrong is not None:
            record.warn_once(f"{self.folder.path / 'record.json'}: {wrong.text}; it is made again")
            self._rows_hold &= wrong.rows_hold
            return None
        stale = found.get("versions.source") != self.source
        if stale and self.config.resume == "auto":
            note = "made with other sources: resume=refresh runs it again, resume=any keeps it"
            return self.settle("stale", found, note)
        return self.settle("done", found, "finished before") if not stale or self.config.resume == "any" else None

    def _fault(self, found: Mapping[str, Any]) -> record.Fault | None:
        """Why a finished record is not this cell's, or not what its samples say."""
        mine = {key: self.identity[key] for key in ("budget", "seed", "dtype", "device")}
        mine |= {"run_id": self.run_id, "method": self.config.method.name, "protocol.pair": pair_id(self.identity)}
        mine |= {f"parts.{name}": value for name, value in self.identity["parts"].items()}
        for key, value in mine.items():
            if found.get(key) != value:
                return record.Fault(f"{key} is {found.get(key)!r}, but {value!r} in its cell", True)
        return self.folder.fault(found)

    def keep(self, ids: Sequence[str]) -> None:
        """Of the samples that are finished keep those that the task has and can summarise; others are told and run again.

        Args:
            ids: of the task's samples, in their order.
        """
        self.total, self.order = len(ids), list(ids)
        kept, known = {}, set(ids)
        for name, row in self.folder.rows(None if self.config.resume == "any" else self.source).items():
            try:
                if name not in known:
                    raise ValueError("the task has no such sample")
                if row["out"].get("oom") is None:
                    self.task.summarise([row])
                kept[name] = row
            except Exception as error:  # whatever a damaged row makes of a task's code
                where = self.folder.path / "samples.jsonl"
                record.warn_once(f"{where}: sample {name!r:.60}: {type(error).__name__}: {error}; left out")
        if kept.keys() != self.done:
            self.folder.keep(kept.values())
            self.done = set(kept)

    def claim(self) -> Outcome | None:
        """Take the cell for this process: None if it is ours to run now, else what became of it."""
        if self.look() is not None:
            return self.outcome
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            if not self._lock.acquire():
                return self.settle("running", note="another process has it")
            if self.look() is not None:  # another process finished it before we had the lock
                self._lock.release()
                return self.outcome
            kept = self.folder.rows(None if self.config.resume == "any" else self.source) if self._rows_hold else {}
            with locked(self.folder.path.parent / ".lock"):
                self.folder.open(plain_yaml(self.config))
                self.folder.start(kept.values())
        except OSError as error:
            self._lock.release()
            return self.settle("refused", note=f"cannot write to paths.results={self.config.paths.results}: {error}")
        self.done = set(kept)
        return None

    def release(self) -> None:
        """Let other processes have it."""
        self._lock.release()

    def fail(self, fault: BaseException) -> str:
        """The status of a cell that `fault` ended; its traceback goes into the record. Never raises an exception."""
        status = "oom" if is_oom(fault) else "failed"
        text = text_of(fault, typed_paths(self.config))
        try:
            self.write(status, text)
        except Exception as again:  # a full disk, a folder that was taken away
            self.settle(status, note=f"{last_line(text)}; no record could be written: {again}")
        return status

    def write(self, status: str, error: str | None) -> dict[str, Any]:
        """Write the record, and leave the cell.

        Raises:
            OSError: it cannot be written; and whatever the task raises over its rows.
        """
        self.folder.arrange(self.order)
        rows = list(self.folder.rows().values())
        found = record.aggregate(rows)
        if status == "ok" and found["n_samples"] < max(self.total, 1):
            status = "partial"
        if status == "ok" and rows and all(row["out"].get("oom") for row in rows):
            status = "oom"
        if status == "ok" and found.get("share_inactive") == 1.0 and self._should_have_acted(rows):
            status = "inactive"
        shared = any(row.get("shared") for row in rows)
        batched = any(row.get("rows", 1) > 1 for row in rows)
        if shared or batched:  # what some samples took alone says nothing of the others
            found |= {key: None for key in found if key.startswith(("time.", "memory."))}
        parts = self.identity["parts"]
        written: dict[str, Any] = dict.fromkeys(record.KEYS)
        written |= found
        if rows and status not in ("failed", "oom"):
            written |= {f"metrics.{name}": value for name, value in self.task.summarise(rows).items()}
        written |= {f"parts.{name}": value for name, value in parts.items()}
        written |= record.versions() | {
            f"versions.{name}": value for name, value in hardware(loading.resolve_device(self.config.device)).items()
        }
        written |= {
            "run_id": self.run_id,
            "status": status,
            "model": self.config.model.name,
            "task": self.task.name,
            "method": self.config.method.name,
            "budget": self.identity["budget"],
            "seed": self.config.seed,
            "dtype": self.identity["dtype"],
            "device": self.identity["device"],
            "metric": f"{self.task.metric}/{self.task.metric_version}",
            "parts.preset": self.method.preset,
            "variant": " ".join(filter(None, (self.method.variant(), self._stepping()))),
            "protocol.chunking": parts["prefill"],
            "protocol.shared": shared,
            "protocol.task_version": self.task.version,
            "protocol.lengths": ", ".join(map(str, getattr(self.task, "lengths", ()))) or None,
            "protocol.pair": pair_id(self.identity),
            **{f"protocol.{name}": value for name, value in self.task.provenance().items()},
            "sanity.gold": self.sanity.gold,
            "sanity.empty": self.sanity.empty,
            "notes": sorted({*(written["notes"] or ()), *self.sanity.notes}),
            "error": error,
        }
        with locked(self.folder.path.parent / ".lock"):
            self.folder.finish(record.readable_record(written))
            record.fill_deltas(self.folder.path.parent, self.run_id)
        written = self.folder.record() or written
        self.settle(written["status"], written, last_line(written["error"]))
        return written

    def _should_have_acted(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """True if the method can drop tokens, or reuses chunks and no prompt had one: all of it is recomputed at ratio 1
        too, and that is a result."""
        reuse = [(row["out"].get("end") or {}).get("reuse") or {} for row in rows]
        without = self.method.parts().prefill.needs_segments and not any(one.get("chunks") for one in reuse)
        return self.method.limited or without


def last_line(text: str | None) -> str:
    """The last line of a traceback: what went wrong."""
    return ((text or "").strip().splitlines() or [""])[-1]
