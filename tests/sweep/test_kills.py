"""A sweep that is killed, or has no room on its disk, goes on with the same command and ends as if nothing had happened."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import subprocess

import pytest
from rich.console import Console
from sweeps import TOGETHER, cells, forked, left, sweep

from kvcompress.commands.run import summary
from kvcompress.common import atomic_files
from kvcompress.sweep import record
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.disk import DiskFull
from kvcompress.sweep.launcher import lock
from kvcompress.sweep.launcher.cell_run import CellRun
from kvcompress.sweep.launcher.lock import FileLock, Lock, holder, locked

METHODS = "full,snapkv,knorm,random"
LIMIT = 120.0  # seconds after which a run hangs


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """An undisturbed sweep of four cells with two samples each; what follows forks from a process that has all loaded."""
    folder = tmp_path_factory.mktemp("calm")
    sweep(cells(folder, METHODS, "0.5"), TOGETHER)
    return folder


def records(folder):
    """Records without what a clock or the machine says."""
    found = {}
    for path in (folder / "test").glob("*/record.json"):
        made = record.read_record(path)
        # a cell that goes on alone shares no prefill: it is run otherwise, to the same result
        aside = (
            "time.",
            "memory.",
            "versions.",
            "protocol.decoding",
            "protocol.shared",
            "protocol.kernel",
            "kv.bytes_allocated",
        )
        found[path.parent.name] = {key: value for key, value in made.items() if not key.startswith(aside)}
    return found


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same(folder, calm):
    assert records(folder) == records(calm)
    assert {key: value[:2] for key, value in left(folder).items()} == {
        key: value[:2] for key, value in left(calm).items()
    }
    assert files(folder) == files(calm)


def killed_inside(number):
    """Have this process killed in its `number`-th write: before it, within it, or after it."""
    calls, stock = [0], {name: getattr(os, name) for name in ("write", "replace", "fsync", "unlink", "ftruncate")}

    def counted(name):
        def call(*arguments, **options):
            calls[0] += 1
            if calls[0] >= number:
                if name == "write":
                    stock["write"](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                elif number % 2:
                    stock[name](*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return stock[name](*arguments, **options)

        return call

    for name in stock:
        setattr(os, name, counted(name))


def run(folder, kill=None, limit=None, told=None):
    """What a forked process does: the sweep; what was printed goes to `told`."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if kill is not None:
        killed_inside(kill)
    outcomes, text = sweep(cells(folder, METHODS, "0.5"), TOGETHER)
    if told is not None:
        out = io.StringIO()
        code = summary(outcomes, Console(file=out, width=300))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        told.write_text(
            json.dumps({"code": code, "text": text + out.getvalue(), "status": [o.status for o in outcomes]})
        )
    os._exit(0)


def ended(process):
    """Wait for a process, which must not hang; its exit code."""
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail("a run hangs")
    return process.exitcode


def kill_often(calm, folder, kills, seed):
    """Kill `kills` runs, each alone or one of two, and compare what a last one leaves with an undisturbed sweep."""
    draw, done = random.Random(seed), 0
    while done < kills:
        several = [forked(run, folder, draw.randint(1, 60)) for _ in range(draw.choice((1, 2)))]
        codes = [ended(process) for process in several]
        assert set(codes) <= {0, -signal.SIGKILL}
        done += codes.count(-signal.SIGKILL)
        if 0 in codes:  # all is done: take a finished cell away, so that there is something to kill
            finished = sorted((folder / "test").glob("*/record.json"))
            if finished:
                draw.choice(finished).unlink()
    assert ended(forked(run, folder)) == 0
    same(folder, calm)


