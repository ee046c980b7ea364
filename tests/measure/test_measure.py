"""Timers, peak memory, hardware facts and paired ratios."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
import torch

from kvcompress.measure import measuring
from kvcompress.measure.measuring import PeakMemory, Timer, git_commit, hardware, paired_ratios, quartiles, timed

MIB = 1 << 20


def allocate(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def test_timer_measures_a_known_sleep_and_sums_its_blocks():
    timer = Timer()
    for _ in range(2):
        with timer:
            time.sleep(0.05)
        assert 0.05 <= timer.seconds < 0.15
    assert timer.count == 2 and 0.1 <= timer.total < 0.3


def test_timed_returns_the_result_beside_the_seconds():
    result, seconds = timed(lambda: time.sleep(0.02) or "done")
    assert result == "done" and seconds >= 0.02


def test_timer_synchronises_the_device_at_both_ends(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(device))
    with Timer("cuda:0"):
        seen.append("work")
    assert seen == [torch.device("cuda:0"), "work", torch.device("cuda:0")]


def test_timer_counts_a_block_that_raises():
    timer = Timer()
    with pytest.raises(RuntimeError), timer:
        raise RuntimeError
    assert timer.count == 1 and timer.seconds > 0


def check_peak_memory():
    with PeakMemory() as outer:
        tensor = allocate(200)
        del tensor
    assert 195 * MIB < outer.growth < 260 * MIB, outer
    assert outer.bytes == outer.growth, "records count growth on the CPU"
    with PeakMemory() as small:
        allocate(20)
    assert small.growth < 60 * MIB, "an earlier peak must not count again"
    return outer.method


def test_peak_memory_sees_a_tensor_that_is_gone_at_the_end():
    assert check_peak_memory() in ("VmHWM", "sampled")


def test_peak_memory_is_sampled_where_linux_cannot_reset_its_mark(monkeypatch):
    monkeypatch.setattr(measuring, "_reset_high_water_mark", lambda: False)
    with PeakMemory() as memory:
        tensor = allocate(200)
        time.sleep(0.05)
        del tensor
    assert memory.method == "sampled" and 195 * MIB < memory.growth < 260 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_peak_memory_on_cuda_is_the_allocators():
    with PeakMemory("cuda") as memory:
        torch.ones(200 * MIB // 4, device="cuda")
    assert memory.method == "cuda" and memory.reserved >= memory.growth >= 200 * MIB


def test_hardware_is_json_and_names_versions_and_machine():
    facts = json.loads(json.dumps(hardware()))
    assert facts["torch"] == torch.__version__ and facts["device"] == "cpu"
    assert facts["cores"] >= 1 and facts["threads"] == torch.get_num_threads() and facts["memory"] > 1 << 28


def test_git_commit_marks_changed_files_and_is_none_outside_a_repository(tmp_path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "f").write_text("1")
    for arguments in (["init", "-q"], ["add", "f"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *arguments], check=True)
    clean = git_commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "f").write_text("2")
    assert git_commit(tmp_path) == f"{clean}+dirty"


def test_the_commit_is_none_where_the_package_lies_in_another_projects_repository(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    package = tmp_path / ".venv" / "site-packages" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text("")
    (tmp_path / "theirs").write_text("")
    for arguments in (["init", "-q"], ["add", "theirs"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *arguments], check=True)
    assert git_commit(package) is None
    subprocess.run([*git, "add", "-f", ".venv"], check=True)
    assert str(git_commit(package)).endswith("+dirty"), "now it is part of that project"


class Drifting:
    """A machine that slows down by 10 % from run to run; work takes `unit` on it."""

    def __init__(self) -> None:
        self.speed = 1.0
        self.order: list[str] = []

    def run(self, name: str, unit: float) -> float:
        self.order.append(name)
        self.speed *= 1.1
        return unit * self.speed


def test_pairs_cancel_the_drift_of_the_machine_and_alternate_their_order():
    machine = Drifting()
    ratios = paired_ratios(lambda: machine.run("a", 1.0), lambda: machine.run("b", 0.8), pairs=10, aa=False, warmup=0)
    assert machine.order == ["a", "b", "b", "a"] * 5
    low, high = 0.8 / 1.1, 0.8 * 1.1
    assert low <= ratios.quartiles[0] <= ratios.median <= ratios.quartiles[1] <= high
    assert ratios.median == pytest.approx(0.8, rel=0.01), "half the pairs gain by the drift, half lose"
    assert ratios.aa is None and ratios.pairs == 10


def test_a_against_a_shows_what_chance_does():
    machine = Drifting()
    ratios = paired_ratios(lambda: machine.run("a", 1.0), lambda: machine.run("b", 1.0), pairs=4)
    assert machine.order == ["a", "b"] + ["a", "b", "a"] * 4
    assert ratios.aa_quartiles[0] < 1 < ratios.aa_quartiles[1]


def test_a_target_is_missed_only_beyond_what_a_against_a_strays():
    steady = iter([1.0, 1.05, 1.0] * 3)
    ratios = paired_ratios(lambda: next(steady), lambda: next(steady), pairs=3, warmup=0)
    assert ratios.median == pytest.approx(1.05) and ratios.aa == 1.0
    assert ratios.missed(1.02) and not ratios.missed(1.05)
    noisy = measuring.Ratios(median=1.05, quartiles=(1, 1.1), pairs=3, a=1, b=1.05, aa=0.96)
    assert not noisy.missed(1.02) and noisy.missed(1.0)


def test_progress_is_called_for_every_run():
    calls = []
    paired_ratios(lambda: 1.0, lambda: 1.0, pairs=3, warmup=2, progress=lambda: calls.append(1))
    assert len(calls) == 2 * 2 + 3 * 3


@pytest.mark.parametrize(("pairs", "value", "words"), [(0, 1.0, "at least 1"), (1, 0.0, "0 or less")])
def test_comparisons_without_meaning_are_refused(pairs, value, words):
    with pytest.raises(ValueError, match=words):
        paired_ratios(lambda: value, lambda: 1.0, pairs=pairs)


def test_quartiles_of_one_value_are_that_value():
    assert quartiles([3.0]) == (3.0, 3.0) and quartiles([1.0, 2.0, 3.0]) == (1.5, 2.5)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with measuring.threads(before + 1) as count:
        assert count == before + 1
    assert torch.get_num_threads() == before
