"""Groups of cells as jobs of joblib, submitit and Ray: the same records on one board."""

from __future__ import annotations

import os
import signal
import time

import pytest
from sweeps import SHORT, cell, cells, forked, left, sweep
from test_commands import clean_hydra, command  # noqa: F401  (a fixture)

from kvcompress.sweep import record
from kvcompress.sweep.launcher import engines
from kvcompress.sweep.launcher.options import Options
from kvcompress.sweep.launcher.plugin import SharedLauncher
from kvcompress.sweep.launcher.scheduler import Scheduler

SETTINGS = {
    "joblib": [],
    "submitit": ["+hydra.launcher.settings={cluster: local, folder: FOLDER/jobs, timeout_min: 10}"],
    "ray": ["+hydra.launcher.settings={include_dashboard: false}"],
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """What one process leaves of the cells that two workers share below."""
    folder = tmp_path_factory.mktemp("here")
    for seed in ("0", "1"):
        sweep(cells(folder, "full,snapkv,knorm", "0.5,0.2", f"seed={seed}", "limit=1"), Options())
    return left(folder)


@pytest.mark.slow
@pytest.mark.parametrize("engine", SETTINGS)
def test_two_workers_leave_what_one_process_leaves(tmp_path, engine, here, capfd):
    pytest.importorskip(engine)
    arguments = ["method=full,snapkv,knorm", "budget=0.5,0.2", "seed=0,1"]
    settings = [setting.replace("FOLDER", str(tmp_path)) for setting in SETTINGS[engine]]
    code = command(
        tmp_path / "jobs", *arguments, f"hydra.launcher.engine={engine}", "hydra.launcher.workers=2", *settings
    )
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert printed.out.count("snapkv") >= 4, "one board of all"
    assert left(tmp_path / "jobs") == here
    assert {record.read_record(p)["protocol.shared"] for p in tmp_path.glob("jobs/test/*/record.json")} == {True}


def test_a_job_that_fails_to_start_leaves_its_cells_failed_and_the_others_finish(tmp_path):
    def elsewhere(groups):
        for number, part in enumerate(groups):
            if number == 0:
                yield number, RuntimeError("the node went away")
            else:
                yield number, sweep([configs[index] for index in part])[0]

    configs = [cell(tmp_path, "method=snapkv", "budget=0.5", f"seed={seed}", "limit=1") for seed in range(2)]
    outcomes = Scheduler().sweep(configs, Options(), elsewhere)
    assert [outcome.status for outcome in outcomes] == ["failed", "ok"]
    assert "the node went away" in outcomes[0].note


def test_groups_that_are_finished_are_no_jobs(tmp_path):
    configs = [cell(tmp_path, "method=snapkv", "budget=0.5", f"seed={seed}", "limit=1") for seed in range(2)]
    sweep(configs[:1])
    handed = []

    def elsewhere(groups):
        handed.extend(groups)
        yield 0, sweep(configs[1:])[0]

    outcomes = Scheduler().sweep(configs, Options(), elsewhere)
    assert handed == [[1]] and [outcome.status for outcome in outcomes] == ["done", "ok"]


def test_groups_that_are_left_when_a_worker_is_killed_go_on_one_at_a_time(monkeypatch):
    """joblib gives up on all that is not done when one of its processes is gone."""
    joblib = pytest.importorskip("joblib")
    rounds = []

    class OneDies:
        def __init__(self, **settings):
            assert settings["n_jobs"] == 2

        def __call__(self, jobs):
            rounds.append(list(jobs))
            for work, arguments, options in rounds[-1]:
                if arguments[2] == [["killed"]]:
                    raise RuntimeError("a worker was terminated")
                yield work(*arguments, **options)

    def ends(part, options):
        if part == [["exits"]]:
            raise SystemExit("enough")
        return part

    monkeypatch.setattr(joblib, "Parallel", OneDies)
    parts = [[[how]] for how in ("fine", "exits", "killed", "late", "later")]
    ended = dict(engines.on_joblib(ends, parts, None, 2, {}))
    assert [ended[number] for number in (0, 3, 4)] == [parts[0], parts[3], parts[4]]
    assert "SystemExit: enough" in str(ended[1]) and "terminated" in str(ended[2])
    assert [len(one) for one in rounds] == [5, 1, 1, 1]


@pytest.mark.long
def test_a_worker_that_is_killed_takes_no_other_group_with_it():
    pytest.importorskip("joblib")

    def ends_badly(part, options):
        """A job that is killed, ends itself, or is done, as its only override says. In here, so that it travels by its code:
        no worker imports the tests, and torch with them."""
        (how,) = part[0]
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            raise SystemExit("enough")
        return []

    parts = [[[how]] for how in ("fine", "exits", "killed", "fine", "fine")]
    ended = dict(engines.on_joblib(ends_badly, parts, None, 2, {}))
    assert [ended[number] for number in (0, 3, 4)] == [[], [], []]
    assert "SystemExit: enough" in str(ended[1]) and type(ended[2]).__name__ == "TerminatedWorkerError"


@pytest.mark.slow
def test_ray_gives_each_job_a_gpu_of_its_own_where_there_are_any():
    pytest.importorskip("ray")

    def which_gpu(part, options):  # in here, so that it travels by its code: Ray's workers do not see the tests
        time.sleep(1.0)
        return [os.environ.get("CUDA_VISIBLE_DEVICES")]

    settings = {"num_gpus": 2, "include_dashboard": False}  # said to be there
    ended = dict(engines.on_ray(which_gpu, [[["a"]], [["b"]]], None, 2, settings))
    assert sorted(ended[0] + ended[1]) == ["0", "1"]


def worker(folder, ready):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    number = engines.take_gpu(2, folder)
    (folder / f"took-{os.getpid()}").write_text(f"{number} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    while not ready.exists():
        pass


def test_each_worker_gets_a_gpu_of_its_own(tmp_path):
    ready = tmp_path / "ready"
    processes = [forked(worker, tmp_path, ready) for _ in range(3)]
    while len([path for path in tmp_path.glob("took-*") if path.read_text()]) < 3:
        pass
    ready.touch()
    for process in processes:
        process.join()
    assert sorted(path.read_text() for path in tmp_path.glob("took-*")) == ["0 0", "1 1", "None None"]


def test_an_engine_that_has_assigned_gpus_is_not_overruled(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert engines.take_gpu(2, tmp_path) is None and os.environ["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    "settings, says",
    [({"engine": "slurm"}, "joblib, submitit, ray"), ({"workers": 0}, "at least 1"), ({"memory": 0}, "GiB")],
)
def test_wrong_settings_of_the_launcher_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        SharedLauncher(**settings)


def test_a_job_composes_its_cells_from_overrides(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    part = [
        [*SHORT, f"paths.results={tmp_path}", "limit=1", f"method={name}", "budget=0.5"] for name in ("snapkv", "knorm")
    ]
    outcomes = engines.run_part(part, Options())
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert all(outcome.record["protocol.shared"] for outcome in outcomes)