def test_killed_inside_writes_a_sweep_ends_as_an_undisturbed_one(calm, tmp_path):
    kill_often(calm, tmp_path, 4, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_killed_fifty_times_a_sweep_ends_as_an_undisturbed_one(calm, tmp_path, seed):
    kill_often(calm, tmp_path, 10, 100 + seed)


# ---------------------------------------------------------------------------------------------------- no room


@pytest.fixture
def small_disk(tmp_path):
    """A function that makes a file system of so many KiB, or gives one more room."""
    made = tmp_path / "disk"
    made.mkdir()

    def mount(size, how="size"):
        options = f"{'remount,' if how == 'more' else ''}size={size}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        return made

    yield mount
    subprocess.run(["umount", str(made)], capture_output=True)


def stopped(told):
    """A run that had no room: it said so in one line, and no more than once."""
    said = json.loads(told.read_text())
    lines = [line for line in said["text"].splitlines() if "goes on when there is room" in line]
    assert said["code"] == 1 and "full" in said["status"] and len(lines) == 1, said
    assert "Traceback" not in said["text"] and not {"failed", "refused"} & set(said["status"]), said
    return lines[0]


@pytest.mark.parametrize("size", [40, 64])
def test_a_full_disk_ends_a_sweep_in_one_line_and_it_goes_on_when_there_is_room(calm, tmp_path, small_disk, size):
    disk, told = small_disk(size), tmp_path / "told"
    assert ended(forked(run, disk, None, None, told)) == 0
    assert "No space left on device" in stopped(told)
    small_disk(4096, "more")
    assert ended(forked(run, disk)) == 0
    same(disk, calm)


@pytest.mark.long
@pytest.mark.parametrize("size", range(4, 100, 4))
def test_a_disk_of_any_size_loses_nothing(calm, tmp_path, small_disk, size):
    disk, told = small_disk(size), tmp_path / "told"
    assert ended(forked(run, disk, None, None, told)) == 0
    if "full" in json.loads(told.read_text())["status"]:
        stopped(told)
    assert all(record.RunFolder(disk, "test", path.name).rows() is not None for path in (disk / "test").glob("*/"))
    small_disk(4096, "more")
    assert ended(forked(run, disk)) == 0
    same(disk, calm)


@pytest.mark.parametrize("limit", [500, 5000])
def test_a_limit_of_file_sizes_ends_a_sweep_in_one_line(calm, tmp_path, limit):
    told = tmp_path / "told"
    assert ended(forked(run, tmp_path / "results", None, limit, told)) == 0
    assert "File too large" in stopped(told)
    assert ended(forked(run, tmp_path / "results")) == 0
    same(tmp_path / "results", calm)


def test_of_a_line_that_finds_no_room_nothing_is_left(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    atomic_files.append_whole(path, b"one\n")
    write = os.write

    def half(file, content):
        if len(content) > 4:
            return write(file, bytes(content)[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        atomic_files.append_whole(path, b"second\n")
    assert path.read_bytes() == b"one\n"


# ---------------------------------------------------------------------------------------------------- locks


def a_cell(folder, number=0):
    path = folder / "sweep" / f"run{number}" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_any_number_of_cells_takes_one_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    held = [Lock(a_cell(tmp_path, number)) for number in range(200)]
    assert all(one.acquire() for one in held)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert not any(Lock(one.path).acquire() for one in held[:3])
    for one in held:
        one.release()
    assert len(os.listdir("/proc/self/fd")) == before and files(tmp_path) == []


def test_a_lock_that_cannot_be_written_down_is_held_by_nobody(tmp_path, monkeypatch):
    path = a_cell(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock, "replacing", full)
        with pytest.raises(DiskFull, match="cannot write .*lock: No space left"):
            Lock(path).acquire()
    assert holder(path) is None and files(tmp_path) == []
    mine = Lock(path)
    assert mine.acquire() and holder(path)["pid"] == os.getpid()
    mine.release()


def test_a_forked_child_neither_has_nor_releases_its_parents_locks(tmp_path):
    mine = Lock(a_cell(tmp_path))
    assert mine.acquire()

    def child():
        assert not Lock(mine.path).acquire()
        mine.release()
        os._exit(0 if holder(mine.path) is not None else 1)

    assert ended(forked(child)) == 0 and holder(mine.path)["pid"] == os.getpid()
    mine.release()
    assert holder(mine.path) is None


def hold(path, ready):
    assert Lock(path).acquire()
    ready.touch()
    signal.pause()


def test_claims_of_killed_processes_are_taken_away_and_those_of_others_stay(tmp_path):
    ready = tmp_path / "ready"
    dead = forked(hold, a_cell(tmp_path), ready)
    while not ready.exists():
        pass
    living = Lock(a_cell(tmp_path, 1))
    assert living.acquire() and len(list((tmp_path / "sweep").glob(".claim-*"))) == 2
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    lock.clear_locks(tmp_path / "sweep")
    assert len(list((tmp_path / "sweep").glob(".claim-*"))) == 1 and holder(living.path) is not None
    living.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"claim": "../../x"}', '{"claim": [1]}', "[" * 100_000])
def test_a_lock_file_of_nonsense_is_held_by_nobody(tmp_path, text):
    path = a_cell(tmp_path)
    path.write_text(text)
    assert holder(path) is None
    mine = Lock(path)
    assert mine.acquire()
    mine.release()


def test_a_file_system_without_locks_is_said_and_status_goes_on(tmp_path, monkeypatch, caplog):
    mine = Lock(a_cell(tmp_path))

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    assert mine.acquire() and holder(mine.path) is None
    assert "do not run two processes" in caplog.text
    mine.release()


# ---------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("make", [os.symlink, lambda _, path: os.mkfifo(path)], ids=["link", "pipe"])
def test_nothing_is_written_through_what_lies_where_a_lock_belongs(tmp_path, make):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "sweep"
    folder.mkdir()
    make(victim, folder / ".lock")
    with pytest.raises(OSError, match="not followed|no plain file"), locked(folder / ".lock"):
        pass
    make(victim, folder / "gpu")
    with pytest.raises(OSError, match="not followed|no plain file"):
        FileLock(folder / "gpu").acquire()
    assert victim.read_text() == "precious"


def test_links_in_the_folder_of_a_run_are_replaced_and_not_followed(calm, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (config,) = cells(tmp_path / "results", "snapkv", "0.5", "limit=1")
    folder = CellRun(CellSpec.from_config(config)).folder.path
    folder.mkdir(parents=True)
    for name in ("config.yaml", "samples.jsonl", "record.json", "lock"):
        (folder / name).symlink_to(victim)
    (outcome,) = sweep([config])[0]
    assert outcome.status == "ok" and victim.read_text() == "precious"
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_the_folder_of_a_run_that_is_a_link_is_refused(tmp_path):
    (config,) = cells(tmp_path / "results", "snapkv", "0.5", "limit=1")
    folder, elsewhere = CellRun(CellSpec.from_config(config)).folder.path, tmp_path / "elsewhere"
    folder.parent.mkdir(parents=True)
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    (outcome,) = sweep([config])[0]
    assert outcome.status == "refused" and "is a link" in outcome.note and files(elsewhere) == []


def test_a_link_at_a_row_that_is_added_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "samples.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="not followed"):
        atomic_files.append_whole(tmp_path / "samples.jsonl", b"x\n")
    assert victim.read_text() == "precious"


def test_deltas_that_a_killed_process_left_to_do_are_filled_by_the_same_command(calm, tmp_path):
    sweep(cells(tmp_path, "snapkv,full", "0.5"))
    for path in (tmp_path / "test").glob("*/record.json"):
        record.write_json(path, record.read_record(path) | {"delta_full": None, "baseline": None})
    outcomes, _ = sweep(cells(tmp_path, "snapkv,full", "0.5"))
    assert {o.status for o in outcomes} == {"done"}
    assert {found["delta_full"] for found in records(tmp_path).values()} == {0.0}


def test_what_is_beside_a_reference_is_taken_away_once_it_is_old(tmp_path):
    folder = tmp_path / ".references"
    folder.mkdir()
    old, new = folder / ".a.safetensors.1.x.tmp", folder / ".b.safetensors.1.x.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    record.clear_left(tmp_path)
    assert not old.exists() and new.exists()
