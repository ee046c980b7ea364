"""Engines: groups of cells as jobs of joblib, submitit (SLURM or local processes) or Ray.

A job is handed command-line overrides and nothing else, composes its cells anew and runs them as one process would: it
writes the same records to the same folder, and locks keep it apart from others.
"""

from __future__ import annotations

import getpass
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcompress.sweep.launcher.lock import FileLock
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.outcome import Listener, Outcome

logger = logging.getLogger(__name__)

Part = list[list[str]]  # the overrides of each cell of a group
Done = tuple[int, list[Outcome] | BaseException]
Work = Callable[[Part, Options], list[Outcome]]
Listen = Callable[
    [Sequence[Any]], Sequence[Listener]
]  # configurations → listeners; found by its name in another process

_gpu: FileLock | None = None  # held by this process for as long as it lives


def run_part(part: Part, options: Options, listen: Listen | None = None) -> list[Outcome]:
    """Run the cells that these overrides describe, in this process.

    Args:
        listen: makes the listeners of these cells here: they themselves do not travel.
    """
    from kvcompress.sweep.config import check_overrides, composing, folder
    from kvcompress.sweep.launcher.scheduler import Scheduler

    take_gpu()
    with composing() as compose:
        for overrides in part:
            check_overrides(overrides, folder())  # makes Hub ids known
        configs = [compose(overrides) for overrides in part]
    return Scheduler(listeners=listen(configs) if listen is not None else ()).sweep(configs, options)


def part_runner(listen: Listen | None) -> Work:
    """`run_part` with listeners, as a function: Ray takes no other callable."""

    def work(part: Part, options: Options) -> list[Outcome]:
        return run_part(part, options, listen)

    return work


def take_gpu(count: int | None = None, folder: Path | None = None) -> int | None:
    """Give this process a GPU that no other worker here has; None where an engine has done so, or there is none.

    Args:
        count: GPUs of this machine, as torch sees them by default.
        folder: of the lock files, one per GPU.
    """
    global _gpu
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    if count is None:
        import torch

        count = torch.cuda.device_count()
    folder = folder or own_folder()
    for number in range(count if folder is not None else 0):
        assert folder is not None
        lock = FileLock(folder / f"kvcompress-gpu-{number}.lock")
        if lock.acquire():
            _gpu = lock
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
            return number
    return None  # more workers than GPUs: they share what there is


def own_folder() -> Path | None:
    """A folder of this user's alone in the shared folder of temporary files, or None: what lies there is another's."""
    path = Path(tempfile.gettempdir()) / f"kvcompress-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or hasattr(os, "getuid")
            and (found.st_uid, found.st_mode & 0o022) != (os.getuid(), 0)
        ):
            raise OSError("it is not a folder of this user alone")
    except OSError as error:
        logger.warning("workers share the GPUs: %s cannot hold their locks: %s", path, error)
        return None
    return path


def on_joblib(
    work: Work, parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any]
) -> Iterator[Done]:
    """Processes on this machine."""
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=workers, return_as="generator_unordered", **{"backend": "loky", **settings})
    left = dict(enumerate(parts))
    try:
        for number, result in parallel(delayed(_guarded)(work, i, part, options) for i, part in enumerate(parts)):
            del left[number]
            yield number, result
    except Exception:  # a worker was killed, say for its memory: joblib gives up on all
        logger.warning("a worker was killed: the %d groups that are not finished go on one at a time", len(left))
        for number, part in left.items():
            try:
                yield from parallel([delayed(_guarded)(work, number, part, options)])
            except Exception as error:
                yield number, error


def _guarded(work: Work, number: int, part: Part, options: Options) -> Done:
    try:
        return number, work(part, options)
    except (Exception, SystemExit) as error:
        return number, RuntimeError(f"{type(error).__name__}: {error}")  # which is sure to travel


def on_submitit(
    work: Work, parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any]
) -> Iterator[Done]:
    """SLURM jobs where there is SLURM, else processes here (`settings.cluster`); the rest are submitit's parameters."""
    import time

    import submitit

    settings = dict(settings)
    folder, cluster = settings.pop("folder", "submitit"), settings.pop("cluster", None)
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    slurm = executor.cluster == "slurm"
    executor.update_parameters(**({"slurm_array_parallelism": workers} if slurm else {}), **settings)
    if slurm:
        running = dict(enumerate(executor.map_array(work, parts, [options] * len(parts))))
        waiting: list[int] = []
    else:
        running, waiting = {}, list(range(len(parts)))
    try:
        while running or waiting:
            while waiting and len(running) < workers:
                number = waiting.pop(0)
                running[number] = executor.submit(work, parts[number], options)
            ended = [number for number, job in running.items() if job.done()]
            for number in ended:
                job = running.pop(number)
                try:
                    yield number, job.result()
                except Exception as error:
                    yield number, error
            if not ended:
                time.sleep(0.2)
    finally:  # interrupted: a job ends as if by Ctrl-C, with resumable records
        for job in running.values():
            job.cancel(check=False)


def on_ray(
    work: Work, parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any]
) -> Iterator[Done]:
    """A Ray cluster: `settings.address`, or one on this machine; `settings.task` are a task's options, as `num_gpus`.

    A task gets a GPU where the cluster has any: from one that asks for none Ray hides them all.
    """
    import ray

    settings = dict(settings)
    task = settings.pop("task", None)
    own = not ray.is_initialized()
    if own:
        local = {} if "address" in settings else {"num_cpus": workers, "include_dashboard": False}
        ray.init(**{**local, **settings})
    try:
        if task is None:
            task = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        remote = ray.remote(**task)(work)
        running = {remote.remote(part, options): number for number, part in enumerate(parts)}
        while running:
            (ended, *_), _ = ray.wait(list(running), num_returns=1)
            number = running.pop(ended)
            try:
                yield number, ray.get(ended)
            except Exception as error:
                yield number, error
    finally:
        if own:
            ray.shutdown()


ENGINES: dict[str, Callable[..., Iterator[Done]]] = {"joblib": on_joblib, "submitit": on_submitit, "ray": on_ray}
