"""The runner: config → model → session → task → record. One cell after another, the model kept between them."""

from __future__ import annotations

import gc
import logging
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcompress import models, record, tracking
from kvcompress.compression import KERNELS
from kvcompress.config import RESUME, build_method, build_task, check_keys, check_overrides, register
from kvcompress.measure import hardware
from kvcompress.method import Method
from kvcompress.references import References
from kvcompress.task import Sample, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one cell.

    `status` is a record's status, or `done` (finished before), `same` (equals an earlier cell of this sweep), `stale`
    (finished with other sources; not run) or `refused` (an illegal configuration; nothing was run or written).
    """

    method: str
    budget: float | int
    status: str
    run_id: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    folder: Path | None = None

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "oom", "refused", "partial")


def identity(config: Any, method: Method, task: Task) -> dict[str, Any]:
    """Everything that may change the result of a cell, and nothing else.

    Left out: launcher, logger, paths, resume, sweep name and the index of the device. A method without a budget gets
    1.0, so that a sweep's budgets collapse to one cell.
    """
    model = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(model, dict)
    described = {key: value for key, value in method.describe().items() if key != "budget"}
    return {
        "model": {key: value for key, value in model.items() if key != "device_map"}
        | models.fingerprint(model["name"]),
        "task": {
            "name": task.name,
            "version": task.version,
            "metric": f"{task.metric}/{task.metric_version}",
            **task.settings(),
            **task.fingerprint(),
        },
        "method": {"name": config.method.name, **described},
        "parts": method.parts().names(),
        "budget": method.budget if method.budget_kind != "none" else 1.0,
        "seed": config.seed,
        "dtype": str(models.resolve_dtype(config.dtype)).removeprefix("torch."),
        "device": models.resolve_device(config.device).type,
        "limit": config.limit,
        "kernel": config.kernel,
    }


def pair_id(cell: Mapping[str, Any]) -> str:
    """What cells share that may be compared: everything but method, parts and budget."""
    return record.digest({key: value for key, value in cell.items() if key not in ("method", "parts", "budget")})


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


class Runner:
    """Runs cells and keeps the loaded model for the next one that wants the same."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.outcomes: list[Outcome] = []
        self._seen: set[tuple[str, str]] = set()
        self._model_key: Any = None
        self._model: tuple[Any, Any] | None = None

    def __call__(self, config: DictConfig) -> Outcome:
        """Run the cell `config` describes, or find that it is done. A fault is recorded, not raised."""
        outcome = self._cell(config)
        self.outcomes.append(outcome)
        score = outcome.record.get("score")
        shown = "" if score is None else f" score {score:.3f}"
        self.console.print(
            f"{outcome.method} budget {outcome.budget}: {outcome.status}{shown}"
            + (f" · {outcome.note}" if outcome.note else ""),
            highlight=False,
            markup=False,
        )
        return outcome

    def _cell(self, config: DictConfig) -> Outcome:
        named: dict[str, Any] = {"method": str(OmegaConf.select(config, "method.name")), "budget": config.budget}
        try:
            check_keys(config)
            if config.resume not in RESUME:
                raise ValueError(f"resume={config.resume!r}; valid: {', '.join(RESUME)}")
            if config.kernel not in KERNELS:
                raise ValueError(f"kernel={config.kernel!r}; valid: {', '.join(KERNELS)}")
            if config.limit is not None and config.limit < 1:
                raise ValueError(f"limit={config.limit}; at least 1 sample, or null for all")
            if not 0 <= config.seed < 2**63:
                raise ValueError(f"seed={config.seed}; 0 to 2**63 - 1")
            if Path(config.sweep.name).is_absolute() or ".." in Path(config.sweep.name).parts or not config.sweep.name:
                raise ValueError(
                    f"sweep.name={config.sweep.name!r}; a name inside paths.results={config.paths.results}"
                )
            method, task = build_method(config), build_task(config)
            cell = identity(config, method, task)
        except (ValueError, TypeError) as error:
            return Outcome(**named, status="refused", note=str(error))
        run_id = record.digest(cell)
        key = (config.sweep.name, run_id)
        folder = record.RunFolder(Path(config.paths.results), config.sweep.name, run_id)
        named |= {"run_id": run_id, "folder": folder.path}
        found = folder.record()
        if key in self._seen:
            again = (
                "this method has no budget: one cell for all" if method.budget_kind == "none" else "the same cell again"
            )
            return Outcome(**named, status="same", record=found or {}, note=again)
        self._seen.add(key)
        source = record.source_hash()
        if found is not None and found["status"] in record.FINISHED:
            stale = found.get("versions.source") != source
            if stale and config.resume == "auto":
                note = "made with other sources: resume=refresh runs it again, resume=any keeps it"
                return Outcome(**named, status="stale", record=found, note=note)
            if not stale or config.resume == "any":
                return Outcome(**named, status="done", record=found, note="finished before")
        if method.limited and isinstance(method.budget, int) and method.budget == 1:
            self.console.print("budget=1 is one token per head; no limit is budget=1.0", style="yellow", markup=False)
        if method.budget_kind == "held_tokens" and not method.limited and method.parts().scorer is not None:
            self.console.print(
                "budget=1.0 evicts nothing; a share such as budget=0.25 does", style="yellow", markup=False
            )
        kept = folder.rows(None if config.resume == "any" else source)
        try:
            folder.open(OmegaConf.to_yaml(config, resolve=True))
            folder.start(kept.values())
        except OSError as error:
            return Outcome(
                **named, status="refused", note=f"cannot write to paths.results={config.paths.results}: {error}"
            )
        written = self._run(config, cell, method, task, folder, source, set(kept))
        record.fill_deltas(folder.path.parent)
        written = folder.record() or written
        tracking.log(config.logger, written, cell, list(folder.rows().values()), config.sweep.name)
        lines = str(written["error"] or "").strip().splitlines()
        return Outcome(**named, status=written["status"], record=written, note=lines[-1] if lines else "")

    def _run(
        self,
        config: DictConfig,
        cell: dict[str, Any],
        method: Method,
        task: Task,
        folder: record.RunFolder,
        source: str,
        done: set[str],
    ) -> dict[str, Any]:
        status, error, total = "ok", None, 0
        try:
            model, tokenizer = self._load(config)
            samples = list(task.samples(tokenizer))[: config.limit]
            total = len(samples)
            check_lengths(samples, model, method)
            references = References(folder.path.parent, [pair_id(cell), source])
            self._samples(config, model, tokenizer, method, task, samples, folder, done, source, references)
        except KeyboardInterrupt:
            self._write(config, cell, method, task, folder, "partial", "interrupted", total)
            raise
        except Exception as fault:
            status = "oom" if is_oom(fault) else "failed"
            error = traceback.format_exc()
            logger.debug("cell %s failed", folder.run_id, exc_info=True)
        if status == "oom":
            release()
        return self._write(config, cell, method, task, folder, status, error, total)

    def _samples(
        self,
        config: DictConfig,
        model: Any,
        tokenizer: Any,
        method: Method,
        task: Task,
        samples: Sequence[Sample],
        folder: record.RunFolder,
        done: set[str],
        source: str,
        references: References,
    ) -> None:
        from kvcompress.session import compress

        kernel = str(config.kernel)
        ends, fitted = models.eos_ids(model, tokenizer), method.for_tokenizer(tokenizer)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            name = f"{type(method).__name__} {method.budget} · {task.name}"
            bar = progress.add_task(name, total=len(samples), completed=len(done))
            for sample in samples:
                if sample.id in done:
                    continue
                turns = tuple(replace(turn, stop=tuple(sorted({*turn.stop, *ends}))) for turn in sample.turns)
                sample = references.attach(task, replace(sample, turns=turns), model, kernel)
                # a session of its own: nothing leaks from sample to sample
                with compress(model, fitted, kernel, tokenizer) as session:
                    out = task.run(session, sample)
                out["text"] = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out["tokens"]]
                scores = task.score(sample, out)
                if not (math.isfinite(scores["score"]) and 0.0 <= scores["score"] <= 1.0):
                    raise ValueError(f"task {task.name} scored {scores['score']} on {sample.id}; a score is 0 to 1")
                folder.append(
                    {
                        "id": sample.id,
                        "source": source,
                        "score": scores["score"],
                        "scores": scores,
                        "references": [list(turn.references) for turn in sample.turns],
                        "protocol": dict(sample.protocol),
                        "meta": dict(sample.meta),
                        "out": out,
                    }
                )
                progress.advance(bar)

    def _load(self, config: DictConfig) -> tuple[Any, Any]:
        settings: Any = OmegaConf.to_container(config.model, resolve=True)
        extra = settings.pop("options")
        name = settings.pop("name")
        key = record.digest([name, settings, extra, config.dtype, str(config.device), config.seed])
        if key != self._model_key:
            self._model = self._model_key = None
            release()
            self._model = models.load(name, config.dtype, config.device, seed=config.seed, **settings, **extra)
            self._model_key = key
        assert self._model is not None
        return self._model

    def _write(
        self,
        config: DictConfig,
        cell: dict[str, Any],
        method: Method,
        task: Task,
        folder: record.RunFolder,
        status: str,
        error: str | None,
        total: int,
    ) -> dict[str, Any]:
        rows = list(folder.rows().values())
        found = record.aggregate(rows)
        if status == "ok" and found["n_samples"] < max(total, 1):
            status = "partial"
        if status == "ok" and method.limited and found["share_inactive"] == 1.0:
            status = "inactive"
        parts = cell["parts"]
        written: dict[str, Any] = dict.fromkeys(record.KEYS)
        written |= found
        written |= {f"metrics.{name}": value for name, value in task.summarise(rows).items()} if rows else {}
        written |= {f"parts.{name}": value for name, value in parts.items()}
        written |= record.versions() | {
            f"versions.{name}": value for name, value in hardware(models.resolve_device(config.device)).items()
        }
        written |= {
            "run_id": folder.run_id,
            "status": status,
            "model": config.model.name,
            "task": task.name,
            "method": config.method.name,
            "budget": cell["budget"],
            "seed": config.seed,
            "dtype": cell["dtype"],
            "device": cell["device"],
            "metric": f"{task.metric}/{task.metric_version}",
            "parts.preset": method.preset,
            "protocol.chunking": parts["prefill"],
            "protocol.shared": False,
            "protocol.task_version": task.version,
            "protocol.pair": pair_id(cell),
            "error": error,
        }
        folder.finish(written)
        return written


def is_oom(error: BaseException) -> bool:
    """True where memory ran out, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in ("out of memory", "can't allocate memory", "not enough memory")
    )


def release() -> None:
    """Give memory back before the next cell."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: Hydra composes the cells, a runner runs them; returns the exit code.

    0 all cells finished (now or before), 1 a cell failed, 2 a name on the command line is unknown, 130 interrupted.
    """
    import hydra
    from transformers.utils import logging as transformers_logging

    import kvcompress.conf
    from kvcompress.report.table import leaderboard, terminal

    folder = Path(str(kvcompress.conf.__file__)).parent
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    register()
    console = Console(stderr=True)
    try:
        check_overrides(arguments, folder)
    except ValueError as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        return 2
    transformers_logging.disable_progress_bar()  # ours is the one that says how far the sweep is
    runner = Runner(console)

    @hydra.main(version_base="1.3", config_path=str(folder), config_name="config")
    def cell(config: DictConfig) -> None:
        runner(config)

    interrupted = False
    before, sys.argv[1:] = sys.argv[1:], arguments
    try:
        cell()
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what is finished is kept, the same command goes on from here", style="yellow")
    finally:
        sys.argv[1:] = before
    unique = {outcome.run_id: outcome for outcome in runner.outcomes if outcome.record}
    stored = [_latest(outcome) for outcome in unique.values()]
    if stored:
        leaderboard([dict(found) for found in stored], terminal())
    for outcome in runner.outcomes:
        if outcome.failed or outcome.status == "stale":
            text = f"{outcome.status}: {outcome.method} budget {outcome.budget} {outcome.run_id} {outcome.note}"
            console.print(text, style="red" if outcome.failed else "yellow", highlight=False, markup=False)
    if interrupted:
        return 130
    return 1 if any(outcome.failed for outcome in runner.outcomes) else 0


def _latest(outcome: Outcome) -> Mapping[str, Any]:
    """The record as it is now: a baseline that ran later has filled in its delta."""
    path = outcome.folder / "record.json" if outcome.folder else None
    try:
        return record.read_record(path) if path else outcome.record
    except ValueError:
        return outcome.record
